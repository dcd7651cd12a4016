"""The matrices of experts that run one after the other, each with a gradient of its own."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache

from peakcast.models.ledger.layouts.base import StoredTensor

MATRICES = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
"""The stacked tensors of a layer's experts -> the Linears of each expert (transformers 4.48
models/mixtral/modeling_mixtral.py MixtralBlockSparseTop2MLP)."""


def expert_by_expert(tensors: Sequence[StoredTensor]) -> tuple[StoredTensor, ...]:
    """`tensors` with the matrices of each expert instead of the stacked ones. Granite's and DBRX's experts are views of a
    stacked parameter; they are divided nevertheless, because their blocks make a gradient for each."""
    return _expert_by_expert(tuple(tensors))


@lru_cache(maxsize=16)
def _expert_by_expert(tensors: tuple[StoredTensor, ...]) -> tuple[StoredTensor, ...]:
    """`expert_by_expert`. Jobs with this network get the same tensors, by which what was computed from them is cached."""
    stacked = (_matrices(tensor) if tensor.path.name in MATRICES else (tensor,) for tensor in tensors)
    return tuple(part for parts in stacked for part in parts)


def _matrices(tensor: StoredTensor) -> Iterator[StoredTensor]:
    """The matrices of a stacked tensor, the first expert's first; itself if it is not stacked."""
    if not tensor.exceeds_matrix:
        yield tensor
        return
    experts, _, stacked = tensor.name.rpartition(".")
    num_experts, rows, columns = tensor.shape
    for expert in range(num_experts):
        for name in MATRICES[stacked]:
            shape = (rows // len(MATRICES[stacked]), columns)
            own, of_all = f"{experts}.{expert}.{name}.weight", f"{experts}.{name}.weight"
            yield replace(tensor, name=own, name_in_block=of_all, shape=shape)
