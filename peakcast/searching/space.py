"""The candidates: every valid way to run a job's training on a number of GPUs with the same tokens per optimizer step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Literal

from peakcast.core.errors import SpecError
from peakcast.jobs.conventions import conventions
from peakcast.jobs.parallelism import layers_beside_ends
from peakcast.jobs.spec import ActivationCheckpointing, Offload, Parallelism, TrainingJob
from peakcast.models.ledger.scope.scope import not_covered, scope_findings

GPUS_PER_NODE = 8
"""Tensor parallelism stays within a node, because it communicates in every layer (Narayanan et al. 2021,
arXiv:2104.04473)."""
MOST_MICRO_BATCH = 64
MEGATRON_CHECKPOINTING = ("none", "selective", "full")
CHECKPOINTING = ("none", "full")
ZERO_STAGES = (0, 1, 2, 3)
MOST_VIRTUAL = 5
"""Virtual stages per rank that are tried: more of them hardly shrink the bubble, and each one sends its output."""
ENOUGH_FOR_A_STAGE = 4
"""Micro-batches per stage that are enough for any schedule: DualPipeV needs two per stage, interleaved schedules a multiple
of the number of stages."""
OFFLOADS = (Offload(), Offload(optimizer=True), Offload(optimizer=True, parameters=True))


def candidates(
    job: TrainingJob, num_gpus: int, global_batch_size: int, gpus_per_node: int = GPUS_PER_NODE
) -> Iterator[TrainingJob]:
    """Every combination of layout, micro-batch, checkpointing, sharding and offloading of `job` on `num_gpus` GPUs whose
    micro-batches add up to `global_batch_size` sequences, except those that `TrainingJob` refuses and those that the ledger
    does not cover (`layouts`)."""
    accepted = not_covered(job)
    modes = MEGATRON_CHECKPOINTING if job.framework == "megatron" else CHECKPOINTING
    kept = job.activation_checkpointing
    checkpointings = [kept if mode == kept.mode else ActivationCheckpointing(mode=mode) for mode in modes]  # type: ignore[arg-type]
    for layout, spread in _spread_over(job, num_gpus, gpus_per_node).items():
        sequences, rest = divmod(global_batch_size, layout.data_parallel_size)
        if rest or not sequences:
            continue
        here = accepted | not_covered(spread)
        for micro_batch_size in _powers_of_two(min(sequences, MOST_MICRO_BATCH)):
            steps = sequences // micro_batch_size
            if sequences % micro_batch_size or not _fills_the_pipeline(layout, steps):
                continue
            for checkpointing in checkpointings:
                for offload in _offloads(job, layout):
                    try:
                        plan = job.replace(
                            parallelism=layout,
                            micro_batch_size=micro_batch_size,
                            gradient_accumulation_steps=steps,
                            activation_checkpointing=checkpointing,
                            offload=offload,
                        )
                    except SpecError:
                        continue
                    if not_covered(plan) <= here:
                        yield plan


def layouts(job: TrainingJob, num_gpus: int, gpus_per_node: int = GPUS_PER_NODE) -> list[Parallelism]:
    """Every layout of `job` on exactly `num_gpus` ranks that its framework supports and the ledger covers: no limit that is
    unknown or fails (`not_covered`) holds of it and not of `job` as asked. If no layout is covered, all of them are
    returned; their predictions say what is not covered."""
    return list(_spread_over(job, num_gpus, gpus_per_node))


def layouts_left_out(job: TrainingJob, num_gpus: int, gpus_per_node: int = GPUS_PER_NODE) -> dict[str, int]:
    """Why the ledger does not cover the layouts of `job` that are not candidates -> how many of them."""
    kept, asked = _spread_over(job, num_gpus, gpus_per_node), scope_findings(job)
    left = [one for layout, one in _every_spread(job, num_gpus, gpus_per_node).items() if layout not in kept]
    reasons = (next((found for found in scope_findings(one) if found not in asked), None) for one in left)
    return dict(Counter(found.sentence.rstrip(".") for found in reasons if found is not None).most_common())


def _spread_over(job: TrainingJob, num_gpus: int, gpus_per_node: int) -> dict[Parallelism, TrainingJob]:
    """`layouts`, and `job` in each of them."""
    spread, accepted = _every_spread(job, num_gpus, gpus_per_node), not_covered(job)
    return {layout: one for layout, one in spread.items() if not_covered(one) <= accepted} or spread


def _every_spread(job: TrainingJob, num_gpus: int, gpus_per_node: int) -> dict[Parallelism, TrainingJob]:
    """`job` in every layout that its framework supports."""
    spread: dict[Parallelism, TrainingJob] = {}
    for layout in _LAYOUTS.get(job.framework, _torch)(job, num_gpus, gpus_per_node):
        with suppress(SpecError):
            spread[layout] = _spread(job, layout)
    return spread


def _deepspeed(job: TrainingJob, num_gpus: int, gpus_per_node: int) -> Iterator[Parallelism]:
    """Data parallelism with and without ZeRO stages."""
    for stage in ZERO_STAGES if num_gpus > 1 else (0,):
        yield Parallelism(data_parallel_size=num_gpus, zero_stage=stage)


def _torch(job: TrainingJob, num_gpus: int, gpus_per_node: int) -> Iterator[Parallelism]:
    """PyTorch's own layouts, in a plain loop or under the Trainer: data parallelism, sharded or not, combined with tensor,
    pipeline and context parallelism."""
    schedule = job.parallelism.pipeline_schedule
    group = int(conventions(job)["shard_group_size"])
    for tensor, pipeline, context, data in _grids(job, num_gpus, gpus_per_node):
        virtual = job.parallelism.virtual_pipeline_stages if pipeline > 1 else 1
        for sequence_parallel in (False, True) if tensor > 1 else (False,):
            for sharding in _shardings(data, context, group):
                try:
                    yield Parallelism(
                        data_parallel_size=data,
                        sharding=sharding,
                        tensor_parallel_size=tensor,
                        sequence_parallel=sequence_parallel,
                        pipeline_parallel_size=pipeline,
                        pipeline_schedule=schedule if pipeline > 1 else "1f1b",
                        virtual_pipeline_stages=virtual,
                        pipeline_layers=_beside_ends(job.architecture.num_hidden_layers, pipeline) if virtual == 1 else (),
                        context_parallel_size=context,
                    )
                except SpecError:
                    continue


def _spread(job: TrainingJob, layout: Parallelism) -> TrainingJob:
    """`job` in that layout, with enough micro-batches for every schedule of its pipeline."""
    stages = layout.pipeline_parallel_size
    steps = ENOUGH_FOR_A_STAGE * stages if stages > 1 else job.gradient_accumulation_steps
    return job.replace(parallelism=layout, gradient_accumulation_steps=steps)


def _shardings(data: int, context: int, group: int) -> Iterator[Literal["none", "fsdp2", "hsdp"]]:
    """Ways to shard the weights over `data` × `context` ranks; hybrid sharding needs more than one group of `group`
    ranks."""
    yield "none"
    if data * context > 1:
        yield "fsdp2"
    if data > group and data % group == 0:
        yield "hsdp"


def _megatron(job: TrainingJob, num_gpus: int, gpus_per_node: int) -> Iterator[Parallelism]:
    experts = job.architecture.moe.num_experts if job.architecture.moe is not None else 1
    for tensor, pipeline, context, data in _grids(job, num_gpus, gpus_per_node):
        for expert in _divisors(experts):
            if (data * context) % expert == 0:
                yield from _variants(job, tensor, pipeline, context, expert, data)


_LAYOUTS: dict[str, Callable[[TrainingJob, int, int], Iterator[Parallelism]]] = {
    "megatron": _megatron,
    "deepspeed": _deepspeed,
}


def _grids(job: TrainingJob, num_gpus: int, gpus_per_node: int) -> Iterator[tuple[int, int, int, int]]:
    """The tensor-, pipeline-, context- and data-parallel sizes whose product is `num_gpus` and by which the network can be
    divided."""
    a = job.architecture
    for tensor in _divisors(num_gpus):
        if tensor > gpus_per_node or a.num_attention_heads % tensor or a.num_key_value_heads % tensor:
            continue
        for pipeline in _divisors(num_gpus // tensor):
            if a.num_hidden_layers % pipeline and not _beside_ends(a.num_hidden_layers, pipeline):
                continue
            for context in _divisors(num_gpus // tensor // pipeline):
                # each rank has two chunks of a sequence: megatron/core/utils.py, get_batch_on_this_cp_rank; also torch's
                # load balancer
                if context == 1 or job.sequence_length % (2 * context) == 0:
                    yield tensor, pipeline, context, num_gpus // (tensor * pipeline * context)


def _beside_ends(num_layers: int, stages: int) -> tuple[int, ...]:
    """Layers of each stage if `stages` does not divide the layers but does divide them with the embedding and the head
    counted as a layer each, for which Llama 3.1's 126 layers were chosen (Llama Team 2024, arXiv:2407.21783, section
    3.3.2); else ()."""
    fits = num_layers % stages and (num_layers + 2) % stages == 0 and (num_layers + 2) // stages > 1
    return layers_beside_ends(num_layers, stages) if fits else ()


def _variants(job: TrainingJob, tensor: int, pipeline: int, context: int, expert: int, data: int) -> Iterator[Parallelism]:
    """The variants of a layout: with and without sequence parallelism and the distributed optimizer, where these have an
    effect; with the job's own number of virtual stages, and with the most up to `MOST_VIRTUAL`, which have the smallest
    bubble."""
    uneven = _beside_ends(job.architecture.num_hidden_layers, pipeline)
    for virtual in (1,) if uneven or pipeline == 1 else _virtual_stages(job, pipeline):
        for sequence_parallel in (False, True) if tensor > 1 else (False,):
            for stage in (0, 1) if data * context > 1 else (0,):
                try:
                    yield Parallelism(
                        data_parallel_size=data,
                        zero_stage=stage,
                        tensor_parallel_size=tensor,
                        sequence_parallel=sequence_parallel,
                        pipeline_parallel_size=pipeline,
                        pipeline_schedule="interleaved_1f1b" if virtual > 1 else "1f1b",
                        virtual_pipeline_stages=virtual,
                        pipeline_layers=uneven,
                        context_parallel_size=context,
                        expert_parallel_size=expert,
                    )
                except SpecError:
                    continue


def _virtual_stages(job: TrainingJob, pipeline: int) -> set[int]:
    """Numbers of virtual stages that a pipeline rank may have."""
    per_stage, asked = job.architecture.num_hidden_layers // pipeline, job.parallelism.virtual_pipeline_stages
    return {1, *(number for number in (asked, _divisors_up_to(per_stage, MOST_VIRTUAL)[-1]) if per_stage % number == 0)}


def _fills_the_pipeline(layout: Parallelism, steps: int) -> bool:
    """Whether there is at least one micro-batch for each stage; interleaving needs a multiple of the number of stages
    (megatron-core schedules.py)."""
    stages = layout.pipeline_parallel_size
    return steps >= stages and (layout.virtual_pipeline_stages == 1 or steps % stages == 0)


def _offloads(job: TrainingJob, layout: Parallelism) -> tuple[Offload, ...]:
    """Kinds of offloading to try. DeepSpeed offloads what it shards; FSDP2 offloads parameters and states together; PyTorch
    offloads activations in any layout; in all other cases only the job's own offloading is tried."""
    if job.framework == "deepspeed" and layout.zero_stage > 0:
        return OFFLOADS if layout.zero_stage == 3 else OFFLOADS[:2]
    if job.framework not in ("huggingface", "torch"):
        return (job.offload,)
    return tuple(dict.fromkeys((job.offload, Offload(activations=True), Offload(optimizer=True, parameters=True))))


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _divisors_up_to(number: int, most: int) -> list[int]:
    return [d for d in _divisors(number) if d <= most]


def _powers_of_two(most: int) -> list[int]:
    return [1 << k for k in range(most.bit_length()) if 1 << k <= most]
