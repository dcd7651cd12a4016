"""Which tensor each gradient is of that a block's backward makes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from peakcast.core.units import round_up
from peakcast.models.allocator.sizes import MIN_BLOCK_BYTES
from peakcast.models.ledger.layouts.base import StoredTensor
from peakcast.models.ledger.layouts.module_tree import SUFFIXES, module_of
from peakcast.models.ledger.layouts.parameter_modules import ParameterModules
from peakcast.models.ledger.tape.template import Template

GRADIENT = ".grad"


def tensors_of_gradients(
    template: Template, gradients: Iterable[int], tensors: Sequence[StoredTensor], element_bytes: int
) -> dict[int, int]:
    """By index of a gradient in `template`: which of `tensors`, those of the block, it is the gradient of. A gradient of
    something else, such as a table that the embedding has, or of only a part of a tensor, is left out. `gradients`: their
    indices in the order in which backward makes them."""
    modules, left = ParameterModules(tensors, template.backward_labels), list(enumerate(tensors))
    found: dict[int, int] = {}
    for index in gradients:
        name = template.names[index].removesuffix(GRADIENT)
        one = next((one for one in left if one[1].name == name), None)
        if one is None:
            size = int(template.num_bytes[index])
            fitting = [one for one in left if round_up(one[1].numel * element_bytes, MIN_BLOCK_BYTES) == size]
            one = _named_otherwise(name, modules, fitting)
        if one is not None:
            found[index] = one[0]
            left.remove(one)
    return found


def _named_otherwise(
    name: str, modules: ParameterModules, fitting: Sequence[tuple[int, StoredTensor]]
) -> tuple[int, StoredTensor] | None:
    """Which of the tensors that are as large as a gradient it belongs to, if no tensor has its name: one of its module or,
    in compiled graphs, which have names of their own, the last of the order that they keep."""
    path = module_of(name)
    if path in modules:
        return next((one for one in fitting if one[1] in modules.tensors(path) and _last(one[1].name) == _last(name)), None)
    return fitting[-1] if fitting else None


def _last(name: str) -> str:
    """Whether a tensor is its module's weight or its bias. An adapter's matrices are stored without either name."""
    last = name.rpartition(".")[2]
    return last if last in SUFFIXES else SUFFIXES[0]
