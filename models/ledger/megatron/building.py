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

from dataclasses import replace
from functools import lru_cache

from peakcast.core.units import DTYPE_BYTES
from peakcast.jobs.spec import TrainingJob
from peakcast.models.ledger.megatron.buffers import (
    buffers,
    frozen_parameters,
    hold_parameters,
    own_tensors,
    owned_parameters,
    parameter_buffer_bytes,
    tensors_of,
)
from peakcast.models.ledger.megatron.fsdp import is_fully_sharded
from peakcast.models.ledger.megatron.share import RankShare, rank_share, weights_share
from peakcast.models.ledger.megatron.states import main_parameters
from peakcast.models.ledger.tape.step import FOREVER, Step
from peakcast.timelines.timeline import Category, Phase, Timeline


def megatron_built(job: TrainingJob, rank: int) -> Timeline:
    """The building of `job` on global `rank`, which ends with what exists before the first step."""
    return _built(weights_share(rank_share(job, None, rank)))


@lru_cache(maxsize=64)
def _built(share: RankShare) -> Timeline:
    """`megatron_built`, cached by the share of weights."""
    step = Step()
    _build(step, share)
    return step.timeline()


def _build(step: Step, share: RankShare) -> None:
    """Add the building to `step`."""
    if is_fully_sharded(share):  # Megatron-FSDP empties the cache after it has made its buffers
        step.moment("sharded", Phase.INIT)
        hold_parameters(step, share)
        step.moment("built", Phase.INIT)
        return
    precision = share.job.precision
    gradient, main = int(DTYPE_BYTES[precision.gradients]), main_parameters(share)
    made = {p: step.moment("make", Phase.INIT) for parameters in owned_parameters(share) for p in parameters}
    for p in frozen_parameters(share):
        for name, module, size in tensors_of([(p, p.numel)], "", int(DTYPE_BYTES[precision.parameters])):
            step.hold(name, Category.PARAMETERS, size, made[p], module=module)
    for buffer in buffers(share):
        if size := parameter_buffer_bytes(share, buffer):
            born = step.moment("parameter buffer", Phase.INIT)
            step.hold("parameter_buffer", Category.PARAMETERS, size, born, module="model")
        born = step.moment("gradient buffer", Phase.INIT)
        step.hold("gradient_buffer", Category.GRADIENTS, buffer.elements * gradient, born, module="model")
        outside_buffers = bool(own_tensors(share, buffer))
        copied = step.moment("copied", Phase.INIT) if buffer.rules.sharded and not outside_buffers else FOREVER
        for p, numel in buffer.whole:
            if outside_buffers:
                tensors = own_tensors(share, replace(buffer, parameters=[p]))
            else:
                tensors = tensors_of([(p, numel)], "", buffer.width)
            for name, module, size in tensors:
                step.hold(name, Category.PARAMETERS, size, made[p], copied, module)
    for buffer in buffers(share) if main.width and not main.made_by_step else ():
        for p, numel in buffer.pieces:
            for part in p.parts(numel):
                now = step.moment("main parameter", Phase.INIT)
                step.hold("clone", Category.TEMPORARIES, part * buffer.width, now, now + 1, p.module)
                step.hold(f"{p.name}.main", Category.MAIN_PARAMETERS, part * main.width, now, module=p.module)
    step.moment("built", Phase.INIT)
