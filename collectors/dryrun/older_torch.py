"""Makes the installed torch allocate as an older release does, where a difference is known."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.distributed.fsdp import FullyShardedDataParallel, _runtime_utils

from peakcast.collectors.dryrun.noted import RunFindings
from peakcast.collectors.tracing import attention
from peakcast.core.versions import release

FLOAT32_NORM = (2, 12)
"""From this release on, autocast computes `rms_norm` in float32; before, in the dtype of its input. Source: pytorch issue
188955; torch 2.13 ATen/autocast_mode.h, AT_FORALL_FP32."""
IN_PLACE_DENOMINATOR = (2, 1)
"""From this release on, foreach Adam and AdamW add eps in place; before, the denominator was a second tensor as large as a
state. Source: torch 2.0 optim/adam.py `_multi_tensor_adam`: `denom = torch._foreach_add(exp_avg_sq_sqrt, eps)`."""
LIMITED_GATHERS = (2, 1)
"""From this release on, FSDP1's `limit_all_gathers` is True unless given. Source: torch 2.0, 2.1
distributed/fsdp/fully_sharded_data_parallel.py."""
RESHARDED_FROZEN = (2, 1)
"""From this release on, FSDP1 reshards units that are frozen when their backward has ended; before, when all of it has.
Source: pytorch/pytorch pull request 101982 (June 2023); torch 2.13 distributed/fsdp/_runtime_utils.py."""
STRIDED_FLASH = (2, 2)
"""From this release on, flash attention reads queries in any layout and leaves its output in theirs; before, rows that do
not follow each other sequence by sequence were copied, and those of the output always did. Source: torch 2.0, 2.1
aten/src/ATen/native/transformers/cuda/attention.cu `_scaled_dot_product_flash_attention_cuda`: `query_reshaped =
q_t.reshape({Nnz_q, num_heads, head_dim})`."""
NORMS = ("rms_norm", "RMSNorm")
_keep_alive: list[Any] = []


def install(asked: str | None) -> None:
    """Allocate as the release `asked` does; None: as the installed one."""
    if asked is None:
        return
    if _is_older(asked) and not _is_older(torch.__version__):
        library = torch.library.Library("aten", "IMPL")
        library.impl("rms_norm", torch.library.fallthrough_kernel, "AutocastCUDA")
        _keep_alive.append(library)
    if _is_older(asked, IN_PLACE_DENOMINATOR):
        _keep_denominators()
    if _is_older(asked, LIMITED_GATHERS):
        _gather_ahead()
    if _is_older(asked, RESHARDED_FROZEN):
        _runtime_utils._register_post_backward_reshard_only_hook = lambda *arguments: None
    if _is_older(asked, STRIDED_FLASH):
        attention.flash_kernel = _PackedFlash.apply


class _PackedFlash(torch.autograd.Function):  # type: ignore[misc]
    """Flash attention on rows [batch × sequence, heads, head_dim]: other layouts are copied, in backward again."""

    @staticmethod
    def forward(ctx: Any, query: Any, key: Any, value: Any, dropout_p: float, is_causal: bool, scale: float | None) -> Any:
        """The output. Shapes: [batch, heads, sequence, head_dim]."""
        output, sums, _, _, *lengths, seed, offset, _ = torch.ops.aten._scaled_dot_product_flash_attention(
            *map(_packed, (query, key, value)), dropout_p, is_causal, False, scale=scale
        )
        ctx.options = *lengths, dropout_p, is_causal, scale
        ctx.save_for_backward(query, key, value, output, sums, seed, offset)
        return output

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        """The gradients of query, key and value."""
        query, key, value, output, sums, seed, offset = ctx.saved_tensors
        *options, scale = ctx.options
        tensors = *map(_packed, (gradient, query, key, value)), output, sums, None, None
        kernel = torch.ops.aten._scaled_dot_product_flash_attention_backward
        gradients = kernel(*tensors, *options, seed, offset, scale=scale)
        return *gradients, None, None, None


def _packed(heads: torch.Tensor) -> torch.Tensor:
    """[batch, heads, sequence, head_dim] with the sequences' rows one after another in memory."""
    batch, number, length, head_dim = heads.shape
    rows = heads.transpose(1, 2).reshape(batch * length, number, head_dim)
    return rows.view(batch, length, number, head_dim).transpose(1, 2)


def _gather_ahead() -> None:
    """Make FSDP1 gather as far ahead as the CPU is, unless the script says otherwise."""
    begin: Any = FullyShardedDataParallel.__init__
    defaults = (one for one in inspect.signature(begin).parameters.values() if one.default is not one.empty)
    begin.__defaults__ = tuple(False if one.name == "limit_all_gathers" else one.default for one in defaults)


def _keep_denominators() -> None:
    """Make a second tensor where an optimizer adds a number to a list, until it has divided by the sum."""
    functions: Any = torch
    add, divide = functions._foreach_add_, functions._foreach_addcdiv_
    denominators: list[Any] = []

    def added(tensors: Any, other: Any, **keywords: Any) -> None:
        if isinstance(other, float):
            denominators.append(functions._foreach_add(tensors, other))
        else:
            add(tensors, other, **keywords)

    def divided(*arguments: Any) -> None:
        divide(*arguments)
        denominators.clear()

    functions._foreach_add_, functions._foreach_addcdiv_ = added, divided


def say(notes: RunFindings, asked: str | None, script: str, *, autocast: bool, compiled: bool) -> None:
    """Say what another release would allocate, if none was `asked`, of a `script`, its text, that ran under `autocast`; and
    that its `compiled` code is not that of the release `asked`."""
    here = torch.__version__.partition("+")[0]
    if asked is not None and compiled and release(asked)[:2] != release(here)[:2]:
        notes.add(
            "compiler_differs",
            "torch",
            f"compiled code is that of torch {here}, which is here, and not of {asked}: which tensors it saves for "
            "backward, and in which order it makes them, is each release's own choice, by which the peak may differ some "
            "per cent.",
        )
    if asked is None and autocast and not _is_older(torch.__version__) and any(name in script for name in NORMS):
        notes.add(
            "versions_not_given",
            "torch",
            "autocast computes rms_norm in float32 from torch 2.12 on, as here; an older release keeps the dtype of its "
            "input and needs less: --torch 2.11 follows it.",
            "less",
        )


def _is_older(version: str, since: tuple[int, int] = FLOAT32_NORM) -> bool:
    """Whether `version` is older than the release `since`, or a nightly build before it."""
    found = release(version)[:2]
    return bool(found) and (found < since or (found == since and ".dev" in version))
