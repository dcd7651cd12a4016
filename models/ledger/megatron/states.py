"""What Megatron-LM's optimizers keep for each element that a rank owns: the main parameter and the states, in which dtypes,
and how much of it on the host.

Source: megatron-core 0.16.1 `optimizer/__init__.py` (`_get_megatron_optimizer_based_on_param_groups`),
`optimizer/optimizer_config.py` (`use_precision_aware_optimizer_no_fp8_or_ds_fp8`), `optimizer/distrib_optimizer.py`
(`_build_model_and_main_param_groups`, `_copy_model_grads_to_main_grads`), `optimizer/cpu_offloading/hybrid_optimizer.py`;
Transformer Engine 2.8 `pytorch/optimizers/fused_adam.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from peakcast.core.units import DTYPE_BYTES, FP32
from peakcast.models.ledger.megatron.parameters import Parameter
from peakcast.models.ledger.megatron.share import RankShare

REMAINDER = 2
"""Bytes of the low half of an fp32 main parameter, whose high half is the bf16 parameter (`store_param_remainders`)."""
FLAG_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1}
"""Value of `--exp-avg-dtype` and similar flags -> bytes per element."""


@dataclass(frozen=True, slots=True)
class MainParameters:
    """The copies of the parameters that the optimizer updates."""

    width: int
    """Bytes per element; 0 if the optimizer updates the parameters themselves."""
    made_by_step: bool
    """Whether Transformer Engine's Adam makes them in its first step; otherwise they exist before it."""
    reads_gradients_in_place: bool
    """Whether Adam reads gradients in the buffer's dtype (`decoupled_grad`); otherwise it gets fp32 copies."""


def main_parameters(share: RankShare) -> MainParameters:
    """The main parameters of this job."""
    convention, precision = share.convention, share.job.precision
    weight = int(DTYPE_BYTES[precision.parameters])
    if not convention.get("use_precision_aware_optimizer"):
        return MainParameters(0 if weight == FP32 else FP32, False, False)
    asked = FLAG_BYTES[str(convention["main_params_dtype"])]
    offloads = share.job.offload.optimizer
    if asked == FP32 and convention.get("fp8_recipe") != "delayed" and not offloads:
        return MainParameters(0 if weight == FP32 else FP32, False, False)
    if weight == FP32 or offloads:  # the hybrid optimizer has its own copies of the parameters
        return MainParameters(0, False, True)
    halved = asked == FP32 and precision.parameters == "bfloat16" and convention["adam_stores_remainders"]
    return MainParameters(REMAINDER if halved else asked, True, True)


def state_widths(share: RankShare, parameter: Parameter) -> dict[str, int]:
    """State -> bytes per element, for `parameter`: one momentum for a matrix under Muon and for all parameters under SGD,
    else Adam's two states."""
    optimizer, convention = share.job.optimizer, share.convention
    width = int(DTYPE_BYTES[share.job.precision.optimizer_states])
    if optimizer.name == "sgd":
        return {"momentum_buffer": width} if optimizer.momentum else {}
    if optimizer.name == "muon" and parameter.is_matrix:
        return {"momentum_buffer": width}
    if convention.get("use_precision_aware_optimizer") and not share.job.offload.optimizer:
        first, second = str(convention["exp_avg_dtype"]), str(convention["exp_avg_sq_dtype"])
        return {"exp_avg": FLAG_BYTES[first], "exp_avg_sq": FLAG_BYTES[second]}
    return {"exp_avg": width, "exp_avg_sq": width}


def offloaded_elements(share: RankShare, total: int) -> int:
    """How many of an optimizer's `total` elements must be on the host before the states of further parameters stay on the
    GPU (`optimizer-offload-fraction`)."""
    if not share.job.offload.optimizer:
        return 0
    return int(total * float(share.convention.get("optimizer_offload_fraction", 1.0)))
