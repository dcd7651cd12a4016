"""torchtitan's layouts: degrees of parallelism, pipeline schedules and stages.

Source: torchtitan (mid-2025 to 2026) distributed/parallel_dims.py, distributed/pipeline_parallel.py.
"""

from __future__ import annotations

from peakcast.core.errors import SpecError
from peakcast.dialects.common.pasted import Pasted
from peakcast.dialects.common.translation import Settings
from peakcast.jobs.parallelism import layers_beside_ends
from peakcast.jobs.spec import Parallelism, PipelineSchedule

SCHEDULES: dict[str, tuple[PipelineSchedule, int]] = {
    "1f1b": ("1f1b", 1), "gpipe": ("gpipe", 1), "interleaved1f1b": ("interleaved_1f1b", 2),
    "loopedbfs": ("gpipe", 2), "interleavedzerobubble": ("zero_bubble", 2), "zbvzerobubble": ("zero_bubble_v", 2),
    "dualpipev": ("dualpipe_v", 2),
}  # fmt: skip
"""torchtitan's schedule -> (the schedule here, stages per rank in torchtitan)."""


def torchtitan_layout(settings: Settings, pasted: Pasted, num_layers: int) -> Parallelism:
    """The layout of a network of `num_layers` layers. Raises: SpecError."""

    tensor = _degree(settings, "tensor_parallel_degree", "training.tensor_parallel_degree")
    pipeline = _degree(settings, "pipeline_parallel_degree", "experimental.pipeline_parallel_degree")
    context = _degree(settings, "context_parallel_degree", "experimental.context_parallel_degree")
    replicate = _degree(settings, "data_parallel_replicate_degree", "training.data_parallel_replicate_degree")
    shard = _shard_degree(settings, pasted, tensor * pipeline * context * replicate)
    if context > 1:
        settings.notes.assumptions.append(
            f"FSDP shards over the {shard} × {context} ranks of data and context parallelism."
        )
    schedule, stages = _schedule(settings)
    per_stage = settings.integer("parallelism.pipeline_parallel_layers_per_stage")
    if settings.raw("parallelism.pipeline_parallel_split_points") or per_stage:
        settings.notes.unsupported.append(
            "The given pipeline split points are not modelled; torchtitan's even split is assumed."
        )
    first, last = (
        settings.integer(f"parallelism.pipeline_parallel_{end}_stage_less_layers", 1, least=0) or 0
        for end in ("first", "last")
    )
    expert_tensor = settings.integer("parallelism.expert_tensor_parallel_degree")
    layers = layers_beside_ends(num_layers, pipeline * stages, first, last) if pipeline > 1 else ()
    return Parallelism(
        data_parallel_size=replicate * shard,
        sharding="hsdp" if replicate > 1 and shard * context > 1 else "fsdp2" if shard * context > 1 else "none",
        tensor_parallel_size=tensor,
        sequence_parallel=settings.switch("parallelism.enable_sequence_parallel", True) and tensor > 1,
        pipeline_parallel_size=pipeline,
        pipeline_schedule=schedule if pipeline > 1 else "1f1b",
        virtual_pipeline_stages=stages if pipeline > 1 else 1,
        pipeline_layers=layers,
        context_parallel_size=context,
        expert_parallel_size=_degree(settings, "expert_parallel_degree"),
        expert_tensor_parallel_size=expert_tensor if tensor > 1 else None,
    )


def _degree(settings: Settings, name: str, older: str | None = None) -> int:
    """The degree `name`, 1 by default. `older`: its key in releases before section `parallelism`."""
    default = (settings.integer(older, 1) or 1) if older else 1
    return settings.integer(f"parallelism.{name}", default, least=-1) or default


def _shard_degree(settings: Settings, pasted: Pasted, others: int) -> int:
    """The number of ranks over which FSDP shards, next to `others` of the other degrees. Raises: SpecError."""
    default = settings.integer("training.data_parallel_shard_degree", -1, least=-1) or -1
    shard = settings.integer("parallelism.data_parallel_shard_degree", default, least=-1) or default
    if shard != -1:
        if pasted.num_gpus is not None and pasted.num_gpus != others * shard:
            raise SpecError(
                f"num_gpus={pasted.num_gpus} is not the product of the degrees, {others * shard}; correct either.",
                parameter="num_gpus",
                value=pasted.num_gpus,
            )
        return shard
    num_gpus = pasted.gpus(settings.notes, others, " (data_parallel_shard_degree=-1 uses all GPUs)")
    if num_gpus % others:
        raise SpecError(
            f"num_gpus={num_gpus} is not a multiple of the {others} ranks of the other degrees; use a multiple.",
            parameter="num_gpus",
            value=num_gpus,
        )
    return num_gpus // others


def _schedule(settings: Settings) -> tuple[PipelineSchedule, int]:
    key = "parallelism.pipeline_parallel_schedule"
    word = settings.text(key, "1F1B").lower()
    if word not in SCHEDULES:
        raise settings.refuse(key, f"must be one of {', '.join(SCHEDULES)}")
    return SCHEDULES[word]
