"""Values of a job that the sentences of the tables name in braces, beside its settings."""

from __future__ import annotations

from collections.abc import Callable

from peakcast.jobs.conventions import adapter_dtype, conventions
from peakcast.jobs.spec import TrainingJob
from peakcast.models.ledger.huggingface.blocks.traits import traits
from peakcast.models.ledger.layouts import LEAVES, gathered_dtype
from peakcast.models.ledger.scope.adapter_targets import ends_named, shared_expert_projections
from peakcast.models.ledger.scope.facts import TENSOR_PARALLEL_FAMILIES, rounds, tokens


def _listed(names: object) -> str:
    return ", ".join(sorted(map(str, names)))  # type: ignore[call-overload]


WORDS: dict[str, Callable[[TrainingJob], object]] = {
    "adapter_dtype": adapter_dtype,
    "gathered_dtype": gathered_dtype,
    "tokens": tokens,
    "rounds": rounds,
    "frozen_parts": lambda job: ", ".join(job.finetuning.frozen),
    "ends_named": lambda job: ", ".join(ends_named(job)),
    "shared_expert_projections": lambda job: ", ".join(shared_expert_projections(job)),
    "width_of_mpt": lambda job: 4 * job.architecture.hidden_size,
    "whole_parts": lambda job: _listed(traits(job.architecture).whole_parts),
    "tensor_parallel_families": lambda job: _listed(TENSOR_PARALLEL_FAMILIES),
    "families_of_leaves": lambda job: ", ".join(LEAVES),
    "stages_of_layers": lambda job: list(job.parallelism.pipeline_layers),
    "loss_kernel": lambda job: conventions(job).get("loss_kernel"),
}
