"""Overlapped exchanges of experts: two micro-batches at once, against traces of megatron-core's own combined schedule."""

from __future__ import annotations

from typing import Any

import pytest

from peakcast.dialects.megatron.job import from_megatron
from peakcast.jobs.spec import TrainingJob
from peakcast.models.ledger.layouts.pipeline import schedule
from peakcast.models.ledger.megatron.ledger import megatron_ledger

MIB = 2**20
LAYERS, STREAM = 12, 2 * MIB
"""Half of 4 × 1024 tokens of 512 elements in bf16 are a rank's residual stream."""
ROUTED: dict[str, Any] = {
    "num-layers": LAYERS, "hidden-size": 512, "num-attention-heads": 8, "micro-batch-size": 4, "seq-length": 1024,
    "max-position-embeddings": 1024, "bf16": True, "tensor-model-parallel-size": 2, "expert-model-parallel-size": 4,
    "expert-tensor-parallel-size": 1, "disable-bias-linear": True, "sequence-parallel": True, "num-experts": 8,
    "moe-router-load-balancing-type": "aux_loss", "moe-router-topk": 2, "moe-aux-loss-coeff": 1e-2,
    "deterministic-mode": True, "no-gradient-accumulation-fusion": True, "moe-grouped-gemm": True,
    "moe-token-dispatcher-type": "alltoall", "attention-softmax-in-fp32": True, "attention-backend": "unfused",
    "no-bias-gelu-fusion": True, "vocab-size": 50257,
}  # fmt: skip


def job(num_gpus: int, overlap: bool, **flags: Any) -> TrainingJob:
    given = {**ROUTED, **{name.replace("_", "-"): value for name, value in flags.items()}}
    given["overlap-moe-expert-parallel-comm"] = overlap
    return from_megatron(given, num_gpus).job


def test_one_more_forward_comes_before_the_first_backward():
    turns = schedule(2, 2, 0, 4, early=1)
    plain = schedule(2, 2, 0, 4)
    first = [turn.forward for turn in turns].index(False)
    assert first == [turn.forward for turn in plain].index(False) + 1
    assert sorted(map(repr, turns)) == sorted(map(repr, plain))
    assert [turn.forward for turn in schedule(1, 1, 0, 3, early=1)] == [True, True, False, True, False, False]


def test_dispatchers_keep_every_layers_input_and_its_gradient_into_the_next_step():
    plain, overlapped = (megatron_ledger(job(8, overlap, global_batch_size=32)) for overlap in (False, True))
    assert overlapped.totals[-1] - plain.totals[-1] == 2 * LAYERS * STREAM


def test_a_predicting_layer_keeps_its_softmax_until_another_micro_batch_has_attended():
    """As a trace of megatron-core 0.16.1 has it: the head's backward comes before the other micro-batch's first attention,
    the predicting layer's attention runs backward after it."""
    scores = 4 * 4 * 1024 * 1024 * 2  # micro-batch, heads of a rank, query, key, bf16

    def softmaxes(overlap: bool) -> int:
        one = job(8, overlap, global_batch_size=32, num_layers=1, mtp_num_layers=1, recompute_granularity=None)
        steady = megatron_ledger(one)
        saved = [name == "softmax" and size == scores for name, size in zip(steady.names, steady.num_bytes, strict=True)]
        return max(int((steady.alive_at(instant) & saved).sum()) for instant in range(len(steady.phases)))

    assert softmaxes(False) == 2, "of the layer and of the one that predicts"
    assert softmaxes(True) == 3, "and of the layer for another micro-batch"


PIPELINE = {"pipeline_model_parallel_size": 2, "num_layers_per_virtual_pipeline_stage": 3, "global_batch_size": 128}


@pytest.mark.parametrize(("rank", "more", "kept"), [(0, (138, 23.1), 114), (15, (17, 21.2), 12.6)])
def test_a_pipelines_rank_needs_little_more(rank, more, kept):
    """In MB, of traces of megatron-core 0.16.1: what the peak of a step rises by, and what stays after it. The ledger has
    the saved attention of one layer more and what a turn hands on while the other runs, not all that waits for streams."""
    plain, overlapped = (megatron_ledger(job(16, overlap, **PIPELINE), rank=rank) for overlap in (False, True))
    rise = (overlapped.totals.max() - plain.totals.max()) / 1e6
    assert rise == pytest.approx(kept, abs=1)
    assert 0 < rise <= more[0]
    assert (overlapped.totals[-1] - plain.totals[-1]) / 1e6 == pytest.approx(more[1], abs=0.5)
