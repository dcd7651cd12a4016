"""Which package versions a row's job names: those that ran and decide whose conventions hold."""

from __future__ import annotations

from peakcast.collectors import probes
from peakcast.fields import FrozenMapping
from peakcast.spec import TrainingJob

DECIDING = {
    "": ("torch", "transformers", "accelerate", "peft"),
    "megatron": ("torch", "megatron_core", "transformer_engine"),
}
"""framework ("" for the others) -> packages whose versions decide whose conventions hold."""


def with_versions(job: TrainingJob) -> TrainingJob:
    """`job` with the versions that really ran, which decide whose conventions hold; a stack that it only follows
    (`torchtitan: main`) stays."""
    found = probes.versions()
    deciding = DECIDING.get(job.framework, DECIDING[""])
    found = {name: found[name] for name in deciding if name in found}
    return job.replace(versions=FrozenMapping({**followed(job), **found}))


def followed(job: TrainingJob) -> FrozenMapping:
    """The stacks and versions that a job names and that do not depend on what is installed."""
    deciding = DECIDING.get(job.framework, DECIDING[""])
    return FrozenMapping({name: version for name, version in job.versions.items() if name not in deciding})
