"""Assumptions, as sentences, about jobs that leave something open: the targets of adapters, what FSDP offloads, the length
of prompts, caches in training, Liger's kernels."""

from __future__ import annotations

from peakcast.jobs.architecture import Architecture
from peakcast.jobs.conventions import conventions, fsdp_offloads, fuses_loss
from peakcast.jobs.spec import TrainingJob
from peakcast.models.ledger.huggingface.blocks.kv_cache import cache_in_training
from peakcast.models.ledger.parameters.adapter_methods import ON_NETWORK
from peakcast.models.ledger.scope.adapter_targets import EXPERTS, projections, shared_expert_projections
from peakcast.networks.adapter_targets import default_adapter_targets, has_default_targets
from peakcast.networks.families import family_of
from peakcast.networks.trained_parts import end_names

LAYER_KERNELS = ("norm_kernel", "rotary_kernel", "gated_activation_kernel")


def assumption_on_adapter_targets(job: TrainingJob) -> str:
    """An assumption about `finetuning.targets`: which names this network does not have, or what is assumed if none are
    named and peft has no default; "" if neither."""
    if job.finetuning.method in ("full", *ON_NETWORK):
        return ""
    if not job.finetuning.targets:
        return "" if has_default_targets(job.architecture) else _default_targets_assumed(job.architecture)
    known = {*projections(job.architecture), *shared_expert_projections(job), *end_names(), *EXPERTS, "all-linear"}
    unknown = [repr(target) for target in job.finetuning.targets if target not in known]
    if not unknown:
        return ""
    return (
        f"finetuning.targets {', '.join(unknown)}: no projection of {job.architecture.name!r} has that name; it is "
        "ignored, as peft does."
    )


def _default_targets_assumed(architecture: Architecture) -> str:
    return (
        f"adapters are assumed to be on {', '.join(default_adapter_targets(architecture))}: finetuning.targets names none, "
        f"and peft, which has no default for model_type={architecture.model_type!r}, raises an error without; name some "
        f"of {', '.join(projections(architecture))}."
    )


def assumption_on_fsdps_offload(job: TrainingJob) -> str:
    """An assumption for a job that offloads its weights by FSDP and says nothing of the optimizer; "" otherwise."""
    if not fsdp_offloads(job) or job.offload.optimizer:
        return ""
    return (
        "FSDP keeps gradients and optimizer states on the host where the weights are (offload.parameters); "
        "offload.optimizer=true is assumed."
    )


def assumption_on_prompts(job: TrainingJob) -> str:
    """An assumption for a loss over pairs or single completions whose length the job does not give; "" otherwise."""
    if job.loss.kind not in ("dpo", "kto") or job.loss.completion_length is not None:
        return ""
    return (
        f"loss.kind={job.loss.kind!r} scores every token but the first: prompts are assumed to be empty. If they are "
        "not, give the number of tokens at the end of each sequence that are scored: loss.completion_length. Fewer need "
        "less."
    )


def assumption_on_caches(job: TrainingJob) -> str:
    """An assumption for a job whose release of transformers fills its cache in training; "" otherwise."""
    if "outputs_have_cache" in job.framework_options or not cache_in_training(job, conventions(job)).does:
        return ""
    return (
        "this release of transformers keeps keys and values of all layers (use_cache) until the loss is computed; set "
        "framework_options.outputs_have_cache=false if your program switches that off."
    )


def assumption_on_liger_kernels(job: TrainingJob) -> str:
    """An assumption for a job that asks for only one half of Liger, which `use_liger_kernel` never does; "" otherwise."""
    chosen = conventions(job)
    layers = all(chosen.get(name) == "fused" for name in LAYER_KERNELS)
    if chosen.get("loss_kernel") == "fused_linear" and not chosen.get("loss_chunks") and not layers:
        return (
            "Liger's fused loss is assumed alone, without its kernels inside layers, which use_liger_kernel brings too: "
            "set framework_options.liger_kernels=true, or name versions.liger_kernel, if they run."
        )
    whole = family_of(job.architecture).libraries.liger != "layers"
    if chosen.get("liger_kernels") and not fuses_loss(job) and whole and chosen.get("loss_kernel") != "tiles":
        return (
            "Liger's kernels inside layers are assumed alone, with all logits there: set "
            "loss.fused_linear_cross_entropy=true if use_liger_kernel is what runs."
        )
    return ""
