"""DeepSpeed's linear layer with stage 3, a Python function that saves its input even if the weight is frozen.

Source: DeepSpeed 0.19.8 `runtime/zero/linear.py` (LinearFunctionForZeroStage3), which `zero.Init` installs in place of
torch's.
"""

from __future__ import annotations

from typing import Any

import torch


class _Linear(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, given: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        ctx.save_for_backward(given, weight, bias)
        if given.dim() == 2 and bias is not None:
            return torch.addmm(bias, given, weight.t())
        product = given.matmul(weight.t())
        if bias is not None:
            product += bias
        return product

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (gradient,), (given, weight, bias) = gradients, ctx.saved_tensors
        rows = gradient.reshape(-1, gradient.shape[-1])
        of_input, of_weight, of_bias = ctx.needs_input_grad[:3]
        return (
            gradient.matmul(weight) if of_input else None,
            rows.t().matmul(given.reshape(-1, given.shape[-1])) if of_weight else None,
            rows.sum(0) if bias is not None and of_bias else None,
        )


def install() -> None:
    """Install it in place of torch's, in this process."""

    def linear(given: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
        return _Linear.apply(given, weight, bias)

    torch.nn.functional.linear = linear  # type: ignore[assignment]
