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
) -> dict[int, StoredTensor]:
    """By index of a gradient in `template`: the tensor of `tensors`, those of the block, that it is the gradient of. A
    gradient of something else, such as a table that the embedding has, or of only a part of a tensor, is left out.
    `gradients`: their indices in the order in which backward makes them."""
    modules, left = ParameterModules(tensors, template.backward_labels), {tensor.name: tensor for tensor in tensors}
    found: dict[int, StoredTensor] = {}
    for index in gradients:
        name, size = template.names[index].removesuffix(GRADIENT), int(template.num_bytes[index])
        path = module_of(name)
        fitting = [t for t in left.values() if round_up(t.numel * element_bytes, MIN_BLOCK_BYTES) == size]
        of_module = (t for t in fitting if t in modules.tensors(path) and _last(t.name) == _last(name))
        tensor = left.get(name) or next(of_module, None)
        if tensor is None and path not in modules:  # compiled graphs have names of their own, and keep the order
            tensor = fitting[-1] if fitting else None
        if tensor is not None:
            found[index] = left.pop(tensor.name)
    return found


def _last(name: str) -> str:
    """Whether a tensor is its module's weight or its bias. An adapter's matrices are stored without either name."""
    last = name.rpartition(".")[2]
    return last if last in SUFFIXES else SUFFIXES[0]
