"""What a layout is to the training loop, and that of one rank."""

from __future__ import annotations

import contextlib
from typing import Any, Protocol


class Layout(Protocol):
    """A model wrapped for data parallelism, and what the training loop does differently because of it."""

    model: Any
    splits_loss: bool
    """Whether the loss is computed over parts of the vocabulary."""

    def accumulating(self) -> contextlib.AbstractContextManager[Any]:
        """Around a micro-batch that is not the last of its step."""

    def computing_loss(self) -> contextlib.AbstractContextManager[Any]:
        """Around the forward with its loss, and around the backward."""

    def clip(self, parameters: list[Any], max_norm: float) -> None:
        """Gradient clipping over all ranks."""


class Alone:
    """One rank: nothing is wrapped."""

    splits_loss = False

    def __init__(self, model: Any) -> None:
        self.model = model

    def computing_loss(self) -> contextlib.AbstractContextManager[Any]:
        """torch's loss over logits that are split by vocabulary, where tensor parallelism leaves them so."""
        if not self.splits_loss:
            return contextlib.nullcontext()
        from torch.distributed.tensor.parallel import loss_parallel

        context: contextlib.AbstractContextManager[Any] = loss_parallel()
        return context

    def accumulating(self) -> contextlib.AbstractContextManager[Any]:
        """Nothing differs."""
        return contextlib.nullcontext()

    def clip(self, parameters: list[Any], max_norm: float) -> None:
        """As the Trainer does by default."""
        import torch

        torch.nn.utils.clip_grad_norm_(parameters, max_norm)
