"""Which of the named adapter targets the ledger covers, and the refusal if nothing would train.

Source: peft 0.21 tuners/tuners_utils.py `inject_adapter`: names that match no module are ignored, unless none matches.
"""

from __future__ import annotations

from functools import lru_cache

from peakcast.core.errors import SpecError, near_misses
from peakcast.core.findings import MORE, Check, Finding, first, found
from peakcast.jobs.architecture import Architecture
from peakcast.jobs.conventions import conventions
from peakcast.jobs.spec import TrainingJob
from peakcast.models.ledger.huggingface.blocks.adapter_tensors import ADAPTED_ROLES
from peakcast.models.ledger.huggingface.blocks.builder import is_adapter_target
from peakcast.models.ledger.parameters.adapter_methods import ON_NETWORK
from peakcast.models.ledger.parameters.adapter_targets import default_adapter_targets, has_default_targets
from peakcast.models.ledger.parameters.inventory import layer_parameters
from peakcast.models.recipes.shelf import recipe_of
from peakcast.networks.families import family_of

ENDS = ("embed_tokens", "wte", "word_embeddings", "lm_head", "embed_out")
"""What families call the token table and the head."""
EXPERTS = ("gate_proj", "up_proj", "down_proj", "w1", "w2", "w3")
"""What families call the matrices of an expert, if each is a Linear."""

ATTENTION_TO_PROMPTS = (
    "what attention keeps of prompts of its own in every layer is not counted, up to 11 % of published runs"
)
BY_SOURCE = "what autograd keeps is counted by peft's source; no whole run has confirmed it"
UNCONFIRMED = {
    **dict.fromkeys(("adalora", "boft", "c3a", "hira", "hra", "ia3", "vblora"), BY_SOURCE),
    **dict.fromkeys(("adaption_prompt", "prefix_tuning"), ATTENTION_TO_PROMPTS),
    **dict.fromkeys(("p_tuning", "prompt_tuning"), "published runs reserved up to 3 % more"),
    "trainable_tokens": "activations are those of a network of which nothing trains but the token table",
}
"""Methods whose parameters, gradients and optimizer states are exact, and why more is not claimed."""


def _method_reason(job: TrainingJob) -> Finding | None:
    """What of a method other than LoRA is not counted, or not confirmed."""
    method, layout = job.finetuning.method, job.parallelism
    if method in ("full", "lora", "qlora"):
        return None
    kept = "parameters, gradients and optimizer states are exact"
    checks: list[Check] = [
        (layout.world_size > 1 or layout.zero_stage > 0, "is modelled on one GPU only."),
        (bool(job.finetuning.quantization), "over quantised weights is not modelled; qlora is."),
        (job.architecture.kind != "decoder", "is modelled for decoders only."),
        (job.finetuning.dropout > 0, "is modelled without dropout only."),
        (job.loss.kind != "cross_entropy", f"is not modelled with loss.kind={job.loss.kind!r}."),
        (
            method == conventions(job).get("unconfirmed_adapters"),
            "is another of the peft release that versions name: published runs of it took up to 28 % more.",
            MORE,
            "versions.peft",
        ),
        (method in UNCONFIRMED, f"is not all counted: {kept}; {UNCONFIRMED.get(method)}.", MORE),
    ]
    return first(checks, "finetuning.method", start=f"finetuning.method={method!r} ")


def adapter_reason(job: TrainingJob) -> Finding | None:
    """Which adapters that `finetuning` asks for the ledger does not count, as a finding; None for none."""
    if reason := _method_reason(job):
        return reason
    targets = set(job.finetuning.targets)
    if job.finetuning.method == "full" or job.task != "train":
        return None
    if ends := sorted(targets.intersection(ENDS)):
        sentence = f"finetuning.targets names {', '.join(ends)}: adapters on the token table or the head are not counted."
        return found(sentence, "finetuning.targets", effect=MORE)
    shared = _projections(job.architecture, ("shared_expert",))
    if targets.intersection((*shared, "all-linear") if shared else ()):
        sentence = f"adapters on the shared experts of {job.architecture.name!r} ({', '.join(shared)}) are not counted."
        return found(sentence, "finetuning.targets", effect=MORE)
    chosen = conventions(job)
    adapted = chosen.get("experts_implementation") == "loop" or chosen.get("quantized_experts")
    adapted = adapted or family_of(job.architecture).libraries.peft_adapts_experts
    if job.architecture.moe is not None and adapted and targets.intersection((*EXPERTS, "gate", "all-linear")):
        sentence = f"adapters on the experts of {job.architecture.name!r} are not counted."
        return found(sentence, "finetuning.targets", effect=MORE)
    return None


def targets_taken(job: TrainingJob) -> str:
    """An assumption about `finetuning.targets`: which names this network does not have, or what is assumed if none are
    named and peft has no default; "" if neither."""
    if job.finetuning.method in ("full", *ON_NETWORK):
        return ""
    if not job.finetuning.targets:
        return "" if has_default_targets(job.architecture) else _default_targets_assumed(job.architecture)
    projections = _projections(job.architecture), _projections(job.architecture, ("shared_expert",))
    known = {*projections[0], *projections[1], *ENDS, *EXPERTS, "all-linear"}
    unknown = [repr(target) for target in job.finetuning.targets if target not in known]
    if not unknown:
        return ""
    return (
        f"finetuning.targets {', '.join(unknown)}: no projection of {job.architecture.name!r} has that name; it is passed "
        "over, as peft does."
    )


def _default_targets_assumed(architecture: Architecture) -> str:
    return (
        f"adapters are taken to be on {', '.join(default_adapter_targets(architecture))}: finetuning.targets names none, "
        f"and peft, which has no default for model_type={architecture.model_type!r}, raises an error without; name some "
        f"of {', '.join(_projections(architecture))}."
    )


def require_adapters(job: TrainingJob) -> None:
    """Refuse a job whose adapters match nothing, as peft does. Raises: SpecError."""
    if recipe_of(job) is not None:  # the recipe was recorded with adapters that peft made
        return
    projections, targets = _projections(job.architecture), job.finetuning.targets
    if job.finetuning.method in ON_NETWORK or any(
        is_adapter_target(name, job.finetuning, job.architecture) for name in projections
    ):
        return
    found = f"{list(targets)} names" if targets else "[], the usual projections for attention, is"
    hint = near_misses(targets[0], projections) if targets else ""
    raise SpecError(
        f"finetuning.targets={found} none of those of {job.architecture.name!r} that can have an adapter here, so "
        f"nothing would train{hint or '; name some of ' + ', '.join(projections) + '.'}",
        parameter="finetuning.targets",
        value=list(targets),
    )


@lru_cache(maxsize=256)
def _projections(architecture: Architecture, roles: tuple[str, ...] = ADAPTED_ROLES) -> tuple[str, ...]:
    """The last parts of the names of the matrices of `roles` inside layers, in the order of the network."""
    matrices = (tensor for layer in range(architecture.num_layers) for tensor in layer_parameters(architecture, layer))
    names = (m.name for m in matrices if len(m.shape) == 2 and m.role in roles)
    return tuple(dict.fromkeys(name.removesuffix(".weight").rsplit(".", 1)[-1] for name in names))
