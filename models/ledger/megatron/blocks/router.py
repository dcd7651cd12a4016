"""The router of a Megatron-LM mixture of experts: logits, the chosen experts' probabilities, auxiliary losses.

Source: megatron-core 0.16.1 `transformer/moe/router.py`, `moe_utils.py`. With `moe-router-dtype fp32` the logits and the
probabilities are fp32. All tensors are [tokens, num_experts] or [tokens, top_k]; most are small.
"""

from __future__ import annotations

from peakcast.core.units import BOOL, FP32, INT32, INT64
from peakcast.models.ledger.megatron.blocks.context import MegatronContext
from peakcast.models.ledger.megatron.blocks.expert_context import ExpertContext
from peakcast.models.ledger.megatron.blocks.gradients import trained
from peakcast.models.ledger.tape.tape import Output, Saved, Tape, Tensor, WeightGradient


def router(tape: Tape, x: Tensor, context: MegatronContext, experts: ExpertContext) -> Tensor:
    """From [stream_rows, hidden] to the routing probabilities [stream_rows, num_experts], which are zero for experts not
    chosen."""
    logits = _gating(tape, x, context, experts)
    if experts.router.z_loss:
        logits = _z_loss(tape, logits, context)
    if experts.router.sinkhorn:
        probabilities = _sinkhorn(tape, logits, context, experts)
    else:
        probabilities = _top_k(tape, logits, context, experts)
    if experts.capacity_factor:  # apply_router_token_dropping: times the mask of tokens within capacity
        mask = context.stream_rows * experts.num_experts * BOOL
        probabilities = tape.operation(
            "router.drop", [probabilities], probabilities.num_bytes, saves=Saved(extra_bytes=[mask])
        )
    return _auxiliary_loss(tape, logits, probabilities, context, experts) if experts.router.aux_loss else probabilities


def _gating(tape: Tape, x: Tensor, context: MegatronContext, experts: ExpertContext) -> Tensor:
    """RouterGatingLinearFunction: saves its input; in a wider dtype, its backward converts the input and both gradients."""
    numel = experts.num_experts * context.hidden
    width = experts.router.element_bytes
    wider = width != context.element_bytes
    converted = context.stream_rows * context.hidden * width + 2 * numel * width if wider else 0
    return tape.operation(
        "router.gating",
        [x],
        context.stream_rows * experts.num_experts * width,
        saves=[x],
        weight_gradients=trained(context, WeightGradient("router.weight.grad", numel * context.element_bytes)),
        backward_temporary_bytes=converted,
    )


def _z_loss(tape: Tape, logits: Tensor, context: MegatronContext) -> Tensor:
    """mean(logsumexp²): saves the logits and two values per token; passes the logits on."""
    per_token = logits.num_bytes // max(1, context.stream_rows)
    return tape.operation(
        "router.z_loss",
        [logits],
        Output.view(logits),
        saves=Saved([logits], extra_bytes=[context.stream_rows * min(per_token, FP32)] * 2),
        backward_temporary_bytes=logits.num_bytes,
        gradients=[(logits, None)],
    )


def _sinkhorn(tape: Tape, logits: Tensor, context: MegatronContext, experts: ExpertContext) -> Tensor:
    """Iterations without a graph choose the experts. The scores are the sigmoid or softmax of the logits, times the map."""
    elements = context.stream_rows * experts.num_experts
    tape.operation("router.sinkhorn", [], 0, forward_temporary_bytes=3 * elements * FP32)
    if experts.top_k == 1:
        scores = tape.operation("router.sigmoid", [logits], logits.num_bytes, saves=Saved(output=True))
    else:
        scores = tape.operation("router.softmax", [logits], elements * FP32, saves=Saved(output=True))
    return tape.operation("router.mask", [scores], logits.num_bytes, saves=Saved(extra_bytes=[elements * BOOL]))


def _top_k(tape: Tape, logits: Tensor, context: MegatronContext, experts: ExpertContext) -> Tensor:
    """`topk_routing_with_score_function`: the chosen experts' scores, normalised and scattered into zeros."""
    chosen = context.stream_rows * experts.top_k
    every = context.stream_rows * experts.num_experts
    indices, width = chosen * INT64, experts.router.element_bytes
    if experts.router.fusion:  # saves the map and the scores (Transformer Engine 2.8 `pytorch/router.py`)
        return tape.operation(
            "router.top_k", [logits], every * width, saves=Saved(extra_bytes=[every * BOOL, every * width])
        )
    if experts.router.score_function == "sigmoid":
        scores = _convert(tape, logits, every * FP32, "router.to_float32")
        scores = tape.operation("router.sigmoid", [scores], every * FP32, saves=Saved(output=True))
        scores = _convert(tape, scores, every * width, "router.to_router_dtype")
        scores = tape.operation(
            "router.top_k",
            [scores],
            chosen * width,
            saves=Saved(extra_bytes=[indices]),
            forward_temporary_bytes=every * max(width, FP32) if experts.router.expert_bias else 0,
        )
        if experts.top_k > 1:
            total = context.stream_rows * width
            scores = tape.operation(
                "router.normalise", [scores], chosen * width, saves=Saved([scores], extra_bytes=[total])
            )
        scores = tape.operation("router.scale", [scores], chosen * width)
    elif experts.router.pre_softmax:
        scores = tape.operation("router.softmax", [logits], every * FP32, saves=Saved(output=True))
        scores = _convert(tape, scores, every * width, "router.to_router_dtype")
        scores = tape.operation("router.top_k", [scores], chosen * width, saves=Saved(extra_bytes=[indices]))
    else:
        scores = tape.operation("router.top_k", [logits], chosen * width, saves=Saved(extra_bytes=[indices]))
        scores = tape.operation("router.softmax", [scores], chosen * FP32, saves=Saved(output=True))
        scores = _convert(tape, scores, chosen * width, "router.to_router_dtype")
    # the map: int32 zeros, scattered into, then converted to bool (the indices are saved already)
    return tape.operation("router.scatter", [scores], every * width, forward_temporary_bytes=2 * every * INT32)


def _convert(tape: Tape, x: Tensor, num_bytes: int, name: str) -> Tensor:
    """A dtype conversion; x itself if the size does not change."""
    return x if num_bytes == x.num_bytes else tape.operation(name, [x], num_bytes)


def _auxiliary_loss(
    tape: Tape, logits: Tensor, probabilities: Tensor, context: MegatronContext, experts: ExpertContext
) -> Tensor:
    """Scores of all experts in fp32, saved; the probabilities are passed on (`MoEAuxLossAutoScaler`)."""
    every = context.stream_rows * experts.num_experts
    narrow = every * experts.router.element_bytes
    saved_bytes = [every * FP32] if experts.router.score_function == "softmax" else [narrow] * 2
    if experts.router.fusion:
        saved_bytes = [narrow]
    loss = tape.operation(
        "router.auxiliary_loss",
        [logits],
        FP32,
        saves=Saved(extra_bytes=[*saved_bytes, experts.num_experts * INT64]),
        forward_temporary_bytes=every * (INT32 + BOOL) + context.stream_rows * experts.top_k * (INT64 + FP32),
        backward_temporary_bytes=every * FP32,
    )
    return tape.operation(
        "router.attach_auxiliary_loss",
        [probabilities, loss],
        Output.view(probabilities),
        saves=[loss],
        gradients=[(probabilities, None), (loss, FP32)],
    )
