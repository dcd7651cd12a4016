"""The modules of a recorded network under ZeRO-3: the turns in which they were entered and left."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from peakcast.models.ledger.layouts.base import StoredTensor
from peakcast.models.ledger.layouts.module_tree import BlockKind, block_of
from peakcast.models.ledger.layouts.zero3_hooks import BlockOperations, Module, ModuleTurn, PassDirection, TurnPart
from peakcast.models.recipes.depth import Deep, deep_names
from peakcast.models.recipes.walk import Visit, Walk


class RecordedModules:
    """Replaces `layouts.zero3_modules.Zero3Modules` for a recorded network. `names`: the name of each place of the deep
    network."""

    tied = False
    """False: the gradients of a table that both ends share are recorded as their sum."""
    leaf = ""
    between_stacks = False
    unread: frozenset[StoredTensor] = frozenset()

    def __init__(self, walk: Walk, deep: Deep, names: Sequence[str], tensors: Sequence[StoredTensor]) -> None:
        self._walk = walk
        self._places = {name: place for place, name in enumerate(names)}
        self._sources = deep.sources.tolist()
        self._weights = {(t.module, t.name): t for t in tensors}
        for short, there in deep_names(walk, deep).items():  # what is between blocks has another number in the short walk
            if block_of(short) is not BlockKind.LAYER:
                self._weights |= {(short, t.name): t for t in tensors if t.module == there}
        """By block and name."""
        self.tensors: dict[str, list[StoredTensor]] = {name: [] for name in names}
        """The tensors of each block."""
        for tensor in tensors:
            self.tensors[tensor.module].append(tensor)

    def turns(self, operations: BlockOperations) -> list[ModuleTurn]:
        """The turns of a block, forward or backward, including recomputations in between."""
        place, backward = self._places[operations.block], operations.direction is PassDirection.BACKWARD
        source = self._sources[place]
        visits = self._walk.visits[2 * self._walk.num_places - 1 - source if backward else source]
        turns = recorded_turns(f"layers.{place // 2}", visits, self._weights)
        if turns and source == 0 and not backward:
            turns[0] = turns[0]._replace(starts=True)
        return [turn.later(operations.begins) for turn in turns]


def recorded_turns(
    block: str, visits: Sequence[Visit], weights: Mapping[tuple[str, str], StoredTensor]
) -> list[ModuleTurn]:
    """The turns of modules at the place of `block`, or before it. A module that has weights and contains other modules
    keeps its weights until it is left."""
    left: dict[int, int] = {}
    entered: dict[tuple[str, str], list[int]] = {}
    for index, visit in enumerate(visits):
        open_ones = entered.setdefault((visit.runs, visit.module), [])
        if visit.enters:
            open_ones.append(index)
        elif open_ones:
            left[open_ones.pop()] = index
    around: dict[int, ModuleTurn] = {}
    """Second turns of such modules, by the index of the visit that ends them."""
    found = []
    for index, visit in enumerate(visits):
        if not visit.enters:
            found += [around[index]] if index in around else []
            continue
        keys = ((of or block, name) for of, name in visit.weights)
        module = Module(f"{block} {visit.module}", tuple(weights[key] for key in keys if key in weights))
        begins, until = visit.instant, left.get(index)
        direction = PassDirection.RECOMPUTATION if visit.runs == "again" else PassDirection.FORWARD
        part = TurnPart.UNRELEASED if until is None else TurnPart.WHOLE
        turn = ModuleTurn(module, begins, begins + 1, part, direction)
        if until is not None and not any(one.enters for one in visits[index:until][1:]):
            turn = turn._replace(ends=max(visits[until].instant, begins + 1))
        elif until is not None and module.tensors:
            turn = turn._replace(part=TurnPart.BEGINS)
            ends = max(visits[until].instant, begins + 1)
            around[until] = ModuleTurn(module, ends - 1, ends, TurnPart.ENDS)
        found.append(turn)
    return found
