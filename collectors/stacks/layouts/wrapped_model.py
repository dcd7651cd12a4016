"""What the training loop expects of a layout, and the layout of a single rank."""

from __future__ import annotations

import contextlib
from typing import Any, Protocol


class WrappedModel(Protocol):
    """A model wrapped for data parallelism, and how the training loop must treat it."""

    model: Any
    splits_loss: bool
    """Whether the loss is computed over parts of the vocabulary."""

    def accumulating(self) -> contextlib.AbstractContextManager[Any]:
        """Context around a micro-batch that is not the last of its step."""

    def computing_loss(self) -> contextlib.AbstractContextManager[Any]:
        """Context around the forward with its loss, and around the backward."""

    def clip(self, parameters: list[Any], max_norm: float) -> None:
        """Clip gradients by their norm over all ranks."""


class UnwrappedModel:
    """One rank, whose model is not wrapped."""

    splits_loss = False

    def __init__(self, model: Any) -> None:
        self.model = model

    def computing_loss(self) -> contextlib.AbstractContextManager[Any]:
        """torch's loss over logits that are split by vocabulary, if tensor parallelism leaves them split."""
        if not self.splits_loss:
            return contextlib.nullcontext()
        from torch.distributed.tensor.parallel import loss_parallel

        context: contextlib.AbstractContextManager[Any] = loss_parallel()
        return context

    def accumulating(self) -> contextlib.AbstractContextManager[Any]:
        """Does nothing."""
        return contextlib.nullcontext()

    def clip(self, parameters: list[Any], max_norm: float) -> None:
        """Clip gradients as the Trainer does by default."""
        import torch

        torch.nn.utils.clip_grad_norm_(parameters, max_norm)
