"""Which parameters of a Megatron-LM rank are FP8 themselves (`fp8-param-gather`)."""

from __future__ import annotations

from peakcast.models.ledger.megatron.parameters import Parameter
from peakcast.models.ledger.megatron.share import RankShare

MXFP8_BLOCK = 32
"""Elements that share a one-byte scale."""


def is_fp8_parameter(share: RankShare, parameter: Parameter) -> bool:
    """Whether the parameter itself is FP8: the weight of one of Transformer Engine's projections, if the job asks for
    it."""
    asked = bool(share.context.fp8_recipe) and bool(share.convention.get("fp8_param_gather"))
    return asked and parameter.is_projection_weight


def reads_either_layout(share: RankShare) -> bool:
    """Whether products read an FP8 tensor by rows or by columns from one copy: Blackwell, with a single scale a tensor."""
    blackwell = share.device is not None and share.device.compute_capability[0] >= 10
    return blackwell and share.context.fp8_recipe in ("delayed", "tensorwise")
