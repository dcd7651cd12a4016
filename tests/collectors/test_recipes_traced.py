"""Recipes against traces: what a network recorded at one point allocates at others, deeper and in parallel layouts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from peakcast.collectors.grid import expand
from peakcast.models.analytical.scope import out_of_scope
from peakcast.models.recipes import shelf
from peakcast.recording import ensure_recipes

pytest.importorskip("transformers")

APERTUS = {"model_type": "apertus", "num_hidden_layers": 6, "hidden_size": 256, "intermediate_size": 640}
APERTUS |= {"num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 4096}
ERNIE = {"model_type": "ernie4_5_moe", "num_hidden_layers": 7, "hidden_size": 256, "intermediate_size": 640}
ERNIE |= {"num_attention_heads": 8, "num_key_value_heads": 2, "vocab_size": 4096}
ERNIE |= {"moe_num_experts": 8, "moe_k": 2, "moe_intermediate_size": 128, "moe_num_shared_experts": 1}
"""Its first layer has no experts."""
FIRST = {"architecture": APERTUS, "micro_batch_size": 2, "sequence_length": 256}
CELLS = {
    "as recorded": FIRST,
    "uneven and longer than recorded": {**FIRST, "micro_batch_size": 5, "sequence_length": 1001},
    "on eight ranks": {**FIRST, "parallelism.data_parallel_size": 8, "parallelism.sharding": "fsdp2"},
    "experts and checkpoints": {**FIRST, "architecture": ERNIE, "activation_checkpointing.mode": "full"},
}
JOBS = dict(zip(CELLS, (expand({"include": [cell]})[0] for cell in CELLS.values()), strict=True))


@pytest.fixture(scope="module", autouse=True)
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of the recipes of all cells."""
    folder = tmp_path_factory.mktemp("recipes")
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("PEAKCAST_RECORD")
        patch.setenv("PEAKCAST_RECIPES", str(folder))
        patch.setattr(shelf, "_found", {})
        ensure_recipes(JOBS.values(), processes=2)
        yield folder


@pytest.mark.parametrize("cell", JOBS)
def test_a_recipe_equals_the_trace_phase_by_phase(cell, ledger_equals_trace):
    """Within 0.1 % in each phase of the first and of a steady step."""
    assert out_of_scope(JOBS[cell]) == ""
    ledger_equals_trace(JOBS[cell], rel=1e-3)


def test_cells_of_one_regime_share_a_recipe_of_a_shorter_network(recorded):
    files = sorted(path.name.partition("-")[0] for path in recorded.iterdir())
    assert files == ["apertus", "ernie4_5_moe"]
    for job in JOBS.values():
        (recipe,) = shelf.recipes_of(job)
        assert recipe.walk.num_layers < recipe.layers == job.architecture.num_hidden_layers
