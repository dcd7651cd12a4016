"""What a Megatron-LM rank has of a job: its stage, its chunks of the network, and the context of their blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from peakcast.catalog import Device
from peakcast.jobs.allocator_settings import Allocator
from peakcast.jobs.conventions import conventions
from peakcast.jobs.spec import ActivationCheckpointing, TrainingJob
from peakcast.models.ledger.layouts.pipeline import Chunk, pipeline_rank, place_in_stage, stage_chunks
from peakcast.models.ledger.megatron.blocks.context import MegatronContext
from peakcast.models.ledger.megatron.contexts import layer_context, part_context, target_context


@dataclass(frozen=True, slots=True, eq=False)
class RankShare:
    """One rank's share of a job: its stage, its model chunks and the context of their blocks. There is one object for each
    job, device and stage, so that what is derived from it can be cached."""

    job: TrainingJob
    device: Device | None
    stage: int
    place: int
    """The rank's position among the ranks that share a sequence (context parallelism)."""
    shard: int
    """The rank's position among the ranks of its stage, which decides the part of the buffers that its distributed
    optimizer owns."""
    chunks: tuple[Chunk, ...]
    context: MegatronContext
    dense: MegatronContext
    """As `context`, for a layer without routed experts."""
    target: MegatronContext | None
    """As `context`, for the decoder of an encoder-decoder."""
    convention: Mapping[str, Any]
    parts: Mapping[str, MegatronContext]
    """As `context`, for each kind of a hybrid's layers."""

    @property
    def overlaps_micro_batches(self) -> bool:
        """Whether the forward of one micro-batch runs together with the backward of another, half a layer of each in turn
        (`overlap-moe-expert-parallel-comm`)."""
        asked = self.convention.get("overlap_moe_expert_parallel_comm") and self.context.experts is not None
        return bool(asked) and not self.convention.get("use_megatron_fsdp")

    @property
    def has_head(self) -> bool:
        return any(chunk.is_last for chunk in self.chunks)

    def layer_context(self, layer: int) -> MegatronContext:
        """The context of layer `layer`. The leading layers of a mixture of experts may be dense; an encoder's layers come
        before its decoder's."""
        if self.parts:
            return self.parts[self.job.architecture.layer_types[layer]]
        if self.target is not None and layer >= self.job.architecture.num_hidden_layers:
            return self.target
        found = self.context if self.job.architecture.is_moe_layer(layer) else self.dense
        if found.offloading.modules and self._runs_backward_next(layer):
            return replace(found, offloading=replace(found.offloading, modules=frozenset()))
        return found

    def _runs_backward_next(self, layer: int) -> bool:
        """Whether the backward of layer `layer` comes next after its forward: what would have to come back from the host at
        once stays (megatron-core 0.16.1 `fine_grained_activation_offload.py` `should_bulk_offload`)."""
        architecture = self.job.architecture
        return layer == architecture.num_hidden_layers - 1 and not architecture.num_nextn_predict_layers

    def is_routed(self, layer: int) -> bool:
        """Whether layer `layer` has routed experts."""
        return self.layer_context(layer).experts is not None

    @property
    def has_experts(self) -> bool:
        """Whether any layer on this rank is routed, including multi-token-prediction layers."""
        ahead = self.has_head and self.job.architecture.num_nextn_predict_layers > 0
        last = self.layer_context(self.job.architecture.num_hidden_layers - 1)
        return any(one.experts is not None for one in (*self.layer_contexts, *([last] if ahead else [])))

    @property
    def micro_batches_in_a_row(self) -> int:
        """Number of micro-batches that a virtual stage runs before the next one runs."""
        asked = int(self.convention.get("microbatch_group_size_per_virtual_pipeline_stage", 0) or 0)
        return asked or self.job.parallelism.pipeline_parallel_size

    @property
    def layer_contexts(self) -> frozenset[MegatronContext]:
        """The different contexts of the layers on this rank."""
        return _layer_contexts(self)


@lru_cache(maxsize=64)
def _layer_contexts(share: RankShare) -> frozenset[MegatronContext]:
    """`RankShare.layer_contexts`. A context's hash is that of all its fields, so each object is hashed once."""
    contexts = (share.layer_context(layer) for chunk in share.chunks for layer in chunk.layers)
    return frozenset({id(context): context for context in contexts}.values())


def rank_share(job: TrainingJob, device: Device | None, rank: int) -> RankShare:
    """The share of global `rank`. Raises: SpecError for a rank that does not exist."""
    innermost, layout = bool(conventions(job).get("use_tp_pp_dp_mapping")), job.parallelism
    place = rank // layout.tensor_parallel_size % layout.context_parallel_size
    stage = pipeline_rank(layout, rank, pipeline_innermost=innermost)
    return _stage_share(job, device, stage, place, place_in_stage(layout, rank, pipeline_innermost=innermost))


@lru_cache(maxsize=8192)
def _stage_share(job: TrainingJob, device: Device | None, stage: int, place: int = 0, shard: int = 0) -> RankShare:
    """`rank_share` for a pipeline stage, the place among ranks that share a sequence, and the place in the stage (`shard`);
    cached."""
    convention = conventions(job)
    chunks = stage_chunks(job.architecture.num_layers, job.parallelism, stage)
    context = layer_context(job, device, place)
    dense = context if context.experts is None else replace(context, experts=None)
    target = target_context(job, context) if job.architecture.num_decoder_layers else None
    parts = {part: part_context(context, part) for part in dict.fromkeys(job.architecture.layer_types)}
    return RankShare(job, device, stage, place, shard, chunks, context, dense, target, convention, parts)


def weights_share(share: RankShare) -> RankShare:
    """The share of the job with the settings that do not change its parameters replaced by defaults, so that jobs alike in
    all else share it."""
    return _stage_share(_weights_job(share.job), None, share.stage, shard=share.shard)


@lru_cache(maxsize=1024)
def _weights_job(job: TrainingJob) -> TrainingJob:
    """The job with the settings that do not change its parameters replaced by defaults."""
    layout = job.parallelism
    return job.replace(
        micro_batch_size=1,
        gradient_accumulation_steps=1,
        sequence_length=layout.context_parallel_size * layout.tensor_parallel_size,
        decoder_sequence_length=None,
        activation_checkpointing=ActivationCheckpointing(),
        allocator=Allocator(),
    )


def activations_share(share: RankShare) -> RankShare:
    """The share of a job with the same turns but without data parallelism, on which no dense block depends, unless the
    layers' parameters are sharded over it."""
    job, layout = share.job, share.job.parallelism
    if share.convention.get("use_megatron_fsdp"):
        return share
    if job.architecture.moe is None and (layout.data_parallel_size > 1 or layout.zero_stage):
        job = _without_data_parallelism(job)
    return _stage_share(job, share.device, share.stage, share.place)


@lru_cache(maxsize=1024)
def _without_data_parallelism(job: TrainingJob) -> TrainingJob:
    alone = replace(job.parallelism, data_parallel_size=1, zero_stage=0)
    return job.replace(parallelism=alone, allocator=Allocator())
