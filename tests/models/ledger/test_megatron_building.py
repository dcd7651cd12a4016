"""How a Megatron-LM rank is built: each weight for itself, then buffers beside them, then fp32 parameters."""

from __future__ import annotations

from typing import Any

import pytest

from peakcast.catalog import gpu
from peakcast.collectors.published.simumax_b200 import read_simumax_b200
from peakcast.dialects.megatron.job import from_megatron
from peakcast.jobs.spec import TrainingJob
from peakcast.measurements.store import datasets_folder
from peakcast.models.baseline.baseline import baseline
from peakcast.models.baseline.building import building
from peakcast.models.ledger.megatron.ledger import megatron_ledger
from peakcast.timelines.timeline import Category, Timeline

H, V, LAYERS = 512, 1024, 2
GPT: dict[str, Any] = {
    "num-layers": LAYERS, "hidden-size": H, "num-attention-heads": 8, "micro-batch-size": 1, "seq-length": 128,
    "vocab-size": V, "bf16": True, "position-embedding-type": "rope", "disable-bias-linear": True,
    "normalization": "RMSNorm", "swiglu": True, "ffn-hidden-size": 1024, "untie-embeddings-and-output-weights": True,
}  # fmt: skip
PARAMETERS = 2 * V * H + H + LAYERS * (4 * H * H + 3 * H * 1024 + 2 * H)


def job(num_gpus: int = 1, **flags: Any) -> TrainingJob:
    return from_megatron({**GPT, **{name.replace("_", "-"): value for name, value in flags.items()}}, num_gpus).job


def end_of(timeline: Timeline) -> set[tuple[str, str, int, int]]:
    columns = zip(timeline.names, timeline.modules, timeline.num_bytes.tolist(), timeline.categories, strict=True)
    end = len(timeline.phases)
    return {(*entry[:3], int(entry[3])) for entry, dies in zip(columns, timeline.dies, strict=True) if dies >= end}


@pytest.mark.parametrize("flags", [{}, {"use_distributed_optimizer": True}])
def test_what_stands_when_it_is_built_is_what_the_first_step_begins_with(flags: dict[str, Any]):
    one = job(4, **flags)
    (built,) = building(one, 0)
    first = megatron_ledger(one, rank=0, step="first")
    kinds = (Category.PARAMETERS, Category.GRADIENTS, Category.MAIN_PARAMETERS)
    columns = zip(first.names, first.modules, first.num_bytes.tolist(), first.categories, first.born, strict=True)
    stands = {(*entry[:3], int(entry[3])) for *entry, born in columns if born == 0 and entry[3] in kinds}
    assert end_of(built) == stands


def test_weights_and_their_buffers_are_there_at_once():
    """With the distributed optimizer 2 + 2 + 4 bytes a parameter when the buffers have been made, of 18 (6 + 12 / ranks)
    later; without it weights stay where they are."""
    (sharded,), (whole,) = building(job(8, use_distributed_optimizer=True), 0), building(job(), 0)
    at_copy = sharded.labels.index("gradient buffer")
    alive = (sharded.born <= at_copy) & (sharded.dies > at_copy)
    assert sharded.num_bytes[alive].sum() == pytest.approx(8 * PARAMETERS, rel=0.001)
    assert sum(size for *_, size, _ in end_of(whole)) == pytest.approx(10 * PARAMETERS, rel=0.05)  # equal ones count once
    assert "parameter buffer" not in whole.labels


@pytest.mark.parametrize(("flags", "tensors"), [({}, 4), ({"moe_use_legacy_grouped_gemm": True}, 1)])
def test_each_local_expert_is_a_tensor(flags: dict[str, Any], tensors: int):
    routed = {"num_experts": 8, "expert_model_parallel_size": 2, "moe_grouped_gemm": True, **flags}
    (built,) = building(job(2, **routed), 0)
    name, module = "mlp.experts.linear_fc2.weight", "layers.0"
    sizes = [
        int(size)
        for one, where, size in zip(built.names, built.modules, built.num_bytes, strict=True)
        if (one, where) == (name, module)
    ]
    assert sizes == [4 // tensors * H * 1024 * 2] * tensors


ROWS = {row.case: row for row in read_simumax_b200(datasets_folder() / "published" / "sources" / "simumax_b200.jsonl")}


@pytest.mark.parametrize("case", sorted(ROWS))
def test_reserved_memory_of_b200_is_found(case: str):
    """Nothing is fitted. The largest of all ranks, which own other parts of the optimizer's buffers."""
    row = ROWS[case]
    found = baseline(row.job, gpu(row.gpu))
    assert found.peak_reserved_bytes == pytest.approx(row.peak_reserved_bytes, rel=0.005)
    assert found.replayed_allocated_bytes == pytest.approx(row.peak_allocated_bytes, rel=0.002)
