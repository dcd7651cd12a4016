"""Which ranks communicate with each other: the groups of a layout in Megatron's order of ranks.

Source: megatron-core 0.13.1 `parallel_state.py`, `RankGenerator` and `generate_masked_orthogonal_rank_groups`: the first
axis of the order varies fastest. Dense layers use the order tp-cp-dp-pp, experts tp-ep-dp-pp with sizes of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from peakcast.answers.explanation import Group
from peakcast.jobs.conventions import conventions
from peakcast.jobs.spec import TrainingJob

TENSOR, CONTEXT, DATA, PIPELINE = "tensor parallel", "context parallel", "data parallel", "pipeline parallel"
GRADIENT = "data × context parallel"
"""The group that reduces gradients and shards the optimizer: context-parallel ranks hold the same weights."""
EXPERT, EXPERT_DATA, EMBEDDING = "expert parallel", "expert data parallel", "embedding"


def group_along(axis: str, sizes: Mapping[str, int], along: Sequence[str], rank: int) -> Group:
    """The group of `rank` along the axes `along` of a layout; `axis` is its name. `sizes`: axis -> size, the fastest
    varying first."""
    strides, stride = {}, 1
    for name, size in sizes.items():
        strides[name] = stride
        stride *= size
    inside = {name: size for name, size in sizes.items() if name in along}
    outside = {name: size for name, size in sizes.items() if name not in along}
    first = rank - sum(rank // strides[name] % size * strides[name] for name, size in inside.items())
    return Group(
        axis=axis,
        members=tuple((first + _ranks(inside, strides)).tolist()),
        firsts=tuple(_ranks(outside, strides).tolist()),
    )


def _ranks(sizes: Mapping[str, int], strides: Mapping[str, int]) -> NDArray[np.int64]:
    """The ranks whose positions on all other axes are 0, in order."""
    found = np.zeros(1, dtype=np.int64)
    for name, size in sizes.items():
        found = (np.arange(size)[:, None] * strides[name] + found).ravel()
    return found


def communication_groups(job: TrainingJob, rank: int) -> tuple[Group, ...]:
    """The groups of `rank` that have more than one member."""
    layout = job.parallelism
    pipeline_first = bool(conventions(job).get("use_tp_pp_dp_mapping"))
    tp, cp, dp, pp = (
        layout.tensor_parallel_size,
        layout.context_parallel_size,
        layout.data_parallel_size,
        layout.pipeline_parallel_size,
    )
    dense = _ordered({"tp": tp, "cp": cp, "dp": dp, "pp": pp}, pipeline_first)
    wanted: list[tuple[str, dict[str, int], tuple[str, ...]]]
    wanted = [(TENSOR, dense, ("tp",)), (CONTEXT, dense, ("cp",)), (DATA, dense, ("dp",)), (PIPELINE, dense, ("pp",))]
    if cp > 1 and dp > 1:
        wanted.insert(3, (GRADIENT, dense, ("cp", "dp")))
    if layout.expert_parallel_size > 1:
        expert_tp = layout.expert_tensor_parallel_size or tp
        expert_dp = layout.world_size // (expert_tp * layout.expert_parallel_size * pp)
        sizes = {"tp": expert_tp, "ep": layout.expert_parallel_size, "dp": expert_dp, "pp": pp}
        experts = _ordered(sizes, pipeline_first)
        wanted += [(EXPERT, experts, ("ep",)), (EXPERT_DATA, experts, ("dp",))]
    found = [group_along(axis, sizes, along, rank) for axis, sizes, along in wanted]
    if job.architecture.tie_word_embeddings and pp > 1:  # `default_embedding_ranks`: the two ends of each pipeline
        stages = group_along(EMBEDDING, dense, ("pp",), rank)
        ends = (stages.members[0], stages.members[-1])
        found += [replace(stages, members=ends)] if rank in ends else []
    return tuple(group for group in found if group.size > 1)


def _ordered(sizes: dict[str, int], pipeline_first: bool) -> dict[str, int]:
    """Axes in Megatron's order, which ends in dp-pp by default; `--use-tp-pp-dp-mapping` makes it pp-dp."""
    if pipeline_first:
        sizes["dp"] = sizes.pop("dp")
    return sizes
