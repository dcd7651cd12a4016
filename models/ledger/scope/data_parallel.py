"""Which settings of DDP and FSDP1 the ledger covers, under any framework but Megatron. ZeRO's are in `zero.py`."""

from __future__ import annotations

from peakcast.core.findings import FAILS, MORE, NEARLY_LESS, UNKNOWN, Check, Finding, first, found
from peakcast.jobs.conventions import adapter_dtype, conventions, fuses_loss, mixes_precision, torch_release
from peakcast.jobs.spec import TrainingJob
from peakcast.models.ledger.layouts import gathered_dtype


def data_parallel_reason(job: TrainingJob) -> Finding | None:
    """Why the ledger does not cover how replicas share weights and gradients, as a finding; None if it does."""
    chosen, layout = conventions(job), job.parallelism
    if layout.num_replicas == 1:
        return None
    accumulates = job.gradient_accumulation_steps > 1 and bool(chosen.get("accumulates_without_sync"))
    if layout.sharding == "none" and accumulates and chosen.get("ddp_gradient_as_bucket_view"):
        return found(
            "ddp_gradient_as_bucket_view beside gradient accumulation without synchronisation is counted up to 0.8 % too "
            "high: gradients leave for their buckets one by one.",
            "framework_options.ddp_gradient_as_bucket_view",
            effect=NEARLY_LESS,
        )
    if layout.sharding != "none" and job.architecture.kind == "encoder":
        return found(
            f"{job.architecture.name!r} under FSDP is not modelled: its embeddings are a unit by themselves and share a "
            "table with the head outside of it, which FSDP1 stores twice and FSDP2 refuses (torch 2.13); use DDP or ZeRO.",
            "parallelism.sharding",
        )
    adapts = job.finetuning.method != "full"
    if layout.sharding in ("fsdp2", "hsdp"):
        if _early_fsdp2(job):
            return found(
                "torchtitan's runs of mid-2024 (nightly torch 2.4 and 2.5, FSDP2 over 8 GPUs, no expandable segments) "
                "reserved 8 to 10 GiB more than is replayed, for a reason that was not found; those of 2025 did not.",
                "versions.torch",
                effect=MORE,
            )
        alone = chosen["fsdp2_units"] == "ends" and not job.architecture.tie_word_embeddings
        if adapts and alone and fuses_loss(job):
            return found(
                "a fused loss with adapters where fsdp2_units=ends fails: it never calls the lm_head, a group by itself "
                "(accelerate finds no norm inside peft's wrapper), whose weight stays in parts; use fsdp2_units=root.",
                "loss.fused_linear_cross_entropy",
                effect=FAILS,
            )
    if layout.sharding != "fsdp1":
        return None
    gathered = gathered_dtype(job)
    checks: list[Check] = [
        (
            adapts and mixes_precision(job) and adapter_dtype(job) != gathered and not chosen.get("autocast"),
            f"adapters of {adapter_dtype(job)} that FSDP1 gathers in {gathered} fail without autocast: peft hands them "
            "inputs of the one, and torch multiplies no two dtypes; set autocast, as accelerate does.",
            FAILS,
            "finetuning.adapter_dtype",
        ),
        (
            adapts and job.activation_checkpointing.mode == "selective",
            "selective checkpointing with adapters under FSDP1 fails in torch 2.13: what the units inside a layer record "
            "when they are called is not the same when it runs again; use mode=full, or fsdp2.",
            FAILS,
            "activation_checkpointing.mode",
        ),
        (
            not chosen.get("fsdp_reshard_after_forward", True) and bool(chosen.get("fsdp1_use_orig_params")),
            "FSDP1 that keeps weights gathered after forward (fsdp_reshard_after_forward=false) is modelled with "
            "fsdp1_use_orig_params=false; with true torch 2.13 cannot be traced.",
            UNKNOWN,
            "framework_options.fsdp_reshard_after_forward",
        ),
        (
            bool(chosen.get("checkpoints_around_units")) and job.offload.activations,
            "activations cannot be offloaded where a model checkpoints FSDP1's units itself (checkpoints_around_units; "
            "transformers < 4.53): its layers do that, which are told by gradient_checkpointing_enable(offload=True).",
            FAILS,
            "offload.activations",
        ),
    ]
    return first(checks, "parallelism.sharding")


def _early_fsdp2(job: TrainingJob) -> bool:
    """Whether torchtitan ran it when FSDP2 was new, with fixed segments and FSDP2 as its only parallelism."""
    alone = job.parallelism.world_size == job.parallelism.num_replicas
    early = "torchtitan" in job.versions and torch_release(job.versions) < (2, 6)
    return job.framework == "torch" and early and alone and not job.allocator.expandable_segments


def matrix_optimizer_reason(job: TrainingJob) -> Finding | None:
    """Why the ledger does not cover an optimizer that needs whole matrices when ranks hold parts of them; None if it
    does."""
    layout, name = job.parallelism, job.optimizer.name
    sharding = layout.sharding if layout.num_replicas > 1 else "none"
    parts = sharding in ("fsdp2", "hsdp") or (layout.tensor_parallel_size > 1 and job.framework == "torch")
    checks: list[Check] = [
        (
            name == "adafactor" and parts,
            "optimizer.name='adafactor' cannot step over DTensors (torch 2.13 optim/_adafactor.py, transformers 5.17): the "
            "norms of their rows are parts of sums; use fsdp1, whose parts are vectors.",
            FAILS,
            "optimizer.name",
        ),
        (
            name == "muon" and parts,
            "optimizer.name='muon' over matrices that ranks have divided is not modelled: what DTensor gathers to multiply "
            "them takes up to 9 % of the step's peak.",
            MORE,
            "optimizer.name",
        ),
        (
            name == "muon" and sharding == "fsdp1",
            "optimizer.name='muon' finds no matrix under fsdp1, whose parts are vectors, and torch refuses an empty list.",
            FAILS,
            "optimizer.name",
        ),
    ]
    return first(checks, "optimizer.name")
