"""A stub of `flash_attn` whose kernels do nothing, for tracing `attention: flash_attention_2` and scripts that call it. A
trace sees the tensors that its functions save and make and, if a GPU is given, what the backward kernel allocates for
itself.

Source: flash-attention 2.8 flash_attn/flash_attn_interface.py (`FlashAttnFunc`, `FlashAttnVarlenFunc`) and the rules for
fake tensors there: saved tensors are query, key, value, output, an fp32 statistic for each query of each head, and the
state of the random numbers; head widths are padded to multiples of 8.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.machinery
import inspect
import math
import sys
import types
from collections.abc import Callable
from typing import Any

import torch

from peakcast.collectors.tracing.kernel_allocations import RULES, KernelAllocation, flash_backward_allocations
from peakcast.collectors.tracing.known_values import label
from peakcast.core.units import round_up

WIDTH = 8
"""Head widths are padded to multiples of this."""


def _attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sequences: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The tensors that the forward kernel makes. Shapes: [batch, sequence, heads, width] if `sequences` is 0 (equal
    lengths); else [tokens, heads, width] for `sequences` sequences of any length, one after the other. The output has the
    layout of the queries (flash-attention 2.8.3 csrc/flash_attn/flash_api.cpp: `torch::empty_like(q)`)."""
    *outer, tokens, heads, _ = query.shape
    statistics = query.new_empty((*outer, heads, tokens), dtype=torch.float32)
    alike = query.shape[-1] == value.shape[-1]
    output = torch.empty_like(query) if alike else query.new_empty((*query.shape[:-1], value.shape[-1]))
    return output, statistics, query.new_empty((2,), dtype=torch.int64)


def _attention_backward(
    gradient: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def _keep(ctx: Any, inputs: Any, output: Any) -> None:
    *tensors, ctx.sequences = inputs
    ctx.save_for_backward(*tensors, *output)


def _go_back(context: Any, gradient: torch.Tensor, *_: Any) -> Any:
    backward = torch.ops.flash_attention.backward
    return *backward(gradient, *context.saved_tensors, context.sequences), None


def _backward_takes(arguments: Any, result: Any, device: Any) -> list[KernelAllocation]:
    _, query, key, *_, sequences = arguments
    *outer, tokens, heads, width = query.shape
    rows = tokens + 128 * sequences if sequences else round_up(tokens, 128) * math.prod(outer)
    return flash_backward_allocations(query, rows, heads, width, grouped=key.shape[-2] != heads)


def _define() -> None:
    """Define forward and backward as two operators, so that compiled code treats them as opaque kernels without side
    effects, and keeps what backward reads: also the output and its statistics (`_flash_attn_backward`)."""
    given, made = "Tensor q, Tensor k, Tensor v", "(Tensor, Tensor, Tensor)"
    read = f"Tensor gradient, {given}, Tensor out, Tensor softmax_lse, Tensor rng_state, int sequences"
    operators = (("forward", f"{given}, int sequences", _attention), ("backward", read, _attention_backward))
    for name, arguments, function in operators:
        torch.library.define(f"flash_attention::{name}", f"({arguments}) -> {made}")
        torch.library.impl(f"flash_attention::{name}", "default", function)
        torch.library.register_fake(f"flash_attention::{name}", function)
    torch.library.register_autograd("flash_attention::forward", _go_back, setup_context=_keep)
    RULES[label(torch.ops.flash_attention.backward.default)] = _backward_takes


_define()


def _attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sequences: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """(output, its statistics)."""
    width = value.shape[-1]
    padding = (0, -width % WIDTH)
    if padding[1]:
        query, key, value = (torch.nn.functional.pad(tensor, padding) for tensor in (query, key, value))
    query, key, value = (tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in (query, key, value))
    output, statistics, _ = torch.ops.flash_attention.forward(query, key, value, sequences)
    return output[..., :width], statistics


OPTIONS = ("dropout_p", "softmax_scale", "causal", "window_size", "softcap", "alibi_slopes", "deterministic")


def _function(*tensors_and_lengths: str) -> Callable[..., Any]:
    """An attention function with these arguments and OPTIONS in its signature, from which transformers reads what it may
    pass."""

    def attend(
        q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, cu_seqlens_q: torch.Tensor | None = None, *_: Any, **more: Any
    ) -> Any:
        ends = cu_seqlens_q if isinstance(cu_seqlens_q, torch.Tensor) else None
        output, statistics = _attend(q, k, v, 0 if ends is None else ends.shape[0] - 1)
        asked = any(more.get(name) for name in ("return_attn_probs", "return_softmax_lse"))
        return (output, statistics, None) if asked else output

    named = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in (*tensors_and_lengths, *OPTIONS)]
    attend.__signature__ = inspect.Signature(named)  # type: ignore[attr-defined]
    return attend


