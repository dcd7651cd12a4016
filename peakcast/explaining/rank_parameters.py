"""The parameters of one rank with their shapes in the whole model and on the rank."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING, NamedTuple

from peakcast.answers.explanation import ParameterRow
from peakcast.core.errors import SpecError
from peakcast.jobs.architecture import Architecture
from peakcast.jobs.spec import Finetuning, Parallelism, TrainingJob
from peakcast.models.ledger.huggingface.blocks.adapter_tensors import NETWORK, network_tensors
from peakcast.models.ledger.huggingface.blocks.builder import is_adapter_target
from peakcast.models.ledger.layouts.module_tree import module_of
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
        return tuple(
            ParameterRow(
                module=tensor.module,
                name=tensor.name,
                shape=tensor.shape,
                rank_shape=tensor.shape,
                shards=shards,
                is_trained_adapter=tensor.trains and module_of(tensor.name).is_adapter,
            )
            for tensor in recorded_parameters(job, recipe)
        )
    return _huggingface_rows(trained_network(job), job.finetuning, shards)


class _Described(NamedTuple):
    """A parameter by its module and name, with its shape."""

    key: tuple[str, str]
    shape: tuple[int, ...]
    is_trained_adapter: bool = False


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
    shapes = {} if whole is None else {tensor.key: tensor.shape for tensor in _megatron(whole)}
    return tuple(
        ParameterRow(
            module=key[0], name=key[1], shape=shapes.get(key, shape), rank_shape=shape, is_trained_adapter=trained
        )
        for key, shape, trained in _megatron(share)
    )


def _megatron(share: RankShare) -> Iterator[_Described]:
    from peakcast.models.ledger.megatron.buffers import owned_parameters

    for chunk in owned_parameters(share):
        for parameter in chunk:
            yield _Described((parameter.module, parameter.name), parameter.shape, parameter.adapter)


@lru_cache(maxsize=64)
def _huggingface_rows(architecture: Architecture, tuning: Finetuning, shards: int) -> tuple[ParameterRow, ...]:
    return tuple(
        ParameterRow(
            module=module, name=name, shape=shape, rank_shape=shape, shards=shards, is_trained_adapter=is_trained_adapter
        )
        for (module, name), shape, is_trained_adapter in _huggingface(architecture, tuning)
    )


def _huggingface(architecture: Architecture, tuning: Finetuning) -> Iterator[_Described]:
    places = [("embedding", embedding_parameters(architecture))]
    places += [(f"layers.{i}", layer_parameters(architecture, i)) for i in range(architecture.num_layers)]
    places += [("head", head_parameters(architecture))]
    for module, tensors in places:
        for tensor in tensors:
            yield _Described((module, tensor.name), tensor.shape)
            leaf = tensor.name.removesuffix(".weight")
            adaptable = len(tensor.shape) == 2 and tensor.role in ("attention", "mlp")
            if tuning.method != "full" and adaptable and is_adapter_target(leaf, tuning, architecture):
                matrix = matrix_of(tuning, leaf, tensor.shape, int(module.rpartition(".")[2]))
                for made in METHODS[tuning.method].on_matrix(matrix):
                    yield _Described((module, f"{leaf}.{made.name}"), made.shape, made.trains)
    for made in network_tensors(architecture, tuning):
        yield _Described((NETWORK, made.name), made.shape, made.trains)
