"""Replacements for kernels of Transformer Engine and apex in a trace: they return new tensors of the same sizes, in the
same order.

Sources: TransformerEngine `pytorch/csrc/extensions/` (gemm.cpp, normalization.cpp, attention.cpp, cast.cpp, softmax.cpp,
apply_rope.cpp, multi_tensor/) and `pytorch/csrc/quantizer.cpp`, as of 2.8; apex `csrc/megatron`, `contrib/layer_norm`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

KERNELS: dict[str, Callable[..., Any]] = {}


def kernel(function: Callable[..., Any]) -> Callable[..., Any]:
    """Registers the replacement for the kernel of the same name."""
    KERNELS[function.__name__] = function
    return function


def _torch_dtype(kind: Any) -> torch.dtype:
    from transformer_engine.pytorch.constants import TE_DType_To_Torch

    return kind if isinstance(kind, torch.dtype) else TE_DType_To_Torch[kind]


def _shape(tensor: Any) -> list[int]:
    """The logical shape of a plain or quantised tensor; the latter may only have its transpose."""
    if isinstance(tensor, torch.Tensor):
        return list(tensor.shape)
    for rows in ("_rowwise_data", "_data"):
        if getattr(tensor, rows, None) is not None:
            return list(getattr(tensor, rows).shape)
    columns = getattr(tensor, "_columnwise_data", None)
    if columns is not None and type(tensor).__name__.startswith("MXFP8"):
        return list(columns.shape)
    columns = columns if columns is not None else tensor._transpose
    return [*columns.shape[1:], columns.shape[0]]


def _made(shape: list[int], dtype: torch.dtype, quantizer: Any) -> Any:
    """The result of `Quantizer::create_tensor`: only the usages that are asked for; if internal, in a class without
    autograd."""
    if quantizer is None:
        return torch.empty(shape, dtype=dtype, device="cuda")
    from transformer_engine.pytorch.tensor.float8_tensor import Float8CurrentScalingQuantizer, Float8Quantizer
    from transformer_engine.pytorch.utils import is_non_tn_fp8_gemm_supported

    tensor = quantizer.make_empty(shape, dtype=dtype, device=torch.device("cuda"))
    if isinstance(quantizer, (Float8Quantizer, Float8CurrentScalingQuantizer)):
        either = is_non_tn_fp8_gemm_supported()
        if either or not quantizer.columnwise_usage:
            tensor._transpose = None
        if not (quantizer.rowwise_usage or either):
            tensor._data = None
    elif not quantizer.rowwise_usage:  # MXFP8's make_empty always has rows
        tensor._rowwise_data = tensor._rowwise_scale_inv = None
    return _internal(tensor) if quantizer.internal else tensor


def _internal(tensor: Any) -> Any:
    """The same data in the class that C++ uses for tensors inside a module."""
    base = next(kind for kind in type(tensor).__mro__ if kind.__name__.endswith("TensorBase") and kind is not type(tensor))
    return base(**tensor.get_metadata())


# -- products ------------------------------------------------------------------------------------------------------------


@kernel
def generic_gemm(
    a: Any, transa: bool, b: Any, transb: bool, out: Any, quantizer: Any, out_dtype: Any, bias: Any, bias_dtype: Any,
    gelu: bool, gelu_in: Any, grad: bool, *_: Any, extra_output: Any = None, **__: Any,
) -> list[Any]:  # fmt: skip
    """D = A·B in column-major order as in BLAS; in backward the bias gradient is returned too (gemm.cpp, `gemm`)."""
    first, second = _shape(a), _shape(b)
    rows = [second[-1]] if transb else second[:-1]
    columns = first[0] if transa else first[-1]
    if transa and len(first) > 2:
        columns = torch.Size(first[:-1]).numel()
    if out is None:
        dtype = _torch_dtype(out_dtype) if out_dtype is not None else a.dtype
        out = _made([*rows, columns], dtype, quantizer)
    gradient = torch.empty(second[-1], dtype=_torch_dtype(bias_dtype), device="cuda") if bias is not None and grad else None
    before = torch.empty([*rows, columns], dtype=_torch_dtype(bias_dtype), device="cuda") if gelu and not grad else gelu_in
    return [out, gradient, before, extra_output]


@kernel
def te_general_grouped_gemm(
    a: Any, transa: bool, b: Any, transb: bool, out: Any, out_dtype: Any, m_splits: Any, bias: Any, *_: Any, **__: Any
) -> Any:
    """Writes into existing outputs; returns the (gradients of) biases that it got."""
    return bias


# -- norms ---------------------------------------------------------------------------------------------------------------


def _normalized(x: Any, out: Any, quantizer: Any, dtype: Any) -> tuple[Any, Any]:
    """The output and an fp32 statistic per row. All recipes except delayed scaling quantise in a second kernel."""
    from transformer_engine.pytorch.tensor.float8_tensor import Float8Quantizer

    statistics = torch.empty(x.shape[0], dtype=torch.float32, device="cuda")
    out = _made(list(x.shape), _torch_dtype(dtype), quantizer) if out is None else out
    if quantizer is not None and not isinstance(quantizer, Float8Quantizer):
        torch.empty_like(x)
    return out, statistics


@kernel
def layernorm_fwd(x: Any, weight: Any, bias: Any, eps: float, out: Any, quantizer: Any, dtype: Any, *_: Any) -> list[Any]:
    mean = torch.empty(x.shape[0], dtype=torch.float32, device="cuda")
    out, deviation = _normalized(x, out, quantizer, dtype)
    return [out, mean, deviation]


@kernel
def rmsnorm_fwd(x: Any, weight: Any, eps: float, out: Any, quantizer: Any, dtype: Any, *_: Any) -> list[Any]:
    out, deviation = _normalized(x, out, quantizer, dtype)
    return [out, None, deviation]


@kernel
def layernorm_bwd(dz: Any, x: Any, mean: Any, deviation: Any, weight: Any, *_: Any) -> list[Any]:
    return [torch.empty_like(x), torch.empty_like(weight), torch.empty_like(weight)]


@kernel
def rmsnorm_bwd(dz: Any, x: Any, deviation: Any, weight: Any, *_: Any) -> list[Any]:
    return [torch.empty_like(x), torch.empty_like(weight)]


# -- quantisation --------------------------------------------------------------------------------------------------------


@kernel
def quantize(tensor: Any, quantizer: Any, out: Any = None, noop: Any = None) -> Any:
    return _made(list(tensor.shape), tensor.dtype, quantizer) if out is None else out


@kernel
def dequantize(tensor: Any, dtype: Any) -> Any:
    return torch.empty(_shape(tensor), dtype=_torch_dtype(dtype), device="cuda")


@kernel
def bgrad_quantize(tensor: Any, quantizer: Any) -> list[Any]:
    bias = torch.empty(tensor.shape[-1], dtype=tensor.dtype, device="cuda")
    return [bias, tensor if quantizer is None else quantize(tensor, quantizer)]


@kernel
def split_quantize(tensor: Any, splits: list[int], quantizers: list[Any], *_: Any) -> list[Any]:
    return [quantize(part, quantizer) for part, quantizer in zip(torch.split(tensor, splits), quantizers, strict=True)]


@kernel
def fp8_transpose(data: Any, dtype: Any, *, out: Any = None) -> Any:
    shape = [data.shape[-1], *data.shape[:-1]]
    return torch.empty(shape, dtype=torch.uint8, device="cuda") if out is None else out


@kernel
def fused_amax_and_scale_update_after_reduction(*_: Any) -> None: ...


@kernel
def compute_amax(*_: Any) -> None: ...


# -- attention -----------------------------------------------------------------------------------------------------------


@kernel
def get_fused_attn_backend(*_: Any) -> Any:
    """cuDNN's kernel for any length; the job's `attention_backend` decides whether it is used."""
    return sys.modules["transformer_engine_torch"].NVTE_Fused_Attn_Backend.NVTE_F16_arbitrary_seqlen


@kernel
def fused_attn_fwd(
    max_q: int, max_kv: int, training: bool, scale: float, dropout: float, fill: bool, layout: Any, bias: Any, mask: Any,
    softmax: Any, window: Any, cu_q: Any, cu_kv: Any, q: Any, k: Any, v: Any, dtype: Any, *rest: Any,
) -> list[Any]:  # fmt: skip
    """[output, softmax statistics, state of the dropout] (attention.cpp)."""
    batch, heads = cu_q.shape[0] - 1, q.shape[-2]
    statistics = torch.empty((batch, heads, max_q, 1), dtype=torch.float32, device="cuda")
    output = torch.empty((*q.shape[:-1], v.shape[-1]), dtype=dtype, device="cuda")
    return [output, statistics, torch.empty(2, dtype=torch.int64, device="cuda")]


@kernel
def fused_attn_bwd(
    max_q: int, max_kv: int, scale: float, dropout: float, fill: bool, layout: Any, bias: Any, mask: Any, softmax: Any,
    window: Any, deterministic: bool, cu_q: Any, cu_kv: Any, q: Any, k: Any, v: Any, o: Any, do: Any, dtype: Any,
    *rest: Any,
) -> list[Any]:  # fmt: skip
    """Gradients in the layout of q, k and v: one tensor if those are views of one; none for a bias or for sinks."""
    name = str(layout).rsplit("_", 1)[-1]
    if name.endswith("3HD") or name.endswith("H3D"):
        place = q.dim() - 2 if name.endswith("3HD") else q.dim() - 1
        shape = list(q.shape)
        shape.insert(place, 3)
        packed = torch.empty(shape, dtype=dtype, device="cuda")
        return [*(packed.select(place, i) for i in range(3)), None, None]
    return [*(torch.empty(tensor.shape, dtype=dtype, device="cuda") for tensor in (q, k, v)), None, None]


@kernel
def fa_prepare_fwd(query: Any) -> Any:
    sequence, batch, heads, dim = query.shape
    return torch.empty((3, batch, sequence, heads, dim), dtype=query.dtype, device="cuda")


@kernel
def fa_prepare_bwd(dq: Any, dk: Any, dv: Any) -> Any:
    batch, sequence, heads, dim = dq.shape
    return torch.empty((sequence, batch, heads, 3 * dim), dtype=dq.dtype, device="cuda")


def _softmax_forward(scores: Any, *_: Any) -> Any:
    return torch.empty_like(scores)


def _softmax_backward(gradient: Any, *_: Any) -> Any:
    """Works in place."""
    return gradient


for _kind in ("scaled_softmax", "scaled_masked_softmax", "scaled_upper_triang_masked_softmax",
              "scaled_aligned_causal_masked_softmax"):  # fmt: skip
    KERNELS[f"{_kind}_forward"], KERNELS[f"{_kind}_backward"] = _softmax_forward, _softmax_backward


@kernel
def fused_rope_forward(tensor: Any, *_: Any) -> Any:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cuda")


KERNELS["fused_rope_backward"] = fused_rope_forward


# -- optimizers and the rest ---------------------------------------------------------------------------------------------


@kernel
def multi_tensor_l2norm(chunk: int, flag: Any, tensors: Any, per_tensor: bool = False) -> tuple[Any, Any]:
    count = len(tensors[0]) if per_tensor else 0
    return torch.zeros(1, device="cuda"), torch.empty(count, device="cuda")


def _in_place(*_: Any, **__: Any) -> None: ...


for _name in ("multi_tensor_scale", "multi_tensor_adam", "multi_tensor_adam_fp8", "multi_tensor_sgd",
              "multi_tensor_compute_scale_and_scale_inv", "fp8_block_scaling_compute_partial_amax",
              "fp8_block_scaling_partial_cast"):  # fmt: skip
    KERNELS[_name] = _in_place


@kernel
def get_num_cublas_streams() -> int:
    return 4


@kernel
def get_cublasLt_version() -> int:  # noqa: N802
    return 130000


@kernel
def device_supports_multicast(*_: Any) -> bool:
    return False


@kernel
def ubuf_built_with_mpi() -> bool:
    return False


# -- the fused router (csrc/extensions/router.cpp) ------------------------------------------------------------------------


@kernel
def fused_topk_with_score_function_fwd(logits: Any, *_: Any) -> tuple[Any, Any, Any]:
    return torch.empty_like(logits), torch.empty_like(logits, dtype=torch.bool), torch.empty_like(logits)


@kernel
def fused_topk_with_score_function_bwd(tokens: int, experts: int, routing_map: Any, scores: Any, *_: Any) -> Any:
    return torch.empty_like(scores)


@kernel
def fused_score_for_moe_aux_loss_fwd(logits: Any, *_: Any, **__: Any) -> tuple[Any, Any, Any]:
    return torch.empty_like(logits), torch.empty_like(logits, dtype=torch.bool), torch.empty_like(logits)


@kernel
def fused_score_for_moe_aux_loss_bwd(*, intermediate_output: Any, **_: Any) -> Any:
    return torch.empty_like(intermediate_output)


@kernel
def fused_moe_aux_loss_fwd(probs: Any, *_: Any, **__: Any) -> tuple[Any, Any]:
    return probs.new_empty(()), probs.new_empty((), dtype=torch.float32)


@kernel
def fused_moe_aux_loss_bwd(*, num_rows: int, num_cols: int, grad_aux_loss: Any, **_: Any) -> Any:
    return grad_aux_loss.new_empty((num_rows, num_cols))


@kernel
def get_cudnn_version() -> int:
    return 91400  # 9.14, as encoded by cudnnGetVersion


class _FastLayerNorm(torch.autograd.Function):  # type: ignore[misc]
    """apex contrib/layer_norm/layer_norm.py `FastLayerNormFN`: saves its input and two fp32 statistics per row."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, bias: Any, epsilon: float) -> Any:
        rows = x.numel() // weight.numel()
        statistics = [torch.empty(rows, dtype=torch.float32, device="cuda") for _ in range(2)]
        ctx.save_for_backward(x, weight, *statistics)
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        x, weight, *_ = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight), torch.empty_like(weight), None


