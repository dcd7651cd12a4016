"""For which jobs the ledger covers fused kernels, and what an answer says if a job asks for only half of Liger's."""

from __future__ import annotations

from peakcast.core.findings import FAILS, LESS, MORE, Check, Finding, first
from peakcast.jobs.conventions import conventions, fuses_loss
from peakcast.jobs.spec import TrainingJob
from peakcast.networks.families import family_of

LAYER_KERNELS = ("norm_kernel", "rotary_kernel", "gated_activation_kernel")


def fused_kernels_reason(job: TrainingJob) -> Finding | None:
    """What of the job's fused kernels the ledger does not count, as a finding; None if it counts them all."""
    family, known_by = job.architecture.model_type, family_of(job.architecture).libraries
    chosen = conventions(job)
    liger, loss = bool(chosen.get("liger_kernels")), str(chosen.get("loss_kernel", "eager"))
    ligers_loss = loss == "fused_linear" and not chosen.get("loss_chunks")
    layout = job.parallelism
    shared = layout.tensor_parallel_size > 1 or layout.pipeline_parallel_size > 1 or layout.context_parallel_size > 1
    sharded = layout.num_replicas > 1 and layout.sharding != "fsdp1"
    fuses_lora = chosen.get("lora_kernel", "eager") != "eager" and job.finetuning.method != "full"
    checks: list[Check] = [
        (
            (liger or ligers_loss) and known_by.liger == "none",
            f"Liger has no kernels for model_type={family!r}, which runs without them.",
            MORE,
            "framework_options.liger_kernels",
        ),
        (
            ligers_loss and known_by.liger == "layers",
            "Liger has no fused loss for Granite and raises an error; set loss.fused_linear_cross_entropy=false.",
            FAILS,
            "loss.fused_linear_cross_entropy",
        ),
        (
            liger and job.architecture.moe is not None,
            "Liger's kernels for experts are not modelled.",
            LESS,
            "framework_options.liger_kernels",
        ),
        (
            bool(chosen.get("fused_kernels")) and not known_by.fms_acceleration,
            f"fms-acceleration has no kernels for model_type={family!r}, which runs without them.",
            MORE,
            "framework_options.fused_kernels",
        ),
        (
            "unsloth" in job.versions and not known_by.unsloth,
            f"Unsloth compiles model_type={family!r} as transformers has it, which is not modelled.",
            LESS,
            "versions.unsloth",
        ),
        (
            loss in ("in_place", "chunked") and (shared or job.compile or job.loss.kind != "cross_entropy"),
            f"loss_kernel={loss!r} is modelled for cross entropy on whole logits, without torch.compile.",
            MORE,
            "framework_options.loss_kernel",
        ),
        (
            fuses_lora and (shared or sharded or job.parallelism.zero_stage > 0 or job.compile),
            "fused LoRA is modelled on one GPU and with FSDP1, without torch.compile.",
            MORE,
            "framework_options.lora_kernel",
        ),
    ]
    return first(checks, "framework_options")


def kernels_taken(job: TrainingJob) -> str:
    """An assumption for a job that asks for only one half of Liger, which `use_liger_kernel` never does; "" otherwise."""
    chosen = conventions(job)
    layers = all(chosen.get(name) == "fused" for name in LAYER_KERNELS)
    if chosen.get("loss_kernel") == "fused_linear" and not chosen.get("loss_chunks") and not layers:
        return (
            "Liger's fused loss is taken alone, without its kernels inside layers, which use_liger_kernel brings too: set "
            "framework_options.liger_kernels=true, or name versions.liger_kernel, if they run."
        )
    whole = family_of(job.architecture).libraries.liger != "layers"
    if chosen.get("liger_kernels") and not fuses_loss(job) and whole:
        return (
            "Liger's kernels inside layers are taken alone, with all logits there: set "
            "loss.fused_linear_cross_entropy=true if use_liger_kernel is what runs."
        )
    return ""
