"""The parts of the ends of a Megatron-LM model on one rank: embedding; output layer and vocabulary-parallel cross-entropy.
`head.py` assembles the end of the last stage.

Sources: megatron-core 0.13.1 `models/common/embeddings/language_model_embedding.py`, `models/gpt/gpt_model.py`,
`tensor_parallel/cross_entropy.py`.
"""

from __future__ import annotations

from functools import lru_cache

from peakcast.core.units import BOOL, FP32, INT64
from peakcast.models.ledger.megatron.blocks.context import MegatronContext
from peakcast.models.ledger.megatron.blocks.gradients import trained
from peakcast.models.ledger.megatron.blocks.primitives import column_linear
from peakcast.models.ledger.tape.marks import Mark
from peakcast.models.ledger.tape.tape import Output, Saved, Tape, Tensor, WeightGradient
from peakcast.models.ledger.tape.template import Template
from peakcast.timelines.timeline import Category


@lru_cache(maxsize=256)
def embedding(context: MegatronContext) -> Template:
    """The template of the token (and learned position) embedding: ids in, [stream_rows, hidden] out."""
    tape = Tape()
    return tape.finish(embed(tape, context))


def embed(tape: Tape, context: MegatronContext) -> Tensor:
    """Append the embedding of one micro-batch to `tape`: [stream_rows, hidden]."""
    full, size = context.gathered_bytes, context.element_bytes
    weight = context.ends.vocabulary * context.hidden * size
    hidden = tape.operation(
        "word_embeddings",
        [],
        full,
        saves=Saved(
            extra_bytes=[context.rows * INT64, context.rows * BOOL] if context.groups.tensor_parallel_size > 1 else []
        ),
        weight_gradients=trained(context, WeightGradient("word_embeddings.weight.grad", weight)),
    )
    if context.ends.positions:
        positions = tape.operation(
            "position_embeddings",
            [],
            full,
            weight_gradients=trained(
                context, WeightGradient("position_embeddings.weight.grad", context.ends.positions * context.hidden * size)
            ),
        )
        hidden = tape.operation("add_positions", [hidden, positions], full, gradients=[(hidden, None), (positions, None)])
    if context.ends.token_types:
        table = WeightGradient("tokentype_embeddings.weight.grad", context.ends.token_types * context.hidden * size)
        types = tape.operation("tokentype_embeddings", [], full, weight_gradients=trained(context, table))
        hidden = tape.operation("add_token_types", [hidden, types], full, gradients=[(hidden, None), (types, None)])
    hidden = tape.operation("transpose", [hidden], full, gradients=[(hidden, None)])
    if context.groups.sequence_parallel:
        hidden = tape.operation("scatter_to_sequence_parallel", [hidden], context.stream_bytes)
    if context.hidden_dropout > 0:
        hidden = tape.operation(
            "embedding_dropout",
            [hidden],
            context.stream_bytes,
            saves=Saved(extra_bytes=[context.stream_rows * context.hidden * BOOL]),
        )
    return hidden


def output_layer(tape: Tape, x: Tensor, context: MegatronContext) -> Tensor:
    """The logits [rows, vocabulary] for [stream_rows, hidden]."""
    with tape.marked(Mark.LM_HEAD):
        logits = column_linear(tape, x, context, context.ends.vocabulary, "output_layer", context.ends.output_bias)
    logits.storage.category = Category.LOGITS
    return logits


def cross_entropy(tape: Tape, logits: Tensor, context: MegatronContext) -> Tensor:
    """The vocabulary-parallel loss per token, fp32.

    It converts the logits to fp32 inside its autograd function and turns that copy into the softmax in place; the copy is
    saved, and backward turns it into the gradient in place. Transformer Engine's kernel writes the gradient over the
    logits, in forward (2.8 `pytorch/triton/cross_entropy.py`) or, from 2.18 on, into an fp32 tensor that it saves.
    """
    wide = context.rows * context.ends.vocabulary * FP32
    if context.cross_entropy.fused and context.cross_entropy.in_place:
        apart = context.cross_entropy.wide_gradient
        return tape.operation(
            "vocab_parallel_cross_entropy",
            [logits],
            Output(context.rows * FP32, category=Category.LOGITS),
            saves=Saved([] if apart else [logits], extra_bytes=[wide] if apart else [], become_gradients=not apart),
            forward_temporary_bytes=3 * context.rows * FP32 * (1 + context.groups.tensor_parallel_size),
        )
    in_place = context.element_bytes == FP32  # .float() of fp32 logits is the logits themselves
    # compiled kernels cannot work in place: the exponentials are a second fp32 copy, and so is their gradient
    second_copy = wide if context.cross_entropy.fused else 0
    # before megatron-core 0.8 the maximum is subtracted into a new tensor, while the caller's copy exists
    passing = wide if context.cross_entropy.copies_logits and not in_place else 0
    # `calculate_gradients` always returns bfloat16 (megatron-core 0.16.1 `fused_cross_entropy.py`)
    rounded = wide // 2 if in_place and context.cross_entropy.fused else 0
    return tape.operation(
        "vocab_parallel_cross_entropy",
        [logits],
        Output(context.rows * FP32, category=Category.LOGITS),
        saves=Saved(
            [logits] if in_place else [],
            extra_bytes=[context.rows * BOOL, context.rows * INT64] + ([] if in_place else [wide]),
            become_gradients=in_place,  # the saved softmax, which is the logits' storage, becomes the gradient
        ),
        gradients=[(logits, logits.num_bytes)],
        forward_temporary_bytes=max(second_copy, passing),
        backward_temporary_bytes=second_copy + rounded,
    )