flash_attn_func = _function("q", "k", "v")
"""Attention for rows of equal length."""
flash_attn_varlen_func = _function("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
"""Attention for sequences of any length, joined in one row."""


def _packed(attend: Callable[..., Any]) -> Callable[..., Any]:
    """`attend` with queries, keys and values as one tensor, whose gradient is one tensor as well."""

    def attend_packed(qkv: torch.Tensor, *arguments: Any, **keywords: Any) -> Any:
        return attend(*qkv.unbind(-3), *arguments, **keywords)

    return attend_packed


def _attend_cached(q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """Attention of a generation: without a graph, and keys and values are written into the cache in place."""
    return torch.empty_like(q)


FUNCTIONS = {"flash_attn_func": flash_attn_func, "flash_attn_varlen_func": flash_attn_varlen_func}
MORE_FUNCTIONS = {
    "flash_attn_qkvpacked_func": _packed(flash_attn_func),
    "flash_attn_varlen_qkvpacked_func": _packed(flash_attn_varlen_func),
    "flash_attn_with_kvcache": _attend_cached,
}
"""Other functions of `flash_attn` that scripts call."""


def _mask(*, kv_length: int, attention_mask: torch.Tensor | None, **_: Any) -> torch.Tensor | None:
    """transformers' `flash_attention_mask` for batches without padding, which fake tensors cannot show: the mask is only
    used if a static cache is longer than it."""
    sliced = None if attention_mask is None else attention_mask[:, -kv_length:]
    return None if sliced is None or sliced.shape[1] == kv_length else sliced


def install(*, packed: bool, padded: bool = True) -> None:
    """Install the stub in place of the package, in this process. `packed`: whether a row of the batch has several
    sequences; `padded`: whether the batch's mask has padding, which fake tensors cannot show."""
    import transformers.modeling_flash_attention_utils as utils
    from transformers import PreTrainedModel

    package, padding = types.ModuleType("flash_attn"), types.ModuleType("flash_attn.bert_padding")
    for module in (package, padding):
        module.__spec__ = importlib.machinery.ModuleSpec(module.__name__, None)
        sys.modules[module.__name__] = module
    vars(package).update(FUNCTIONS, flash_attn_with_kvcache=None, __path__=[])
    if not hasattr(utils, "_pad_input"):
        _install_in_old(utils, packed)
        return
    import transformers.masking_utils as masking

    vars(padding).update(pad_input=utils._pad_input, unpad_input=utils._unpad_input)
    utils.is_flash_attn_2_available = lambda: True
    if not padded:
        masking.ALL_MASK_ATTENTION_FUNCTIONS._global_mapping["flash_attention_2"] = _mask
    utils._is_packed_sequence = lambda position_ids, batch_size: packed
    PreTrainedModel._flash_attn_can_dispatch = lambda *arguments, **keywords: True


def _install_in_old(utils: Any, packed: bool) -> None:
    """Install the stub for transformers before 4.54. It imports flash_attn's names, if they exist, when it is imported
    itself, and reads positions in each layer, which fake tensors do not have. Rows of several sequences are not supported
    and fail there."""
    import transformers.utils as shared
    from transformers import PreTrainedModel

    def enabled(cls: type, config: Any, *_: Any, **__: Any) -> Any:
        config._attn_implementation = "flash_attention_2"
        return config

    attend = utils._flash_attention_forward

    @functools.wraps(attend)
    def attend_to_all(*arguments: Any, position_ids: Any = None, **keywords: Any) -> Any:
        return attend(*arguments, position_ids=position_ids if packed else None, **keywords)

    for module in (shared, shared.import_utils, utils):
        for name in ("is_flash_attn_2_available", "is_flash_attn_greater_or_equal", "is_flash_attn_greater_or_equal_2_10"):
            setattr(module, name, lambda *_: True)
    vars(utils).update(FUNCTIONS, _flash_supports_window_size=True, _flash_attention_forward=attend_to_all)
    with contextlib.suppress(ImportError):  # from 4.48 on
        import transformers.integrations.flash_attention as integration

        integration._flash_attention_forward = attend_to_all
    PreTrainedModel._check_and_enable_flash_attn_2 = classmethod(enabled)
