"""Kernels of packages that transformers calls where they are installed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from peakcast.collectors.measure.grid import expand
from peakcast.collectors.tracing import kernel_packages
from peakcast.doors.recording import ensure_recipes
from peakcast.models.ledger.recorded.covering import recipe_findings
from peakcast.models.recipes import shelf
from peakcast.models.recipes.lent import Lent, lending
from peakcast.models.recipes.recipe import recorded
from peakcast.models.recipes.shelf import recipe_of
from tests.models.recipes.walks import Library

LINEAR = {
    "model_type": "qwen3_next", "num_hidden_layers": 8, "hidden_size": 128, "intermediate_size": 256, "head_dim": 32,
    "num_attention_heads": 4, "num_key_value_heads": 2, "linear_key_head_dim": 32, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_value_head_dim": 32, "linear_conv_kernel_dim": 4, "vocab_size": 2048,
    "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "shared_expert_intermediate_size": 64,
}  # fmt: skip


def test_functions_that_fall_back_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The sentence is transformers 5.17's."""
    monkeypatch.setattr(kernel_packages, "replaced", {})
    kernel_packages._noticed(
        "`chunk_gated_delta_rule` is falling back to its reference PyTorch implementation because "
        "`flash-linear-attention` is not installed. This is correct but much slower; install it."
    )
    kernel_packages._noticed("something else")
    assert kernel_packages.replaced == {"chunk_gated_delta_rule": "flash-linear-attention"}


def test_a_release_whose_kernels_write_no_log_is_traced_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers 4.57 has the module of kernels without a logger."""
    monkeypatch.setattr(kernel_packages, "TRITON_KERNELS", ())
    monkeypatch.delattr("transformers.integrations.hub_kernels.logger")
    kernel_packages.install()


@pytest.mark.parametrize(
    ("package", "code", "says"),
    [
        ("flash-linear-attention", "not_modelled", "if you train with flash-linear-attention, record it where that is"),
        ("causal_conv1d", "version_not_modelled", "takes more memory than their kernels do."),
    ],
)
def test_a_missing_package_is_said_with_the_answer(package: str, code: str, says: str) -> None:
    (job,) = expand({"include": [{"architecture": LINEAR, "micro_batch_size": 2, "sequence_length": 512}]})
    one = recorded(Library(8), (2, 512))
    one = replace(one, walk=replace(one.walk, replaced=(("a_kernel", package),)))
    with lending(Lent(job, (one,))):
        (finding,) = recipe_findings(job)
    assert (finding.code, finding.direction) == (code, "less")
    assert says in finding.sentence


@pytest.fixture
def records(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Recipes are recorded, into a folder of this test."""
    monkeypatch.delenv("PEAKCAST_RECORD")
    monkeypatch.setenv("PEAKCAST_RECIPES", str(tmp_path))
    monkeypatch.setattr(shelf, "_found", {})


@pytest.mark.needs("fla", "liger_kernel")
def test_ligers_kernels_are_recorded_beside_another_packages(ledger_equals_trace: Any, records: None) -> None:
    """Both need the stub of Triton, which Inductor's modules, that are imported for one of them, must not find."""
    network = {
        "model_type": "gemma4_text", "num_hidden_layers": 2, "hidden_size": 256, "intermediate_size": 640, "head_dim": 64,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 4096, "vocab_size_per_layer_input": 4096,
        "hidden_size_per_layer_input": 32, "layer_types": ["full_attention", "full_attention"],
    }  # fmt: skip
    cell = {"architecture": network, "micro_batch_size": 2, "loss.fused_linear_cross_entropy": True}
    (job,) = expand({"include": [{**cell, "sequence_length": 256, "framework_options": {"liger_kernels": True}}]})
    ensure_recipes([job], processes=1)
    assert recipe_of(job) is not None
    ledger_equals_trace(job, rel=1e-3)


@pytest.mark.whole
@pytest.mark.needs("fla")
def test_linear_attention_runs_with_its_packages_kernels(ledger_equals_trace: Any, records: None) -> None:
    """The recipe's tensors are the trace's, and it holds for other lengths: no loop over the sequence is left."""
    cells = {"architecture": LINEAR, "micro_batch_size": 2}
    first, other = expand({"include": [{**cells, "sequence_length": 512}, {**cells, "sequence_length": 2001}]})
    ensure_recipes([first], processes=1)
    assert recipe_of(first) is recipe_of(other) is not None
    ledger_equals_trace(other, rel=1e-3)
