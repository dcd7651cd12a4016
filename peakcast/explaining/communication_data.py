"""Communication between model replicas: DDP, FSDP, ZeRO and Megatron-LM's distributed optimizer.

Sources: torch 2.13 `nn/parallel/distributed.py`, `distributed/fsdp`; accelerate `Accelerator.no_sync`; Rajbhandari et al.
2019, arXiv:1910.02054, section 7; megatron-core 0.13.1 `distributed/param_and_grad_buffer.py`.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from peakcast.answers.explanation import CollectiveName, ParameterRow
from peakcast.core.units import DTYPE_BYTES, MIB
from peakcast.explaining.collectives import CollectiveCall, StageOfJob
from peakcast.explaining.groups import DATA, EXPERT_DATA, GRADIENT
from peakcast.explaining.rank_parameters import parameter_rows, parameter_shards
from peakcast.jobs.conventions import adapter_dtype
from peakcast.models.ledger.parameters.inventory import embedding_parameters, head_parameters, layer_parameters

DDP_FIRST_BUCKET_BYTES = 1 * MIB
DDP_BUCKET_BYTES = 25 * MIB
"""Source: torch 2.13 `distributed/__init__.py`, `_DEFAULT_FIRST_BUCKET_BYTES`; `nn/parallel/distributed.py`."""
MEGATRON = "megatron-core 0.13.1 distributed/param_and_grad_buffer.py, optimizer/distrib_optimizer.py"
DDP = "Li et al. 2020, arXiv:2006.15704; torch 2.13 nn/parallel/distributed.py; accelerate Accelerator.no_sync"
FSDP = "torch 2.13 distributed/fsdp; Zhao et al. 2023, arXiv:2304.11277"
ZERO = "Rajbhandari et al. 2019, arXiv:1910.02054, section 7; DeepSpeed runtime/zero"


def data_parallel(share: StageOfJob) -> Iterator[CollectiveCall]:
    """Calls that sum gradients over replicas, and that gather sharded weights before use or after their update."""
    if share.job.framework == "megatron":
        yield from _megatron(share)
    elif parameter_shards(share.job) > 1:
        yield from _fully_sharded(share)
    else:
        yield from _replicated(share)


def _axis(share: StageOfJob) -> tuple[str, int]:
    layout = share.job.parallelism
    axis = GRADIENT if layout.context_parallel_size > 1 and layout.data_parallel_size > 1 else DATA
    return axis, layout.data_parallel_size * layout.context_parallel_size


# -- Megatron-LM --------------------------------------------------------------------------------------------------------


def _megatron(share: StageOfJob) -> Iterator[CollectiveCall]:
    axis, n = _axis(share)
    layout = share.job.parallelism
    dense, experts, buckets = _elements(share)
    expert_tp = layout.expert_tensor_parallel_size or layout.tensor_parallel_size
    expert_n = layout.world_size // (expert_tp * layout.expert_parallel_size * layout.pipeline_parallel_size)
    sharded = layout.zero_stage > 0
    for name, size, elements, count in ((axis, n, dense, buckets), (EXPERT_DATA, expert_n, experts, len(share.chunks))):
        if not elements:
            continue
        gradients = elements * int(DTYPE_BYTES[share.job.precision.gradients]) // count
        weights = elements * int(DTYPE_BYTES[share.job.precision.parameters]) // count
        reduce: CollectiveName = "reduce-scatter" if sharded else "all-reduce"
        kind = "experts' gradients" if name == EXPERT_DATA else "gradients"
        where = "backward of the last micro-batch"
        yield CollectiveCall(
            axis=name, function=reduce, what=kind, where=where, group_size=size, message_bytes=gradients, count=count,
            source=MEGATRON, once=True,
        )  # fmt: skip
        if sharded:
            yield CollectiveCall(
                axis=name, function="all-gather", what=kind.replace("gradients", "updated weights"),
                where="after the optimizer step", group_size=size, message_bytes=weights, count=count, source=MEGATRON,
                once=True,
            )  # fmt: skip


def _elements(share: StageOfJob) -> tuple[int, int, int]:
    """Number of elements of the stage that every replica holds, number of its experts' elements, and number of buckets in
    which the former are sent."""
    job, layout = share.job, share.job.parallelism
    if job.architecture.moe is None:
        inner = layout.tensor_parallel_size * layout.context_parallel_size
        innermost = bool(share.convention.get("use_tp_pp_dp_mapping"))
        rows = parameter_rows(job, share.stage * inner * (1 if innermost else layout.data_parallel_size))
        return sum(prod(row.rank_shape) for row in rows), 0, _buckets(share, rows)
    expert_tp = layout.expert_tensor_parallel_size or layout.tensor_parallel_size
    tensors = [tensor for layer in share.layers for tensor in layer_parameters(job.architecture, layer)]
    tensors += embedding_parameters(job.architecture) if share.is_first else ()
    tensors += head_parameters(job.architecture) if share.is_last else ()
    dense = experts = 0
    for tensor in tensors:
        if tensor.role == "expert":
            experts += tensor.numel // (layout.expert_parallel_size * expert_tp)
        else:
            dense += tensor.numel // (layout.tensor_parallel_size if tensor.tensor_parallel_dim is not None else 1)
    return dense, experts, len(share.chunks)


def _buckets(share: StageOfJob, rows: tuple[ParameterRow, ...]) -> int:
    """Number of buckets: one per chunk, or, if the reduction overlaps with backward, one whenever enough elements are
    collected."""
    from peakcast.models.ledger.megatron.distributed_optimizer import bucket_size

    layout, convention = share.job.parallelism, share.convention
    replicas = layout.data_parallel_size * layout.context_parallel_size
    asked = int(convention.get("ddp_bucket_size", 0) or 0)
    closes_at = bucket_size(bool(convention.get("overlap_grad_reduce")), share.stage, replicas, asked)
    if closes_at is None:
        return len(share.chunks)
    buckets = held = 0
    for row in reversed(rows):
        held += prod(row.rank_shape)
        if held >= closes_at:
            buckets, held = buckets + 1, 0
    return buckets + (held > 0)


# -- PyTorch and DeepSpeed ----------------------------------------------------------------------------------------------


def _trained_bytes(share: StageOfJob) -> int:
    """Bytes of one replica's gradients: of all weights, or of the adapters."""
    job, rows = share.job, parameter_rows(share.job, 0)
    if job.finetuning.method == "full":
        return sum(prod(row.shape) for row in rows) * int(DTYPE_BYTES[job.precision.gradients])
    return sum(prod(row.shape) for row in rows if row.is_trained_adapter) * int(DTYPE_BYTES[adapter_dtype(job)])


