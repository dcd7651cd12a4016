"""A tracer that also finds the block of the network to which each operation belongs, forward and backward.

A network's forward is cut at the beginning and end of each block (the layers in a `ModuleList`): gap, block, gap, block,
..., gap. Places 0, 1, 2, ... are these in the order in which they run; odd ones are blocks. Backward visits the same places
from the last to the first. An operation belongs to the place in whose forward its autograd node was made, which the node's
sequence number tells; a recomputation belongs to the block that it recomputes.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch.nn.modules import module as hooks
from torch.utils._pytree import tree_leaves

from peakcast.collectors.tracing.tracer import Tracer
from peakcast.collectors.tracing.visits import Visits
from peakcast.timelines.timeline import Phase

WRAPPED = "_checkpoint_wrapped_module"
"""The name of what torch's wrapper for checkpoints wraps (torch/distributed/algorithms/_checkpoint/
checkpoint_wrapper.py)."""


@dataclass(frozen=True, slots=True)
class Cut:
    """From the operation `instant` on, the step is at `place` of `micro_batch`, forward or backward."""

    instant: int
    micro_batch: int
    place: int
    backward: bool


class StretchTracer(Tracer):
    """A `Tracer` that also knows the stretches. `cuts` are their beginnings; `raw_bytes` are requested sizes, not
    rounded."""

    def __init__(self) -> None:
        super().__init__()
        self.cuts: list[Cut] = []
        self.raw_bytes: dict[int, int] = {}
        """Number of the entry -> bytes."""
        self.gradients: dict[int, str] = {}
        """Number of an entry that autograd gives to a parameter as its gradient -> the parameter's name."""
        self.handed_on: dict[int, int] = {}
        """Number of such an entry -> the operation before which this happens."""
        self.visits = Visits()
        self.returned: tuple[int, ...] = ()
        """Numbers of the entries that the network's last forward has returned; its loss is none of them."""
        self.first_place: dict[str, int] = {}
        """Module -> the place where it first ran."""
        self._blocks: dict[int, str] = {}
        self._parameters: dict[int, str] = {}
        self._made_from: list[int] = []
        self._made_at: list[int] = []
        self._micro_batch = -1
        self._nodes_made = 0
        """The sequence number after all nodes that the current forward has made."""
        self._recomputing: int | None = None
        """The node that is recomputing a block."""
        self._again = False
        """Whether a block is being recomputed."""

    @contextmanager
    def following(self, model: torch.nn.Module) -> Iterator[None]:
        """A context in which the blocks of `model` are watched as they begin and end."""
        self._blocks = {id(part): name for name, part in blocks_of(model)}
        self._parameters = {id(parameter): name for name, parameter in model.named_parameters()}
        names = {id(part): name for name, part in model.named_modules()}
        before = hooks.register_module_forward_pre_hook(lambda part, args: self._begins(part, names, args))
        after = hooks.register_module_forward_hook(
            lambda part, _, results: self._ends(part, names, results), always_call=True
        )
        unwatch = self.visits.watch(model)
        try:
            yield
        finally:
            before.remove()
            after.remove()
            unwatch()

    def micro_batch_begins(self) -> None:
        """The forward of the next micro-batch begins."""
        self._micro_batch += 1
        self._made_from, self._made_at = [], []
        self.visits.begin(self._micro_batch)
        self._move(0, backward=False)

    def backward_begins(self) -> None:
        """The backward of the micro-batch begins."""
        self._recomputing, self._again, self._nodes_made = None, False, torch._C._autograd._get_sequence_nr()
        self._move(self.cuts[-1].place, backward=True)

    def _move(self, place: int, *, backward: bool) -> None:
        self.visits.place = place
        self.cuts.append(Cut(self.now, self._micro_batch, place, backward))
        if not backward:  # a reentrant checkpoint has made its node by the time that its block begins, without a graph
            before = place % 2 and not torch.is_grad_enabled()
            self._made_from.append(torch._C._autograd._get_sequence_nr() - before)
            self._made_at.append(place)

    def _begins(self, part: torch.nn.Module, names: dict[int, str], arguments: Any) -> None:
        if id(part) in self._blocks:
            if self.phase == Phase.BACKWARD:
                self._recompute(id(part))
            elif self.cuts and not self.cuts[-1].place % 2:
                self._move(self.cuts[-1].place + 1, backward=False)
        if self.cuts and id(part) in names:
            self.first_place.setdefault(names[id(part)], self.cuts[-1].place)
            self.visits.enter(names[id(part)], arguments, self.now, self._again)

    def _ends(self, part: torch.nn.Module, names: dict[int, str], results: Any) -> None:
        if self.cuts and id(part) in names:
            self.visits.leave(names[id(part)], results, self.now, self._again)
            if not names[id(part)]:
                self.returned = self._numbers_of(results)
        if id(part) not in self._blocks or not self.cuts:
            return
        self._again = False
        if self.phase != Phase.BACKWARD and self.cuts[-1].place % 2:
            self._move(self.cuts[-1].place + 1, backward=False)

    def _numbers_of(self, results: Any) -> tuple[int, ...]:
        """Numbers of the entries of all tensors in `results` that are more than one number."""
        tensors = [one for one in tree_leaves(results) if isinstance(one, torch.Tensor) and one.dim()]
        numbers = (self._alive.get(one.untyped_storage()._cdata) for one in tensors)
        return tuple(dict.fromkeys(number for number in numbers if number is not None))

    def _recompute(self, block: int) -> None:
        """A block is recomputed inside backward: what follows belongs to the block, whichever code caused it."""
        node = torch._C._current_autograd_node()
        self._recomputing = node._sequence_nr() if node is not None else None
        self._again = True
        place = self.first_place.get(self._blocks[block], 0)
        if place < self.cuts[-1].place:
            self._move(place, backward=True)
        if self._recomputing is not None:
            self.visits.backward_at(self._recomputing, self.now)
        # a checkpoint with use_reentrant goes backward through the nodes that are made now, another one throws them away
        self.visits.graph = type(node).__name__ == "CheckpointFunctionBackward"

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self.phase == Phase.BACKWARD and self.cuts and self.cuts[-1].backward:
            self._follow(torch._C._current_autograd_node(), func, args)
        return super().__torch_dispatch__(func, types, args, kwargs)

    def _follow(self, node: Any, func: Any, args: Any) -> None:
        """Move to the place where the backward node was made, never back to one that was left. Nodes made by a
        recomputation are younger than the forward."""
        variable = getattr(node, "variable", None)  # AccumulateGrad has one, and no place
        if variable is not None:
            self._accumulated(self._parameters.get(id(variable), ""), func, args)
            return
        number = node._sequence_nr() if node is not None else None
        if number is None or number == self._recomputing:
            return
        if number < self._nodes_made:
            place = self._made_at[max(0, bisect.bisect_right(self._made_from, number) - 1)]
            if place < self.cuts[-1].place:
                self._move(place, backward=True)
        self.visits.backward_at(number, self.now)

    def _accumulated(self, parameter: str, func: Any, args: Any) -> None:
        """Note the gradient that a parameter gets from backward, or to which it is added (torch
        `csrc/autograd/functions/accumulate_grad.h`): the last tensor that is read."""
        read = [one for one in args if isinstance(one, torch.Tensor)]
        if parameter and read and func in (torch.ops.aten.detach.default, torch.ops.aten.add_.Tensor):
            number = self._alive.get(read[-1].untyped_storage()._cdata)
            if number is not None and number not in self.gradients:
                self.gradients[number], self.handed_on[number] = parameter, self.now

    def _begin(self, storage: torch.UntypedStorage, instant: int) -> None:
        number = self._count
        super()._begin(storage, instant)
        if number in self._entries:
            self.raw_bytes[number] = int(storage.nbytes())


