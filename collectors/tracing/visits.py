"""Which modules a step enters and leaves, in order: what ZeRO-3, which fetches weights module by module, goes by.

Forward that is what hooks see. Backward enters a module when it comes to a node that was made before the module was left,
and leaves it when it comes to one made before the module was entered. DeepSpeed hangs nodes of its own on a module's
results and arguments (DeepSpeed 0.19.8 `runtime/zero/parameter_offload.py`), which would change the graph here; as there,
results and arguments without a gradient have none, nor have arguments by keyword, and nothing says then that it is done.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._pytree import tree_iter

FORWARD, AGAIN, BACKWARD = "forward", "again", "backward"
"""What runs: forward once more is what checkpointing does."""


@dataclass(frozen=True, slots=True)
class Visit:
    """A module of `place` is entered or left before the operation `instant`."""

    runs: str
    enters: bool
    module: str
    instant: int
    micro_batch: int
    place: int


@dataclass(frozen=True, slots=True)
class _Passed:
    """A module was entered or left when autograd had made `nodes` nodes, so that backward will leave or enter it."""

    nodes: int
    enters: bool
    """Whether backward enters it there."""
    module: str
    micro_batch: int
    place: int


class Visits:
    """`seen`: the visits so far. `weights`: by module, the names of the parameters that it reads: its own, and those of
    others that it was seen to read while it was the innermost one that ran (`register_external_parameter`)."""

    def __init__(self) -> None:
        self.seen: list[Visit] = []
        self.weights: dict[str, dict[str, None]] = {}
        self.first_read: dict[str, int] = {}
        """By parameter, the place where it was first read."""
        self.micro_batch, self.place = -1, 0
        """What is running."""
        self.graph = False
        """Whether backward runs the nodes that are made while a block runs again."""
        self._passed: list[_Passed] = []
        self._running: list[str] = []

    def watch(self, model: torch.nn.Module) -> Callable[[], None]:
        """See which module reads which parameter; returns what ends it."""
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
        """A module begins to run; `again`: once more, in backward."""
        self._running.append(module)
        self.seen.append(Visit(AGAIN if again else FORWARD, True, module, now, self.micro_batch, self.place))
        if (self.graph or not again) and _has_gradient(arguments):
            self._pass(False, module)

    def leave(self, module: str, results: Any, now: int, again: bool) -> None:
        """It is done; without a result where a recomputation has stopped inside it."""
        self._running.pop()
        if results is None:
            return
        self.seen.append(Visit(AGAIN if again else FORWARD, False, module, now, self.micro_batch, self.place))
        if (self.graph or not again) and _has_gradient(tree_iter(results)):
            self._pass(True, module)

    def _pass(self, enters: bool, module: str) -> None:
        nodes = torch._C._autograd._get_sequence_nr()
        self._passed.append(_Passed(nodes, enters, module, self.micro_batch, self.place))

    def backward_at(self, node: int, now: int) -> None:
        """Backward is about to run the `node`-th node."""
        while self._passed and self._passed[-1].nodes > node:
            one = self._passed.pop()
            self.seen.append(Visit(BACKWARD, one.enters, one.module, now, one.micro_batch, one.place))

    def begin(self, micro_batch: int) -> None:
        """A new forward begins: what backward has not come to, it never will."""
        self.micro_batch, self.place = micro_batch, 0
        self._passed.clear()
        self._running.clear()


class _Read(dict[str, Any]):
    """A module's parameters, whose reading is told. `names`: theirs in the network."""

    def __init__(self, parameters: dict[str, Any], names: dict[str, str], told: Callable[[str], None]) -> None:
        super().__init__(parameters)
        self._names, self._told = names, told

    def __getitem__(self, key: str) -> Any:
        if key in self._names:
            self._told(self._names[key])
        return super().__getitem__(key)


def _has_gradient(values: Iterable[Any]) -> bool:
    return torch.is_grad_enabled() and any(isinstance(one, torch.Tensor) and one.requires_grad for one in values)
