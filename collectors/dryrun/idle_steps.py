"""Lets a training loop run on without training, once enough of its steps were followed and an evaluation is still to come.

The network's forward and backward then do nothing, so that a step takes a hundredth of the time and the evaluation is
reached: after a warm-up of many steps, or every few hundred. Its outputs are tensors as a forward with inputs of the same
sizes has returned, which need gradients and give none to the parameters; the optimizer finds no gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from peakcast.collectors.dryrun.repeated_forwards import mapped, numbers_of


class IdleSteps:
    """Whether steps are idle now (`going`), and whether some have been (`began`)."""

    def __init__(self) -> None:
        self.going = self.began = False
        self._idle: list[_IdleForward] = []

    def begin(self, network: torch.nn.Module) -> None:
        """Let the forwards of an outermost `network` that is trained do nothing, from the next one on."""
        self.going = self.began = True
        if not any(one.network is network for one in self._idle):
            self._idle.append(_IdleForward(network, lambda: self.going))

    def end(self) -> None:
        """Let networks be trained again."""
        self.going = False
        while self._idle:
            self._idle.pop().leave()


class _OutputTensor:
    """A tensor of an output, whose memory is not kept."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape, self.dtype, self.device = tuple(tensor.shape), tensor.dtype, tensor.device
        self._needs_gradients = tensor.requires_grad

    def again(self) -> torch.Tensor:
        """Another tensor like it."""
        if not self._needs_gradients:
            return torch.empty(self.shape, dtype=self.dtype, device=self.device)
        made: torch.Tensor = _Untrained.apply(torch.zeros((), device=self.device, requires_grad=True), self)
        return made


class _Untrained(torch.autograd.Function):  # type: ignore[misc]
    """Makes an output that needs gradients, and gives none further back."""

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, made: _OutputTensor) -> torch.Tensor:
        return torch.empty(made.shape, dtype=made.dtype, device=made.device)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[None, None]:
        return None, None


class _IdleForward:
    """Takes the place of the `forward` of `network` while steps are idle; runs it for inputs of other sizes than before."""

    def __init__(self, network: torch.nn.Module, idles: Callable[[], bool]) -> None:
        self.network = network
        self._idles = idles
        self._own = network.__dict__.get("forward")
        self._forward: Callable[..., Any] = network.forward
        self._outputs: dict[tuple[int, ...], Any] = {}
        """Numbers in the inputs -> the output, with `_OutputTensor` in the place of tensors."""
        vars(network)["forward"] = self

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        given, _, plain = numbers_of((arguments, keywords))
        if not (plain and torch.is_grad_enabled() and self._idles()):
            return self._forward(*arguments, **keywords)
        if tuple(given) in self._outputs:
            return mapped(_OutputTensor.again, self._outputs[tuple(given)], _OutputTensor)
        answer = self._forward(*arguments, **keywords)
        self._outputs[tuple(given)] = mapped(_OutputTensor, answer, torch.Tensor)
        return answer

    def leave(self) -> None:
        """Give the network its own forward back, unless something else has taken its place."""
        if self.network.__dict__.get("forward") is self:
            if self._own is None:
                del vars(self.network)["forward"]
            else:
                vars(self.network)["forward"] = self._own
