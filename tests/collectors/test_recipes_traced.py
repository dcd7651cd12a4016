"""Recipes against traces: what a network recorded at one point allocates at others, deeper and in parallel layouts.

Of the whole lane, since to record a network takes long: by default, shipped recipes are compared with traces, on one rank
and on several (`test_shipped_recipes.py`), and one that a script's run has left with its dry runs
(`dryrun/test_saved_recipes.py`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import pytest

import peakcast
from peakcast.collectors.measure.grid import expand
from peakcast.doors.recording import ensure_recipes
from peakcast.models.ledger.recorded.parameters import recorded_parameters
from peakcast.models.ledger.scope.scope import out_of_scope
from peakcast.models.recipes import shelf, shipped

pytest.importorskip("transformers")
pytestmark = pytest.mark.whole

EXPERTS = {"model_type": "minimax_m2", "num_hidden_layers": 5, "hidden_size": 256, "intermediate_size": 256}
EXPERTS |= {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32, "vocab_size": 4096}
EXPERTS |= {"num_local_experts": 8, "num_experts_per_tok": 2}
FIRST = {"architecture": EXPERTS, "micro_batch_size": 2, "sequence_length": 256, "activation_checkpointing.mode": "full"}
SIDE = {"attention_heads": 4, "ffn_dim": 128}
"""Sizes of a small BART's encoder and decoder."""
BUCKETS = {"reduce_bucket_size": 65536, "stage3_prefetch_bucket_size": 58982, "stage3_param_persistence_threshold": 2560}
DEEPSPEED = {"framework": "deepspeed", "framework_options": BUCKETS}
DEEPSPEED |= {"precision": {"optimizer_states": "float32", "main_parameters": "float32"}}
CELLS = {
    "as recorded": FIRST,
    "uneven and longer than recorded": {**FIRST, "micro_batch_size": 5, "sequence_length": 1001},
    "of several micro-batches": {**FIRST, "gradient_accumulation_steps": 4, "micro_batch_size": 3},
    "on eight ranks": {**FIRST, "parallelism.data_parallel_size": 8, "parallelism.sharding": "fsdp2"},
    "under ZeRO-2": {**FIRST, **DEEPSPEED, "parallelism": {"data_parallel_size": 8, "zero_stage": 2}},
    "under ZeRO-3": {**FIRST, **DEEPSPEED, "parallelism": {"data_parallel_size": 8, "zero_stage": 3}},
    "with its weights on the host": {
        **FIRST,
        "offload": {"parameters": True, "optimizer": True},
        "parallelism": {"data_parallel_size": 8, "sharding": "fsdp2"},
    },
    "with an optimizer on the host": {
        **{**FIRST, **DEEPSPEED, "parallelism": {"data_parallel_size": 8, "zero_stage": 2}},
        "offload.optimizer": True,
    },
    "with another optimizer step": {**FIRST, "optimizer": {"name": "sgd"}, "parallelism.data_parallel_size": 8},
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
        patch.setattr(shipped, "_stacks", lambda _: ())  # none that came with peakcast
        ensure_recipes(JOBS.values(), processes=1)
        yield folder


NEEDS = {cell: [pytest.mark.needs("deepspeed")] * (job.framework == "deepspeed") for cell, job in JOBS.items()}


@pytest.mark.parametrize("cell", [pytest.param(cell, marks=NEEDS[cell]) for cell in JOBS])
def test_a_recipe_equals_the_trace_phase_by_phase(cell, ledger_equals_trace):
    """Within 0.1 % in each phase of the first and of a steady step."""
    assert out_of_scope(JOBS[cell]) == ""
    ledger_equals_trace(JOBS[cell], rel=1e-3)


def test_all_cells_share_one_recipe_of_a_shorter_network(recorded):
    (path,) = recorded.iterdir()
    assert path.name.startswith("minimax_m2-")
    for job in JOBS.values():
        (recipe,) = shelf.recipes_of(job)
        assert recipe.walk.num_layers < recipe.layers == EXPERTS["num_hidden_layers"]


def test_answers_say_what_they_rest_on(recorded: Path) -> None:
    job = JOBS["uneven and longer than recorded"]
    answer = peakcast.predict(job, "H200")
    assert any("recorded without a GPU" in sentence for sentence in answer.assumptions)
    assert not any("no family of the ledger" in sentence for sentence in answer.warnings)
    found = peakcast.explain(job)
    assert found.source == "recipe"
    assert found.peak.num_bytes == found.timeline.peak().num_bytes
    assert sum(row.num_parameters for row in found.modules) == sum(math.prod(row.rank_shape) for row in found.parameters)


def test_adapters_of_a_network_that_generates_nothing_are_recorded(ledger_equals_trace) -> None:
    """Of masked words: peft is told no task, for its class of generating networks asks for what this one has not."""
    network = {"model_type": "modernbert", "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}
    network |= {"num_hidden_layers": 6, "vocab_size": 8000}
    adapted = {"architecture": network, "finetuning": {"method": "lora", "rank": 8, "targets": ["all-linear"]}}
    (job,) = expand({"include": [{**adapted, "micro_batch_size": 2, "sequence_length": 512}]})
    ensure_recipes([job], processes=1)
    assert out_of_scope(job) == ""
    ledger_equals_trace(job, rel=1e-3)


@pytest.mark.whole
def test_one_recipe_holds_for_every_pair_of_lengths_of_an_encoder_decoder(ledger_equals_trace) -> None:
    """Recorded once, with stacks of different depths; and under DDP, which clones what the network returns: logits, and
    the encoder's output."""
    sides = {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in SIDE.items()}
    network = {"model_type": "bart", "d_model": 64, "vocab_size": 512, "max_position_embeddings": 2048, **sides}
    network |= {"encoder_layers": 6, "decoder_layers": 2}
    first = {"architecture": network, "decoder_sequence_length": 96, "micro_batch_size": 2, "sequence_length": 512}
    longer = {**first, "micro_batch_size": 3, "sequence_length": 1000, "decoder_sequence_length": 1001}
    shorter = {**first, "sequence_length": 41, "parallelism.data_parallel_size": 8}
    recorded, *others = expand({"include": [first, longer, shorter]})
    ensure_recipes([recorded], processes=1)
    (recipe,) = shelf.recipes_of(recorded)
    assert recipe.walk.num_layers < recipe.layers == 8
    for other in others:
        assert shelf.recipes_of(other) == [recipe]
        ledger_equals_trace(other, rel=1e-3)


TRAINED_ENDS = {"targets": ["q_proj", "v_proj", "lm_head"], "modules_to_save": ["embed_tokens"]}


def small_llama(**tuning):
    """A job of a family that the ledger knows, whose adapters are `tuning`'s."""
    network = {"model_type": "llama", "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4}
    network |= {"num_hidden_layers": 3, "vocab_size": 8000, "tie_word_embeddings": False}
    asked = {"architecture": network, "finetuning": {"method": "lora", "rank": 8, **tuning}}
    return expand({"include": [{**asked, "micro_batch_size": 2, "sequence_length": 512}]})[0]


@pytest.mark.whole
def test_what_trains_outside_the_layers_of_a_known_family_is_counted_by_a_recipe(ledger_equals_trace) -> None:
    """Adapters on the lm_head, and the copy that peft trains of the token table."""
    job = small_llama(**TRAINED_ENDS)
    ensure_recipes([job], processes=1)
    assert out_of_scope(job) == ""
    ledger_equals_trace(job, rel=1e-3)
    (recipe,) = shelf.recipes_of(job)
    trained = [tensor for tensor in recorded_parameters(job, recipe) if tensor.trains]
    in_layers, on_head, copied = 3 * 2 * 8 * (256 + 256), 8 * (256 + 8000), 8000 * 256
    assert sum(math.prod(tensor.shape) for tensor in trained) == in_layers + on_head + copied


def test_without_a_recipe_the_ledger_says_what_it_leaves_out(monkeypatch) -> None:
    monkeypatch.setenv("PEAKCAST_RECORD", "never")
    said = out_of_scope(small_llama(targets=["q_proj"], modules_to_save=["norm"]))
    assert "which parts of 'llama' train is counted by a recipe, and no recipe of it has been recorded" in said
    assert "finetuning.modules_to_save names norm: the copies that peft trains of them are not counted." in said
    assert "token table or the head" in out_of_scope(small_llama(targets=["q_proj", "lm_head"]))
