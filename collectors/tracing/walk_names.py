"""Names in a walk: of tensors, modules and the places to which they belong."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

from peakcast.collectors.tracing.fsdp_wrapping import ModuleGroup
from peakcast.collectors.tracing.stretches import StretchTracer
from peakcast.timelines.places import block_name

PEFT = "base_model.model."
"""Prefix that peft adds to every name of a network."""


class WalkNames:
    """Names of tensors and of the places to which they belong; within a block, relative to the block."""

    def __init__(self, tracer: StretchTracer, weights: Sequence[tuple[str, Any]], last_place: int) -> None:
        self._first, self._last = tracer.first_place, last_place
        self._read = {name.removeprefix(PEFT): place for name, place in tracer.visits.first_read.items()}
        ran = ((self._first[name], name) for name in set(tracer._blocks.values()) if name in self._first)
        self._blocks = [name.removeprefix(PEFT) for _, name in sorted(ran)]
        self._prefix = _common_prefix([name.removeprefix(PEFT) for name, _ in weights])

    def _split(self, name: str) -> tuple[int | None, str]:
        """(the block of a dotted name, the rest of the name without what peft adds around a module and its adapters)."""
        name = name.removeprefix(PEFT)
        for index, block in enumerate(self._blocks):
            if name == block or name.startswith(f"{block}."):
                return index, _plain(name[len(block) + 1 :])
        return None, _plain(name.removeprefix(self._prefix))

    def place_of(self, name: str) -> int:
        block = self._split(name)[0]
        return 0 if block is None else 2 * block + 1

    def of_module(self, module: str) -> str:
        return self._split(module)[1]

    def of_weight(self, name: str) -> str:
        """The name of a weight or a buffer."""
        return self._split(name)[1]

    def as_it_is(self, module: str) -> str:
        """A module's name within its block, including what peft adds."""
        name = module.removeprefix(PEFT)
        block = self._split(module)[0]
        return name.removeprefix(self._blocks[block]).lstrip(".") if block is not None else name

    def owner(self, weight: str, place: int) -> list[str]:
        """[the module of a weight, or "" for the block that is at `place` or after it; the weight's name there]."""
        block, own = self._split(weight)
        if block is None:
            return [self._end(weight), own]
        return ["" if place // 2 == block else f"layers.{block}", own]

    def parameters(self, weights: Sequence[tuple[str, Any]], updated: Set[str]) -> list[list[Any]]:
        """[module, name, shape, bytes of an element, whether it is trained], in the order of the network's modules. A
        weight on which no loss depends gets no gradient, and optimizers skip it."""
        found = []
        for name, weight in weights:
            block, own = self._split(name)
            module = f"layers.{block}" if block is not None else self._end(name)
            found.append([module, own, list(weight.shape), weight.element_size(), name in updated])
        return found

    def groups(self, groups: Sequence[ModuleGroup], weights: Sequence[tuple[str, Any]], num_places: int) -> list[list[Any]]:
        """[role, the block in which the first of its modules begins, the weights as their modules and names] of each."""
        names, found = {id(weight): name for name, weight in weights}, []
        for role, modules, own in groups:
            place = min((self._first[module] for module in modules if module in self._first), default=0)
            pairs = [self.owner(names[id(weight)], place) for weight in own if id(weight) in names]
            found.append([role, block_name(place, num_places), pairs])
        return found

    def _end(self, name: str) -> str:
        """Whether a weight outside of the blocks is first used before or after them."""
        module = name
        while module:
            module = module.rpartition(".")[0]
            if module in self._first and (module or "." not in name):
                break
        # if its module never runs, another one reads it: a fused loss reads the lm_head's
        place = self._first[module] if module else self._read.get(name, 0)
        return block_name(place, self._last + 1)


def _plain(name: str) -> str:
    """A name inside a block without peft's parts: an adapter's matrices have the name of what they adapt."""
    return name.replace(".base_layer", "").replace(".default", "")


def _common_prefix(names: Sequence[str]) -> str:
    """The prefix of most names, which is the network's base model, such as "model."."""
    heads = [name.split(".")[0] + "." for name in names]
    return max(set(heads), key=heads.count, default="")
