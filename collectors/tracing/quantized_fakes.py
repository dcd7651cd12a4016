"""bitsandbytes' 4-bit layers on fake tensors: the weight is an ordinary parameter of packed bytes, since a subclass of a
fake tensor cannot be made, and its product is what the library runs on a GPU for more than some 1,500 tokens.

Source: bitsandbytes 0.50.2 `nn/modules.py` (Params4bit), `backends/cuda/ops.py` (_dequant_linear_fallback), which releases
before 0.50 have in `autograd/_functions.py`.
"""

from __future__ import annotations

from typing import Any

import torch

from peakcast.collectors.packages import imported


def packed(weight: torch.Tensor, device: str, made: Any, **options: Any) -> torch.nn.Parameter:
    """The parameter that represents the 4-bit weight of the layer `made`, with the attributes that the library and peft
    read."""
    functional = imported("bitsandbytes.functional", "bitsandbytes", parameter="finetuning.quantization", value="nf4")
    data, state = functional.quantize_4bit(weight.contiguous().to(device), **options)
    parameter = torch.nn.Parameter(data, requires_grad=False)
    attributes = {**options, "quant_state": state, "blocksize": state.blocksize, "quant_storage": torch.uint8}
    for name, value in {**attributes, "bnb_quantized": True, "module": made}.items():
        setattr(parameter, name, value)
    made.quant_state = state
    return parameter


def install() -> None:
    """Take the fused product apart, in this process."""
    imported("bitsandbytes", "bitsandbytes", parameter="finetuning.quantization", value="nf4")
    torch.ops.bitsandbytes.gemm_4bit = _Product()  # type: ignore[assignment]


class _Product:
    """Stands for the operator and its only overload."""

    @property
    def default(self) -> _Product:
        return self

    def __call__(
        self,
        given: torch.Tensor,
        weight: torch.Tensor,
        shape: Any,
        absmax: torch.Tensor,
        blocksize: int,
        quant_type: str,
        bias: torch.Tensor | None = None,
        absmax_8bit: torch.Tensor | None = None,
        absmax_code: torch.Tensor | None = None,
        absmax_offset: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if absmax_8bit is not None:
            absmax = torch.empty_like(absmax_8bit, dtype=torch.float32) + absmax_offset
        assert absmax is not None  # it lives until the product is there
        whole = torch.empty(tuple(shape), dtype=given.dtype, device=given.device)
        return torch.nn.functional.linear(given, whole, bias)
