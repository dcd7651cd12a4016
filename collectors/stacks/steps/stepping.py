"""Runs training steps phase by phase, and reports to a follower: a recorder on a GPU, a tracer without one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from peakcast.timelines.timeline import Category, Phase


class Follower(Protocol):
    """An observer of a run, which is told what the run is about to do and which tensors it has made."""

    def step_begins(self) -> None:
        """A step begins."""

    def begin(self, phase: Phase) -> None:
        """A phase begins; the one before ends."""

    def loss_made(self, loss: Any) -> None:
        """The forward has ended with this loss."""

    def gradients_made(self) -> None:
        """The last backward of the step has ended."""

    def states_made(self) -> None:
        """The optimizer has stepped; gradients still exist."""

    def step_ends(self) -> None:
        """The gradients are released."""


def run_steps(training: Any, num_steps: int, follower: Follower) -> None:
    """Run `num_steps` steps of `training`, by its own loop if it has one."""
    if hasattr(training, "drive"):
        training.drive(num_steps, follower)
        return
    for _ in range(num_steps):
        follower.step_begins()
        run_step(training, follower)
        follower.step_ends()


def run_step(training: Any, follower: Follower) -> None:
    """Run one step by calling the methods of `training`."""
    if hasattr(training, "forward_backward"):  # the library's own schedule runs both
        training.forward_backward(follower.begin)
    else:
        for _ in range(training.job.gradient_accumulation_steps):
            follower.begin(Phase.FORWARD)
            loss = training.forward(lambda: follower.begin(Phase.LOSS))
            follower.loss_made(loss)
            follower.begin(Phase.BACKWARD)
            training.backward(loss)
            del loss
    follower.gradients_made()
    follower.begin(Phase.GRADIENT_CLIPPING)
    training.clip()
    follower.begin(Phase.OPTIMIZER_STEP)
    training.step()
    follower.states_made()
    training.zero_grad()


Name = Callable[[Any, Category], None]
"""`Tracer.name`: takes (name, tensor) pairs and the category of the tensors."""


def name_gradients(training: Any, name: Name) -> None:
    """Call `name` with the tensors that are gradients."""
    parameters = dict(training.model.named_parameters())
    name(((f"{each}.grad", p.grad) for each, p in parameters.items() if p.grad is not None), Category.GRADIENTS)


def name_states(training: Any, name: Name) -> None:
    """Call `name` with the tensors that are optimizer states."""
    import torch

    states = [
        (f"state.{key}", value)
        for state in training.optimizer.state.values()
        for key, value in state.items()
        if isinstance(value, torch.Tensor)
    ]
    name(states, Category.OPTIMIZER_STATES)
