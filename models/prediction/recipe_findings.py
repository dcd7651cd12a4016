"""The finding that recipes leave out the temporary memory of kernels, for networks whose peaks show it."""

from __future__ import annotations

from peakcast.core.findings import Finding
from peakcast.jobs.images import reads_pixels
from peakcast.jobs.spec import TrainingJob
from peakcast.models.recipes.baseline_choice import seen_run, tracer

SHARE = 0.03
"""The most that traces with an A100's kernels needed beyond recipes: 1.1 to 2.7 % of ViT from base to huge, whose backward
sums the gradients of biases over all patches. Networks with a vocabulary peak at its logits, and hide it."""


def left_out_by_recipes(job: TrainingJob) -> tuple[Finding, ...]:
    """The finding for a job of images that a recipe answers; none where a trace or the user's own run does."""
    if job.task != "train" or not reads_pixels(job.architecture) or tracer() is not None or seen_run() is not None:
        return ()
    sentence = (
        "kernels that sum the gradients of biases need temporary memory, which recipes do not contain: traces of ViT need "
        "up to 3 % more; --baseline trace counts it."
    )
    return (Finding("nearly_modelled", "architecture", "more", sentence, share=SHARE),)
