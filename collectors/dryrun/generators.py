"""Random generators of GPUs, which a build of torch without CUDA cannot make."""

from __future__ import annotations

from typing import Any

import torch

from peakcast.collectors.tracing.inductor import Generator

_OF_TORCH = torch.Generator


def install(gpus_per_node: int) -> None:
    """Give each GPU its default generator, and let scripts make others (`torch.Generator("cuda")`)."""
    torch.cuda.default_generators = (Generator(),) * gpus_per_node
    torch.Generator = _Made  # type: ignore[misc]


class _OfTorch(type(_OF_TORCH)):  # type: ignore[misc]
    def __instancecheck__(cls, instance: Any) -> bool:
        return isinstance(instance, _OF_TORCH)


class _Made(_OF_TORCH, metaclass=_OfTorch):  # type: ignore[misc,valid-type]
    """`torch.Generator` as a class whose calls make a GPU's generator where that is asked for."""

    def __new__(cls, device: Any = "cpu") -> torch.Generator:
        return Generator() if torch.device(device).type == "cuda" else _OF_TORCH(device)
