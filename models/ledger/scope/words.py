"""Values of a job that the sentences of the tables name in braces, beside its settings."""

from __future__ import annotations

from collections.abc import Callable

from peakcast.core.versions import OWN_NETWORK_STACKS
from peakcast.jobs.conventions import adapter_dtype, conventions
from peakcast.jobs.spec import TrainingJob
from peakcast.models.ledger.layouts import gathered_dtype
from peakcast.models.ledger.scope.adapter_targets import shared_expert_projections
from peakcast.models.ledger.scope.facts import rounds, tokens
from peakcast.networks.families import families_where, family_of
from peakcast.networks.trained_parts import copied_inside, ends_named


def _listed(names: object) -> str:
    return ", ".join(sorted(map(str, names)))  # type: ignore[call-overload]


WORDS: dict[str, Callable[[TrainingJob], object]] = {
    "adapter_dtype": adapter_dtype,
    "gathered_dtype": gathered_dtype,
    "tokens": tokens,
    "rounds": rounds,
    "frozen_parts": lambda job: ", ".join(job.finetuning.frozen),
    "copied_inside": lambda job: ", ".join(copied_inside(job)),
    "ends_named": lambda job: ", ".join(ends_named(job)),
    "shared_expert_projections": lambda job: ", ".join(shared_expert_projections(job)),
    "unmodelled": lambda job: family_of(job.architecture).traces.unmodelled,
    "four_hidden": lambda job: 4 * job.architecture.hidden_size,
    "whole_parts": lambda job: _listed(family_of(job.architecture).modules.gathered_parts),
    "tensor_parallel_families": lambda job: ", ".join(families_where(lambda family: family.traces.tensor_parallel)),
    "families_of_leaves": lambda job: ", ".join(families_where(lambda family: family.libraries.deepspeed_leaf)),
    "stages_of_layers": lambda job: list(job.parallelism.pipeline_layers),
    "own_library": lambda job: next(stack for stack in OWN_NETWORK_STACKS if stack in job.versions),
    "loss_kernel": lambda job: conventions(job).get("loss_kernel"),
}
