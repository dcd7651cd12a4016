"""Findings about what the simulated allocator reserves beyond the tensors of a job."""

from __future__ import annotations

from collections.abc import Iterator

from peakcast.core.findings import Finding
from peakcast.core.units import format_gib
from peakcast.models.baseline.baseline import Baseline

NEAR = 0.95
"""From this share of the GPU's memory on, a run may return its cache though the simulated one does not: something else that
holds some of the memory is enough."""
NOTABLE_WAIT = 0.05
"""The share of reserved memory from which blocks that wait are worth a finding."""


def cache_findings(base: Baseline, there: int) -> Iterator[Finding]:
    """What makes the reserved memory of `base` uncertain on a GPU with `there` bytes."""
    parameter = "allocator.expandable_segments"
    if base.num_retries:
        sentence = (
            f"the simulated allocator gives cached memory back and retries {base.num_retries} times: the run would be slow "
            "and close to out of memory; try expandable_segments."
        )
        yield Finding("allocator_retries", parameter, "either", sentence)
    elif NEAR * there < base.peak_device_bytes <= there:
        sentence = (
            f"the allocator's cache leaves less than {format_gib(int((1 - NEAR) * there))} of the GPU's memory: if "
            "something else holds that, the allocator gives its cache back and retries, which is slow and reserves less."
        )
        yield Finding("allocator_retries", parameter, "less", sentence)
    if base.waiting_bytes > NOTABLE_WAIT * base.peak_reserved_bytes:
        sentence = (
            f"{format_gib(base.waiting_bytes)} of reserved memory are blocks that are freed but wait until another stream "
            "of the GPU has finished with them, as many as if kernels took much longer than their launches; small "
            "micro-batches reserve less. The allocator returns them rather than run out of memory."
        )
        yield Finding("blocks_wait", "parallelism", "less", sentence)
