"""Records walks of a script's own steps. A process runs the script up to its first batch. For each requested walk, a forked
copy of it goes on with batches of another size (`resizing.py`) and writes the walk of its second step.

A question is a file `walk-N.json` in the folder of the dry run, [layers, batch, length], where layers may be null, meaning
all; its answer is `walked-N.json`.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import torch

from peakcast.catalog import Device
from peakcast.collectors.dryrun.file_overlay import Overlay
from peakcast.collectors.dryrun.resizing import BatchShape, Resizing, outside_of
from peakcast.collectors.dryrun.session import ANSWERED, Session, end
from peakcast.collectors.dryrun.steps import ScriptSteps
from peakcast.collectors.tracing.stretches import Cut, StretchTracer, blocks_of
from peakcast.collectors.tracing.walks import mapping_of
from peakcast.core.errors import CollectorError
from peakcast.timelines.timeline import Category, Phase

POLL_SECONDS = 0.01
NUM_STEPS = 2
"""The second step begins with what the first has left in memory, as every later one does."""
AFTER = (int(Phase.GRADIENT_CLIPPING), int(Phase.OPTIMIZER_STEP))
"""Phases that are not part of a walk: layouts and optimizers are added without one."""
WRAPPERS = ("DistributedDataParallel", "FullyShardedDataParallel", "DeepSpeedEngine")


class WalkedSession(Session):
    """A dry run that answers questions for walks."""

    def __init__(self, question: Mapping[str, Any], overlay: Overlay) -> None:
        super().__init__(question, overlay)
        self._own = BatchShape(*question["walks"])
        self._asked = self._own

    def tracer(self, device: Device) -> StretchTracer:
        """A tracer that sees the network's blocks. It leaves out what kernels allocate for themselves, because that depends
        on the GPU."""
        return StretchTracer()

    def follow(self, *parts: Any) -> ScriptSteps:
        """As in `Session`, with the places in the network."""
        steps = WalkedSteps(*parts)
        steps.lengths.num_steps = NUM_STEPS
        self.mode.resizing = Resizing(self._own, self._serve, outside_of(steps.depth))
        return steps

    def _serve(self) -> BatchShape:
        """Answer questions forever; it only returns in a forked copy, which has its question."""
        folder = Path(self.question["folder"])
        number = 0
        while True:
            question = folder / f"walk-{number}.json"
            if not question.is_file():
                time.sleep(POLL_SECONDS)
                continue
            self.answer_file = folder / f"walked-{number}.json"
            child = os.fork()
            if child == 0:
                layers, size, length = json.loads(question.read_text(encoding="utf-8"))
                self._asked = BatchShape(size, length)
                assert isinstance(self.steps, WalkedSteps)
                self.steps.layers = layers
                return self._asked
            os.waitpid(child, 0)
            if not self.answer_file.is_file():
                self.write({"refused": "the script ended before its second step with it"})
            number += 1

    def finish(self) -> NoReturn:
        """Write the walk."""
        from torch.utils._python_dispatch import _disable_current_modes

        assert isinstance(self.steps, WalkedSteps)
        try:
            with _disable_current_modes():
                found = self.steps.walk(self._asked)
        except CollectorError as error:
            found = {"refused": str(error)}
        self.write(found)
        end(ANSWERED)

    def failed(self, error: BaseException) -> None:
        """Write the failure."""
        super().failed(error)
        self.write({"refused": f"it raised {' '.join(f'{type(error).__name__}: {error}'.split())[:300]}"})


class WalkedSteps(ScriptSteps):
    """`ScriptSteps` that reports micro-batches and, from the first optimizer step on, blocks to its tracer."""

    tracer: StretchTracer

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self.layers: int | None = None
        """Number of the network's layers that run; None: all."""
        self._network: torch.nn.Module | None = None
        self._updated: set[str] = set()
        self._began: list[int] = []
        """The first operation of each micro-batch."""
        self._goes_forward = False
        self._refused = ""
        self._following = contextlib.ExitStack()

    def depth(self) -> int:
        """Number of modules that are running inside each other."""
        return self._depth

    def runs(self, network: torch.nn.Module) -> None:
        """An outermost module begins."""
        if not torch.is_grad_enabled():
            evaluates = not self._goes_forward and not network.training and self._is_trained(network)
            if self._network is not None and _has_weights(network) and not evaluates:
                self._refused = "it runs a network without gradients, and not to evaluate the one that it trains"
        elif not self._goes_forward:
            self._goes_forward = True
            if self.layers is not None and not self.tracer.cuts:
                _shorten(network, self.layers)
            if any(one.grad is not None for one in network.parameters()) and self._backwards == 0 and self.spans:
                self._refused = "gradients of the step before are still there in forward"
            self._began.append(self.tracer.now)
            self.tracer.micro_batch_begins()

    def _is_trained(self, network: torch.nn.Module) -> bool:
        held = {id(one) for optimizer in self.optimizers for group in optimizer.param_groups for one in group["params"]}
        return any(id(weight) in held for weight in network.parameters())

    def goes_back(self) -> None:
        """Backward begins."""
        if not self._goes_forward:
            self._refused = "it goes backward more than once for a forward"
            return
        self._goes_forward = False
        self.tracer.backward_begins()

    def _step_begins(self, optimizer: Any, *more: Any) -> None:
        super()._step_begins(optimizer, *more)
        if self._network is None:
            self._network = _together(self.networks)
            self._following.enter_context(self.tracer.following(self._network))
            self.tracer.name(self._network.named_buffers(), Category.OTHER)
        self._updated |= {name for name, weight in self._network.named_parameters() if weight.grad is not None}

    def walk(self, asked: BatchShape) -> dict[str, Any]:
        """The walk of the last step, with batches of `asked`. Raises: CollectorError if the step cannot be a walk."""
        if self._refused or self._network is None:
            raise CollectorError(self._refused or "no optimizer of torch steps")
        kinds = {type(part).__name__ for part in self._network.modules()}
        if wrapped := [kind for kind in kinds if kind in WRAPPERS or kind.startswith("FSDP")]:
            raise CollectorError(f"its network is in {wrapped[0]}, on one GPU too")
        if (seen := self.tokens or self.inputs) not in ((asked.size, asked.length), (asked.size * asked.length,)):
            raise CollectorError(f"its network was given {seen} instead of {(asked.size, asked.length)}")
        start, stop = self.spans[-1]
        number = next(number for number, instant in enumerate(self._began) if instant >= start)
        own = [cut for cut in self.tracer.cuts if cut.micro_batch == number and cut.instant < stop]
        later = [instant for instant in self._began[number + 1 :] if instant < stop]
        end = later[0] if later else self._ends(own, stop)
        weights = list(self._network.named_parameters())
        return mapping_of(self.tracer, weights, self._updated, own, end)

    def _ends(self, cuts: list[Cut], stop: int) -> int:
        """The operation at which backward has ended."""
        phases = self.tracer._phases
        return next((instant for instant in range(cuts[-1].instant, stop) if phases[instant] in AFTER), stop)


def _shorten(network: torch.nn.Module, layers: int) -> None:
    """Remove all but the first layers of `network`. Raises: CollectorError if it has no list of layers, or several."""
    blocks = blocks_of(network)
    lists = [part for part in network.modules() if isinstance(part, (torch.nn.ModuleList, torch.nn.Sequential))]
    whole = [one for one in lists if [id(part) for part in one] == [id(part) for _, part in blocks]]
    if not whole or layers > len(blocks):
        raise CollectorError("its layers are in no list of their own")
    del whole[0][layers:]


def _has_weights(network: torch.nn.Module) -> bool:
    return any(True for _ in network.parameters())


def _together(networks: list[torch.nn.Module]) -> torch.nn.Module:
    """The networks that have weights, as one module."""
    held = [network for network in networks if _has_weights(network)]
    if len(held) == 1:
        return held[0]
    whole = torch.nn.Module()
    for number, network in enumerate(held):
        whole.add_module(str(number), network)
    return whole
