"""Which kernels a family does not have, and which combinations of settings differ from their traces."""

from __future__ import annotations

from peakcast.core.findings import FAILS, MORE, NEARLY, NEARLY_LESS, NEARLY_MORE, Check, Finding, first
from peakcast.jobs.conventions import conventions, mixes_precision
from peakcast.jobs.spec import TrainingJob
from peakcast.networks.families import family_of


def kernels_reason(job: TrainingJob) -> Finding | None:
    """Which attention kernel the job asks for that the family does not have, or that the ledger does not count; None if
    neither."""
    family, code = job.architecture.model_type, family_of(job.architecture)
    flash, flex = job.attention == "flash_attention_2", job.attention == "flex"
    checks: list[Check] = [
        (
            flash and not code.attention.flash,
            f"model_type={family!r} has no flash_attention_2 in transformers; use eager.",
            FAILS,
            "attention",
        ),
        (
            flex and not code.attention.flex,
            f"model_type={family!r} has no flex_attention in transformers; use sdpa.",
            FAILS,
            "attention",
        ),
        (
            flex and job.architecture.attention_sinks and bool(conventions(job).get("autocast")),
            "attention sinks beside flex_attention under autocast: what they widen is not all counted; use eager.",
            MORE,
            "attention",
        ),
        (
            flex and job.task == "train" and job.architecture.attention_dropout > 0,
            f"flex_attention has no dropout: transformers refuses attention_dropout={job.architecture.attention_dropout}.",
            FAILS,
            "attention",
        ),
        (
            flash
            and job.precision.parameters == "float32"
            and not (conventions(job).get("autocast") or mixes_precision(job)),
            "flash_attention_2 has no kernel for float32; use autocast or half precision.",
            FAILS,
            "attention",
        ),
        (
            "flash attention" in code.traces.differ and flash,
            "flash_attention_2 of Falcon, whose key heads are copied for it, is not modelled; use sdpa.",
            MORE,
            "attention",
        ),
        (
            job.offload.activations
            and "activations offloaded from eager attention or under autocast" in code.traces.differ
            and (job.attention == "eager" or bool(conventions(job).get("autocast"))),
            "Falcon's offloaded activations with eager attention or under autocast are up to 1.2 % off their trace.",
            NEARLY,
            "offload.activations",
        ),
        (
            flash and job.batch.form == "padding_free" and not code.attention.passes_positions,
            f"model_type={family!r} tells attention no positions, so that flash_attention_2 without padding is not "
            "modelled there.",
        ),
        (
            flash and code.attention.makes_padding_mask,
            "OPT makes a padding mask of its own, by which flash_attention_2 takes rows apart in its trace: up to 1 %.",
            NEARLY,
            "attention",
        ),
    ]
    return first(checks, "attention")


def mixture_reason(job: TrainingJob) -> Finding | None:
    """Combinations for which traces of small networks showed more, or less, than the ledger has."""
    if job.task != "train":
        return None
    architecture, checkpointing = job.architecture, job.activation_checkpointing
    differ = family_of(architecture).traces.differ
    adapts, autocast = job.finetuning.method != "full", bool(conventions(job).get("autocast"))
    reentrant = checkpointing.mode == "full" and checkpointing.use_reentrant
    leaves = reentrant and architecture.kind == "encoder"
    if architecture.norm_placement == "post":  # projections read the layer's input, not a norm's output
        leaves = reentrant or (adapts and checkpointing.mode != "none")
    checks: list[Check] = [
        (
            job.offload.activations and job.attention == "flex",
            "offloaded activations are compared with traces of sdpa, eager and flash attention, not of flex.",
        ),
        (
            autocast and "autocast" in differ,
            f"model_type={architecture.model_type!r} under autocast: what its own attention widens is not all counted.",
            MORE,
            "framework_options.autocast",
        ),
        (
            autocast and adapts and checkpointing.mode != "none" and "autocast with adapters and checkpointing" in differ,
            f"model_type={architecture.model_type!r} under autocast, with adapters and checkpointing: backward is up to "
            "1.6 % below its trace.",
            NEARLY_MORE,
            "framework_options.autocast",
        ),
        (
            autocast and leaves,
            f"{architecture.name!r} under autocast with reentrant checkpoints, or with adapters and any: inputs of layers "
            "are leaves, which autocast casts once for all projections; up to 2.5 % too much is counted.",
            NEARLY_LESS,
            "framework_options.autocast",
        ),
        (
            job.optimizer.name == "lomo" and autocast and checkpointing.mode != "none",
            "lomo under autocast with checkpointing: backward is up to 0.4 % above its trace.",
            NEARLY_LESS,
            "optimizer.name",
        ),
        (
            "checkpointing or offloaded activations" in differ
            and (checkpointing.mode != "none" or job.offload.activations),
            f"model_type={architecture.model_type!r} with checkpointing or offloaded activations: position tables and "
            "rotated parts that its attention names are not counted where no graph keeps them.",
            MORE,
            "activation_checkpointing",
        ),
    ]
    return first(checks, "activation_checkpointing")
