"""Releases that a project's own installation asks for, assumed where neither question nor configuration names one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from peakcast.core.fields import FrozenMapping
from peakcast.core.versions import resolved
from peakcast.dialects.common.asked_versions import AskedVersions
from peakcast.dialects.common.translation import Notes
from peakcast.jobs.spec import TrainingJob


@dataclass(frozen=True, slots=True)
class Required:
    """The newest releases of packages that a project allows."""

    by: str
    """What asks for them."""
    versions: Mapping[str, str]


REQUIRED = {
    # axolotl 0.19.0, Requires-Dist: deepspeed<0.19.0,>=0.18.6, liger-kernel==0.8.1
    "axolotl": Required("axolotl 0.19", {"deepspeed": "0.18.9", "liger_kernel": "0.8.1"}),
    # requirements/install_all.sh at commit 070fedc9: "deepspeed<0.19"
    "ms-swift": Required("ms-swift's requirements/install_all.sh", {"deepspeed": "0.18.9"}),
    # requirements/deepspeed.txt at commit 81b8a50a: deepspeed>=0.10.0,<=0.16.9
    "LLaMA-Factory": Required("LLaMA-Factory's requirements/deepspeed.txt", {"deepspeed": "0.16.9"}),
}
"""Project -> what it requires, of packages whose newer releases need another amount of memory."""


def as_required(
    job: TrainingJob, project: str, asked: AskedVersions, notes: Notes, *, ligers_loss: bool = False
) -> TrainingJob:
    """`job` with the releases that `project` requires of packages that it uses, unless the question says which releases the
    run has. `ligers_loss`: whether its fused loss is Liger's."""
    required = REQUIRED[project]
    uses = {"deepspeed": job.framework == "deepspeed", "liger_kernel": ligers_loss}
    if asked.here or "transformers" in resolved(asked.given):  # another release of the project than the newest
        return job
    missing = {name: version for name, version in required.versions.items() if uses[name] and name not in job.versions}
    for package, version in missing.items():
        notes.assumptions.append(f"{package} is assumed to be {version}, the newest that {required.by} allows.")
    return job.replace(versions=FrozenMapping({**missing, **job.versions})) if missing else job
