"""Which parameters of a Megatron-LM rank are FP8 themselves (`fp8-param-gather`)."""

from __future__ import annotations

from peakcast.core.units import round_up
from peakcast.models.ledger.megatron.parameters import Parameter
from peakcast.models.ledger.megatron.share import RankShare

MXFP8_BLOCK = 32
"""Elements that share a one-byte scale."""


def is_fp8_parameter(share: RankShare, parameter: Parameter) -> bool:
    """Whether the parameter itself is FP8: the weight of one of Transformer Engine's projections, if the job asks for
    it."""
    asked = bool(share.context.fp8_recipe) and bool(share.convention.get("fp8_param_gather"))
    return asked and parameter.is_projection_weight


def mxfp8_scale_bytes(parameter: Parameter) -> int:
    """Bytes of an MXFP8 parameter's scales, by rows and by columns, padded as products read them (Transformer Engine 2.8
    `pytorch/tensor/mxfp8_tensor.py` `make_empty`)."""
    rows, columns = parameter.shape[-2:]
    by_rows = round_up(rows, 128) * round_up(columns // MXFP8_BLOCK, 4)
    by_columns = round_up(rows // MXFP8_BLOCK, 4) * round_up(columns, 128)
    return parameter.numel // (rows * columns) * (by_rows + by_columns)


def reads_either_layout(share: RankShare) -> bool:
    """Whether products read an FP8 tensor by rows or by columns from one copy: Blackwell, with a single scale a tensor."""
    blackwell = share.device is not None and share.device.compute_capability[0] >= 10
    return blackwell and share.context.fp8_recipe in ("delayed", "tensorwise")
