"""Jobs whose experts all take equal shares of the tokens, which is what the simulated allocator replays."""

from __future__ import annotations

from peakcast.core.fields import FrozenMapping
from peakcast.jobs.conventions import conventions
from peakcast.jobs.spec import TrainingJob

LOAD = "fullest_expert_load"
"""The convention that says how many equal shares the fullest expert takes."""


def evenly_routed(job: TrainingJob) -> TrainingJob:
    """`job` with an equal share of the tokens for each expert; `job` itself where the load of an expert changes nothing:
    without experts, or where they run in grouped products."""
    if job.architecture.moe is None:
        return job
    known = conventions(job)
    if known.get("experts_implementation") != "loop" or known.get(LOAD, 1) == 1:
        return job
    return job.replace(framework_options=FrozenMapping({**job.framework_options, LOAD: 1}))


def fullest_expert(job: TrainingJob) -> str:
    """What is assumed of the load of experts that run one after the other; "" where it changes nothing."""
    if evenly_routed(job) == job:
        return ""
    return (
        f"the fullest expert of a layer takes {conventions(job)[LOAD]} times an equal share of the tokens, as in published "
        f"runs of Mixtral-8x7B; framework_options.{LOAD}=1 gives every expert the same."
    )
