"""Hybrids of Megatron-LM: a Mamba-2 layer counted by hand, and published runs."""

from __future__ import annotations

from typing import Any

import pytest

from peakcast.catalog import gpu
from peakcast.collectors.published.megatron_ci import read_megatron_ci
from peakcast.dialects.megatron.job import from_megatron
from peakcast.jobs.spec import TrainingJob
from peakcast.measurements.store import datasets_folder
from peakcast.models.baseline.baseline import baseline
from peakcast.models.ledger.megatron.blocks.layer import decoder_layer
from peakcast.models.ledger.megatron.contexts import layer_context, part_context
from peakcast.models.ledger.megatron.parameters import layer_parameters
from peakcast.models.ledger.scope.scope import out_of_scope

B, S, H = 4, 1024, 1024
INNER, STATES, HEADS, GROUPS = 2048, 8 * 128, 32, 8
HYBRID: dict[str, Any] = {
    "hidden-size": H, "num-attention-heads": 16, "micro-batch-size": B, "seq-length": S, "max-position-embeddings": S,
    "hybrid-layer-pattern": "M-M*", "bf16": True, "vocab-size": 50257, "attention-dropout": 0.0, "hidden-dropout": 0.0,
    "spec": "[megatron.core.models.hybrid.hybrid_layer_specs hybrid_stack_spec]",
}  # fmt: skip


def job(**flags: Any) -> TrainingJob:
    return from_megatron({**HYBRID, **{name.replace("_", "-"): value for name, value in flags.items()}}, 8).job


def test_parameters_of_a_mamba_layer_by_hand():
    """Gate, stream, B, C and time steps come of one projection; the convolution reads stream, B and C over four tokens."""
    convolved = INNER + 2 * STATES
    expected = (INNER + convolved + HEADS) * H + 2 * H + convolved * 4 + convolved + 3 * HEADS + INNER + H * INNER
    context = part_context(layer_context(job(), None), "mamba")
    assert sum(p.numel for p in layer_parameters(context)) == expected
    halved = part_context(layer_context(job(tensor_model_parallel_size=2), None), "mamba")
    whole = 2 * H  # the norm before the projection
    assert 2 * (sum(p.numel for p in layer_parameters(halved)) - whole) + whole == expected


@pytest.mark.parametrize("batch", [1, B])
def test_what_a_mamba_layer_keeps_by_hand(batch: int):
    """Input and norm's output; the projection, put into the order of samples; the scan's result before its gate; after it,
    in the order of tokens, and normalised. Statistics in fp32: two of the first norm, one a group of the second."""
    template = decoder_layer(part_context(layer_context(job(micro_batch_size=batch), None), "mamba"))
    kept = int(template.num_bytes[~template.born_backward & template.dies_backward].sum())
    projected = 2 * INNER + 2 * STATES + HEADS
    assert kept == batch * S * (2 * (2 * H + projected + 3 * INNER) + 4 * (2 + GROUPS))


def test_what_of_hybrids_is_modelled():
    assert out_of_scope(job()) == ""
    assert "without context parallelism" in out_of_scope(job(context_parallel_size=2))
    assert "nor a hybrid" in out_of_scope(job(hybrid_layer_pattern="M-G*"))


def test_published_runs():
    """The last rank of one to four stages on H100, 20 state-space layers of 44; nothing is fitted."""
    every = read_megatron_ci(datasets_folder() / "published" / "sources" / "megatron_ci.jsonl")
    rows = [row for row in every if row.counts and row.job.architecture.kind == "hybrid"]
    assert len(rows) == 4
    for row in rows:
        found = baseline(row.job, gpu(row.gpu), row.rank)
        assert found.replayed_allocated_bytes == pytest.approx(row.peak_allocated_bytes, rel=0.001), row.case
        assert found.first_step_peak_bytes == pytest.approx(row.first_step_peak_allocated_bytes, rel=0.001), row.case
