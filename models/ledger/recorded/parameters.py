"""The weights of a recorded network as a rank stores them."""

from __future__ import annotations

from dataclasses import replace

from peakcast.core.units import DTYPE_BYTES
from peakcast.jobs.conventions import adapter_dtype, mixes_precision
from peakcast.jobs.spec import TrainingJob
from peakcast.models.ledger.layouts import gathered_dtype
from peakcast.models.ledger.layouts.base import StoredTensor, is_decayed
from peakcast.models.ledger.layouts.module_tree import BlockKind, block_of, module_of
from peakcast.models.recipes.recipe import Recipe
from peakcast.timelines.places import block_name

_Sizes = tuple[tuple[int, ...], int, int, bool, bool]
"""Of a weight: its shape, bytes of an element and of a gathered one, whether it trains and whether it is decayed."""


def with_recorded_network(job: TrainingJob, recipe: Recipe) -> TrainingJob:
    """The job, with what the recipe knows of its network added."""
    if job.architecture.kind != "undescribed":
        return job
    return job.replace(architecture=replace(job.architecture, tie_word_embeddings=recipe.tied))


def recorded_parameters(job: TrainingJob, recipe: Recipe) -> tuple[StoredTensor, ...]:
    """Every tensor of the network as a rank stores it, in the order of the modules."""
    stored, used = (int(DTYPE_BYTES[one]) for one in (job.precision.parameters, gathered_dtype(job)))
    adapters, mixes = int(DTYPE_BYTES[adapter_dtype(job)]), mixes_precision(job)
    found: dict[str, list[tuple[str, _Sizes]]] = {}
    for module, name, shape, size, trains in recipe.walk.parameters:
        own = stored if size == used else size  # what the library keeps in fp32 stays in fp32
        if module_of(name).is_adapter:
            own = adapters
        gathered = used if mixes and own > 1 else own  # packed bytes are not cast
        found.setdefault(module, []).append((name, (shape, own, gathered, trains, is_decayed(name, shape))))
    deep = recipe.deep()
    before, after = recipe.walk.num_places, deep.num_places
    order = [(block_name(place, after), block_name(source, before)) for place, source in enumerate(deep.sources.tolist())]
    last = {BlockKind.LAYER: 1, BlockKind.HEAD: 2}  # after the embedding and what is between layers
    order.sort(key=lambda names: last.get(block_of(names[0]), 0))
    return tuple(StoredTensor(name, module, *own) for module, source in order for name, own in found.get(source, ()))
