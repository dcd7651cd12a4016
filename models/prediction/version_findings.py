"""The finding that earlier releases need another amount of memory, for a job that names no release."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from peakcast.core.fields import FrozenMapping
from peakcast.core.findings import Finding
from peakcast.core.units import format_gib
from peakcast.jobs.conventions import conventions
from peakcast.jobs.spec import TrainingJob
from peakcast.models.baseline.baseline import Baseline
from peakcast.models.baseline.ledger import ledger
from peakcast.models.recipes.baseline_choice import tracer
from peakcast.models.recipes.shelf import wants_recipe

if TYPE_CHECKING:
    from peakcast.catalog import Device

_OF_2024: Mapping[str, str] = FrozenMapping(
    {
        **{"torch": "2.4.1", "transformers": "4.44.2", "accelerate": "0.33.0", "peft": "0.12.0", "trl": "0.10.1"},
        **{"bitsandbytes": "0.43.3", "flash_attn": "2.6.3"},
    }
)
EARLIER: Mapping[str, tuple[Mapping[str, str], str]] = {
    "huggingface": (_OF_2024, "September 2024 (transformers 4.44.2, torch 2.4.1)"),
    "deepspeed": (_OF_2024, "September 2024 (transformers 4.44.2, torch 2.4.1)"),
    "megatron": (FrozenMapping({"ngc_pytorch": "24.01"}), "NVIDIA's image 24.01"),
}
"""Framework -> earlier releases, and what they are called: those that fms-acceleration's table of September 2024 records
(`datasets/published/fms_history.csv`), and Megatron-LM's image for long-term support (`megatron_ci.csv`, "lts")."""
NOTABLE = 0.05
"""From this share of the peak on the difference is said. Without their versions, 264 of 491 rows of fms-acceleration are
more than 10 % off, 163 of them with no other finding, and 29 of 371 of Megatron-LM; earlier releases move all but two of
these by more than this, and the right way."""


def versions_matter(job: TrainingJob, device: Device, base: Baseline) -> Finding | None:
    """The finding for training without versions whose steady peak would differ notably with `EARLIER`; None for another
    job, and where a trace or a recipe answers, which is of one release. `base`: the job's baseline."""
    trains = job.task == "train" and job.framework in EARLIER
    if not trains or job.versions or tracer() is not None or wants_recipe(job):
        return None
    versions, named = EARLIER[job.framework]
    earlier = job.replace(versions=versions)
    if conventions(earlier) == conventions(job):
        return None
    peak = ledger(earlier, device=device, rank=base.rank).peak().num_bytes
    change = peak / max(base.phase_peaks_bytes.values()) - 1
    if abs(change) < NOTABLE:
        return None
    sentence = (
        f"no versions are given, so the newest releases are assumed: those of {named} would allocate {format_gib(peak)} in "
        f"a step, {change:+.0%}; say which yours are in versions."
    )
    return Finding("versions_not_given", "versions", "more" if change > 0 else "less", sentence)
