"""Scaled dot product attention as a GPU computes it: which kernel takes the call, and what is padded before.

Without a GPU torch would choose the math path, so the operator that a GPU would run is called directly. The function is
replaced; a mode would not do, because modes are off inside backward, where checkpointing recomputes.
Source: torch 2.13 aten/src/ATen/native/transformers/attention.cpp and cuda/sdp_utils.cpp.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.attention import SDPBackend

from peakcast.collectors.tracing import fake_cuda

ALIGNMENT = 8
"""Flash attention's head_dim and the rows of a mask are padded to a multiple of it (attention.cpp `pad_last_dim`,
`preprocess_mask`)."""
MAX_FLASH_HEAD_DIM = 256
HALVES = (torch.float16, torch.bfloat16)
of_torch = torch.nn.functional.scaled_dot_product_attention
"""torch's own function, which sends jagged tensors to code in Python."""


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Any:
    """The kernel that a GPU would take; `context_parallel` looks for this name. Shapes: [batch, heads, sequence, head_dim].

    Of the kernels that the script has not switched off, the first that can: flash, memory-efficient, step by step.
    """
    if query.is_nested:
        return of_torch(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
    if torch.is_autocast_enabled("cuda"):  # attention is on autocast's lower-precision list, and runs without autocast
        dtype = torch.get_autocast_dtype("cuda")  # (autocast_mode.h WrapFunction_, which casts a mask of numbers too)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        if attn_mask is not None and attn_mask.is_floating_point():
            attn_mask = attn_mask.to(dtype)
        with torch.autocast("cuda", enabled=False):
            return scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
    if _flash_can(query, key, value, attn_mask, is_causal=is_causal, enable_gqa=enable_gqa):
        return _flash(query, key, value, dropout_p, is_causal, scale)
    bias = attn_mask
    if bias is not None and bias.dtype == torch.bool:  # as attention.cpp's convert_boolean_attn_mask does
        bias = torch.where(bias, 0.0, torch.full((), -torch.inf, dtype=query.dtype, device=query.device))
    if _efficient_can(query, key, value, bias):
        return torch.ops.aten._scaled_dot_product_efficient_attention(
            query, key, value, _aligned(bias, query, key), query.requires_grad, dropout_p, is_causal, scale=scale
        )[0]
    return _math(query, key, value, bias, dropout_p, is_causal, scale, enable_gqa)


def of_jagged(query: Any, key: Any, value: Any, mask: Any, dropout: float, is_causal: bool, enable_gqa: bool) -> SDPBackend:
    """The kernel for jagged tensors (torch/nested/_internal/sdpa.py `_select_sdp_backend`, which asks the GPU)."""
    if query.dtype in HALVES and has_flash() and torch.backends.cuda.flash_sdp_enabled():
        return SDPBackend.FLASH_ATTENTION
    return SDPBackend.EFFICIENT_ATTENTION if query.shape[1] == key.shape[1] else SDPBackend.MATH


def _flash_can(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    is_causal: bool,
    enable_gqa: bool,
) -> bool:
    """sdp_utils.cpp `can_use_flash_attention`: half precision, no mask, from compute capability 8.0 on."""
    heads = key.dim() == 4 and (key.shape[1] == query.shape[1] or enable_gqa)
    square = not is_causal or query.shape[-2] == key.shape[-2]
    return bool(
        mask is None
        and query.dtype in HALVES
        and has_flash()
        and query.dim() == 4
        and heads
        and square
        and query.shape[-1] == key.shape[-1] == value.shape[-1] <= MAX_FLASH_HEAD_DIM
        and _rows_are_contiguous(query, key, value)
        and _flash_is_on()
    )


def _efficient_can(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, bias: torch.Tensor | None) -> bool:
    """sdp_utils.cpp `can_use_mem_efficient_attention`: as many key heads as query heads (grouped ones from torch 2.14 on),
    and a head_dim of whole vectors of 16 bytes, as CUTLASS's kernels load them."""
    old = fake_cuda.COMPUTE_CAPABILITY < (8, 0)
    dtypes = (torch.float16, torch.float32) if old else (*HALVES, torch.float32)
    vector = 4 if query.dtype is torch.float32 else 8
    if old and query.dtype is torch.float32:  # without tensor cores
        vector = 1
    return bool(
        query.dtype in dtypes
        and query.dim() == key.dim() == value.dim() == 4
        and query.shape[:2] == key.shape[:2]
        and query.shape[-1] == key.shape[-1]
        and query.shape[-1] % vector == value.shape[-1] % vector == 0
        and _rows_are_contiguous(query, key, value, *(() if bias is None else (bias,)))
        and _efficient_is_on()
    )


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _flash_is_on() -> bool:
    """Whether the script has left flash attention switched on; torch.compile cannot trace the question."""
    return bool(torch.backends.cuda.flash_sdp_enabled())


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _efficient_is_on() -> bool:
    """Whether memory-efficient attention is enabled; a constant for torch.compile."""
    return bool(torch.backends.cuda.mem_efficient_sdp_enabled())


def has_flash() -> bool:
    """Whether flash attention has kernels for the GPU."""
    return fake_cuda.COMPUTE_CAPABILITY >= (8, 0)


def _rows_are_contiguous(*tensors: torch.Tensor) -> bool:
    return all(one.stride(-1) == 1 or one.shape[-1] == 1 for one in tensors)


def _flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout_p: float, is_causal: bool, scale: float | None
) -> torch.Tensor:
    """Flash attention, before which torch pads head_dim to a multiple of 8: the padded copies are saved for backward."""
    head_dim = query.shape[-1]
    missing = -head_dim % ALIGNMENT
    if missing:
        query, key, value = (torch.nn.functional.pad(one, (0, missing)) for one in (query, key, value))
        scale = head_dim**-0.5 if scale is None else scale
    output = flash_kernel(query, key, value, dropout_p, is_causal, scale)
    return output[..., :head_dim] if missing else output


