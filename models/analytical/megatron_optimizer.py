"""The optimizer step of a Megatron-LM rank, on the fp32 parameters that it owns: Adam, or Muon for matrices."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache

from peakcast.models.analytical.columns import Recording
from peakcast.models.analytical.layer_wise_optimizer import orthogonalized_bytes
from peakcast.models.analytical.megatron_buffers import FP32, buffers, owned_parameters, tensors_of
from peakcast.models.analytical.megatron_fsdp import buckets_of, is_fully_sharded
from peakcast.models.analytical.megatron_parameters import Parameter
from peakcast.models.analytical.megatron_share import RankShare
from peakcast.models.analytical.step import FOREVER, Step
from peakcast.timeline import Category, Phase
from peakcast.units import DTYPE_BYTES


@lru_cache(maxsize=512)
def optimizer_stepped(share: RankShare, first: bool) -> Recording:
    """`optimizer_step`, recorded."""
    step = Step()
    step.moment("before", Phase.BACKWARD)
    optimizer_step(step, share, first=first)
    return step.record()


def widens_gradients(share: RankShare) -> bool:
    """Whether the optimizer makes fp32 copies of the gradients."""
    precision = share.job.precision
    return DTYPE_BYTES[precision.gradients] < FP32 and precision.main_parameters == "float32"


def hold_previous_gradients(step: Step, share: RankShare) -> None:
    """Hold the fp32 gradients of the step before until `zero_grad`, with which a step begins after the buffers are
    zeroed."""
    for buffer in buffers(share):
        step.hold_all(tensors_of(buffer.pieces, ".main_grad", FP32), Category.GRADIENTS, 0, 1)


def state_names(share: RankShare, parameter: Parameter) -> tuple[str, ...]:
    """Names of the states of `parameter`: one for a matrix under Muon, else Adam's two."""
    if share.job.optimizer.name == "muon" and parameter.is_matrix:
        return ("momentum_buffer",)
    return ("exp_avg", "exp_avg_sq")


def optimizer_step(step: Step, share: RankShare, *, first: bool) -> None:
    """Add the optimizer step on the fp32 parameters that the rank owns. The first step makes the states. Gradients narrower
    than fp32 get an fp32 copy that lives until the next step's `zero_grad`."""
    now = step.moment("optimizer.step", Phase.OPTIMIZER_STEP)
    born = now if first else 0
    width = int(DTYPE_BYTES[share.job.precision.optimizer_states])
    if is_fully_sharded(share):
        for bucket in (b for parameters in owned_parameters(share) for b in buckets_of(share, parameters)):
            for name in ("exp_avg", "exp_avg_sq"):
                size = bucket.shard_elements * width
                step.hold(f"shard.{name}", Category.OPTIMIZER_STATES, size, born, module=min(bucket.modules))
        return
    widened = widens_gradients(share)
    groups: Counter[bool] = Counter()
    for buffer in buffers(share):
        for p, owned in buffer.pieces:
            names = state_names(share, p)
            if "exp_avg_sq" in names:
                groups[len(p.shape) > 1] += owned * width
            for part in p.parts(owned):
                for name in names:
                    step.hold(f"{p.name}.{name}", Category.OPTIMIZER_STATES, part * width, born, module=p.module)
                if widened:
                    step.hold(f"{p.name}.main_grad", Category.GRADIENTS, part * FP32, now, FOREVER, p.module)
    if share.job.optimizer.name == "muon":
        _orthogonalize(step, share, now)
    if share.convention.get("adam_library") == "torch" and groups:
        # AdamW's foreach path: the square roots of a group's second moments; vectors and biases are a group of their own,
        # without weight decay (`get_standard_config_overrides`)
        largest = max(groups.values())
        step.hold("exp_avg_sq_sqrt", Category.OPTIMIZER_TEMPORARIES, largest, now, now + 1, "optimizer")
        step.moment("optimizer.step returns", Phase.OPTIMIZER_STEP)


def _orthogonalize(step: Step, share: RankShare, now: int) -> None:
    """Hold the temporaries of Muon's update of the largest matrix. If tensors are dealt out to the ranks, hold also the
    updated tensors of all ranks as they are gathered, together with this rank's in one piece (megatron-core 0.16.1
    `layer_wise_optimizer.py` `allgather_params`: experts after the others)."""
    context, found = share.context, buffers(share)
    fused = context.heads * context.head_dim, context.key_value, context.key_value
    sizes = [
        orthogonalized_bytes(p, fused if p.name.endswith("linear_qkv.weight") else ())
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
