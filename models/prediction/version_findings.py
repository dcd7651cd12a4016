"""The finding that other releases, or another stack, need another amount of memory, for a job that names none."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from peakcast.core.fields import FrozenMapping
from peakcast.core.findings import Direction, Finding
from peakcast.core.units import format_gib
from peakcast.jobs.conventions import conventions
from peakcast.jobs.spec import TrainingJob
from peakcast.models.baseline.baseline import Baseline, baseline
from peakcast.models.ledger.scope.scope import scope_findings
from peakcast.models.recipes.baseline_choice import tracer
from peakcast.models.recipes.shelf import wants_recipe

if TYPE_CHECKING:
    from peakcast.catalog import Device


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """Releases that a job without versions may have in place of the assumed ones."""

    versions: Mapping[str, str]
    assumed: str
    """The releases that are assumed for a job that names none, in words."""
    named: str
    """`versions` in words."""


_NEWEST = "the newest releases are assumed"
_SEPTEMBER_2024 = Alternative(
    versions=FrozenMapping(
        {
            **{"torch": "2.4.1", "transformers": "4.44.2", "accelerate": "0.33.0", "peft": "0.12.0", "trl": "0.10.1"},
            **{"bitsandbytes": "0.43.3", "flash_attn": "2.6.3", "liger_kernel": "0.3.0"},
        }
    ),
    assumed=_NEWEST,
    named="those of September 2024 (transformers 4.44.2, torch 2.4.1)",
)
_NOVEMBER_2023 = Alternative(
    versions=FrozenMapping({"torch": "2.1.1", "transformers": "4.35.2", "accelerate": "0.24.1"}),
    assumed=_NEWEST,
    named="those of November 2023 (transformers 4.35.2, torch 2.1.1)",
)
ALTERNATIVES: Mapping[tuple[str, str], Alternative] = {
    ("huggingface", "train"): _SEPTEMBER_2024,
    ("huggingface", "inference"): _NOVEMBER_2023,
    ("deepspeed", "train"): Alternative(
        versions=FrozenMapping({**_SEPTEMBER_2024.versions, "deepspeed": "0.15.1"}),
        assumed=_NEWEST,
        named="those of September 2024 (DeepSpeed 0.15.1, transformers 4.44.2, torch 2.4.1)",
    ),
    ("megatron", "train"): Alternative(
        versions=FrozenMapping({"ngc_pytorch": "24.01"}), assumed=_NEWEST, named="those of NVIDIA's image 24.01"
    ),
    ("torch", "train"): Alternative(
        versions=FrozenMapping({"torchtitan": "0.2.2"}), assumed="a plain PyTorch loop is assumed", named="torchtitan 0.2.2"
    ),
}
"""(framework, task) -> what a job may run with. Sources of the releases: fms-acceleration's table of September 2024
(`datasets/published/fms_history.csv`), Liger's and DeepSpeed's of that month; optimum-benchmark's runs, whose cache of keys
and values is copied in each step (`optimum_benchmark.csv`); Megatron-LM's image for long-term support (`megatron_ci.csv`,
"lts"); torchtitan's own runs (`torchtitan_log.csv`)."""
NOTABLE = 0.05
"""From this share of a peak on the difference is said. Without their versions, hundreds of peaks of published rows are more
than 10 % off; all of these answers but one name a cause."""


def versions_matter(job: TrainingJob, device: Device, base: Baseline) -> tuple[Finding, ...]:
    """The finding for a job without versions of which the ledger counts a notably different peak, or less of the job, with
    its `ALTERNATIVES`; none for another job, and where a trace or a recipe answers, which is of one release. `base`: the
    job's baseline."""
    alternative = ALTERNATIVES.get((job.framework, job.task))
    if alternative is None or job.versions or tracer() is not None or wants_recipe(job):
        return ()
    other_job = job.replace(versions=alternative.versions)
    if conventions(other_job) == conventions(job):
        return ()
    other = baseline(other_job, device, base.rank)
    allocates = other.peak_allocated_bytes / base.peak_allocated_bytes - 1
    reserves = other.peak_reserved_bytes / base.peak_reserved_bytes - 1
    notable = [change for change in (allocates, reserves) if abs(change) >= NOTABLE]
    direction: Direction
    if notable:
        direction = "either" if min(notable) < 0 < max(notable) else "more" if notable[0] > 0 else "less"
        difference = (
            f"the peak would be {format_gib(other.peak_allocated_bytes)} allocated ({allocates:+.0%}) and "
            f"{format_gib(other.peak_reserved_bytes)} reserved ({reserves:+.0%})"
        )
    else:
        covered = {(left.code, left.parameter, left.direction) for left in scope_findings(job)}
        others = [left for left in scope_findings(other_job) if left.direction != "either"]
        one_way = [left for left in others if (left.code, left.parameter, left.direction) not in covered]
        if not one_way:
            return ()
        direction, difference = one_way[0].direction, one_way[0].sentence.rstrip(".")
    sentence = (
        f"no versions are given, so {alternative.assumed}: with {alternative.named} {difference}; say which yours are in "
        "versions."
    )
    return (Finding("versions_not_given", "versions", direction, sentence),)