def flash_kernel(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout_p: float, is_causal: bool, scale: float | None
) -> torch.Tensor:
    """Flash attention's kernel, whose output has the layout of `query`."""
    output: torch.Tensor = torch.ops.aten._scaled_dot_product_flash_attention(
        query, key, value, dropout_p, is_causal, False, scale=scale
    )[0]
    return output


def _aligned(bias: torch.Tensor | None, query: torch.Tensor, key: torch.Tensor) -> torch.Tensor | None:
    """A mask as the memory-efficient kernel reads it: a padded copy if its rows do not begin at multiples of 8 elements."""
    if bias is None:
        return None
    if any(stride % ALIGNMENT for stride in bias.stride()[:-1]) or bias.stride(-1) != 1:
        length = bias.shape[-1]
        bias = torch.nn.functional.pad(bias, (0, ALIGNMENT - length % ALIGNMENT))[..., :length]
    return bias.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])


def _math(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    dropout_p: float,
    is_causal: bool,
    scale: float | None,
    enable_gqa: bool,
) -> Any:
    """`_scaled_dot_product_attention_math` (attention.cpp), whose own code adds the mask in place except for fake
    tensors."""
    narrow = query.dtype
    if narrow in (torch.float16, torch.bfloat16):
        query, key, value = query.float(), key.float(), value.float()
    factor = (scale if scale is not None else query.shape[-1] ** -0.5) ** 0.5
    scaled = query * factor
    if is_causal:
        mask = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).tril()
        mask = torch.zeros_like(mask, dtype=query.dtype)
    wide_key, wide_value = key, value
    if enable_gqa:
        repeats = query.shape[1] // key.shape[1]
        wide_key, wide_value = key.repeat_interleave(repeats, 1), value.repeat_interleave(repeats, 1)
    weights = torch.matmul(scaled, wide_key.transpose(-2, -1) * factor)
    if mask is not None:
        weights.add_(mask)
    weights = torch.ops.aten._safe_softmax(weights, -1)
    if dropout_p > 0:
        weights = torch.nn.functional.dropout(weights, dropout_p)
    second_result = weights.to(narrow)
    output = torch.matmul(weights, wide_value).to(narrow)
    del second_result
    return output
