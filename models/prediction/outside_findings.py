"""The finding that memory outside PyTorch's allocator is only an estimate, for answers so small that it matters."""

from __future__ import annotations

from peakcast.core.findings import SILENT_ABOVE, Finding
from peakcast.core.units import MIB, format_gib
from peakcast.models.baseline.baseline import Baseline

ELSEWHERE_BYTES = (1_395 * MIB, 2_417 * MIB)
"""How much more a GPU held in a run on another machine with equal tensors, command and releases of torch and accelerate:
the most, for one process and for several. Source: A100, fms-acceleration's tables at commits 9239802 and 876e2ed, 14 runs
on one GPU (median 1,163 MiB) and 15 on two (1,179). Loading all kernels at once would make such a difference: pytorch
#86509, 667 MB against 287 for a bare process."""


def outside_estimated(base: Baseline, device_bytes: int) -> Finding | None:
    """The finding for an answer of `device_bytes`, if such a difference would be an error above SILENT_ABOVE; None if not,
    or if readings of this machine replace the estimate."""
    one, several = ELSEWHERE_BYTES
    more = several if base.communicator_bytes else one
    if base.outside is not None or more <= SILENT_ABOVE * (device_bytes + more):
        return None
    parts = "CUDA context, kernels and NCCL" if base.communicator_bytes else "CUDA context and kernels"
    sentence = (
        f"what lies outside PyTorch's allocator ({parts}) is an estimate: a published run held {format_gib(more)} more "
        "than the same run on another machine, as happens where all kernels are loaded at once "
        "(CUDA_MODULE_LOADING=EAGER); `peakcast collect constants` measures yours."
    )
    return Finding("outside_estimated", "", "more", sentence)
