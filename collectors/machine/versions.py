"""The package versions in a row's job: those that ran and decide which conventions apply."""

from __future__ import annotations

from peakcast.collectors.machine import probes
from peakcast.core.fields import FrozenMapping
from peakcast.jobs.spec import TrainingJob

DECIDING = {
    "": ("torch", "transformers", "accelerate", "peft"),
    "megatron": ("torch", "megatron_core", "transformer_engine"),
}
"""framework ("" for the others) -> packages whose versions decide which conventions apply."""


def with_versions(job: TrainingJob) -> TrainingJob:
    """`job` with the versions that really ran and decide which conventions apply. A stack that is only followed
    (`torchtitan: main`) is kept."""
    found = probes.versions()
    deciding = DECIDING.get(job.framework, DECIDING[""])
    found = {name: found[name] for name in deciding if name in found}
    return job.replace(versions=FrozenMapping({**followed(job), **found}))


def followed(job: TrainingJob) -> FrozenMapping:
    """The stacks and versions in a job that do not depend on what is installed."""
    deciding = DECIDING.get(job.framework, DECIDING[""])
    return FrozenMapping({name: version for name, version in job.versions.items() if name not in deciding})
