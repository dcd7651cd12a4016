"""What megatron-core needs of CUDA and of a process group besides tensors, replaced on a machine without a GPU.

To be installed before megatron-core is imported. Functions that it compiles become one operation of the trace: intermediate
tensors of a fused kernel are never allocated.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor

from peakcast.collectors.tracing import transformer_engine_stub
from peakcast.collectors.tracing.tracer import Tracer

HOPPER = SimpleNamespace(major=9, minor=0, multi_processor_count=132, name="NVIDIA H100 80GB HBM3")
BLACKWELL = SimpleNamespace(major=10, minor=0, multi_processor_count=148, name="NVIDIA B200")
"""The GPUs for which a trace stands; Transformer Engine chooses by their compute capability."""
COMPILED_MODULES = frozenset({"megatron.core.fusions.fused_cross_entropy", "megatron.core.activations"})
"""Modules whose functions Inductor compiles in a trace too, because their kernels exchange large tensors, or because
autograd makes their backward."""
_TYPE_NAMES = {torch.float32: "Float", torch.bfloat16: "BFloat16", torch.float16: "Half"}


class _Done:
    """A finished communication."""

    def wait(self) -> None:
        """Nothing to wait for."""


def install(tracer: Tracer, *, engine: bool, compiles: bool, gpu: SimpleNamespace = HOPPER) -> None:
    """Replace them in this process. `engine`: with Transformer Engine, if its Python is installed; otherwise without it,
    even if it is installed. `compiles`: whether functions in `COMPILED_MODULES` are compiled, within
    `inductor.compiling`."""
    cuda: Any = torch.cuda
    compiler = torch.compile if compiles else None
    torch.compile = functools.partial(_one_operation, tracer, compiler)  # type: ignore[assignment]  # core/jit.py
    device = torch.device("cuda:0")
    cuda.current_device = lambda: device
    cuda.get_rng_state = cuda.random.get_rng_state = lambda *_, **__: torch.zeros(1, dtype=torch.uint8, device="cpu")
    cuda.is_current_stream_capturing = lambda: False
    cuda.nvtx.range_push = cuda.nvtx.range_pop = lambda *_: None
    cuda.manual_seed = cuda.set_rng_state = lambda *_, **__: None
    # CheckpointWithoutOutput copies back; with fake storages that would keep both forever
    torch.UntypedStorage.copy_ = lambda storage, *_, **__: storage  # type: ignore[method-assign]
    dist.all_gather_object = _all_gather_object
    make, torch.Tensor.cuda = torch.tensor, lambda tensor, *_, **__: tensor.to(device)  # type: ignore[method-assign]
    torch.tensor = lambda *values, pin_memory=False, **keywords: make(*values, **keywords)
    kind = torch.Tensor.type

    def type_of(tensor: Any, dtype: Any = None, **keywords: Any) -> Any:
        """The names of CUDA's types, by which the optimizers distinguish parameters."""
        if dtype is None and tensor.dtype in _TYPE_NAMES and tensor.device.type == "cuda":
            return f"torch.cuda.{_TYPE_NAMES[tensor.dtype]}Tensor"
        return kind(tensor, dtype, **keywords)

    FakeTensor.type = type_of  # type: ignore[method-assign]
    if engine:
        transformer_engine_stub.install()
        import transformer_engine.pytorch.distributed as checkpointing  # recomputes in FP8

        checkpointing._get_cuda_rng_state = cuda.get_rng_state
        checkpointing._set_cuda_rng_state = cuda.set_rng_state
    else:
        sys.modules["transformer_engine"] = None  # type: ignore[assignment]
    cuda.get_device_properties = lambda device=None: gpu
    torch.version.cuda = torch.version.cuda or "13.0"
    cuda.get_device_capability = lambda device=None: (gpu.major, gpu.minor)
    _install_in_megatron()


def _install_in_megatron() -> None:
    import megatron.core.distributed.param_and_grad_buffer as buffers
    import megatron.core.optimizer.clip_grads as clipping
    import megatron.core.parallel_state as groups
    import megatron.core.tensor_parallel.random as random
    from megatron.core.optimizer.optimizer import MixedPrecisionOptimizer

    random._set_cuda_rng_state = lambda *_, **__: None
    groups.einops = SimpleNamespace(rearrange=_ranks_by_level)
    # its operators do not accept fake tensors
    buffers._coalescing_manager = dist._coalescing_manager = lambda *_, **__: contextlib.nullcontext(_Done())
    if not hasattr(clipping.l2_norm_impl, "__self__") and clipping.l2_norm_impl.__name__ == "local_multi_tensor_l2_norm":
        clipping.l2_norm_impl = _local_l2_norm
    unscale = MixedPrecisionOptimizer._unscale_main_grads_and_check_for_nan

    def unscale_finite(optimizer: Any) -> bool:
        """False: an overflow of float16 gradients, which the host would read from the GPU, would skip the step and its
        states."""
        unscale(optimizer)
        return False

    MixedPrecisionOptimizer._unscale_main_grads_and_check_for_nan = unscale_finite


