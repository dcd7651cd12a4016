"""The routed feed-forward of a mixture of experts in Hugging Face: a loop over the experts, with balanced routing.

Experts run one after the other, each on its share of `num_experts_per_tok` rows per token; many experts are written in at
most `MOST_GROUPS` groups of equals, which keeps what they save exact and what they need in passing a little high.
Source: transformers 4.48-5.17 `models/mixtral/modeling_mixtral.py`.
Assumes balanced routing: with a skewed router the share of one expert grows, the kept rows do not.
"""

from __future__ import annotations

import math

from peakcast.models.analytical.blocks import primitives as ops
from peakcast.models.analytical.blocks.hf_builder import BlockBuilder
from peakcast.models.analytical.tape import Tensor

MOST_GROUPS = 16
FP32 = 4
INT64 = 8


def routed_feed_forward(build: BlockBuilder, x: Tensor) -> Tensor:
    """[micro_batch_size · sequence_length, hidden_size] in and out."""
    context, tape = build.context, build.tape
    moe = context.architecture.moe
    assert moe is not None
    width, inner, rows = context.architecture.hidden_size, moe.moe_intermediate_size, context.rows
    routed_rows = rows * moe.num_experts_per_tok
    weights = _router(build, x, rows, moe.num_experts, moe.num_experts_per_tok)
    size = x.num_bytes // (rows * width)
    output = tape.operation("mlp.final_hidden_states", [], rows * width * size)
    groups = math.gcd(moe.num_experts, MOST_GROUPS) if moe.num_experts > MOST_GROUPS else moe.num_experts
    experts = build.for_rows(routed_rows // groups, moe.num_experts // groups)
    for _ in range(groups):
        output = _expert(experts, x, weights, output, inner)
    if moe.shared_expert_intermediate_size:
        output = ops.add(tape, output, _shared_expert(build, x, moe.shared_expert_intermediate_size), "mlp.add_shared")
    return output


def _expert(experts: BlockBuilder, x: Tensor, weights: Tensor, output: Tensor, inner: int) -> Tensor:
    """Take the rows routed here, gate · up, down, weigh, and add to the output in place."""
    tape, width = experts.tape, experts.context.architecture.hidden_size
    size = x.num_bytes // (experts.context.rows * width)
    taken = tape.operation("mlp.experts.take", [x], experts.rows * width * size)  # backward scatters into all rows
    gate = experts.projection(taken, width, inner, "mlp.experts.gate_proj", False)
    activated = ops.unary(tape, gate, "mlp.experts.act")
    up = experts.projection(taken, width, inner, "mlp.experts.up_proj", False)
    product = ops.multiply(tape, activated, up, "mlp.experts.product")
    down = experts.projection(product, inner, width, "mlp.experts.down_proj", False)
    weighted = tape.operation("mlp.experts.weighted", [down, weights], down.num_bytes, saves=[down, weights])
    return tape.operation(
        "mlp.experts.index_add",
        [output, weighted],
        output.num_bytes,
        view_of=output,
        gradients=[(output, None), (weighted, weighted.num_bytes)],
    )


def _router(build: BlockBuilder, x: Tensor, rows: int, num_experts: int, top_k: int) -> Tensor:
    """Softmax over all experts in fp32, the top k renormalised; one-hot expert mask of int64."""
    tape = build.tape
    logits = build.projection(x, build.context.architecture.hidden_size, num_experts, "mlp.gate", False)
    logits = ops.cast(tape, logits, rows * num_experts * FP32, "mlp.router.to_float32")
    probabilities = ops.unary_of_result(tape, logits, "mlp.router.softmax")
    weights = tape.operation(
        "mlp.router.topk",
        [probabilities],
        rows * top_k * FP32,
        extra_saved_bytes=[rows * top_k * INT64],
        gradients=[(probabilities, probabilities.num_bytes)],
    )
    mask = tape.operation("mlp.router.expert_mask", [], rows * top_k * num_experts * INT64)
    tape.operation("mlp.router.done", [mask], 0)
    return ops.unary(tape, weights, "mlp.router.normalise")


def _shared_expert(build: BlockBuilder, x: Tensor, inner: int) -> Tensor:
    width = build.context.architecture.hidden_size
    gate = build.projection(x, width, inner, "mlp.shared_expert.gate_proj", False)
    activated = ops.unary(build.tape, gate, "mlp.shared_expert.act")
    up = build.projection(x, width, inner, "mlp.shared_expert.up_proj", False)
    product = ops.multiply(build.tape, activated, up, "mlp.shared_expert.product")
    return build.projection(product, inner, width, "mlp.shared_expert.down_proj", False)
