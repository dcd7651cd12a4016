"""Finds the tensor of each gradient that a block's backward makes."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Sequence

from peakcast.models.ledger.layouts.base import StoredTensor
from peakcast.models.ledger.layouts.module_tree import BIAS, LM_HEAD, SUFFIXES, WEIGHT, module_of
from peakcast.models.ledger.tape.template import Template


def tensors_of_gradients(template: Template, gradients: Iterable[int], tensors: Sequence[StoredTensor]) -> dict[int, int]:
    """Index of a gradient in `template` -> index of its tensor in `tensors`, those of the block. Two kinds of gradients are
    left out: those of other blocks' tensors, such as the embedding's table, and those of only a part of a tensor.
    `gradients`: the indices in the order in which backward makes the gradients. Several gradients of one name belong to the
    tensors of that name, in order."""
    parameters = dict(zip(template.gradient_columns.tolist(), template.parameters, strict=True))
    places: defaultdict[str, deque[int]] = defaultdict(deque)
    for place, tensor in enumerate(tensors):
        places[tensor.name_in_block or tensor.name].append(place)
    found: dict[int, int] = {}
    for index in gradients:
        left = places[parameters[index]]
        if left and not _is_part(int(template.num_bytes[index]), tensors[left[0]]):
            found[index] = left.popleft()
    return found


def _is_part(num_bytes: int, tensor: StoredTensor) -> bool:
    """Whether a gradient of `num_bytes` is that of one of the matrices that are stacked in `tensor`."""
    return tensor.exceeds_matrix and num_bytes < tensor.numel


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


def _last(name: str) -> str:
    """Whether a tensor is its module's weight or its bias. An adapter's matrices are stored without either name."""
    last = name.rpartition(".")[2]
    return last if last in SUFFIXES else WEIGHT