def answer_counts(rows: int) -> None:
    """Lists that the host reads from the GPU are assumed to be counts of tokens: equal shares of `rows`."""

    read = torch.Tensor.tolist

    def counts(tensor: Any) -> Any:
        return read(tensor) if tensor.is_floating_point() else [rows // tensor.numel()] * tensor.numel()

    FakeTensor.tolist = counts  # type: ignore[method-assign]


def balance(rows: int, shares: int, dispatcher: str) -> None:
    """Assume a balanced router. A rank sends `rows` copies of tokens to experts and receives as many, and with expert
    tensor parallelism also those of the other `shares` ranks that split an expert. Counts of tokens, which the host reads
    from the GPU, are equal shares; a routing map selects as many, from the rank's own tokens or from all gathered ones."""
    received = rows * shares
    selected = received if dispatcher == "allgather" else rows
    read = torch.Tensor.numpy

    def counts(tensor: Any) -> Any:
        if tensor.is_floating_point():
            return read(tensor)
        return np.full(tuple(tensor.shape), rows // max(1, tensor.numel()), dtype=np.int64)

    FakeTensor.numpy = counts  # type: ignore[method-assign]
    answer_counts(received)
    _sort_equal_chunks()
    _permute_known_rows(selected)
    _send_all_rows_to_each_share(rows)
    torch.Tensor.masked_select = _selecting(selected)  # type: ignore[method-assign]


def _sort_equal_chunks() -> None:
    """All chunks have one size; the host reads their order, which is not one of the counts."""
    import megatron.core.transformer.moe.token_dispatcher as dispatching

    sort = dispatching.sort_chunks_by_idxs

    def sort_chunks(tensor: Any, sizes: Any, order: Any, *arguments: Any, **keywords: Any) -> Any:
        if not keywords.get("fused"):
            order = np.arange(order.numel())
        return sort(tensor, sizes, order, *arguments, **keywords)

    dispatching.sort_chunks_by_idxs = sort_chunks


def _permute_known_rows(selected: int) -> None:
    """The number of rows that are permuted, which would be read from the GPU, is known."""
    import megatron.core.transformer.moe.token_dispatcher as dispatching

    permute = dispatching.permute

    def permute_rows(*arguments: Any, num_out_tokens: Any = None, **keywords: Any) -> Any:
        if keywords.get("fused") and isinstance(num_out_tokens, torch.Tensor):
            num_out_tokens = selected
        return permute(*arguments, num_out_tokens=num_out_tokens, **keywords)

    dispatching.permute = permute_rows


def _send_all_rows_to_each_share(rows: int) -> None:
    """Each rank among which an expert is split sends all its rows. (A fake exchange would give each a share.)"""
    import megatron.core.transformer.moe.token_dispatcher as dispatching

    kind = dispatching.MoEAlltoAllTokenDispatcher
    synchronize = kind._maybe_dtoh_and_synchronize

    def synchronized(dispatcher: Any, point: str, tokens_per_expert: Any = None) -> Any:
        tokens_per_expert = synchronize(dispatcher, point, tokens_per_expert)
        if isinstance(dispatcher.output_splits_tp, np.ndarray):
            dispatcher.output_splits_tp = np.full(len(dispatcher.output_splits_tp), rows, dtype=np.int64)
        return tokens_per_expert

    kind._maybe_dtoh_and_synchronize = synchronized


def _selecting(selected: int) -> Callable[[Any, Any], Any]:
    """`masked_select` that selects so many elements, whatever the mask."""

    class Selected(torch.autograd.Function):  # type: ignore[misc]
        """It saves both its inputs."""

        @staticmethod
        def forward(ctx: Any, tensor: Any, mask: Any) -> Any:
            ctx.save_for_backward(tensor, mask)
            return tensor.new_empty(selected)

        @staticmethod
        def backward(ctx: Any, gradient: Any) -> Any:
            return torch.zeros_like(ctx.saved_tensors[0]), None

    return lambda tensor, mask: Selected.apply(tensor, mask)


def _one_operation(
    tracer: Tracer, compiler: Callable[..., Any] | None, function: Callable[..., Any] | None = None, **options: Any
) -> Any:
    """`torch.compile` for a trace: the function is one operation. `compiler` is torch's own, for functions of which more
    must be seen than their outputs."""
    if function is None:
        return functools.partial(_one_operation, tracer, compiler)
    if compiler is not None and function.__module__ in COMPILED_MODULES:
        return compiler(function, **options)

    @functools.wraps(function)
    def fused(*arguments: Any, **keywords: Any) -> Any:
        with tracer.one_operation(function.__name__):
            return function(*arguments, **keywords)

    return fused


def _ranks_by_level(ranks: Any, pattern: str, *, l: int, s: int, u: int) -> Any:  # noqa: E741  # its caller's names
    """The only operation of einops that parallel_state uses, "(l s u) -> (l u) s"."""
    return ranks.reshape(l, s, u).transpose(0, 2, 1).reshape(l * u, s)


def _all_gather_object(gathered: list[Any], value: Any, group: Any = None) -> None:
    gathered[:] = [value] * len(gathered)


def _local_l2_norm(chunk_size: int, flag: Any, tensors: list[list[Any]], *_: Any) -> tuple[Any, None]:
    """`local_multi_tensor_l2_norm`, which would read each tensor's norm back to the host."""
    norms = [torch.norm(tensor) for group in tensors for tensor in group]
    del norms
    return torch.zeros(1, device="cuda"), None
