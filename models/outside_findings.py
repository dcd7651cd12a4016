"""That what lies outside PyTorch's allocator is an estimate, where an answer is so small that it matters."""

from __future__ import annotations

from peakcast.findings import Finding
from peakcast.models.baseline import Baseline
from peakcast.models.metrics import SILENT_ABOVE
from peakcast.units import MIB, format_gib

ELSEWHERE_BYTES = (1_395 * MIB, 2_417 * MIB)
"""How much more a GPU held in a run on another machine that was equal in its tensors, its command and its releases of torch
and accelerate: the most, of one process and of several. Source: A100, fms-acceleration's tables at commits 9239802 and
876e2ed, 14 runs on one GPU (1,163 MiB in the middle) and 15 on two (1,179). That loading all kernels at once would be such
a difference: pytorch #86509, 667 MB of a bare process beside 287."""


def outside_estimated(base: Baseline, device_bytes: int) -> Finding | None:
    """The finding for an answer of `device_bytes`, where such a difference would be an error above SILENT_ABOVE; None where
    it would not, or where readings of the machine at hand stand in the estimate's place."""
    one, several = ELSEWHERE_BYTES
    more = several if base.communicator_bytes else one
    if base.outside is not None or more <= SILENT_ABOVE * (device_bytes + more):
        return None
    parts = "CUDA context, kernels and NCCL" if base.communicator_bytes else "CUDA context and kernels"
    sentence = (
        f"what lies outside PyTorch's allocator ({parts}) is an estimate: a published run held {format_gib(more)} more "
        "than its equal on another machine, as processes do that load all kernels at once (CUDA_MODULE_LOADING=EAGER); "
        "`peakcast collect constants` measures yours."
    )
    return Finding("outside_estimated", "", "more", sentence)
