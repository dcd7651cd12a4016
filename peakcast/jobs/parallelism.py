"""`Parallelism`: how a job is divided over ranks, and the conditions that the network must meet for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from peakcast.core.errors import SpecError
from peakcast.core.fields import require_positive
from peakcast.jobs.architecture import Architecture

MOST_RANKS = 2**20
"""Most ranks of a job: far more than were ever used, and few enough that an answer takes a bounded time."""
V_SHAPED = ("zero_bubble_v", "dualpipe_v")
"""Schedules in which a rank's second stage is as far from the end as its first is from the beginning."""
Sharding = Literal["none", "fsdp1", "fsdp2", "hsdp", "no_shard"]
PipelineSchedule = Literal["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble", "zero_bubble_v", "dualpipe_v"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Parallelism:
    """The layout. `sharding` is PyTorch's FSDP, `zero_stage` is DeepSpeed's (1 with Megatron: distributed optimizer)."""

    data_parallel_size: int = 1
    sharding: Sharding = "none"
    tensor_parallel_size: int = 1
    sequence_parallel: bool = False
    pipeline_parallel_size: int = 1
    pipeline_schedule: PipelineSchedule = "1f1b"
    virtual_pipeline_stages: int = 1
    pipeline_layers: tuple[int, ...] = ()
    """Layers on each virtual stage in model order; empty means an even split."""
    context_parallel_size: int = 1
    expert_parallel_size: int = 1
    expert_tensor_parallel_size: int | None = None
    """null means `tensor_parallel_size`."""
    zero_stage: int = 0

    def __post_init__(self) -> None:
        require_positive(
            self,
            "data_parallel_size",
            "tensor_parallel_size",
            "pipeline_parallel_size",
            "virtual_pipeline_stages",
            "context_parallel_size",
            "expert_parallel_size",
            "expert_tensor_parallel_size",
            where="parallelism.",
        )
        if self.zero_stage not in (0, 1, 2, 3):
            raise SpecError(
                f"parallelism.zero_stage={self.zero_stage} must be 0, 1, 2 or 3.",
                parameter="parallelism.zero_stage",
                value=self.zero_stage,
            )

    @property
    def num_replicas(self) -> int:
        """Number of ranks that train the same weights on different tokens. They reduce gradients, and FSDP shards over
        them."""
        return self.data_parallel_size * self.context_parallel_size

    @property
    def sequence_sharing_ranks(self) -> int:
        """Number of ranks over which each sequence is divided outside of the matrix products."""
        return self.context_parallel_size * (self.tensor_parallel_size if self.sequence_parallel else 1)

    @property
    def world_size(self) -> int:
        """Number of ranks of the job."""
        return (
            self.data_parallel_size * self.tensor_parallel_size * self.pipeline_parallel_size * self.context_parallel_size
        )


def layers_beside_ends(num_layers: int, num_stages: int, first: int = 1, last: int = 1) -> tuple[int, ...]:
    """Number of layers on each of `num_stages` stages, if in an even split the embedding counts as `first` layers and the
    head as `last`. Remaining layers go to the earlier stages. 126 layers on 8 stages: 15, six times 16, and 15.

    Source: torchtitan 0.2.0 distributed/pipeline_parallel.py `generate_llm_fqn_per_model_part`.
    """
    each, extra = divmod(num_layers + first + last, num_stages)
    layers = [each + (stage < extra) for stage in range(num_stages)]
    layers[0] -= first
    layers[-1] -= last
    return tuple(layers)


def check_layout(layout: Parallelism, architecture: Architecture, framework: str, sequence_length: int) -> None:
    """Refuse a layout that does not divide the network or the sequence evenly, or that no framework runs.

    Raises: SpecError.
    """
    _check_size(layout)
    t = layout.tensor_parallel_size
    if architecture.num_attention_heads % t:
        raise SpecError(
            f"tensor_parallel_size={t} does not divide num_attention_heads={architecture.num_attention_heads} of "
            f"{architecture.name!r}; use a divisor of {architecture.num_attention_heads}.",
            parameter="parallelism.tensor_parallel_size",
            value=t,
        )
    if layout.zero_stage and layout.sharding in ("fsdp1", "fsdp2", "hsdp") and framework != "megatron":
        raise SpecError(
            f"parallelism.sharding={layout.sharding!r} and zero_stage={layout.zero_stage} shard the same things, the "
            "one of PyTorch, the other of DeepSpeed; set sharding: none or zero_stage: 0.",
            parameter="parallelism.sharding",
            value=layout.sharding,
        )
    _check_stages(layout, architecture, framework)
    if sequence_length % layout.sequence_sharing_ranks:
        raise SpecError(
            f"sequence_length={sequence_length} is not divisible by the ranks that share it "
            f"(context_parallel_size={layout.context_parallel_size}"
            + (f" × tensor_parallel_size={t}" if layout.sequence_parallel else "")
            + "); use a multiple.",
            parameter="sequence_length",
            value=sequence_length,
        )
    _check_experts(layout, architecture)


def _check_size(layout: Parallelism) -> None:
    if layout.world_size > MOST_RANKS:
        raise SpecError(
            f"parallelism of {layout.world_size:,} ranks must be of at most {MOST_RANKS:,}; lower "
            f"data_parallel_size={layout.data_parallel_size} or another of its sizes.",
            parameter="parallelism.data_parallel_size",
            value=layout.data_parallel_size,
        )


def _check_stages(layout: Parallelism, architecture: Architecture, framework: str) -> None:
    p = layout.pipeline_parallel_size
    if p == 1 and layout.virtual_pipeline_stages > 1:
        raise SpecError(
            f"parallelism.virtual_pipeline_stages={layout.virtual_pipeline_stages} divides the stages of a "
            "pipeline, and pipeline_parallel_size=1 is none; use 1, or a larger pipeline_parallel_size.",
            parameter="parallelism.virtual_pipeline_stages",
            value=layout.virtual_pipeline_stages,
        )
    if p > 1 and layout.pipeline_schedule in V_SHAPED and layout.virtual_pipeline_stages != 2:
        raise SpecError(
            f"parallelism.virtual_pipeline_stages={layout.virtual_pipeline_stages} must be 2 with "
            f"pipeline_schedule={layout.pipeline_schedule!r}, which runs two stages on each rank.",
            parameter="parallelism.virtual_pipeline_stages",
            value=layout.virtual_pipeline_stages,
        )
    num_stages = p * layout.virtual_pipeline_stages
    if layout.pipeline_layers:
        _check_layers_of_stages(layout, architecture, framework)
    elif architecture.num_hidden_layers % num_stages:
        raise SpecError(
            f"pipeline_parallel_size={p} × virtual_pipeline_stages={layout.virtual_pipeline_stages} does not divide "
            f"num_hidden_layers={architecture.num_hidden_layers} of {architecture.name!r}; use a divisor or give "
            "parallelism.pipeline_layers.",
            parameter="parallelism.pipeline_parallel_size",
            value=p,
        )


def _check_layers_of_stages(layout: Parallelism, architecture: Architecture, framework: str) -> None:
    """Refuse `pipeline_layers` that are not those of the network, or that leave a stage empty that must not be."""
    num_stages = layout.pipeline_parallel_size * layout.virtual_pipeline_stages
    if len(layout.pipeline_layers) != num_stages or sum(layout.pipeline_layers) != architecture.num_hidden_layers:
        raise SpecError(
            f"parallelism.pipeline_layers={list(layout.pipeline_layers)} must list {num_stages} stages that add "
            f"up to num_hidden_layers={architecture.num_hidden_layers} of {architecture.name!r}.",
            parameter="parallelism.pipeline_layers",
            value=list(layout.pipeline_layers),
        )
    # the first stage may have only the embedding and the last only the head; Megatron's layouts may also have empty
    # stages
    between = () if framework == "megatron" else layout.pipeline_layers[1:-1]
    if min(layout.pipeline_layers) < 0 or 0 in between:
        raise SpecError(
            f"parallelism.pipeline_layers leaves a stage of pipeline_parallel_size={layout.pipeline_parallel_size} without "
            f"layers of the {architecture.num_hidden_layers} of {architecture.name!r}; use fewer stages, or give each "
            "some.",
            parameter="parallelism.pipeline_layers",
            value=list(layout.pipeline_layers),
        )


def _check_experts(layout: Parallelism, architecture: Architecture) -> None:
    if architecture.moe is None and layout.expert_parallel_size > 1:
        raise SpecError(
            f"expert_parallel_size={layout.expert_parallel_size} needs a mixture-of-experts architecture and "
            f"{architecture.name!r} is dense; use 1.",
            parameter="parallelism.expert_parallel_size",
            value=layout.expert_parallel_size,
        )
    if architecture.moe is not None and architecture.moe.num_experts % layout.expert_parallel_size:
        raise SpecError(
            f"expert_parallel_size={layout.expert_parallel_size} does not divide num_experts="
            f"{architecture.moe.num_experts} of {architecture.name!r}; use a divisor.",
            parameter="parallelism.expert_parallel_size",
            value=layout.expert_parallel_size,
        )
