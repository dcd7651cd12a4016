"""What Megatron-LM's optimizers keep for an element that they own: a main parameter, states, and in which dtypes; and which
of it is on the host.

Source: megatron-core 0.16.1 `optimizer/__init__.py` (`_get_megatron_optimizer_based_on_param_groups`),
`optimizer/optimizer_config.py` (`use_precision_aware_optimizer_no_fp8_or_ds_fp8`), `optimizer/distrib_optimizer.py`
(`_build_model_and_main_param_groups`, `_copy_model_grads_to_main_grads`), `optimizer/cpu_offloading/hybrid_optimizer.py`;
Transformer Engine 2.8 `pytorch/optimizers/fused_adam.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from peakcast.core.units import DTYPE_BYTES
from peakcast.models.ledger.megatron.parameters import Parameter
from peakcast.models.ledger.megatron.share import RankShare

FP32 = 4
REMAINDER = 2
"""Bytes of the low half of an fp32 main parameter, whose high half is the bf16 parameter (`store_param_remainders`)."""
FLAG_BYTES = {"fp32": 4, "fp16": 2, "bf16": 2, "fp8": 1}
"""Of the dtypes that `--exp-avg-dtype` and its like name."""


@dataclass(frozen=True, slots=True)
class MainParameters:
    """The copies of the parameters that the optimizer updates."""

    width: int
    """Bytes of an element; 0 where the optimizer updates the parameters themselves."""
    made_by_step: bool
    """Whether Transformer Engine's Adam makes them in its first step, where else they are there before."""
    reads_gradients_in_place: bool
    """Whether Adam reads the gradient buffer in its own dtype (`decoupled_grad`); else it gets fp32."""


def main_parameters(share: RankShare) -> MainParameters:
    """Those of this job."""
    convention, precision = share.convention, share.job.precision
    weight = int(DTYPE_BYTES[precision.parameters])
    if not convention.get("use_precision_aware_optimizer"):
        return MainParameters(0 if weight == FP32 else FP32, False, False)
    asked = FLAG_BYTES[str(convention["main_params_dtype"])]
    offloads = share.job.offload.optimizer
    if asked == FP32 and convention.get("fp8_recipe") != "delayed" and not offloads:
        return MainParameters(0 if weight == FP32 else FP32, False, False)
    if weight == FP32 or offloads:  # the hybrid optimizer updates the parameters by way of copies of its own
        return MainParameters(0, False, True)
    halved = asked == FP32 and precision.parameters == "bfloat16" and convention["adam_stores_remainders"]
    return MainParameters(REMAINDER if halved else asked, True, True)


def state_widths(share: RankShare, parameter: Parameter) -> dict[str, int]:
    """Bytes of an element of each state of `parameter`: one momentum of a matrix under Muon and of all under SGD, else
    Adam's two."""
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
    """Of `total` elements of an optimizer, after how many the rest stays on the GPU (`optimizer-offload-fraction`)."""
    if not share.job.offload.optimizer:
        return 0
    return int(total * float(share.convention.get("optimizer_offload_fraction", 1.0)))
