"""Makes jobs whose experts all take equal shares of the tokens, for replays in the simulated allocator."""

from __future__ import annotations

from peakcast.core.fields import FrozenMapping
from peakcast.jobs.conventions import conventions
from peakcast.jobs.spec import TrainingJob

LOAD = "fullest_expert_load"
"""The convention for the load of the fullest expert, as a multiple of an equal share."""


def evenly_routed(job: TrainingJob) -> TrainingJob:
    """`job` with an equal share of the tokens for each expert; `job` unchanged if the load does not matter: without
    experts, or if they run in grouped matrix products."""
    if job.architecture.moe is None:
        return job
    known = conventions(job)
    if known.get("experts_implementation") != "loop" or known.get(LOAD, 1) == 1:
        return job
    return job.replace(framework_options=FrozenMapping({**job.framework_options, LOAD: 1}))


def fullest_expert(job: TrainingJob) -> str:
    """A sentence on the assumed load of experts that run one after the other; "" if the load does not matter."""
    if evenly_routed(job) == job:
        return ""
    return (
        f"the fullest expert of a layer takes {conventions(job)[LOAD]} times an equal share of the tokens, as in published "
        f"runs of Mixtral-8x7B; framework_options.{LOAD}=1 gives every expert the same."
    )
