"""The candidates: every valid way to run a job's training on a number of GPUs with the same tokens per optimizer step."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from peakcast.errors import SpecError
from peakcast.spec import ActivationCheckpointing, Offload, Parallelism, TrainingJob

GPUS_PER_NODE = 8
"""Tensor parallelism does not leave a node, for it talks in every layer (Narayanan et al. 2021, arXiv:2104.04473)."""
MOST_MICRO_BATCH = 64
MEGATRON_CHECKPOINTING = ("none", "selective", "full")
CHECKPOINTING = ("none", "full")
ZERO_STAGES = (0, 1, 2, 3)
SHARDINGS = ("none", "fsdp2")
OFFLOADS = (Offload(), Offload(optimizer=True), Offload(optimizer=True, parameters=True))


def candidates(
    job: TrainingJob, num_gpus: int, global_batch_size: int, gpus_per_node: int = GPUS_PER_NODE
) -> Iterator[TrainingJob]:
    """Every layout × micro-batch × checkpointing × sharding × offload of `job` on `num_gpus` GPUs whose micro-batches add
    up to `global_batch_size` sequences. What a `TrainingJob` refuses is not among them."""
    modes = MEGATRON_CHECKPOINTING if job.framework == "megatron" else CHECKPOINTING
    kept = job.activation_checkpointing
    checkpointings = [kept if mode == kept.mode else ActivationCheckpointing(mode=mode) for mode in modes]  # type: ignore[arg-type]
    for layout in layouts(job, num_gpus, gpus_per_node):
        sequences, rest = divmod(global_batch_size, layout.data_parallel_size)
        if rest or not sequences:
            continue
        for micro_batch_size in _powers_of_two(min(sequences, MOST_MICRO_BATCH)):
            steps = sequences // micro_batch_size
            if sequences % micro_batch_size or not _fills_the_pipeline(layout, steps):
                continue
            for checkpointing in checkpointings:
                for offload in _offloads(job, layout):
                    try:
                        yield job.replace(
                            parallelism=layout,
                            micro_batch_size=micro_batch_size,
                            gradient_accumulation_steps=steps,
                            activation_checkpointing=checkpointing,
                            offload=offload,
                        )
                    except SpecError:
                        continue


def layouts(job: TrainingJob, num_gpus: int, gpus_per_node: int = GPUS_PER_NODE) -> list[Parallelism]:
    """Every way to spread `job` over exactly `num_gpus` ranks that its framework has."""
    found = _megatron(job, num_gpus, gpus_per_node) if job.framework == "megatron" else _data_parallel(job, num_gpus)
    return list(dict.fromkeys(found))


def _data_parallel(job: TrainingJob, num_gpus: int) -> Iterator[Parallelism]:
    """Replicas of the data stream, sharded as the framework can."""
    plain = Parallelism(data_parallel_size=num_gpus)
    if num_gpus == 1:
        yield plain
    elif job.framework == "deepspeed":
        yield from (replace(plain, zero_stage=stage) for stage in ZERO_STAGES)
    else:
        yield from (replace(plain, sharding=sharding) for sharding in SHARDINGS)  # type: ignore[arg-type]


def _megatron(job: TrainingJob, num_gpus: int, gpus_per_node: int) -> Iterator[Parallelism]:
    a = job.architecture
    experts = a.moe.num_experts if a.moe is not None else 1
    for tensor in _divisors(num_gpus):
        if tensor > gpus_per_node or a.num_attention_heads % tensor or a.num_key_value_heads % tensor:
            continue
        for pipeline in _divisors(num_gpus // tensor):
            if a.num_hidden_layers % pipeline:
                continue
            for context in _divisors(num_gpus // tensor // pipeline):
                # each rank has two chunks: megatron/core/utils.py, get_batch_on_this_cp_rank
                if context > 1 and job.sequence_length % (2 * context):
                    continue
                data = num_gpus // (tensor * pipeline * context)
                for expert in _divisors(experts):
                    if (data * context) % expert:
                        continue
                    yield from _variants(job, tensor, pipeline, context, expert, data)


def _variants(
    job: TrainingJob, tensor: int, pipeline: int, context: int, expert: int, data: int
) -> Iterator[Parallelism]:
    """Sequence parallelism and the distributed optimizer, where they do something; interleaving as the job has it, since it
    costs memory and communication, and what it buys, a smaller bubble, is no part of the order."""
    per_stage, asked = job.architecture.num_hidden_layers // pipeline, job.parallelism.virtual_pipeline_stages
    for virtual in {1, asked if pipeline > 1 and per_stage % asked == 0 else 1}:
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
                        context_parallel_size=context,
                        expert_parallel_size=expert,
                    )
                except SpecError:
                    continue


def _fills_the_pipeline(layout: Parallelism, steps: int) -> bool:
    """At least one micro-batch for each stage; interleaving wants a multiple (megatron-core schedules.py)."""
    stages = layout.pipeline_parallel_size
    return steps >= stages and (layout.virtual_pipeline_stages == 1 or steps % stages == 0)


def _offloads(job: TrainingJob, layout: Parallelism) -> tuple[Offload, ...]:
    """DeepSpeed offloads what it shards; elsewhere the job's own choice stands."""
    if job.framework != "deepspeed" or layout.zero_stage == 0:
        return (job.offload,)
    return OFFLOADS if layout.zero_stage == 3 else OFFLOADS[:2]


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]


def _powers_of_two(most: int) -> list[int]:
    return [1 << k for k in range(most.bit_length()) if 1 << k <= most]
