"""The gradients that a backward allocates for parameters: none where adapters train and the network is frozen."""

from __future__ import annotations

from peakcast.models.ledger.megatron.blocks.context import MegatronContext
from peakcast.models.ledger.tape.tape import WeightGradient


def trained(context: MegatronContext, *gradients: WeightGradient) -> list[WeightGradient]:
    """`gradients` of the network's own parameters, if these train."""
    return [] if context.frozen else list(gradients)


def norm_gradients(context: MegatronContext, name: str, width: int) -> list[WeightGradient]:
    """The norm's parameter gradients; `--disable-bias-linear` does not remove LayerNorm's bias."""
    gradients = [WeightGradient(f"{name}.weight.grad", width * context.element_bytes)]
    if context.normalization == "layernorm":
        gradients.append(WeightGradient(f"{name}.bias.grad", width * context.element_bytes))
    return trained(context, *gradients)


def weight_gradients(context: MegatronContext, name: str, numel: int, bias: int) -> list[WeightGradient]:
    """What a projection's backward allocates for its parameters, with `numel` weight and `bias` bias elements."""
    gradients = matrix_gradients(context, name, numel)
    if bias:
        gradients.append(WeightGradient(f"{name}.bias.grad", bias * context.element_bytes))
    return trained(context, *gradients)


def matrix_gradients(context: MegatronContext, name: str, numel: int) -> list[WeightGradient]:
    """What the backward of a product allocates for its matrix of `numel` elements, which trains."""
    placeholder = context.transformer_engine and not context.weight_gradients.cached_placeholders
    if context.weight_gradients.fused and not placeholder:
        return []
    return [WeightGradient(f"{name}.weight.grad", numel * context.element_bytes)]


def fused_weight_gradient_bytes(context: MegatronContext, numel: int) -> int:
    """Bytes of the placeholder that a fused weight gradient returns to autograd in megatron-core's own projections."""
    made = (
        context.weight_gradients.fused
        and not context.transformer_engine
        and not context.weight_gradients.cached_output_placeholder
        and not context.frozen
    )
    return numel * context.element_bytes if made else 0
