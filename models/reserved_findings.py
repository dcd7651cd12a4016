"""What is known to make published runs hold more memory than the simulated allocator reserves, and cannot be simulated."""

from __future__ import annotations

from peakcast.findings import Finding
from peakcast.spec import TrainingJob


def reserved_findings(job: TrainingJob) -> tuple[Finding, ...]:
    """Where the replay of `job` is known to reserve too little: its tensors are counted, what they leave in the cache
    depends on timing or data. Bars are those of the rows, which have it."""
    return tuple(
        Finding("reserved_beyond_replay", parameter, "more", sentence)
        for holds, parameter, sentence in (
            (
                job.task == "train" and job.framework == "huggingface" and job.architecture.moe is not None,
                "moe",
                "experts' tensors change size with what the router sends, so the allocator's cache grows step by step: "
                "published runs hold 0.5 to 8 GiB more than is simulated with equal shares.",
            ),
        )
        if holds
    )
