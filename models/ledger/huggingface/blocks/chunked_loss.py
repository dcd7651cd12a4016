"""Cross entropy over one chunk of the logits after the other. Whole logits exist, but narrow; only one chunk at a time is
widened or processed further.

Source: torchtune 0.6.1 modules/loss/ce_chunked_output_loss.py CEWithChunkedOutputLoss (`num_output_chunks`, 8), which has a
product of the lm_head for each chunk (modules/transformer.py chunked_output); training/_compile.py compile_loss compiles
each chunk's cross entropy. litgpt 0.5.13 utils.py chunked_cross_entropy: chunks of 128 tokens, not widened.
"""

from __future__ import annotations

from peakcast.core.units import FP32
from peakcast.models.ledger.huggingface.blocks.context import HFContext
from peakcast.models.ledger.tape.tape import Output, Saved, Tape, Tensor
from peakcast.timelines.timeline import Category


def chunked_cross_entropy(tape: Tape, logits: Tensor, context: HFContext) -> None:
    """Append the loss. Backward runs through all chunks' losses before the lm_head, so a chunk's gradient takes the place
    of its saved tensor. Eager, all log-softmax are saved in fp32 and a chunk's two gradients are temporaries; compiled, the
    logits are saved as they are."""
    chunks, narrow = context.loss.logits_chunks, logits.num_bytes
    widens = context.precision.autocast or context.loss.logits_upcast != "none"
    wide = narrow // context.precision.compute_bytes * FP32 if widens else narrow
    tape.begin_loss()
    parts = tape.operation(
        "logits.chunks", [logits], Output(narrow, view_of=logits, category=Category.LOGITS), gradients=[(logits, narrow)]
    )
    compiled = "loss" in context.compiled
    tape.operation(
        "cross_entropy",
        [parts],
        Output(FP32, category=Category.LOGITS),
        saves=Saved([parts], extra_bytes=[context.rows * FP32] * 2) if compiled else Saved(extra_bytes=[wide]),
        gradients=[(parts, 0)],  # in the place of the saved tensors
        forward_temporary_bytes=wide // chunks if widens and not compiled else 0,  # a chunk widened
        backward_temporary_bytes=narrow // chunks if compiled else 2 * wide // chunks,
    )
    tape.hold(logits)
