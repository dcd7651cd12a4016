"""Which networks the ledger covers, and how encoder-decoders may be trained."""

from __future__ import annotations

from peakcast.core.findings import FAILS, MORE, UNKNOWN, Check, Finding, first, found
from peakcast.jobs.architecture import Architecture
from peakcast.jobs.conventions import conventions, fuses_loss
from peakcast.jobs.spec import Offload, TrainingJob
from peakcast.networks.families import family, family_of


def architecture_reason(architecture: Architecture) -> Finding | None:
    """Why the ledger does not cover the network, as a finding; None if it does."""
    sentence = _unmodelled_network(architecture)
    if not sentence:
        return None
    # for state-space layers the ledger has what the kernels save, but not their temporaries
    return found(sentence, "architecture", effect=MORE if architecture.kind == "hybrid" else UNKNOWN)


def _unmodelled_network(architecture: Architecture) -> str:
    """What of the network itself the ledger does not have, as a sentence; "" for nothing."""
    known = family(architecture.model_type)
    if known is not None and known.traces.unmodelled:
        return f"{architecture.name!r}: {known.traces.unmodelled}"
    if architecture.kind == "encoder" and not family_of(architecture).layer.norm_after_residual:
        return f"{architecture.name!r}: of encoders only BERT is modelled, not model_type={architecture.model_type!r}."
    if architecture.kind == "hybrid":
        return (
            f"{architecture.name!r} has state-space layers: parameters, gradients and optimizer states are exact, their "
            "mixers' activations are what mamba_ssm's kernels save, without what those allocate in passing and not what "
            "transformers computes without that package (`peakcast explain --trace` shows that)."
        )
    if architecture.kind == "undescribed":
        return f"model_type={architecture.model_type!r} is not known to the ledger; trace it (`peakcast explain --trace`)."
    if architecture.kind not in ("decoder", "encoder", "encoder_decoder"):
        return f"{architecture.name!r} is not a decoder-only transformer, BERT or T5 (kind={architecture.kind!r})."
    if known is None:
        return (
            f"model_type={architecture.model_type!r} is not known to the ledger, which takes it for Llama by its keys; "
            "trace it (`peakcast explain --trace`)."
        )
    if known.layer.four_hidden and architecture.intermediate_size != 4 * architecture.hidden_size:
        return (
            f"{architecture.name!r} has intermediate_size={architecture.intermediate_size}, and transformers makes MPT's "
            f"feed-forward 4 * hidden_size wide, whatever is asked for; use {4 * architecture.hidden_size}."
        )
    return ""


def encoder_decoder_reason(job: TrainingJob) -> Finding | None:
    """Why the ledger does not cover an encoder-decoder's training, as a finding; None if it does."""
    if job.architecture.kind != "encoder_decoder":
        return None
    checkpointing, layout = job.activation_checkpointing, job.parallelism
    name = f"{job.architecture.name!r} is an encoder-decoder:"
    checks: list[Check] = [
        (job.task != "train", "generation with it is not modelled.", UNKNOWN, "task"),
        (
            layout.world_size > layout.data_parallel_size,
            "of several ranks it is modelled with DDP, FSDP and ZeRO only.",
            UNKNOWN,
            "parallelism",
        ),
        (
            layout.sharding in ("fsdp2", "hsdp") and conventions(job).get("fsdp2_units") == "ends",
            "FSDP2 cannot shard it as accelerate asks: modules of several groups share its table; use fsdp1.",
            FAILS,
            "parallelism.sharding",
        ),
        (
            layout.sharding != "none" and layout.num_replicas > 1 and job.finetuning.method != "full",
            "adapters in shards are not modelled for it.",
            UNKNOWN,
            "finetuning.method",
        ),
        (
            job.attention not in ("eager", "sdpa"),
            f"attention={job.attention!r} is not modelled for it; use sdpa or eager.",
            UNKNOWN,
            "attention",
        ),
        (
            "float16" in (job.precision.parameters, job.precision.compute),
            "T5 in float16 keeps projections in float32 and clamps what it adds, which is not modelled; use bfloat16.",
            MORE,
            "precision.compute",
        ),
        (
            checkpointing.mode == "selective" or checkpointing.every_n_layers > 1 or checkpointing.use_reentrant,
            "of checkpointing, mode full of every layer without use_reentrant is modelled for it.",
            UNKNOWN,
            "activation_checkpointing",
        ),
        (
            bool(job.finetuning.quantization),
            "quantised weights are not modelled for it.",
            UNKNOWN,
            "finetuning.quantization",
        ),
        (job.offload != Offload(), "offloading is not modelled for it.", UNKNOWN, "offload"),
        (
            bool(conventions(job).get("liger_kernels")) or fuses_loss(job),
            "Liger has no kernels for it.",
            UNKNOWN,
            "framework_options.liger_kernels",
        ),
    ]
    return first(checks, "architecture", start=f"{name} ")
