"""Which tensor each gradient is of that a block's backward makes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from peakcast.core.units import round_up
from peakcast.models.allocator.rounding import MIN_BLOCK_BYTES
from peakcast.models.ledger.layouts.base import StoredTensor
from peakcast.models.ledger.layouts.module_tree import BIAS, LM_HEAD, SUFFIXES, WEIGHT, ModulePath, module_of
from peakcast.models.ledger.tape.template import Template


def tensors_of_gradients(
    template: Template, gradients: Iterable[int], tensors: Sequence[StoredTensor], element_bytes: int
) -> dict[int, int]:
    """By index of a gradient in `template`: which of `tensors`, those of the block, it is the gradient of. A gradient of
    something else, such as a table that the embedding has, or of only a part of a tensor, is left out. `gradients`: their
    indices in the order in which backward makes them."""
    parameters = dict(zip(template.gradient_columns.tolist(), template.parameters, strict=True))
    left = [(place, (_of_any(tensor.path), _last(tensor.name)), tensor) for place, tensor in enumerate(tensors)]
    found: dict[int, int] = {}
    for index in gradients:
        name, size = parameters[index], int(template.num_bytes[index])
        parameter = _of_any(module_of(name)), _last(name)
        own = [one for one in left if one[1] == parameter and not (one[2].exceeds_matrix and size < one[2].numel)]
        named = (one for one in own if one[2].name == name)
        sized = (one for one in own if round_up(one[2].numel * element_bytes, MIN_BLOCK_BYTES) == size)
        if (taken := next(named, None) or next(sized, None)) is not None:
            found[index] = taken[0]
            left.remove(taken)
    return found


def lm_head_gradients(template: Template) -> list[int]:
    """Indices of the gradients of the lm_head's matrix that the block's backward makes: one, or none. Where the token
    table is the lm_head's matrix too, this is the lm_head's part of the table's gradient."""
    parameters = zip(template.gradient_columns.tolist(), template.parameters, strict=True)
    return [index for index, name in parameters if module_of(name) == LM_HEAD and _last(name) == WEIGHT]


def larger_than_their_bias(template: Template) -> set[int]:
    """Indices of the weights' gradients that are larger than the gradient of the same module's bias, as a Linear's are; a
    norm's weight is as large as its bias."""
    gradients = [
        (index, module_of(name), _last(name), int(template.num_bytes[index]))
        for index, name in zip(template.gradient_columns.tolist(), template.parameters, strict=True)
    ]
    biases = {module: size for _, module, kind, size in gradients if kind == BIAS}
    return {index for index, module, kind, size in gradients if kind == WEIGHT and biases.get(module, size) < size}


def _of_any(path: ModulePath) -> ModulePath:
    """The path without numbers: a gradient in the ledger's block does not name the expert that it belongs to."""
    return ModulePath(tuple(name for name in path.names if not name.isdecimal()))


def _last(name: str) -> str:
    """Whether a tensor is its module's weight or its bias. An adapter's matrices are stored without either name."""
    last = name.rpartition(".")[2]
    return last if last in SUFFIXES else WEIGHT
