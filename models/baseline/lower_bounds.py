"""Lower bounds of a rank's peak that cost less than its timeline: what exists during the whole step, and what shallower
networks need."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

from peakcast.jobs.spec import ActivationCheckpointing, TrainingJob
from peakcast.models.ledger.huggingface.blocks.traits import kinds_of_layers
from peakcast.models.ledger.tape.columns import BORN, DIES, NUM_BYTES, RecordedColumns
from peakcast.models.ledger.tape.step import FOREVER, Step
from peakcast.models.recipes.shelf import wants_recipe
from peakcast.timelines.timeline import Phase


def persistent_bytes(job: TrainingJob, stage: int) -> int:
    """Bytes of the weights, gradient buffers, main parameters and optimizer states that the first rank of pipeline stage
    `stage` holds from the beginning to the end of a steady step. (Only Megatron-LM keeps gradient buffers between steps;
    other frameworks free gradients.)"""
    layout = job.parallelism
    # for weights and states, context-parallel ranks are replicas; sequence parallelism splits only activations
    replicas = layout.data_parallel_size * layout.context_parallel_size
    shards = replace(layout, data_parallel_size=replicas, context_parallel_size=1, sequence_parallel=False)
    alike = job.replace(
        parallelism=layout if layout.sharding == "hsdp" else shards,
        gradient_accumulation_steps=1,
    )
    if not wants_recipe(job):  # weights come from the recipe, and there may be none for another batch or checkpointing
        alike = alike.replace(micro_batch_size=1, activation_checkpointing=ActivationCheckpointing())
    return _megatron(alike, stage) if job.framework == "megatron" else _torch(alike, stage)


@lru_cache(maxsize=4096)
def _megatron(job: TrainingJob, stage: int) -> int:
    """`persistent_bytes` of a Megatron-LM job."""
    from peakcast.models.ledger.megatron.buffers import parameters_held
    from peakcast.models.ledger.megatron.optimizer import optimizer_stepped
    from peakcast.models.ledger.megatron.share import rank_share, weights_share

    ranks_per_stage = job.parallelism.world_size // job.parallelism.pipeline_parallel_size
    share = weights_share(rank_share(job, None, stage * ranks_per_stage))
    return _bytes_of_whole_step(parameters_held(share)) + _bytes_of_whole_step(optimizer_stepped(share, False))


@lru_cache(maxsize=4096)
def _torch(job: TrainingJob, stage: int) -> int:
    """`persistent_bytes` of any other job."""
    from peakcast.models.ledger.huggingface.stored_parameters import stored_parameters
    from peakcast.models.ledger.huggingface.torch_pipeline import stage_layout
    from peakcast.models.ledger.layouts import layout_of
    from peakcast.models.ledger.layouts.optimizer_step import place_optimizer_step

    staged = job.parallelism.pipeline_parallel_size > 1
    held, step = stage_layout(job, stage) if staged else layout_of(job, stored_parameters(job)), Step()
    held.hold_resident(step)
    step.moment("before", Phase.BACKWARD)
    place_optimizer_step(step, job, held, "steady")
    return _bytes_of_whole_step(step.record())


SHALLOW = (4, 6)
"""Layers per stage of the two networks that bound a deeper one: more than FSDP gathers at a time."""


def bound_by_depth(job: TrainingJob, peak_bytes: Callable[[TrainingJob], int]) -> int:
    """A lower bound of the peak of `job`, from the peaks that `peak_bytes` finds for two shallower networks; 0 (no bound)
    if its layers differ from each other.

    At each instant of a step, a rank's memory is an affine function of the number of equal layers. The peak is the largest
    of these functions, so it is convex in the depth, and a deeper network lies on or above the line through two shallower
    ones. Two things are not affine: the layers that FSDP gathers ahead, for which `SHALLOW` is deep enough, and DeepSpeed's
    buckets, for which there is no bound.
    """
    architecture, layout = job.architecture, job.parallelism
    per_stage = architecture.num_hidden_layers // (layout.pipeline_parallel_size * layout.virtual_pipeline_stages)
    if per_stage <= SHALLOW[1] or layout.zero_stage or not _alike(job):
        return 0
    low, high = (
        peak_bytes(job.replace(architecture=replace(architecture, num_hidden_layers=layers)))
        for layers in (architecture.num_hidden_layers // per_stage * number for number in SHALLOW)
    )
    return high + (high - low) * (per_stage - SHALLOW[1]) // (SHALLOW[1] - SHALLOW[0])


def _alike(job: TrainingJob) -> bool:
    """Whether all layers of the network are equal."""
    a = job.architecture
    routed = a.moe is None or all(a.is_moe_layer(layer) for layer in range(a.num_hidden_layers))
    return a.kind == "decoder" and routed and kinds_of_layers(a) == 1 and job.activation_checkpointing.every_n_layers == 1


def _bytes_of_whole_step(recorded: RecordedColumns) -> int:
    """Bytes of the tensors that exist from the beginning of the recording to its end."""
    sizes, born, dies = recorded.columns[NUM_BYTES], recorded.columns[BORN], recorded.columns[DIES]
    return int(sizes[(born == 0) & (dies == FOREVER)].sum())
