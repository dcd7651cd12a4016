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

EARLIER: Mapping[str, str] = FrozenMapping(
    {
        **{"torch": "2.4.1", "transformers": "4.44.2", "accelerate": "0.33.0", "peft": "0.12.0", "trl": "0.10.1"},
        **{"bitsandbytes": "0.43.3", "flash_attn": "2.6.3"},
    }
)
"""Releases of September 2024, as fms-acceleration's table of that month records them
(`datasets/published/fms_history.csv`)."""
NOTABLE = 0.05
"""From this share of the peak on the difference is said. Without their versions, 264 of 491 rows of fms-acceleration are
more than 10 % off, 163 of them with no other finding; September 2024's releases move all 264 by more than this, and the
right way."""


def versions_matter(job: TrainingJob, device: Device, base: Baseline) -> Finding | None:
    """The finding for training by the Trainer without versions whose steady peak would differ notably with `EARLIER`; None
    for another job, and where a trace or a recipe answers, which is of one release. `base`: the job's baseline."""
    trains = job.task == "train" and job.framework in ("huggingface", "deepspeed")
    if not trains or job.versions or tracer() is not None or wants_recipe(job):
        return None
    earlier = job.replace(versions=EARLIER)
    if conventions(earlier) == conventions(job):
        return None
    peak = ledger(earlier, device=device, rank=base.rank).peak().num_bytes
    change = peak / max(base.phase_peaks_bytes.values()) - 1
    if abs(change) < NOTABLE:
        return None
    sentence = (
        f"no versions are given, so the newest releases are taken: those of September 2024 (transformers "
        f"{EARLIER['transformers']}, torch {EARLIER['torch']}) would allocate {format_gib(peak)} in a step, {change:+.0%}; "
        "say which yours are in versions."
    )
    return Finding("versions_not_given", "versions", "more" if change > 0 else "less", sentence)
