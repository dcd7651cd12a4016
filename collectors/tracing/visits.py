"""Which modules a step enters and leaves, in order. ZeRO-3 gathers weights module by module in this order.

In forward, hooks see it. Backward enters a module when it reaches a node that was made before the module was left, and
leaves the module when it reaches a node that was made before the module was entered. DeepSpeed attaches nodes of its own to
a module's results and arguments (DeepSpeed 0.19.8 `runtime/zero/parameter_offload.py`), which would change the graph here.
As in DeepSpeed, results and arguments without a gradient have no such node, nor have keyword arguments, and then nothing
shows that the module is done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_iter

FORWARD, AGAIN, BACKWARD = "forward", "again", "backward"
"""What is running; "again" is the forward of a recomputation."""


@dataclass(frozen=True, slots=True)
class PlacedVisit:
    """A module of `place` is entered or left before the operation `instant`."""

    runs: str
    enters: bool
    module: str
    instant: int
    micro_batch: int
    place: int


@dataclass(frozen=True, slots=True)
class _Passed:
    """A module was entered or left in forward when autograd had made `nodes` nodes; backward will leave or enter it
    there."""

    nodes: int
    enters: bool
    """Whether backward enters the module there."""
    module: str
    micro_batch: int
    place: int


class Visits:
    """Which modules ran, in which order, and which parameters each of them read.

    `seen`: the visits so far. `weights`: module -> names of the parameters that it reads: its own, and those of other
    modules that were read while no module inside it ran (DeepSpeed's `register_external_parameter`)."""

    def __init__(self) -> None:
        self.seen: list[PlacedVisit] = []
        self.weights: dict[str, dict[str, None]] = {}
        self.first_read: dict[str, int] = {}
        """Parameter -> the place where it was first read."""
        self.micro_batch, self.place = -1, 0
        """The micro-batch and the place that are running."""
        self.graph = False
        """Whether backward runs the nodes that a recomputation makes."""
        self._passed: list[_Passed] = []
        self._running: list[str] = []

    def watch(self, model: torch.nn.Module) -> Callable[[], None]:
        """Watch which module reads which parameter. Returns a function that ends it."""
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        watched = []
        for name, part in model.named_modules():
            own = {key: names[id(one)] for key, one in part._parameters.items() if one is not None}
            if own:
                self.weights[name] = dict.fromkeys(own.values())
                watched.append((part, part._parameters))
                part._parameters = _Read(part._parameters, own, self._read)

        def end() -> None:
            for part, parameters in watched:
                part._parameters = parameters

        return end

    def _read(self, weight: str) -> None:
        if self._running:
            self.first_read.setdefault(weight, self.place)
            self.weights.setdefault(self._running[-1], {}).setdefault(weight)

    def enter(self, module: str, arguments: Any, now: int, again: bool) -> None:
        """A module begins to run; `again`: as a recomputation in backward."""
        self._running.append(module)
        self.seen.append(PlacedVisit(AGAIN if again else FORWARD, True, module, now, self.micro_batch, self.place))
        if (self.graph or not again) and _has_gradient(arguments):
            self._pass(False, module)

    def leave(self, module: str, results: Any, now: int, again: bool) -> None:
        """A module has run; it has no result if a recomputation stopped inside it."""
        self._running.pop()
        if results is None:
            return
        self.seen.append(PlacedVisit(AGAIN if again else FORWARD, False, module, now, self.micro_batch, self.place))
        if (self.graph or not again) and _has_gradient(tree_iter(results)):
            self._pass(True, module)

    def _pass(self, enters: bool, module: str) -> None:
        nodes = torch._C._autograd._get_sequence_nr()
        self._passed.append(_Passed(nodes, enters, module, self.micro_batch, self.place))

    def backward_at(self, node: int, now: int) -> None:
        """Backward is about to run node number `node`."""
        while self._passed and self._passed[-1].nodes > node:
            one = self._passed.pop()
            self.seen.append(PlacedVisit(BACKWARD, one.enters, one.module, now, one.micro_batch, one.place))

    def begin(self, micro_batch: int) -> None:
        """A new forward begins; nodes that backward has not reached will never be reached."""
        self.micro_batch, self.place = micro_batch, 0
        self._passed.clear()
        self._running.clear()


class _Read(dict[str, Any]):
    """A module's parameters; reading one is reported. `names`: their names in the network."""

    def __init__(self, parameters: dict[str, Any], names: dict[str, str], told: Callable[[str], None]) -> None:
        super().__init__(parameters)
        self._names, self._told = names, told

    def __getitem__(self, key: str) -> Any:
        if key in self._names:
            self._told(self._names[key])
        return super().__getitem__(key)


def _has_gradient(values: Iterable[Any]) -> bool:
    return torch.is_grad_enabled() and any(isinstance(one, torch.Tensor) and one.requires_grad for one in values)