class _FusedLayerNorm(_FastLayerNorm):
    """apex normalization/fused_layer_norm.py `FusedLayerNormAffineFunction`: the same, with the normalised shape as an
    argument."""

    @staticmethod
    def forward(ctx: Any, x: Any, weight: Any, bias: Any, shape: Any, epsilon: float) -> Any:  # type: ignore[override]
        return _FastLayerNorm.forward(ctx, x, weight, bias, epsilon)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        return (*_FastLayerNorm.backward(ctx, gradient), None)


_SOFTMAX = {
    "forward": _softmax_forward,
    "backward": _softmax_backward,
    "get_batch_per_block": lambda sq, sk, b, heads: 4 if sk > 128 else 8,
}
EXTENSIONS: dict[str, dict[str, Callable[..., Any]]] = {
    "fused_weight_gradient_mlp_cuda": {"wgrad_gemm_accum_fp32": _in_place, "wgrad_gemm_accum_fp16": _in_place},
    "scaled_upper_triang_masked_softmax_cuda": _SOFTMAX,
    "scaled_masked_softmax_cuda": _SOFTMAX,
    "scaled_softmax_cuda": _SOFTMAX,
    "apex": {},
    "apex.contrib": {},
    "apex.contrib.layer_norm": {},
    "apex.contrib.layer_norm.layer_norm": {"FastLayerNormFN": _FastLayerNorm},
    "apex.normalization": {},
    "apex.normalization.fused_layer_norm": {"FusedLayerNormAffineFunction": _FusedLayerNorm},
}
"""Module -> what megatron-core imports from it (apex csrc/megatron, contrib/layer_norm, normalization)."""
