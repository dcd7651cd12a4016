"""The names by which rows are grouped: the architecture (which defines "unseen"), the layout, and the groups of an error
bar."""

from __future__ import annotations

from peakcast.core.units import GIB
from peakcast.jobs.spec import TrainingJob

EXPERTS = "/experts"
"""The end of the name of a `residual_group` of networks with experts."""
EVERYTHING = "all"
"""The group that every job belongs to."""
SIZES_GIB = (5, 20)
"""Allocated baselines from which a job is `medium` and `large`: below 5 GiB, workspaces and buffers of fixed size are
several percent of the peak; above 20 GiB, nearly all of it is the network's tensors."""


def architecture_shape(job: TrainingJob) -> str:
    """The architecture as a unit of evidence, such as `gpt/512x12/8`: model_type, hidden_size x num_hidden_layers,
    num_attention_heads, and the number of experts.

    Finer than `model_type`, because one published source trains one small GPT in hundreds of layouts, which would otherwise
    count as much as a model that was run once. Not finer than the shape, because rows of one shape share their tensors and
    would leak from the fit into its judgement.
    """
    a = job.architecture
    experts = f"/e{a.moe.num_experts}" if a.moe else ""
    return f"{a.model_type}/{a.hidden_size}x{a.num_hidden_layers}/{a.num_attention_heads}{experts}"


def gathers_weights(job: TrainingJob) -> bool:
    """Whether a rank keeps a part of the weights and gathers them for use, on streams and in pools of their own: FSDP,
    ZeRO-3, Megatron-FSDP."""
    p = job.parallelism
    return p.sharding in ("fsdp1", "fsdp2", "hsdp") or p.zero_stage == 3 or _megatron_fsdp(job)


def _megatron_fsdp(job: TrainingJob) -> bool:
    """Whether Megatron-FSDP shards the job, which is an option of Megatron-LM beside its distributed optimizer."""
    return bool(job.framework_options.get("use_megatron_fsdp"))


def layout_name(job: TrainingJob) -> str:
    """The layout by its parts, such as `single`, `fsdp2`, `tp+pp` or `ddp+tp+sp`; sizes do not matter."""
    p = job.parallelism
    parts = {
        "megatron_fsdp": _megatron_fsdp(job),
        p.sharding: p.sharding != "none",
        f"zero{p.zero_stage}": p.zero_stage > 0 and not _megatron_fsdp(job),
        "ddp": p.data_parallel_size > 1 and p.sharding == "none" and p.zero_stage == 0,
        "tp": p.tensor_parallel_size > 1,
        "sp": p.sequence_parallel and p.tensor_parallel_size > 1,
        "pp": p.pipeline_parallel_size > 1,
        "cp": p.context_parallel_size > 1,
        "ep": p.expert_parallel_size > 1,
    }
    return "+".join(name for name, holds in parts.items() if holds) or "single"


def residual_group(job: TrainingJob) -> str:
    """The group whose median the residual may learn: framework, layout, and whether there are experts, whose leftovers in
    the cache are of another order of magnitude."""
    return f"{job.framework}/{layout_name(job)}" + (EXPERTS if job.architecture.moe else "")


def layout_of_group(group: str) -> str:
    """The `residual_group` of a dense network with the framework and layout of `group`."""
    return group.removesuffix(EXPERTS)


def row_kind(job: TrainingJob) -> str:
    """The kind of row in a report: `inference`, `generation`, `fused kernels`, else the method of fine-tuning."""
    if job.task == "inference":
        return "generation" if (job.inference.new_tokens or 0) > 1 else "inference"
    return "fused kernels" if job.framework_options.get("fused_kernels") else job.finetuning.method


def size_of(allocated_bytes: int) -> str:
    """`small`, `medium` or `large`, by the allocated baseline."""
    return ("small", "medium", "large")[sum(allocated_bytes >= edge * GIB for edge in SIZES_GIB)]


def feed_forward_of(job: TrainingJob) -> str:
    """`experts` or `dense`: what a router sends to a rank depends on the data, which no ledger knows."""
    return "experts" if job.architecture.moe else "dense"


def bar_groups(job: TrainingJob) -> tuple[str, ...]:
    """Groups whose residuals may set the error bar of `job`, finest first: jobs like it with experts or without, and all.
    Finer ones (framework, layout, size) have a few architectures each, mostly exact ones; what makes errors large is in the
    expected error (`spread.py`)."""
    return (feed_forward_of(job), EVERYTHING)
