"""Recognises the phases of a user's own training step from outside, by the functions of torch that it calls."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from peakcast.timelines.timeline import Phase

LOSSES = ("cross_entropy", "nll_loss", "mse_loss", "l1_loss", "binary_cross_entropy_with_logits")
"""Functions of `torch.nn.functional`; the first call of one begins the loss phase, which lasts until backward."""
CLIPPING = ("clip_grad_norm_", "clip_grad_value_", "get_total_norm")
"""Functions of `torch.nn.utils`."""


@contextlib.contextmanager
def announced(tracer: Any) -> Iterator[None]:
    """A context in which `tracer` is told when loss, backward and gradient clipping begin, and a forward after a
    backward."""
    saved: list[tuple[Any, str, Any]] = []

    def announce(owner: Any, name: str, phase: Phase) -> None:
        original = getattr(owner, name)
        saved.append((owner, name, original))

        def announcing(*arguments: Any, **keywords: Any) -> Any:
            tracer.phase = phase
            return original(*arguments, **keywords)

        setattr(owner, name, announcing)

    for name in LOSSES:
        announce(torch.nn.functional, name, Phase.LOSS)
    announce(torch.Tensor, "backward", Phase.BACKWARD)
    for name in CLIPPING:
        announce(torch.nn.utils, name, Phase.GRADIENT_CLIPPING)
    before = torch.nn.modules.module.register_module_forward_pre_hook(lambda *_: _forward_again(tracer))
    try:
        yield
    finally:
        before.remove()
        for owner, name, original in reversed(saved):
            setattr(owner, name, original)


def inside_backward() -> bool:
    """Whether autograd is running; a module that runs then is being recomputed."""
    return bool(torch._C._current_graph_task_id() != -1)


def _forward_again(tracer: Any) -> None:
    """A module that runs after a backward, and not within one, begins the next micro-batch."""
    if torch.compiler.is_compiling():  # compiled code would be compiled again for each phase
        return
    if tracer.phase == Phase.BACKWARD and not inside_backward():
        tracer.phase = Phase.FORWARD