def blocks_of(model: torch.nn.Module) -> list[tuple[str, torch.nn.Module]]:
    """The blocks of a network by name: the parts with weights of its outermost lists of modules; without such lists, the
    parts of its outermost sequence of blocks of one class."""
    found: list[tuple[str, torch.nn.Module]] = []
    lists: list[str] = []
    for name, part in model.named_modules():
        if isinstance(part, torch.nn.ModuleList) and not any(name.startswith(f"{outer}.") for outer in lists):
            lists.append(name)
            found += [
                _inner(f"{name}.{index}", one) for index, one in enumerate(part) if any(True for _ in one.parameters())
            ]
    if not found:
        sequences = ((name, part) for name, part in model.named_modules() if isinstance(part, torch.nn.Sequential))
        of_blocks = ((name, part) for name, part in sequences if _are_blocks(list(part)))
        for name, part in islice(of_blocks, 1):
            found = [(f"{name}.{index}".lstrip("."), one) for index, one in enumerate(part)]
    return found


def _inner(name: str, part: torch.nn.Module) -> tuple[str, torch.nn.Module]:
    """A block inside torch's wrapper for checkpoints, which recomputes what it wraps; else the block itself."""
    wrapped = getattr(part, WRAPPED, None)
    return (f"{name}.{WRAPPED}", wrapped) if isinstance(wrapped, torch.nn.Module) else (name, part)


def _are_blocks(parts: list[torch.nn.Module]) -> bool:
    """Whether modules that run one after the other are several modules of one class, with submodules."""
    return len(parts) > 1 and len({type(one) for one in parts}) == 1 and any(True for _ in parts[0].children())
