"""Which preference training the ledger covers: TRL's, in settings where its trace agrees (`peakcast verify agreement-trl`,
and `agreement-trl-deepspeed`)."""

from __future__ import annotations

from peakcast.core.findings import FAILS, Check, Finding, first
from peakcast.jobs.conventions import conventions, fuses_loss, makes_whole_logits
from peakcast.jobs.loss import PAIRS
from peakcast.jobs.spec import Batch, Offload, Parallelism, TrainingJob


def preference_reason(job: TrainingJob) -> Finding | None:
    """Why the ledger does not cover the job's loss, as a finding; None if it does, or if the loss is plain cross
    entropy."""
    kind = job.loss.kind
    if kind == "cross_entropy":
        return None
    name = f"loss.kind={kind!r}"
    checks: tuple[Check, ...] = (
        (
            kind in PAIRS and job.micro_batch_size % 2 == 1,
            "counts both of a pair: give an even micro_batch_size.",
            FAILS,
            "micro_batch_size",
        ),
        (job.task != "train", "is a training's."),
        (
            job.framework not in ("huggingface", "deepspeed"),
            f"is modelled as TRL's trainers have it, not with framework={job.framework!r}.",
        ),
        (makes_whole_logits(job), "is modelled as in trl since 1.15; whole logits are taken as the cross entropy's."),
        (bool(shards := _shards(job)), shards),
        (job.architecture.kind != "decoder", "is modelled for decoders."),
        (job.architecture.moe is not None, "is modelled without experts, whose balance is a loss too."),
        (job.batch != Batch(), "is modelled for full rows: TRL pads to the longest sequence of both halves."),
        (job.compile, "is not modelled with torch.compile."),
        (job.offload != Offload(), "is not modelled with offload."),
        (fuses_loss(job), "has a head of its own: leave loss.fused_linear_cross_entropy out."),
        (bool(job.finetuning.quantization), "over quantised weights was compared with no trace."),
        (job.activation_checkpointing.every_n_layers > 1, "was compared with every layer checkpointed only."),
        (job.precision.compute == "float8", "is not modelled in float8."),
        (job.attention == "flex", "was compared with sdpa and eager, and not with attention='flex'."),
        (bool(conventions(job).get("neftune")), "is not modelled with neftune."),
    )
    return first(checks, "loss.kind", start=f"{name} ")


def _shards(job: TrainingJob) -> str:
    """Which division of the network among ranks was compared with no trace, as the end of a sentence; "" if ranks share
    only gradients."""
    layout = job.parallelism
    ranks = layout.data_parallel_size
    if layout == Parallelism(data_parallel_size=ranks):
        return ""
    if layout.zero_stage:
        return _zero(job)
    if layout != Parallelism(data_parallel_size=ranks, sharding="fsdp2"):
        return "was compared with traces on one GPU, under DDP, FSDP2 and ZeRO only."
    if job.loss.kind == "reward":
        return "under FSDP2 was compared with no trace: accelerate does not name a classifier's head as a group."
    return ""


def _zero(job: TrainingJob) -> str:
    """Why preference training under ZeRO is out of scope; "" if it is not."""
    stage = job.parallelism.zero_stage
    if job.parallelism.data_parallel_size == 1:
        return "under ZeRO was compared with traces of several ranks only."
    if job.loss.kind == "reward" and stage == 3:
        return "under ZeRO-3 was compared with no trace: transformers 5.17 cannot make a classifier's weights in parts."
    if job.parallelism != Parallelism(data_parallel_size=job.parallelism.data_parallel_size, zero_stage=stage):
        return "under ZeRO was compared with traces beside no other parallelism."
    return ""
