"""The parameters of one rank with their shapes in the whole model and on the rank."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING

from peakcast.answers.explanation import ParameterRow
from peakcast.core.errors import SpecError
from peakcast.jobs.architecture import Architecture
from peakcast.jobs.spec import Finetuning, Parallelism, TrainingJob
from peakcast.models.ledger.huggingface.blocks.adapter_tensors import NETWORK, network_tensors
from peakcast.models.ledger.huggingface.blocks.builder import is_adapter_target
from peakcast.models.ledger.parameters.adapter_methods import METHODS, matrix_of
from peakcast.models.ledger.parameters.inventory import embedding_parameters, head_parameters, layer_parameters
from peakcast.models.ledger.recorded.parameters import recorded_parameters
from peakcast.models.recipes.shelf import recipe_of
from peakcast.networks.trained_parts import trained_network

if TYPE_CHECKING:
    from peakcast.models.ledger.megatron.share import RankShare


def unsharded(job: TrainingJob) -> TrainingJob | None:
    """The same job on one rank that holds everything; None if there is no such job."""
    try:
        return job.replace(parallelism=Parallelism())
    except SpecError:
        return None


def parameter_shards(job: TrainingJob) -> int:
    """Number of ranks over which sharded data parallelism (FSDP, ZeRO-3) splits each parameter; 1 without it."""
    layout = job.parallelism
    if layout.sharding in ("fsdp1", "fsdp2", "hsdp") or layout.zero_stage == 3:
        return layout.data_parallel_size * layout.context_parallel_size
    return 1


def parameter_rows(job: TrainingJob, rank: int) -> tuple[ParameterRow, ...]:
    """Every parameter on `rank` of `job`, in model order."""
    if job.framework == "megatron":
        return _megatron_rows(job, rank)
    shards = parameter_shards(job)
    if (recipe := recipe_of(job)) is not None:
        named = ((tensor.module, tensor.name, tensor.shape) for tensor in recorded_parameters(job, recipe))
        return tuple(
            ParameterRow(module=module, name=name, shape=shape, rank_shape=shape, shards=shards)
            for module, name, shape in named
        )
    return _huggingface_rows(trained_network(job), job.finetuning, shards)


_Named = tuple[tuple[str, str], tuple[int, ...]]


def _megatron_rows(job: TrainingJob, rank: int) -> tuple[ParameterRow, ...]:
    from peakcast.models.ledger.megatron.buffers import parameters_share
    from peakcast.models.ledger.megatron.share import rank_share

    whole = unsharded(job)
    return _rows_of_share(
        parameters_share(rank_share(job, None, rank)),
        None if whole is None else parameters_share(rank_share(whole, None, 0)),
    )


@lru_cache(maxsize=512)
def _rows_of_share(share: RankShare, whole: RankShare | None) -> tuple[ParameterRow, ...]:
    """The rows of `share`, whose parameters `whole` has unsharded. A search asks for them again for each micro-batch size
    and each way to recompute."""
    shapes = {} if whole is None else dict(_named(whole))
    return tuple(
        ParameterRow(module=module, name=name, shape=shapes.get((module, name), shape), rank_shape=shape)
        for (module, name), shape in _named(share)
    )


def _named(share: RankShare) -> Iterator[_Named]:
    from peakcast.models.ledger.megatron.buffers import owned_parameters

    for chunk in owned_parameters(share):
        yield from (((parameter.module, parameter.name), parameter.shape) for parameter in chunk)


@lru_cache(maxsize=64)
def _huggingface_rows(architecture: Architecture, tuning: Finetuning, shards: int) -> tuple[ParameterRow, ...]:
    return tuple(
        ParameterRow(module=module, name=name, shape=shape, rank_shape=shape, shards=shards)
        for (module, name), shape in _huggingface(architecture, tuning)
    )


def _huggingface(architecture: Architecture, tuning: Finetuning) -> Iterator[_Named]:
    places = [("embedding", embedding_parameters(architecture))]
    places += [(f"layers.{i}", layer_parameters(architecture, i)) for i in range(architecture.num_layers)]
    places += [("head", head_parameters(architecture))]
    for module, tensors in places:
        for tensor in tensors:
            yield (module, tensor.name), tensor.shape
            leaf = tensor.name.removesuffix(".weight")
            adaptable = len(tensor.shape) == 2 and tensor.role in ("attention", "mlp")
            if tuning.method != "full" and adaptable and is_adapter_target(leaf, tuning, architecture):
                matrix = matrix_of(tuning, leaf, tensor.shape, int(module.rpartition(".")[2]))
                for made in METHODS[tuning.method].on_matrix(matrix):
                    yield (module, f"{leaf}.{made.name}"), made.shape
    for made in network_tensors(architecture, tuning):
        yield (NETWORK, made.name), made.shape
