"""Phases of a step that is nobody's but the user's, seen from outside: by what of torch it calls."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from peakcast.timeline import Phase

LOSSES = ("cross_entropy", "nll_loss", "mse_loss", "l1_loss", "binary_cross_entropy_with_logits")
"""Of `torch.nn.functional`: from the first of these on until backward, the phase is the loss."""
CLIPPING = ("clip_grad_norm_", "clip_grad_value_", "get_total_norm")
"""Of `torch.nn.utils`."""


@contextlib.contextmanager
def announced(tracer: Any) -> Iterator[None]:
    """Tell `tracer` of loss, backward and gradient clipping as they begin, and of a forward after a backward."""
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
    """Whether autograd is running: a module that runs then is recomputed."""
    return bool(torch._C._current_graph_task_id() != -1)


def _forward_again(tracer: Any) -> None:
    """A module that runs after a backward outside of it begins the next micro-batch."""
    if torch.compiler.is_compiling():  # what is compiled would be so again for each phase
        return
    if tracer.phase == Phase.BACKWARD and not inside_backward():
        tracer.phase = Phase.FORWARD
