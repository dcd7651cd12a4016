"""Runs few of the many forwards of an evaluation. Those after the first ones are like them: batches of the same shape, or
tokens that a loop of the script's own generates one by one.

What the others return is made of what those that ran have returned, and of the numbers in their inputs, which are sizes of
tensors and whole numbers: each number in an output was the same in every forward, or differed from one in the inputs by
the same amount.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree

FEW = 8
"""Number of forwards from whose sizes those of others follow."""
GROWTH = 1.125
"""A forward runs if its inputs have so many times the elements of the largest that ran: a sequence that grows token by
token is seen at lengths that are at most this far apart."""
PLAIN = (torch.dtype, torch.device, str, int, float, type(None))
"""Inputs, beside tensors, that hold nothing which a forward could change."""


@dataclasses.dataclass(frozen=True)
class _FromNumbers:
    """A tensor or a whole number of an output: `places` of its sizes, or of itself, among all numbers of the output."""

    places: range
    dtype: torch.dtype | None = None
    device: torch.device | None = None

    def from_numbers(self, numbers: Sequence[int]) -> Any:
        """The tensor or number itself."""
        if self.dtype is None:
            return numbers[self.places.start]
        return torch.empty([numbers[place] for place in self.places], dtype=self.dtype, device=self.device)


class RepeatedForwards:
    """Takes the place of the `forward` of a `network` while it evaluates; `note` is called when one did not run."""

    def __init__(self, network: torch.nn.Module, evaluates: Callable[[], bool], note: Callable[[], None]) -> None:
        self._network, self._evaluates, self._note = network, evaluates, note
        self._own = network.__dict__.get("forward")
        self._forward: Callable[..., Any] = network.forward
        self._structure: Any = None
        """An output, with `_FromNumbers` in the place of tensors and whole numbers."""
        self._rules: list[dict[int | None, int]] = []
        """For each number of the output: place of a number of the inputs -> by how much it was more in every forward, and
        None -> what it was in every forward."""
        self._num_inputs = self._num_seen = self._largest = 0
        vars(network)["forward"] = self  # wrappers (Lightning's Fabric) hand what is set to the network in them

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        if not self._evaluates():
            self._leave()
            return self._forward(*arguments, **keywords)
        given, elements, plain = numbers_of((arguments, keywords))
        if plain and self._num_seen >= FEW and elements <= GROWTH * self._largest:
            numbers = self._following(given)
            if numbers is not None:
                self._note()
                return mapped(lambda one: one.from_numbers(numbers), self._structure, _FromNumbers)
        answer = self._forward(*arguments, **keywords)
        if plain:
            self._saw(given, answer)
        self._largest = max(self._largest, elements)
        return answer

    def _saw(self, given: list[int], answer: Any) -> None:
        """Keep the rules that hold in this forward too."""
        numbers: list[int] = []

        def made(one: Any) -> Any:
            if isinstance(one, bool):
                return one
            sizes, start = [one] if isinstance(one, int) else one.shape, len(numbers)
            numbers.extend(sizes)
            places = range(start, len(numbers))
            return _FromNumbers(places) if isinstance(one, int) else _FromNumbers(places, one.dtype, one.device)

        structure = mapped(made, answer, (torch.Tensor, int))
        if structure != self._structure or len(given) != self._num_inputs:
            self._structure, self._num_inputs, self._num_seen = structure, len(given), 0
            self._rules = [
                {None: number} | {place: number - other for place, other in enumerate(given)} for number in numbers
            ]
        for number, rules in zip(numbers, self._rules, strict=True):
            for place in [place for place, more in rules.items() if number != _by_rule(place, more, given)]:
                del rules[place]
        self._num_seen += 1

    def _following(self, given: list[int]) -> list[int] | None:
        """The numbers of the output as they follow from those of the inputs; None if they do not, or if rules that always
        held would give different ones now."""
        if len(given) != self._num_inputs:
            return None
        found = []
        for rules in self._rules:
            possible = {_by_rule(place, more, given) for place, more in rules.items()}
            if len(possible) != 1:
                return None
            found.append(possible.pop())
        return found

    def _leave(self) -> None:
        """Give the network its own forward back, unless something else has taken its place."""
        if self._network.__dict__.get("forward") is self:
            if self._own is None:
                del vars(self._network)["forward"]
            else:
                vars(self._network)["forward"] = self._own


def _by_rule(place: int | None, more: int, given: Sequence[int]) -> int:
    return more if place is None else given[place] + more


def numbers_of(given: Any) -> tuple[list[int], int, bool]:
    """All sizes of tensors and whole numbers in `given`, the number of its elements, and whether there is nothing beside
    them in it that a forward could change, such as a cache."""
    leaves: list[Any] = []
    mapped(leaves.append, given, object)
    tensors = [one for one in leaves if isinstance(one, torch.Tensor)]
    if any(tensor.is_nested for tensor in tensors) or not all(isinstance(one, (torch.Tensor, *PLAIN)) for one in leaves):
        return [], 0, False
    numbers: list[int] = []
    for one in leaves:
        if isinstance(one, torch.Tensor):
            numbers.extend(one.shape)
        elif isinstance(one, int):
            numbers.append(int(one))
    return numbers, sum(tensor.numel() for tensor in tensors), True


def mapped(function: Callable[[Any], Any], value: Any, kind: type | tuple[type, ...]) -> Any:
    """`value` with `function` applied to everything of `kind` in its containers and dataclasses."""

    def leaf(one: Any) -> Any:
        if dataclasses.is_dataclass(one) and not isinstance(one, (type, _FromNumbers)):
            made = copy.copy(one)
            for part in dataclasses.fields(one):
                object.__setattr__(made, part.name, mapped(function, getattr(one, part.name), kind))
            return made
        return function(one) if isinstance(one, kind) else one

    return pytree.tree_map(leaf, value)
