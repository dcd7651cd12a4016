"""The settings with which DeepSpeed's ZeRO runs a job."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from peakcast.core.fields import FrozenMapping
from peakcast.core.units import DTYPE_BYTES
from peakcast.jobs.conventions import conventions, fuses_loss, scores_tokens
from peakcast.jobs.ranks import ranks_that_differ
from peakcast.jobs.spec import TrainingJob
from peakcast.models.ledger.layouts.base import Layout, StoredTensor
from peakcast.models.ledger.layouts.looped_experts import expert_by_expert
from peakcast.models.ledger.layouts.zero import Buckets
from peakcast.models.ledger.layouts.zero3 import Zero3, Zero3Settings
from peakcast.models.ledger.layouts.zero3_modules import ModuleTurns, Zero3Modules
from peakcast.models.ledger.layouts.zero12 import Zero12, Zero12Settings
from peakcast.networks.families import family_of


def zero_of(job: TrainingJob, tensors: Sequence[StoredTensor], rank: int | None, modules: ModuleTurns | None) -> Layout:
    """The layout of `job`, which asks for a ZeRO stage, on `rank`. `modules`: as in `layout_of`."""
    # every framework uses DeepSpeed's ZeRO, so DeepSpeed's conventions hold where the job's framework has none
    chosen = {**conventions(job.replace(framework="deepspeed", framework_options=FrozenMapping())), **conventions(job)}
    if job.parallelism.zero_stage < 3:
        return _zero12(job, tensors, chosen, rank)
    return _zero3(job, tensors, chosen, modules)


def _buckets(chosen: Mapping[str, Any], *, num_reduce: int) -> Buckets:
    """DeepSpeed's sizes in elements, under the names of its configuration."""
    return Buckets(
        reduce=int(chosen["reduce_bucket_size"]),
        num_reduce=num_reduce,
        prefetch=int(chosen["stage3_prefetch_bucket_size"]),
        persistence=int(chosen["stage3_param_persistence_threshold"]),
        reuse=int(chosen["stage3_max_reuse_distance"]),
        live=int(chosen["stage3_max_live_parameters"]),
        sub_group=int(chosen["sub_group_size"]),
    )


def _overlaps(chosen: Mapping[str, Any], stage: int) -> bool:
    """Whether communication has streams of its own."""
    return stage == 3 if chosen["overlap_comm"] == "auto" else bool(chosen["overlap_comm"])


def _zero12(job: TrainingJob, tensors: Sequence[StoredTensor], chosen: Mapping[str, Any], rank: int | None) -> Layout:
    """The layout of a job under ZeRO stage 1 or 2."""
    if chosen.get("experts_implementation") == "loop":
        tensors = expert_by_expert(tensors)
    stage, offloads = job.parallelism.zero_stage, job.offload.optimizer
    settings = Zero12Settings(
        ranks=job.parallelism.data_parallel_size,
        element_bytes=int(DTYPE_BYTES[job.precision.parameters]),
        scales_loss=job.precision.parameters == "float16",
        buckets=_buckets(chosen, num_reduce=2 if _overlaps(chosen, stage) else 1),
        contiguous=bool(chosen.get("contiguous_gradients", True)) or offloads,
        offloads=offloads,
        biases_first=True,
        bucket_first=bool(chosen["reduce_bucket_before_backward"]),
        clones_large=bool(chosen["offload_clones_large_gradients"]),
        returns_wide=bool(chosen["offload_returns_float32"]),
        overflow_bytes=int(chosen["overflow_check_bytes"]),
    )
    this_rank = ranks_that_differ(job)[0] if rank is None else rank
    return Zero12(tensors, settings, stage=stage, rank=this_rank, round_robin=bool(chosen["round_robin_gradients"]))


def _zero3(
    job: TrainingJob, tensors: Sequence[StoredTensor], chosen: Mapping[str, Any], modules: ModuleTurns | None
) -> Layout:
    """The layout of a job under ZeRO stage 3."""
    family = family_of(job.architecture)
    if chosen.get("experts_implementation") == "loop" and not family.experts.viewed_before_5:
        tensors = expert_by_expert(tensors)
    if modules is None:
        modules = Zero3Modules(
            [tensor for tensor in tensors if tensor.sharded],
            head_of_root=scores_tokens(job) or fuses_loss(job),
            leaf="mlp" if family.libraries.deepspeed_leaf else "",
            family=job.architecture.model_type,
        )
    replaces = bool(chosen["partitions_as_made"] or chosen["replaces_linear_late"])
    settings = Zero3Settings(
        ranks=job.parallelism.data_parallel_size,
        element_bytes=int(DTYPE_BYTES[job.precision.parameters]),
        scales_loss=job.precision.parameters == "float16",
        buckets=_buckets(chosen, num_reduce=1),
        contiguous=bool(chosen.get("contiguous_gradients", True)),
        offloads=job.offload.optimizer,
        biases_first=family.linear.conv1d or not replaces,  # DeepSpeed replaces torch's Linear, but not Conv1D
        packs=not job.activation_checkpointing.use_reentrant,
        overlaps=_overlaps(chosen, 3),
        offloads_parameters=job.offload.parameters,
        reassigns=bool(chosen["reassigns_recomputed_weights"]),
        views_layers=family.linear.transposes_weight or not (replaces or family.linear.conv1d),
        views_head=not replaces,
    )
    return Zero3(tensors, settings, modules)
