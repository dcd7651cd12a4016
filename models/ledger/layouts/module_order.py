"""The order in which a network's modules register their parameters, which is the order in which optimizers and FSDP2
process them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, TypeVar

from peakcast.jobs.architecture import Architecture
from peakcast.models.ledger.layouts.module_tree import SUB_LAYERS, ModulePath
from peakcast.networks.families import family_of


class _Tensor(Protocol):
    @property
    def name(self) -> str: ...
    @property
    def module(self) -> str: ...
    @property
    def decays(self) -> bool: ...


T = TypeVar("T", bound=_Tensor)


def in_order_of_modules(tensors: Sequence[T], architecture: Architecture) -> list[T]:
    """`tensors` in the order of registration, module by module. Most of transformers' layers register their norms after
    their matrices. Tensors of a recorded network are in the right order already."""
    if architecture.configuration or family_of(architecture).modules.norms_first:
        return list(tensors)
    by_module: dict[str, list[T]] = {}
    for tensor in tensors:
        by_module.setdefault(tensor.module, []).append(tensor)
    ends = ("embedding", "head")
    layers = {name: part if name in ends else sorted(part, key=_is_norm_of_stream) for name, part in by_module.items()}
    return [tensor for part in layers.values() for tensor in part]


def _is_norm_of_stream(tensor: _Tensor) -> bool:
    """Whether the tensor belongs to a norm of the residual stream, which lies outside attention and feed-forward. The other
    vectors are biases, each registered after its matrix, or belong to norms inside attention. (FSDP1's flattened pieces are
    all vectors, so shapes cannot tell.)"""
    return not tensor.decays and ModulePath.of(tensor.name).outermost not in SUB_LAYERS
