"""What an operator's kernel allocates for itself, computed from the tensors that it was given."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import torch

from peakcast.catalog import Device, kernel_workspaces
from peakcast.catalog.kernel_workspaces import CUBLASLT_BYTES, INDEXED_MAX_ACCUMULATOR_BYTES, SUM_ACCUMULATOR_BYTES, VECTOR
from peakcast.collectors.tracing.known_values import label
from peakcast.core.units import round_up

aten = torch.ops.aten
RELEASE = tuple(map(int, torch.__version__.split(".")[:2]))


@dataclass(frozen=True, slots=True)
class KernelAllocation:
    """Bytes that a kernel allocates: freed when it has run or, if `kept`, kept by its library from then on."""

    name: str
    num_bytes: int
    kept: bool = False


def kernel_allocations(operator: Any, arguments: Sequence[Any], result: Any, device: Device) -> list[KernelAllocation]:
    """What `operator` allocated on `device` to make `result`; empty for operators without a rule."""
    rule = RULES.get(label(operator))
    return rule(arguments, result, device) if rule is not None else []


def _reduces(accumulator_bytes: int) -> Callable[[Sequence[Any], Any, Device], list[KernelAllocation]]:
    def rule(arguments: Sequence[Any], result: Any, device: Device) -> list[KernelAllocation]:
        source = arguments[0]
        dims = arguments[1] if len(arguments) > 1 else None
        found = reduction_of(source, dims, device, accumulator_bytes)
        if not found:
            return []
        return [
            KernelAllocation("reduction.buffer", found.buffer_bytes),
            KernelAllocation("reduction.semaphores", found.semaphore_bytes),
        ]

    return rule


def reduction_of(source: torch.Tensor, dims: Any, device: Device, accumulator_bytes: int) -> kernel_workspaces.Workspace:
    """What a reduction of `source` over `dims` (None or empty: all) allocates, from its shape and strides."""
    given = (dims,) if isinstance(dims, int) else tuple(dims or range(source.dim()))
    reduced = {dim % source.dim() for dim in given} if source.dim() else set()
    sides: list[list[int]] = [[], []]
    for dim, (size, stride) in enumerate(zip(source.shape, source.stride(), strict=True)):
        if size > 1 and stride:
            sides[dim not in reduced].append(stride)
    kept = [size for dim, size in enumerate(source.shape) if dim not in reduced]
    inner = not sides[1] or (bool(sides[0]) and min(sides[0]) < min(sides[1]))
    return kernel_workspaces.reduction(
        prod(kept),
        prod(source.shape) // max(prod(kept), 1),
        device.num_sms,
        device.max_threads_per_sm,
        reduced_is_contiguous=inner,
        accumulator_bytes=accumulator_bytes,
        vector=VECTOR if sides[1] and min(sides[1]) == 1 else 1,
    )


def _index_put(arguments: Sequence[Any], result: Any, device: Device) -> list[KernelAllocation]:
    """With `accumulate`, indices are sorted first, which takes four copies of them (torch 2.11 `Indexing.cu`,
    `index_put_with_sort_kernel`; a fifth is freed by then), and the sort's own memory."""
    target, indices, _, *rest = arguments
    if not (rest and rest[0]):
        return []
    picked = [index for index in indices if index is not None]
    count = max((index.numel() for index in picked), default=0)
    rows = prod(size for size, index in zip(target.shape, indices, strict=False) if index is not None)
    if not count:
        return []
    copies = [KernelAllocation("index_put.indices", count * picked[0].element_size())] * 4
    return [*copies, KernelAllocation("index_put.sort", kernel_workspaces.sort_bytes(count, rows))]


def _product(arguments: Sequence[Any], result: Any, device: Device) -> list[KernelAllocation]:
    return [KernelAllocation("cublas_workspace", kernel_workspaces.cublas_bytes(device, RELEASE), kept=True)]


def _addmm(arguments: Sequence[Any], result: Any, device: Device) -> list[KernelAllocation]:
    """A product with a bias goes to cublasLt (aten/src/ATen/native/cuda/Blas.cpp, `addmm_out_cuda_impl`)."""
    found = _product(arguments, result, device)
    bias, _, second = arguments[:3]
    kept = kernel_workspaces.cublaslt_kept(RELEASE)
    if kept is not None and bias.dim() == 1 and bias.shape[0] == second.shape[1] and min(second.shape) > 1:
        found.append(KernelAllocation("cublaslt_workspace", CUBLASLT_BYTES, kept=kept))
    return found


