"""Replaces what PyTorch and transformers do differently on fake tensors, for the process that traces."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import _meta_registrations as shapes
from torch.nested._internal import sdpa as jagged

from peakcast.collectors.machine.imports import when_imported
from peakcast.collectors.tracing import copied_tensors
from peakcast.collectors.tracing.attention import of_jagged, scaled_dot_product_attention
from peakcast.collectors.tracing.known_values import value_of


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
            if "data" in vars(type(parameter)):  # a quantised tensor, which takes the other's data
                parameter.data = converted
            elif converted is not parameter:
                made = self._parameters[name] = torch.nn.Parameter(converted, parameter.requires_grad)
                for note, value in vars(parameter).items():
                    vars(made).setdefault(note, value)  # a fake tensor already has its own, such as its device
    for name, buffer in self._buffers.items():
        if buffer is not None:
            self._buffers[name] = convert(buffer)
    return self


def install(*, masks_of_batch: bool = False) -> None:
    """Use the attention of a GPU for every call in this process, and prevent transformers from building a mask that it
    does not need. `masks_of_batch`: the batch has padding, or sequences joined in a row, which fake values cannot show."""
    torch.nn.functional.scaled_dot_product_attention = scaled_dot_product_attention
    jagged._select_sdp_backend = of_jagged
    torch.nn.Module._apply = _apply  # type: ignore[method-assign]
    copied_tensors.install()
    if _bfloat16_grouped_mm is not None:
        shapes._meta_grouped_mm_common = _grouped_mm
    # whether a fake gradient is infinite is unknown; the step that is taken is the one to trace
    torch.amp.GradScaler._maybe_opt_step = (  # type: ignore[method-assign]
        lambda self, optimizer, state, *arguments, **keywords: optimizer.step(*arguments, **keywords)
    )
    when_imported("transformers.masking_utils", functools.partial(_without_masks, masks_of_batch=masks_of_batch))


def _without_masks(masks: Any, *, masks_of_batch: bool) -> None:
    """Prevent transformers from building a mask that it does not need."""
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
