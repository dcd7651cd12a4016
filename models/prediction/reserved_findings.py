"""Known reasons why published runs hold more memory than the simulated allocator reserves, which cannot be simulated."""

from __future__ import annotations

from peakcast.core.findings import Finding
from peakcast.jobs.spec import TrainingJob


def reserved_findings(job: TrainingJob) -> tuple[Finding, ...]:
    """Findings for a job whose replay is known to reserve too little: its tensors are counted, but what they leave in the
    cache depends on timing or data. The bars come from rows that have this effect."""
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
