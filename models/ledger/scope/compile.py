"""Which compiled steps the ledger covers: those with which it agrees in a trace (`peakcast verify agreement`, the compiled
cells)."""

from __future__ import annotations

from peakcast.core.findings import Check, Finding, first, found
from peakcast.jobs.conventions import adapter_dtype, conventions, fuses_loss
from peakcast.jobs.spec import Batch, Offload, TrainingJob
from peakcast.models.ledger.huggingface.blocks.traits import kinds_of_layers, slides_anywhere
from peakcast.models.ledger.layouts import gathered_dtype
from peakcast.networks.families import family_of

TRACE = "; `peakcast explain --trace` compiles the step and shows it, on a machine with torch."


def compile_reason(job: TrainingJob) -> Finding | None:
    """Why the ledger does not cover the compiled `job`, as a finding; None if it does, or if nothing is compiled."""
    if not job.compile:
        return None
    if conventions(job).get("compiled_regions") == "loss":
        return _loss_reason(job)
    traced = family_of(job.architecture).traces.compiled
    architecture, convention, checkpointing = job.architecture, conventions(job), job.activation_checkpointing
    tuning, adapts = job.finetuning, job.finetuning.method != "full"
    autocast = bool(convention.get("autocast"))
    cast = autocast and job.parallelism.world_size == 1  # weights are cast; FSDP2 gathers them narrow already
    around = bool(convention.get("checkpoints_around_compiled"))
    whole, accelerate = convention.get("compiled_regions") == "network", job.framework == "huggingface"
    checks: tuple[Check, ...] = (
        (job.framework not in ("huggingface", "torch"), f"with framework={job.framework!r}"),
        (job.parallelism.world_size > 1 and not _in_shards(job), "on several ranks, but for layers that FSDP2 shards,"),
        (job.task != "train", "other than for training"),
        (adapts and job.parallelism.world_size > 1, "with adapters on several ranks"),
        (
            adapts and not (checkpointing.mode == "none" or (checkpointing.mode == "full" and around)),
            "with adapters and checkpointing other than full around what is compiled,",
        ),
        (
            adapts and (tuning.method != "lora" or bool(tuning.quantization) or tuning.dropout > 0),
            "with adapters other than plain ones without dropout",
        ),
        (adapts and autocast, "with adapters under autocast"),
        (
            adapts and adapter_dtype(job) not in ("float32",) + ("bfloat16",) * (not whole),
            "with adapters that are not float32, or bfloat16 in layers,",
        ),
        ("alone" not in traced or architecture.moe is not None, f"of {architecture.name!r}"),
        (
            whole and not (checkpointing.mode in ("none", "full") and checkpointing.every_n_layers == 1),
            "of a whole network with checkpointing of some layers, or of some operations,",
        ),
        (checkpointing.mode != "none" and checkpointing.use_reentrant, "with reentrant checkpointing"),
        (job.attention != "sdpa", f"with attention={job.attention!r}"),
        (
            gathered_dtype(job) != ("float32" if cast else "bfloat16"),
            "of other weights than bfloat16, or float32 under autocast,",
        ),
        (
            job.precision.compute == "float8",
            "of products in float8, whose conversions fuse, is counted as that of products in bfloat16 and",
        ),
        (job.precision.compute != "bfloat16", "of products in other than bfloat16"),
        (
            autocast and not (accelerate or (whole and cast)),
            "under autocast, in shards or layer by layer, without accelerate,",
        ),
        *(
            (asked and way not in traced, f"with {way} of {architecture.name!r}")
            for way, asked in (
                ("autocast of a whole network", cast and whole),
                ("autocast of layers", cast and not whole),
                ("checkpointing of a whole network", whole and checkpointing.mode != "none"),
                ("full checkpointing of layers", not whole and checkpointing.mode == "full"),
                ("selective checkpointing of layers", not whole and checkpointing.mode == "selective"),
                ("adapters of a whole network", adapts and whole),
                ("adapters of layers", adapts and not whole),
                ("layers in shards", _in_shards(job)),
                ("layers in shards with accelerate", _in_shards(job) and accelerate),
            )
        ),
        (
            checkpointing.mode == "selective" and accelerate and _in_shards(job),
            "with selective checkpointing around layers that are compiled in place",
        ),
        (job.batch != Batch() or job.offload != Offload(), "with padding, packing or offloading"),
        (fuses_loss(job) or bool(convention.get("liger_kernels")), "with Liger's kernels"),
        (bool(convention.get("neftune")), "with neftune"),
        (
            whole and checkpointing.mode != "none" and kinds_of_layers(architecture) > 1,
            "with checkpointing of a whole network of layers with and without a window",
        ),
        (slides_anywhere(architecture, job.sequence_length), "beyond the sliding window"),
    )
    return first(checks, "compile", start="compile=true ", end=f" is not modelled{TRACE}")


def _loss_reason(job: TrainingJob) -> Finding | None:
    """Why the job is out of scope if only the loss is compiled, whose two kernels are known for whole logits; else None."""
    split = job.parallelism.tensor_parallel_size > 1 or job.loss.kind != "cross_entropy"
    return found(f"compile=true of a loss over logits in parts is not modelled{TRACE}", "compile") if split else None


def _in_shards(job: TrainingJob) -> bool:
    """Whether layers are compiled one by one, each a unit of FSDP2 or HSDP, and nothing else is divided."""
    layout = job.parallelism
    alone = layout.world_size == layout.data_parallel_size and layout.sharding in ("fsdp2", "hsdp")
    return alone and layout.world_size > 1 and conventions(job).get("compiled_regions") == "layers"
