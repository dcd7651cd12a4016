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
from peakcast.models.recipes.walk import WalkedParameter
from peakcast.timelines.places import block_name


def with_recorded_network(job: TrainingJob, recipe: Recipe) -> TrainingJob:
    """The job, with what the recipe knows of its network added."""
    if job.architecture.kind != "undescribed":
        return job
    return job.replace(architecture=replace(job.architecture, tie_word_embeddings=recipe.tied))


def recorded_parameters(job: TrainingJob, recipe: Recipe) -> tuple[StoredTensor, ...]:
    """Every tensor of the network as a rank stores it, in the order of the modules."""
    found: dict[str, list[WalkedParameter]] = {}
    for weight in recipe.walk.parameters:
        found.setdefault(weight.module, []).append(weight)
    deep = recipe.deep()
    before, after = recipe.walk.num_places, deep.num_places
    order = [(block_name(place, after), block_name(source, before)) for place, source in enumerate(deep.sources.tolist())]
    last = {BlockKind.LAYER: 1, BlockKind.HEAD: 2}  # after the embedding and what is between layers
    order.sort(key=lambda names: last.get(block_of(names[0]), 0))
    stored, used = (int(DTYPE_BYTES[one]) for one in (job.precision.parameters, gathered_dtype(job)))
    adapters, mixes = int(DTYPE_BYTES[adapter_dtype(job)]), mixes_precision(job)
    tensors = []
    for module, source in order:
        for _, name, shape, size, trains in found.get(source, []):
            own = stored if size == used else size  # what the library keeps in fp32 stays in fp32
            if module_of(name).is_adapter:
                own = adapters
            gathered = used if mixes and own > 1 else own  # packed bytes are not cast
            tensors.append(StoredTensor(name, module, shape, own, gathered, trains, decays=is_decayed(name, shape)))
    return tuple(tensors)
