"""`ParameterTensor`, one trainable tensor, and the projections and norms of which inventories are made."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from peakcast.jobs.architecture import Architecture

Role = Literal[
    "embedding",
    "position_embedding",
    "norm",
    "attention",
    "mlp",
    "router",
    "expert",
    "shared_expert",
    "lm_head",
    "state_space",
]


@dataclass(frozen=True, slots=True)
class ParameterTensor:
    """One trainable tensor of the network."""

    name: str
    """Hugging Face style without the layer's index, for example "self_attn.q_proj.weight"."""
    shape: tuple[int, ...]
    role: Role
    tensor_parallel_dim: int | None
    """The dimension that Megatron-style tensor parallelism splits; None means replicated."""

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


def linear(
    name: str, out_features: int, in_features: int, role: Role, split: Literal[0, 1] | None, *, bias: bool
) -> Iterator[ParameterTensor]:
    """The tensors of a projection. `split` 0: column-parallel, its bias is split too; 1: row-parallel, its bias is
    replicated."""
    yield ParameterTensor(f"{name}.weight", (out_features, in_features), role, split)
    if bias:
        yield ParameterTensor(f"{name}.bias", (out_features,), role, 0 if split == 0 else None)


def norm(architecture: Architecture, name: str, width: int) -> Iterator[ParameterTensor]:
    """The tensors that the architecture's norm over `width` elements trains."""
    if architecture.normalization != "nonparametric":
        yield ParameterTensor(f"{name}.weight", (width,), "norm", None)
    if architecture.normalization == "layernorm":
        yield ParameterTensor(f"{name}.bias", (width,), "norm", None)
