"""What FSDP1 does that fake tensors cannot: it moves buffers of modules to its GPU (`device_id=...`), of which small ones
are real tensors on the CPU, which cannot become fake ones in place; and it asks for the address of a storage."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.distributed.fsdp import FullyShardedDataParallel, _flat_param, _init_utils


def install() -> None:
    """Change this process permanently: FSDP1 puts copies on the GPU in the place of such buffers, before it moves the rest
    by `tensor.data = ...` (torch 2.13, distributed/fsdp/_init_utils.py, `_move_states_to_device`)."""
    move: Any = _init_utils._move_module_to_device

    def moved(module: torch.nn.Module, ignored_params: Any, ignored_buffers: Any, device: Any) -> None:
        if device is not None:
            ignored = {id(buffer) for buffer in ignored_buffers}
            for part in _own(module):
                for name, buffer in part._buffers.items():
                    if buffer is not None and _is_real(buffer) and id(buffer) not in ignored:
                        part._buffers[name] = buffer.to(device)
        move(module, ignored_params, ignored_buffers, device)

    _init_utils._move_module_to_device = moved
    flat: Any = _flat_param
    flat._data_ptr_allocated = _has_bytes  # SHARD_GRAD_OP with use_orig_params asks it before each backward (torch 2.13)


def _has_bytes(tensor: torch.Tensor) -> bool:
    """Whether the storage of `tensor` is allocated; the address of a fake one is always 0."""
    return bool(tensor.untyped_storage().size() > 0)


def _is_real(tensor: torch.Tensor) -> bool:
    return not isinstance(tensor, FakeTensor) and tensor.device.type == "cpu"


def _own(module: torch.nn.Module) -> Iterator[torch.nn.Module]:
    """The modules of a unit of FSDP1, without those of units in it."""
    yield module
    for child in module.children():
        if not isinstance(child, FullyShardedDataParallel):
            yield from _own(child)
