"""A `flash_attn` whose kernels do nothing, for tracing `attention: flash_attention_2`: what its functions keep and make
around the kernels is seen; what the backward kernel takes inside itself is not.

Source: flash-attention 2.8 flash_attn/flash_attn_interface.py (`FlashAttnFunc`, `FlashAttnVarlenFunc`) and the rules for
fake tensors there: query, key, value and output are saved, an fp32 statistic for each query of each head, and the state of
the random numbers; head widths are padded to multiples of 8.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.machinery
import inspect
import sys
import types
from collections.abc import Callable
from typing import Any

import torch

WIDTH = 8
"""Head widths are padded to multiples of this."""


class _Attention(torch.autograd.Function):  # type: ignore[misc]
    """Shapes: [batch, sequence, heads, width], or with sequences of any length [tokens, heads, width]."""

    @staticmethod
    def forward(context: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        width = query.shape[-1]
        padding = (0, -width % WIDTH)
        if padding[1]:
            query, key, value = (torch.nn.functional.pad(tensor, padding) for tensor in (query, key, value))
        query, key, value = (tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in (query, key, value))
        output = torch.empty_like(query)
        *outer, tokens, heads, _ = query.shape
        statistics = torch.empty((*outer, heads, tokens), dtype=torch.float32, device=query.device)
        random_state = torch.empty((2,), dtype=torch.int64, device=query.device)
        context.save_for_backward(query, key, value, output, statistics, random_state)
        return output[..., :width]

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> Any:
        query, key, value, *_ = context.saved_tensors
        (gradient,) = gradients
        made = [torch.empty_like(tensor) for tensor in (query, key, value)]
        return tuple(tensor[..., : gradient.shape[-1]] for tensor in made)


OPTIONS = ("dropout_p", "softmax_scale", "causal", "window_size", "softcap", "alibi_slopes", "deterministic")


def _function(*tensors_and_lengths: str) -> Callable[..., Any]:
    """Attention with these arguments and OPTIONS in its signature, from which transformers reads what it may pass."""

    def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any) -> Any:
        return _Attention.apply(q, k, v)

    named = [inspect.Parameter(name, inspect.Parameter.POSITIONAL_OR_KEYWORD) for name in (*tensors_and_lengths, *OPTIONS)]
    attend.__signature__ = inspect.Signature(named)  # type: ignore[attr-defined]
    return attend


flash_attn_func = _function("q", "k", "v")
"""For rows of equal lengths."""
flash_attn_varlen_func = _function("q", "k", "v", "cu_seqlens_q", "cu_seqlens_k", "max_seqlen_q", "max_seqlen_k")
"""For sequences of any length, joined in one row."""


FUNCTIONS = {"flash_attn_func": flash_attn_func, "flash_attn_varlen_func": flash_attn_varlen_func}


def _mask(*, kv_length: int, attention_mask: torch.Tensor | None, **_: Any) -> torch.Tensor | None:
    """transformers' `flash_attention_mask` for batches without padding, which fake tensors cannot show: a mask is only kept
    if a static cache is longer."""
    sliced = None if attention_mask is None else attention_mask[:, -kv_length:]
    return None if sliced is None or sliced.shape[1] == kv_length else sliced


def install(*, packed: bool, padded: bool = True) -> None:
    """Install it in place of the package, in this process. `packed`: a row of the batch has several sequences; `padded`:
    the batch's mask has padding, which fake tensors cannot show."""
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
    """The same for transformers before 4.54. It imports flash_attn's names, if they exist, when it is imported itself, and
    reads positions in each layer, which fake tensors do not have. Rows of several sequences are not supported and fail
    there."""
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