def flash_backward_allocations(
    query: torch.Tensor, rows: int, heads: int, width: int, *, grouped: bool
) -> list[KernelAllocation]:
    """What the backward kernel of flash attention allocates for `rows` queries (rounded up to whole blocks) and `heads`
    heads. If heads share keys (`grouped`), this includes gradients of keys and values for all heads."""
    accumulator, sums = kernel_workspaces.flash_backward(rows, heads, width)
    found = [KernelAllocation("flash.dq_accum", accumulator), KernelAllocation("flash.row_sums", sums)]
    whole = query.numel() * query.element_size()
    return [*found, *(KernelAllocation(name, whole) for name in ("flash.dk_expanded", "flash.dv_expanded") if grouped)]


def _flash_backward(arguments: Sequence[Any], result: Any, device: Device) -> list[KernelAllocation]:
    """Shapes: [batch, heads, sequence, width]."""
    _, query, key, *_ = arguments
    batch, heads, tokens, width = query.shape
    rows = batch * round_up(tokens, 128)
    return flash_backward_allocations(query, rows, heads, width, grouped=key.shape[1] != heads)


def _efficient_backward(arguments: Sequence[Any], result: Any, device: Device) -> list[KernelAllocation]:
    """The row sums "delta" of memory-efficient attention's backward (attention_backward.cu). Shapes: [batch, heads,
    sequence, width]."""
    batch, heads, tokens, _ = arguments[1].shape
    return [KernelAllocation("attention.row_sums", 4 * batch * heads * tokens)]


def _contiguous_copies(operands: int) -> Callable[[Sequence[Any], Any, Device], list[KernelAllocation]]:
    """The rule of a kernel that first makes its `operands` first arguments contiguous."""

    def rule(arguments: Sequence[Any], result: Any, device: Device) -> list[KernelAllocation]:
        given = (one for one in arguments[:operands] if not one.is_contiguous())
        return [KernelAllocation("contiguous_copy", one.numel() * one.element_size()) for one in given]

    return rule


def _safe_softmax(arguments: Sequence[Any], result: Any, device: Device) -> list[KernelAllocation]:
    """The softmax itself and a truth value for each score, from which the result is selected (torch 2.13
    `native/transformers/attention.cpp`)."""
    masked = KernelAllocation("safe_softmax.masked", arguments[0].numel())
    return [KernelAllocation("safe_softmax.softmax", result.numel() * result.element_size()), masked]


def _isinf(arguments: Sequence[Any], result: Any, device: Device) -> list[KernelAllocation]:
    """The absolute values, which are compared with infinity (torch 2.13 `native/TensorCompare.cpp` isinf)."""
    source = arguments[0]
    return [KernelAllocation("isinf.abs", source.numel() * source.element_size())] if source.is_floating_point() else []


# aten/src/ATen/native/cuda/SoftMax.cu host_softmax: input_.contiguous(); host_softmax_backward: grad_ and output_
_softmax, _softmax_backward = _contiguous_copies(1), _contiguous_copies(2)
_sum, _max = _reduces(SUM_ACCUMULATOR_BYTES), _reduces(INDEXED_MAX_ACCUMULATOR_BYTES)
_BY_OPERATOR: dict[Any, Callable[[Sequence[Any], Any, Device], list[KernelAllocation]]] = {
    aten.sum.dim_IntList: _sum,
    aten.sum.default: _sum,
    aten.mean.dim: _sum,
    aten.mean.default: _sum,
    aten.linalg_vector_norm.default: lambda given, result, device: _sum(
        (given[0], given[2] if len(given) > 2 else None), result, device
    ),
    aten.max.dim: _max,
    aten.min.dim: _max,
    aten.any.default: _reduces(1),
    aten._softmax.default: _softmax,
    aten._log_softmax.default: _softmax,
    aten._safe_softmax.default: _safe_softmax,
    aten.isinf.default: _isinf,
    aten._softmax_backward_data.default: _softmax_backward,
    aten._log_softmax_backward_data.default: _softmax_backward,
    aten._index_put_impl_.default: _index_put,
    aten.index_put_.default: _index_put,
    aten.index_put.default: _index_put,
    **dict.fromkeys((aten.mm.default, aten.bmm.default, aten.baddbmm.default), _product),
    **dict.fromkeys((aten.mm.out, aten.bmm.out, aten.baddbmm.out), _product),  # as compiled code calls them
    **dict.fromkeys((aten.addmm.default, aten.addmm.out), _addmm),
    aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
    aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
}
RULES = {label(operator): rule for operator, rule in _BY_OPERATOR.items()}
"""Operator -> rule for its workspace, from recordings (`datasets/published/histories`) or from its source."""
