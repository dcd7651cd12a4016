"""The optimizer step of a Megatron-LM rank, on the parameters that it owns: Adam, SGD, or Muon for matrices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import lru_cache

from peakcast.core.units import DTYPE_BYTES, FP8, FP32
from peakcast.models.ledger.megatron.buffers import buffers, owned_parameters, shares_gradient_buffer, tensors_of
from peakcast.models.ledger.megatron.fp8_parameters import is_fp8_parameter, mxfp8_scale_bytes
from peakcast.models.ledger.megatron.fsdp import (
    FSDPParameterGroup,
    buckets_of,
    gathers_both_layouts,
    is_fully_sharded,
)
from peakcast.models.ledger.megatron.layer_wise_optimizer import orthogonalized_bytes
from peakcast.models.ledger.megatron.parameters import Parameter, Projection
from peakcast.models.ledger.megatron.share import RankShare
from peakcast.models.ledger.megatron.states import REMAINDER, main_parameters, offloaded_elements, state_widths
from peakcast.models.ledger.tape.columns import RecordedColumns
from peakcast.models.ledger.tape.step import FOREVER, Step
from peakcast.timelines.timeline import Category, Phase

WHOLE_BUCKETS = 5 * 2**30
"""Elements after which whole buckets are cast to FP8 (`BATCH_QUANT_MEMORY_LIMIT_BYTES`)."""


@lru_cache(maxsize=512)
def optimizer_stepped(share: RankShare, first: bool) -> RecordedColumns:
    """`optimizer_step`, recorded."""
    step = Step()
    step.moment("before", Phase.BACKWARD)
    optimizer_step(step, share, first=first)
    return step.record()


def widens_gradients(share: RankShare) -> bool:
    """Whether the optimizer makes fp32 copies of the gradients."""
    precision = share.job.precision
    if precision.main_parameters != "float32" or main_parameters(share).reads_gradients_in_place:
        return False
    return DTYPE_BYTES[precision.gradients] < FP32


def hold_previous_gradients(step: Step, share: RankShare) -> None:
    """Hold the fp32 gradients of the step before until `zero_grad`, with which a step begins after the buffers are
    zeroed."""
    for buffer in buffers(share):
        step.hold_all(tensors_of(buffer.pieces, ".main_grad", FP32), Category.GRADIENTS, 0, 1)


def optimizer_step(step: Step, share: RankShare, *, first: bool) -> None:
    """Add the optimizer step on the parameters that the rank owns. The first step makes the states. Gradients narrower than
    fp32 get an fp32 copy that lives until the next step's `zero_grad`, unless Adam reads them as they are."""
    now = step.moment("optimizer.step", Phase.OPTIMIZER_STEP)
    born = now if first else 0
    if is_fully_sharded(share):
        _hold_sharded_states(step, share, born)
        _cast_shards_to_fp8(step, share)
        return
    widened, main = widens_gradients(share), main_parameters(share)
    groups: Counter[bool] = Counter()
    unscaled: Counter[bool] = Counter()
    for p, owned, on_host in _pieces(share):
        states = {} if on_host else state_widths(share, p)
        if main.made_by_step:
            states["master_param"] = main.width
        if "exp_avg_sq" in states:
            groups[len(p.shape) > 1] += owned * states["exp_avg_sq"]
        if share.convention.get("use_precision_aware_optimizer") and not share.job.offload.optimizer:
            narrow = sum(width < FP32 for name, width in states.items() if name != "master_param" or width != REMAINDER)
            unscaled[len(p.shape) > 1] += owned * FP32 * narrow
        for part in p.parts(owned):
            for name, width in states.items():
                category = Category.MAIN_PARAMETERS if name == "master_param" else Category.OPTIMIZER_STATES
                step.hold(f"{p.name}.{name}", category, part * width, born, module=p.module)
            if widened:
                step.hold(f"{p.name}.main_grad", Category.GRADIENTS, part * FP32, now, FOREVER, p.module)
    if any(unscaled.values()):  # of one group after the other, all its narrow states in fp32
        step.hold("unscaled_states", Category.OPTIMIZER_TEMPORARIES, max(unscaled.values()), now, now + 1, "optimizer")
        step.moment("optimizer.step returns", Phase.OPTIMIZER_STEP)
    if share.job.optimizer.name == "muon":
        _orthogonalize(step, share, now)
    if share.convention.get("adam_library") == "torch" and groups:
        # AdamW's foreach path: the square roots of a group's second moments; vectors and biases are a group of their own,
        # without weight decay (`get_standard_config_overrides`)
        largest = max(groups.values())
        step.hold("exp_avg_sq_sqrt", Category.OPTIMIZER_TEMPORARIES, largest, now, now + 1, "optimizer")
        step.moment("optimizer.step returns", Phase.OPTIMIZER_STEP)
    _cast_to_fp8(step, share)


def _cast_to_fp8(step: Step, share: RankShare) -> None:
    """Hold this rank's part of the FP8 parameters in the model's dtype: each optimizer, that of the experts last, casts all
    of its own to that dtype and then one by one to FP8 (Transformer Engine 2.8 `pytorch/tensor/utils.py`,
    `cast_master_weights_to_fp8`). MXFP8 ones are gathered in the gradient buffer as they are."""
    width = int(DTYPE_BYTES[share.job.precision.parameters])
    narrow = [] if shares_gradient_buffer(share) else [buffer for buffer in buffers(share) if buffer.width == FP8]
    for expert in (False, True):
        owned = sum(numel for buffer in narrow if buffer.parameters[0].expert == expert for _, numel in buffer.pieces)
        if owned:
            at = step.moment("cast to FP8", Phase.OPTIMIZER_STEP)
            step.hold("cast_parameters", Category.OPTIMIZER_TEMPORARIES, owned * width, at, at + 1, "optimizer")
    if narrow:
        step.moment("optimizer.step returns", Phase.OPTIMIZER_STEP)