def _replicated(share: StageOfJob) -> Iterator[CollectiveCall]:
    axis, n = _axis(share)
    size, stage = _trained_bytes(share), share.job.parallelism.zero_stage
    if stage == 0:
        count = 1 + -(-max(0, size - DDP_FIRST_BUCKET_BYTES) // DDP_BUCKET_BYTES)
        yield CollectiveCall(
            axis=axis, function="all-reduce", what="gradients, in buckets", where="backward of the last micro-batch",
            group_size=n, message_bytes=size // count, count=count, source=DDP, once=True,
        )  # fmt: skip
        return
    bucket = int(share.convention.get("reduce_bucket_size", 500_000_000)) * int(DTYPE_BYTES[share.job.precision.gradients])
    count = -(-size // bucket)
    every = stage >= 2  # gradients are sharded as soon as they exist, in every micro-batch
    yield CollectiveCall(
        axis=axis, function="reduce-scatter", what="gradients, in buckets",
        where="backward" if every else "backward of the last micro-batch", group_size=n, message_bytes=size // count,
        count=count, source=ZERO, once=not every,
    )  # fmt: skip
    yield CollectiveCall(
        axis=axis, function="all-gather", what="updated weights", where="after the optimizer step", group_size=n,
        message_bytes=size // count, count=count, source=ZERO, once=True,
    )  # fmt: skip


def _fully_sharded(share: StageOfJob) -> Iterator[CollectiveCall]:
    """FSDP and ZeRO-3: a layer's weights are gathered before its forward and again before its backward. Weights outside of
    layers are gathered once and, with FSDP, kept gathered in between."""
    job, (axis, n) = share.job, _axis(share)
    zero = job.parallelism.zero_stage == 3
    source = ZERO if zero else FSDP
    sizes: dict[str, int] = {}
    for row in parameter_rows(job, 0):
        sizes[row.module] = sizes.get(row.module, 0) + prod(row.shape) * share.element_bytes
    layers = [size for module, size in sizes.items() if module.startswith("layers.")]
    root = sum(sizes.values()) - sum(layers)

    def call(
        function: CollectiveName, what: str, where: str, message: int, count: int, once: bool = False
    ) -> CollectiveCall:
        return CollectiveCall(
            axis=axis, function=function, what=what, where=where, group_size=n, message_bytes=message, count=count,
            source=source, once=once,
        )  # fmt: skip

    mean = sum(layers) // len(layers)
    yield call("all-gather", "a layer's weights", "forward, each layer", mean, len(layers))
    yield call("all-gather", "a layer's weights again", "backward, each layer", mean, len(layers))
    yield call("all-gather", "embedding, norm and head", "forward", root, 1)
    if zero:
        yield call("all-gather", "embedding, norm and head again", "backward", root, 1)
    full = job.finetuning.method == "full"
    units = len(layers) + (1 if full else 0)
    message = _trained_bytes(share) // units
    where = "backward" if zero else "backward of the last micro-batch"
    yield call("reduce-scatter", "gradients", where, message, units, once=not zero)
