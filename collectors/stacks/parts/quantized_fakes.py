"""bitsandbytes on fake tensors. The weight of a quantised layer is an ordinary parameter of packed bytes, because fake
tensors cannot be of bitsandbytes' parameter classes. Operators are replaced by the steps that they run on a GPU. Paged
optimizer states are in managed memory, which the allocator does not see.

Source: bitsandbytes 0.50.2 `nn/modules.py` (Params4bit, Int8Params), `backends/cuda/ops.py` (_dequant_linear_fallback,
which is run for more than about 1,500 tokens, and which is in `autograd/_functions.py` before 0.50; and operators whose
names begin with int8), `functional.py` (get_paged).
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch

from peakcast.collectors.machine.packages import imported


def packed(weight: torch.Tensor, device: str, made: Any, **options: Any) -> torch.nn.Parameter:
    """The parameter that represents the 4-bit weight of the layer `made`, with the attributes that the library and peft
    read."""
    functional = imported("bitsandbytes.functional", "bitsandbytes", parameter="finetuning.quantization", value="nf4")
    options = {"quant_storage": torch.uint8, **options}
    data, state = functional.quantize_4bit(weight.contiguous().to(device), **options)
    parameter = torch.nn.Parameter(data, requires_grad=False)
    attributes = {**options, "quant_state": state, "blocksize": state.blocksize}
    for name, value in {**attributes, "bnb_quantized": True, "module": made}.items():
        setattr(parameter, name, value)
    made.quant_state = state
    return parameter


def packed_int8(weight: torch.Tensor, device: str) -> torch.nn.Parameter:
    """The parameter that represents the 8-bit weight of a layer: one byte per element, and a scale for each row."""
    whole = weight.contiguous().to(device=device, dtype=torch.float16)
    data = torch.empty_like(whole, dtype=torch.int8)
    parameter: Any = torch.nn.Parameter(data, requires_grad=False)
    parameter.CB, parameter.has_fp16_weights = data, False
    parameter.SCB = torch.empty(whole.shape[0], dtype=torch.float32, device=device)
    return parameter


def install() -> None:
    """Replace the operators by their steps, and keep paged states out of the allocator, in this process."""
    imported("bitsandbytes", "bitsandbytes", parameter="finetuning.quantization", value="nf4")
    functional = imported("bitsandbytes.functional", "bitsandbytes", parameter="optimizer.name", value="paged")
    for name, function in OPERATORS.items():
        setattr(torch.ops.bitsandbytes, name, _Operator(function))
    layers = imported("bitsandbytes.nn.modules", "bitsandbytes", parameter="finetuning.quantization", value="nf4")
    layers.fix_4bit_weight_quant_state_from_module = _state_from_layer
    functional.get_paged = _paged
    functional.prefetch_tensor = functional.fill = lambda *_, **__: None


def dequantize_for_peft(integrations: Any) -> None:
    """Let peft dequantize weights of 4 bits, as DoRA asks its module `integrations` to; it knows them by their class."""
    own = integrations.dequantize_module_weight

    @functools.wraps(own)
    def dequantized(layer: Any) -> Any:
        weight: Any = getattr(layer, "weight", None)
        if (state := getattr(weight, "quant_state", None)) is None:
            return own(layer)
        functional = imported("bitsandbytes.functional", "bitsandbytes", parameter="finetuning.quantization", value="nf4")
        return functional.dequantize_4bit(weight.data, state)

    integrations.dequantize_module_weight = dequantized
    for name, module in list(sys.modules.items()):  # those that were imported before have it by its name
        if name.startswith("peft.") and vars(module).get("dequantize_module_weight") is own:
            vars(module)["dequantize_module_weight"] = dequantized


def _state_from_layer(layer: Any) -> None:
    """Give a weight that FSDP has gathered the quantization state that its layer keeps; the library would also change its
    class, which fake tensors do not allow."""
    if getattr(layer.weight, "quant_state", None) is None:
        layer.weight.quant_state = layer.quant_state


class _Operator:
    """Replaces an operator and its only overload."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function

    @property
    def default(self) -> _Operator:
        return self

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        return self._function(*arguments, **keywords)


def _product_4bit(
    given: torch.Tensor,
    weight: torch.Tensor,
    shape: Any,
    absmax: torch.Tensor,
    *_: Any,
    bias: torch.Tensor | None = None,
    **nested: torch.Tensor,
) -> torch.Tensor:
    """`nested`: the scales in 8 bits, their code and their offset, if the scales are quantized too (bitsandbytes 0.49
    `_ops.py` gemm_4bit)."""
    if "absmax_8bit" in nested:
        scales = torch.empty_like(nested["absmax_8bit"], dtype=torch.float32)
        absmax = scales + nested["absmax_offset"]
    assert absmax is not None  # both live until the product is computed
    whole = torch.empty(tuple(shape), dtype=given.dtype, device=given.device)
    return torch.nn.functional.linear(given, whole, bias)


def _quantized_rows(given: torch.Tensor, threshold: float = 0.0) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """(rows of bytes, their scales, the columns with outliers). There are no outliers here, because values are not
    known."""
    scales = torch.empty(given.numel() // given.shape[-1], dtype=torch.float32, device=given.device)
    rows = torch.empty(given.shape, dtype=torch.int8, device=given.device)
    if not threshold:
        return rows, scales, None
    too_large = given.abs() >= threshold
    del too_large
    return rows, scales, torch.empty(0, dtype=torch.int64, device=given.device)


def _scaled_product(
    rows: torch.Tensor,
    weight: torch.Tensor,
    row_scales: torch.Tensor,
    column_scales: torch.Tensor,
    bias: torch.Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    whole = torch.empty((*rows.shape[:-1], weight.shape[0]), dtype=torch.int32, device=rows.device)
    product = torch.empty_like(whole, dtype=torch.float16)
    if bias is not None and bias.dtype is not torch.float16:
        product.add_(bias)
    return product.to(dtype or torch.float16)


def _mixed_product(
    given: torch.Tensor,
    rows: torch.Tensor,
    weight: torch.Tensor,
    row_scales: torch.Tensor,
    column_scales: torch.Tensor,
    too_large: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    apart = torch.empty(0, dtype=given.dtype, device=given.device)
    return _scaled_product(rows, weight, row_scales, column_scales, bias, given.dtype), apart


OPERATORS: dict[str, Callable[..., Any]] = {
    "gemm_4bit": _product_4bit,
    "int8_vectorwise_quant": _quantized_rows,
    "int8_scaled_mm": _scaled_product,
    "int8_mixed_scaled_mm": _mixed_product,
}


def _paged(*shape: int, dtype: torch.dtype = torch.float32, device: Any = None) -> torch.Tensor:
    """A tensor in managed memory, which the driver moves between host and GPU and the allocator never sees."""
    made: Any = torch.empty(shape, dtype=dtype, device="meta")
    made.is_paged, made.page_deviceid = True, getattr(device, "index", 0)
    state: torch.Tensor = made
    return state
