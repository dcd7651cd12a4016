"""What the ledger covers. For a job that it does not cover, findings give the reasons; the answer never passes for one
inside."""

from __future__ import annotations

from functools import cache
from itertools import chain

from peakcast.core.findings import FAILS, GUESSED, UNKNOWN, Finding, sentences
from peakcast.dialects.common.own_networks import own_network
from peakcast.jobs.spec import TrainingJob
from peakcast.models.ledger.recorded.covering import (
    no_recipe,
    of_another_release,
    recipe_findings,
    with_other_kernels,
    without_kernels,
)
from peakcast.models.ledger.scope.kernels import ATTENTION, COMPILED, FUSED_KERNELS, TIMED_KERNELS
from peakcast.models.ledger.scope.layouts import LAYOUTS, ZERO
from peakcast.models.ledger.scope.networks import CLASSIFIERS, ENCODER_DECODERS, NETWORKS, OWN_NETWORKS, TRACED_NETWORKS
from peakcast.models.ledger.scope.table import ScopeLimit, Section
from peakcast.models.ledger.scope.training import (
    ADAM_MINI,
    ADAPTERS,
    BATCHES,
    FROZEN,
    LENGTHS,
    MIXTURES,
    PREFERENCES,
    SETTINGS,
    UPDATES_IN_BACKWARD,
)
from peakcast.models.recipes.baseline_choice import stack_traces, tracer
from peakcast.models.recipes.lent import lent
from peakcast.models.recipes.shelf import installed_libraries, wants_recipe

EVERY_STACK = (BATCHES, CLASSIFIERS, PREFERENCES, LENGTHS, FROZEN)
PYTORCH = (
    *(NETWORKS, OWN_NETWORKS, ENCODER_DECODERS, LAYOUTS, SETTINGS, MIXTURES, ADAPTERS, ATTENTION, FUSED_KERNELS),
    *(ZERO, COMPILED, TIMED_KERNELS, UPDATES_IN_BACKWARD, ADAM_MINI),
)
"""The sections for Hugging Face, plain PyTorch and DeepSpeed."""


@cache
def sections(framework: str) -> tuple[Section, ...]:
    """The sections of the table for jobs of `framework`, in the order of their findings."""
    if framework != "megatron":
        return EVERY_STACK + PYTORCH
    from peakcast.models.ledger.scope.megatron import MEGATRON

    return EVERY_STACK + MEGATRON


def scope_findings(job: TrainingJob) -> tuple[Finding, ...]:
    """Why the ledger does not cover `job`: a finding from each section of the table of which a row holds; none if it covers
    all. Of a trace: why it is not of the job's network."""
    if tracer() is not None:
        return traced_findings(job)
    recorded = recipe_findings(job) if wants_recipe(job) else None
    if recorded is not None and (job.architecture.configuration or not no_recipe(job)):
        # of a library whose own networks are not built here the recipe is of transformers', unless a user's run gave it
        own = OWN_NETWORKS.finding(job) if lent() is None and own_network(job) is None else None
        return (*recorded, own) if own else recorded
    found = (section.finding(job) for section in sections(job.framework))  # a family of the ledger, which then answers
    return (*(recorded or ()), *(finding for finding in found if finding))


def traced_findings(job: TrainingJob) -> tuple[Finding, ...]:
    """Findings for parts of the job's own program that peakcast's trace of the same stack does not have. Empty if the
    user's program itself is traced."""
    traces = stack_traces()
    if traces is None:
        return ()
    own, release = TRACED_NETWORKS.finding(job), of_another_release(job, installed_libraries())
    lacked = without_kernels(traces.replaced.items())
    return (*lacked, *with_other_kernels(job), *(finding for finding in (own, release) if finding))


def out_of_scope(job: TrainingJob) -> str:
    """The sentences of `scope_findings` as one text; "" if the ledger covers `job`."""
    return " ".join(sentences(scope_findings(job)))


def not_covered(job: TrainingJob) -> frozenset[ScopeLimit]:
    """All rows of the table that hold of `job` and say that a library refuses it, or that nothing is known; also those
    that do not become a finding because an earlier row of their section does."""
    rows = chain.from_iterable(section.holding(job) for section in sections(job.framework))
    return frozenset(row for row in rows if row.effect in (FAILS, GUESSED, UNKNOWN))
