"""The parts of a job that change its recipe: the network, its kernels, precision, checkpoints, adapters and the form of a
batch."""

from __future__ import annotations

from functools import lru_cache

from peakcast.core.fields import FrozenMapping, build, to_mapping
from peakcast.dialects.common.own_networks import LITGPT, TORCHTUNE, library_of, of_any_release, own_network
from peakcast.jobs.allocator_settings import Allocator
from peakcast.jobs.conventions import DRIVEN_BY, adapter_dtype, conventions, mixes_precision, replaces_linear
from peakcast.jobs.micro_batch import Batch
from peakcast.jobs.parallelism import Parallelism
from peakcast.jobs.spec import Finetuning, Offload, Optimizer, Precision, TrainingJob
from peakcast.models.ledger.layouts import gathered_dtype
from peakcast.models.recipes.chunked import ChunkRule


@lru_cache(maxsize=1024)
def regime(job: TrainingJob) -> TrainingJob:
    """The job on one GPU that has the same recipe as `job`, with the network that its library has of its own, if any.
    What the layout, the optimizer and the allocator do is not recorded, nor what these keep on the host, except ZeRO-3's
    linear layers, which save more if weights are frozen. All micro-batches run alike; what becomes of their gradients is
    up to the layout."""
    precision = job.precision
    adapts = job.finetuning.method != "full"
    adapters = used_adapter_dtype(job) if adapts else None
    dtypes = dict.fromkeys(("parameters", "gradients", "optimizer_states"), gathered_dtype(job))
    driven = DRIVEN_BY.get(job.framework, job.framework)
    own = own_network(job)
    return job.replace(
        architecture=own or job.architecture,
        framework=driven,
        framework_options=_framework_options(driven, job) if own is None else _options_of_library(job),
        finetuning=build(Finetuning, to_mapping(job.finetuning) | {"adapter_dtype": adapters}),
        batch=Batch(form=job.batch.form),
        micro_batch_size=1,
        sequence_length=1,
        decoder_sequence_length=None,
        gradient_accumulation_steps=1,
        parallelism=Parallelism(zero_stage=3) if adapts and replaces_linear(job) else Parallelism(),
        optimizer=Optimizer(),
        offload=Offload(activations=job.offload.activations),
        allocator=Allocator(),
        versions=FrozenMapping() if own is None else of_any_release(job).versions,
        precision=build(Precision, to_mapping(precision) | {**dtypes, "main_parameters": None}),
    )


def point_of(job: TrainingJob) -> tuple[int, ...]:
    """The numbers of `job` that its recipe leaves open: micro-batch size, sequence length, that of targets if given."""
    targets = job.decoder_sequence_length
    return (job.micro_batch_size, job.sequence_length, *(() if targets is None else (targets,)))


CHUNK = 128
"""litgpt 0.5.13 utils.py `chunked_cross_entropy(chunk_size=128)` and finetune/lora.py `lm_head_chunk_size=128`."""


def chunks_of_loss(job: TrainingJob) -> ChunkRule | None:
    """How the loss of the job's loop goes in chunks of a fixed size, so that each length runs other operations; None if it
    does not. With adapters LitGPT's logits are made in chunks of the sequence, else all of them are cut."""
    own = own_network(job) is not None and library_of(job) == LITGPT
    return ChunkRule(CHUNK, by_length=job.finetuning.method != "full") if own else None


def used_adapter_dtype(job: TrainingJob) -> str:
    """The dtype in which adapters are used: FSDP's mixed precision gathers them like other weights."""
    return gathered_dtype(job) if mixes_precision(job) else adapter_dtype(job)


def _framework_options(framework: str, job: TrainingJob) -> FrozenMapping:
    """The options of a job that the framework which runs its loop knows, without those of the layout's own engine."""
    if framework == job.framework:
        return job.framework_options
    known = conventions(job.replace(framework=framework, framework_options=FrozenMapping()))
    return FrozenMapping({name: value for name, value in job.framework_options.items() if name in known})


OF_LOOPS = {LITGPT: ("autocast", "adapted_of_qkv"), TORCHTUNE: ("loss_kernel", "logits_chunks")}
"""Library with its own networks -> the options that its loop takes from the job. LitGPT's chunks of the loss are of a fixed
size."""


def _options_of_library(job: TrainingJob) -> FrozenMapping:
    names = OF_LOOPS[library_of(job)]
    return FrozenMapping({name: value for name, value in job.framework_options.items() if name in names})
