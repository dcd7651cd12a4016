"""Which parts of a network `finetuning.targets` names, and the refusal if nothing would train.

Source: peft 0.21 tuners/tuners_utils.py `inject_adapter`: names that match no module are ignored, unless none matches.
"""

from __future__ import annotations

from functools import lru_cache

from peakcast.core.errors import SpecError, near_misses
from peakcast.jobs.architecture import Architecture
from peakcast.jobs.conventions import conventions
from peakcast.jobs.spec import TrainingJob
from peakcast.models.ledger.huggingface.blocks.adapter_tensors import ADAPTED_ROLES
from peakcast.models.ledger.huggingface.blocks.builder import is_adapter_target, names_experts_alone
from peakcast.models.ledger.huggingface.blocks.expert_adapters import expert_adapters, names_of
from peakcast.models.ledger.parameters.adapter_methods import ON_NETWORK
from peakcast.models.ledger.parameters.inventory import layer_parameters
from peakcast.models.recipes.baseline_choice import tracer
from peakcast.models.recipes.shelf import recipe_of

EXPERTS = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
"""What families call the matrices of an expert, if each is a Linear."""


def shared_expert_projections(job: TrainingJob) -> tuple[str, ...]:
    """The names of the matrices of the network's shared experts."""
    return projections(job.architecture, ("shared_expert",))


def adapts_shared_experts(job: TrainingJob) -> bool:
    """Whether `finetuning.targets` names matrices of shared experts."""
    stacked = conventions(job).get("experts_implementation") != "loop"
    shared = {
        name
        for name in shared_expert_projections(job)
        if not (stacked and names_experts_alone(name, job.finetuning, job.architecture))
    }
    return bool(shared) and not {*shared, "all-linear"}.isdisjoint(job.finetuning.targets)


def names_experts(job: TrainingJob) -> bool:
    """Whether `finetuning.targets` names what routed experts and their router are called, in whichever network."""
    return not {*EXPERTS, "gate", "all-linear"}.isdisjoint(job.finetuning.targets)


def adapts_experts(job: TrainingJob) -> bool:
    """Whether adapters on stacked experts, or on their router, are counted."""
    implementation = str(conventions(job).get("experts_implementation"))
    return bool(expert_adapters(job.architecture, job.finetuning, implementation))


def leaves_out_experts(job: TrainingJob) -> bool:
    """Whether peft takes names among `finetuning.targets` for stacked experts whose adapters are not counted."""
    chosen, targets = conventions(job), set(job.finetuning.targets)
    counted = expert_adapters(job.architecture, job.finetuning, str(chosen.get("experts_implementation")))
    if chosen.get("experts_implementation") == "loop" or (chosen.get("quantized_experts") and not counted):
        return names_experts(job)
    if job.finetuning.method not in ("lora", "qlora"):
        return False
    named = names_of(job.architecture).items()
    return any(("all-linear" in targets or names & targets) and one not in counted for one, names in named)


def require_adapters(job: TrainingJob) -> None:
    """Refuse a job whose adapters match nothing, as peft does. Raises: SpecError."""
    if tracer() is not None or recipe_of(job) is not None:  # there, peft has made the adapters
        return
    known, targets = projections(job.architecture), job.finetuning.targets
    if job.finetuning.method in ON_NETWORK or any(
        is_adapter_target(name, job.finetuning, job.architecture) for name in known
    ):
        return
    found = f"{list(targets)} names" if targets else "[], the usual projections for attention, is"
    hint = near_misses(targets[0], known) if targets else ""
    raise SpecError(
        f"finetuning.targets={found} none of those of {job.architecture.name!r} that can have an adapter here, so "
        f"nothing would train{hint or '; name some of ' + ', '.join(known) + '.'}",
        parameter="finetuning.targets",
        value=list(targets),
    )


@lru_cache(maxsize=256)
def projections(architecture: Architecture, roles: tuple[str, ...] = ADAPTED_ROLES) -> tuple[str, ...]:
    """The last parts of the names of the matrices of `roles` inside layers, in the order of the network."""
    matrices = (tensor for layer in range(architecture.num_layers) for tensor in layer_parameters(architecture, layer))
    names = (m.name for m in matrices if len(m.shape) == 2 and m.role in roles)
    return tuple(dict.fromkeys(name.removesuffix(".weight").rsplit(".", 1)[-1] for name in names))
