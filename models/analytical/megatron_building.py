"""How a Megatron-LM rank makes its parameters and buffers before the first step, and what that leaves in the allocator's
cache.

Every weight is first a tensor of its own on the GPU. Then DDP makes the buffers of each model chunk, copies the weights
into the parameter buffer and frees them one by one; their segments stay cached. Last, the optimizer makes its fp32
parameters, each from a copy in the parameters' dtype.

Source: megatron-core 0.14.0 `distributed/param_and_grad_buffer.py` `_ParamAndGradBuffer.__init__`,
`distributed/distributed_data_parallel.py`, `optimizer/distrib_optimizer.py` `_build_model_and_main_param_groups`
(`shard_model_param.clone().float()`), `optimizer/optimizer.py`; Megatron-LM `megatron/training/training.py` `get_model`.
"""

from __future__ import annotations

from peakcast.models.analytical.megatron_buffers import FP32, buffers, hold_parameters, owned_parameters, tensors_of
from peakcast.models.analytical.megatron_fsdp import is_fully_sharded
from peakcast.models.analytical.megatron_share import rank_share, weights_share
from peakcast.models.analytical.step import FOREVER, Step
from peakcast.spec import TrainingJob
from peakcast.timeline import Category, Phase
from peakcast.units import DTYPE_BYTES


def build_megatron(step: Step, job: TrainingJob, rank: int) -> None:
    """Add the building of `job` on global `rank` to `step`, which ends with what exists before the first step."""
    share = weights_share(rank_share(job, None, rank))
    if is_fully_sharded(share):  # Megatron-FSDP empties the cache after it has made its buffers
        step.moment("sharded", Phase.INIT)
        hold_parameters(step, share)
        step.moment("built", Phase.INIT)
        return
    precision = job.precision
    weight, gradient = int(DTYPE_BYTES[precision.parameters]), int(DTYPE_BYTES[precision.gradients])
    made = {}
    for parameters in owned_parameters(share):
        for p in parameters:
            made[p] = step.moment("make", Phase.INIT)
    for buffer in buffers(share):
        if buffer.rules.sharded:
            born = step.moment("parameter buffer", Phase.INIT)
            step.hold("parameter_buffer", Category.PARAMETERS, buffer.elements * buffer.width, born, module="model")
        born = step.moment("gradient buffer", Phase.INIT)
        step.hold("gradient_buffer", Category.GRADIENTS, buffer.elements * gradient, born, module="model")
        copied = step.moment("copied", Phase.INIT) if buffer.rules.sharded else FOREVER
        for p, numel in buffer.whole:
            step.hold_all(tensors_of([(p, numel)], "", buffer.width), Category.PARAMETERS, made[p], copied)
    for buffer in buffers(share) if weight != FP32 else ():
        for p, numel in buffer.pieces:
            for part in p.parts(numel):
                now = step.moment("main parameter", Phase.INIT)
                step.hold("clone", Category.TEMPORARIES, part * buffer.width, now, now + 1, p.module)
                step.hold(f"{p.name}.main", Category.MAIN_PARAMETERS, part * FP32, now, module=p.module)
    step.moment("built", Phase.INIT)