def _cast_shards_to_fp8(step: Step, share: RankShare) -> None:
    """Megatron-FSDP's cast of this rank's parts of the FP8 parameters: by way of the model's dtype, like other optimizers',
    but for scales of blocks in whole buckets, which are as many at once as `WHOLE_BUCKETS` has room for (megatron-core
    0.16.1 `param_and_grad_buffer.py` `copy_main_weights_to_model_weights`). For MXFP8 ones the maximum for each scale is in
    that dtype too, on every rank for all (Transformer Engine 2.20 `_cast_master_weights_to_fp8_mxfp8_scaling`)."""
    width = int(DTYPE_BYTES[share.job.precision.parameters])
    maxima = {
        expert: sum(
            mxfp8_scale_bytes(p) * width
            for parameters in owned_parameters(share)
            for p in (parameters if gathers_both_layouts(share) else ())
            if p.expert == expert and is_fp8_parameter(share, p)
        )
        for expert in (False, True)
    }
    narrow = [b for parameters in owned_parameters(share) for b in buckets_of(share, parameters) if b.narrow]
    whole = share.context.fp8_recipe == "blockwise"
    batches: list[list[FSDPParameterGroup]] = [[]]
    for bucket in narrow:
        if whole and sum(one.elements for one in batches[-1]) > WHOLE_BUCKETS:
            batches.append([])
        batches[-1].append(bucket)
    for batch in filter(None, batches):
        began = at = 0
        for expert in sorted({bucket.expert for bucket in batch}):
            at = step.moment("cast to FP8", Phase.OPTIMIZER_STEP)
            began = began or at
            owned = sum(bucket.shard_elements for bucket in batch if bucket.expert == expert)
            cast = owned * width + maxima[expert]
            step.hold("cast_parameters", Category.OPTIMIZER_TEMPORARIES, cast, at, at + 1, "optimizer")
        if whole:
            gathered = sum(bucket.elements for bucket in batch) * FP8
            step.hold("whole_parameters", Category.PARAMETERS, gathered, began, at + 1, "optimizer")
    if narrow:
        step.moment("optimizer.step returns", Phase.OPTIMIZER_STEP)


def end_of_columns(share: RankShare, p: Parameter, now: int) -> int:
    """The instant at which an optimizer step that begins at `now` frees the copy by columns of an FP8 parameter: with
    scales of blocks, when the optimizer has cast all of its own, unless the release keeps it. FOREVER if it stays."""
    if share.context.fp8_recipe != "blockwise" or share.convention["fp8_columns_outlive_step"]:
        return FOREVER
    after_dense = p.expert and any(buffer.width == FP8 and not buffer.parameters[0].expert for buffer in buffers(share))
    return now + 2 + after_dense


def _pieces(share: RankShare) -> Iterator[tuple[Parameter, int, bool]]:
    """The parameters of all buffers, the elements of each that the rank owns, and whether their states are on the host:
    those of each optimizer's first ones, until as many as asked for are there (`_get_sub_optimizer_param_groups`)."""
    for expert in (False, True):
        pieces = [(p, owned) for buffer in buffers(share) for p, owned in buffer.pieces if p.expert == expert]
        threshold, offloaded = offloaded_elements(share, sum(owned for _, owned in pieces)), 0
        for p, owned in pieces:
            on_host = offloaded < threshold
            offloaded += owned * on_host
            yield p, owned, on_host


def _hold_sharded_states(step: Step, share: RankShare, born: int) -> None:
    width = int(DTYPE_BYTES[share.job.precision.optimizer_states])
    for bucket in (b for parameters in owned_parameters(share) for b in buckets_of(share, parameters)):
        for name in ("exp_avg", "exp_avg_sq"):
            size = bucket.shard_elements * width
            step.hold(f"shard.{name}", Category.OPTIMIZER_STATES, size, born, module=min(bucket.modules))


def _orthogonalize(step: Step, share: RankShare, now: int) -> None:
    """Hold the temporaries of Muon's update of the largest matrix. If tensors are dealt out to the ranks, hold also the
    updated tensors of all ranks as they are gathered, together with this rank's in one piece (megatron-core 0.16.1
    `layer_wise_optimizer.py` `allgather_params`: experts after the others)."""
    context, found = share.context, buffers(share)
    fused = context.attention.heads * context.attention.head_dim, context.attention.key_value, context.attention.key_value
    sizes = [
        orthogonalized_bytes(p, fused if p.projection is Projection.QKV and not p.adapter else ())
        for buffer in found
        for p, _ in buffer.pieces
        if p.is_matrix
    ]
    step.hold("orthogonalized", Category.OPTIMIZER_TEMPORARIES, max(sizes, default=0), now, now + 1, "optimizer")
    for expert in (False, True):
        dealt = [buffer for buffer in found if not buffer.rules.sharded and buffer.parameters[0].expert == expert]
        if dealt and share.job.parallelism.zero_stage and dealt[0].rules.shards > 1:
            at = step.moment("all-gather", Phase.OPTIMIZER_STEP)
            gathered = sum(buffer.elements * buffer.width for buffer in dealt)
            own = sum(numel * buffer.width for buffer in dealt for _, numel in buffer.pieces)
            step.hold("gathered_parameters", Category.COMMUNICATION_BUFFERS, gathered + own, at, at + 1, "optimizer")
    step.moment("optimizer.step returns", Phase.OPTIMIZER_STEP)
