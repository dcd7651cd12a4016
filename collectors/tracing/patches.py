"""Replaces what PyTorch and transformers do differently on fake tensors, for the process that traces.

Most important is scaled dot product attention: without a GPU it would choose the math path, so the operator that a GPU
would run is called directly. The function is replaced; a mode would not do, because modes are off inside backward, where
checkpointing recomputes.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import _meta_registrations as shapes

from peakcast.collectors.tracing.known_values import value_of


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

    Flash needs half precision and no mask; the memory-efficient kernel needs as many key heads as query heads (grouped ones
    from torch 2.14 on); what neither takes is computed step by step. Source: torch 2.13
    aten/src/ATen/native/transformers/cuda/sdp_utils.cpp, use_flash_attention and use_mem_efficient_attention.
    """
    if torch.is_autocast_enabled("cuda"):  # attention is on autocast's lower-precision list, and runs without autocast
        dtype = torch.get_autocast_dtype("cuda")  # (autocast_mode.h WrapFunction_, which casts a mask of numbers too)
        query, key, value = query.to(dtype), key.to(dtype), value.to(dtype)
        if attn_mask is not None and attn_mask.is_floating_point():
            attn_mask = attn_mask.to(dtype)
        with torch.autocast("cuda", enabled=False):
            return scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
    same_heads = key.shape[1] == query.shape[1]
    half = query.dtype is not torch.float32
    if attn_mask is None and half and (same_heads or enable_gqa) and _one_head_dim(query, value):
        return torch.ops.aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, False, scale=scale
        )[0]
    bias = attn_mask
    if bias is not None and bias.dtype == torch.bool:  # as attention.cpp's convert_boolean_attn_mask does
        bias = torch.where(bias, 0.0, torch.full((), -torch.inf, dtype=query.dtype, device=query.device))
    if not same_heads:
        return _math(query, key, value, bias, dropout_p, is_causal, scale, enable_gqa)
    if bias is not None:
        bias = bias.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    return torch.ops.aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, query.requires_grad, dropout_p, is_causal, scale=scale
    )[0]


def _one_head_dim(query: torch.Tensor, value: torch.Tensor) -> bool:
    return bool(query.shape[-1] == value.shape[-1] <= 256)


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
    weights = torch._safe_softmax(weights, -1)
    if dropout_p > 0:
        weights = torch.nn.functional.dropout(weights, dropout_p)
    second_result = weights.to(narrow)
    output = torch.matmul(weights, wide_value).to(narrow)
    del second_result
    return output


def _grouped_mm(
    mat_a: torch.Tensor, mat_b: torch.Tensor, scale_a: Any, scale_b: Any, *, offs: Any, out_dtype: Any, **more: Any
) -> Any:
    """The result of `aten._grouped_mm`. torch 2.13's meta function only accepts bfloat16; a GPU also accepts other dtypes,
    and multiplies them group by group into the result (aten/src/ATen/native/GroupedMMUtils.h)."""
    if scale_a is None and mat_a.dtype == mat_b.dtype != torch.bfloat16:
        return shapes._create_grouped_mm_output_tensor(mat_a, mat_b, offs, out_dtype)
    return _bfloat16_grouped_mm(mat_a, mat_b, scale_a, scale_b, offs=offs, out_dtype=out_dtype, **more)


_bfloat16_grouped_mm: Any = getattr(shapes, "_meta_grouped_mm_common", None)


def _apply(self: torch.nn.Module, convert: Any, recurse: bool = True) -> torch.nn.Module:
    """`Module._apply` (behind `.to`, `.float`) by plain assignment: torch's own swaps tensors, which fake ones refuse.
    Attributes that a framework has set on a parameter are kept: Megatron marks experts as not part of the dense buffers."""
    for child in self.children():
        child._apply(convert)
    for name, parameter in self._parameters.items():
        if parameter is not None:
            with torch.no_grad():
                converted = convert(parameter)
            if converted is not parameter:
                made = self._parameters[name] = torch.nn.Parameter(converted, parameter.requires_grad)
                for note, value in vars(parameter).items():
                    vars(made).setdefault(note, value)  # a fake tensor already has its own, such as its device
    for name, buffer in self._buffers.items():
        if buffer is not None:
            self._buffers[name] = convert(buffer)
    return self


def install(*, masks_of_batch: bool = False) -> None:
    """Use this module's attention for every call in this process, and prevent transformers from building a mask that it
    does not need. `masks_of_batch`: the batch has padding, or sequences joined in a row, which fake values cannot show."""
    torch.nn.functional.scaled_dot_product_attention = scaled_dot_product_attention
    torch.nn.Module._apply = _apply  # type: ignore[method-assign]
    if _bfloat16_grouped_mm is not None:
        shapes._meta_grouped_mm_common = _grouped_mm
    # whether a fake gradient is infinite is unknown; the step that is taken is the one to trace
    torch.amp.GradScaler._maybe_opt_step = (  # type: ignore[method-assign]
        lambda self, optimizer, state, *arguments, **keywords: optimizer.step(*arguments, **keywords)
    )
    try:
        import transformers.masking_utils as masks
    except ImportError:
        return
    compiling = torch.compiler.is_compiling  # inside what is compiled, transformers does not look at values either
    if hasattr(masks, "find_packed_sequence_indices") and not masks_of_batch:
        find = masks.find_packed_sequence_indices  # fake tensors without values look packed to it: a b·s·s mask
        masks.find_packed_sequence_indices = lambda position_ids: (
            find(position_ids) if compiling() or value_of(position_ids) is not None else None
        )
    if hasattr(masks, "is_tracing") and hasattr(masks, "fast_all"):
        # a padding mask of ones (OPT makes one itself) is dropped for real tensors and kept, b·s·s, for fake ones
        masks.is_tracing = lambda tensor=None: compiling()
        masks.fast_all = lambda tensor: not masks_of_batch if value_of(tensor) is None else tensor.all()


def install_for_trainer() -> None:
    """Answer the Trainer's question whether the GPU has bfloat16."""
    import transformers.training_args as training_arguments

    training_arguments.is_torch_bf16_gpu_available = lambda: True
