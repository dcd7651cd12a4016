"""Cross entropy over one chunk of the logits after the other. Whole logits exist, but narrow unless what wraps the network
widens them; only one chunk at a time is widened or processed further.

Source: torchtune 0.6.1 modules/loss/ce_chunked_output_loss.py CEWithChunkedOutputLoss (`num_output_chunks`, 8), which has a
product of the lm_head for each chunk (modules/transformer.py chunked_output); training/_compile.py compile_loss compiles
each chunk's cross entropy. litgpt 0.5.13 utils.py chunked_cross_entropy: chunks of 128 tokens of logits that what wraps
the network has widened, all at once.
"""

from __future__ import annotations

from peakcast.core.units import FP32
from peakcast.models.ledger.huggingface.blocks.context import HFContext
from peakcast.models.ledger.huggingface.blocks.whole_logits import widened_by_model
from peakcast.models.ledger.tape.tape import Output, Saved, Tape, Tensor
from peakcast.timelines.timeline import Category


def chunked_cross_entropy(tape: Tape, logits: Tensor, context: HFContext) -> None:
    """Append the loss. Backward runs through all chunks' losses before the lm_head, so a chunk's gradient takes the place
    of its saved tensor. Eager, all log-softmax are saved in fp32 and a chunk's two gradients are temporaries; compiled, the
    logits are saved as they are."""
    by_wrapper = context.loss.logits_upcast == "wrapper"
    if by_wrapper:
        logits = widened_by_model(tape, logits, context)
    chunks, given = context.loss.logits_chunks, logits.num_bytes
    widens = not by_wrapper and (context.precision.autocast or context.loss.logits_upcast != "none")
    wide = given // context.precision.compute_bytes * FP32 if widens else given
    tape.begin_loss()
    copies = by_wrapper and context.batch > 1  # logits[..., :-1, :].reshape(-1, vocabulary)
    whole = copies and not context.loss.logits_chunks_apart
    parts = _cut_and_copied(tape, logits) if whole else _views(tape, logits)
    compiled = "loss" in context.compiled
    tape.operation(
        "cross_entropy",
        [parts],
        Output(FP32, category=Category.LOGITS),
        saves=Saved([parts], extra_bytes=[context.rows * FP32] * 2) if compiled else Saved(extra_bytes=[wide]),
        gradients=[(parts, 0)],  # in the place of the saved tensors
        # a chunk widened; or the last one cut, which adapters have as a product of the lm_head of its own
        forward_temporary_bytes=wide // chunks if (widens and not compiled) or (copies and not whole) else 0,
        backward_temporary_bytes=given // chunks if compiled else 2 * wide // chunks,
    )
    tape.hold(logits)


def _views(tape: Tape, logits: Tensor) -> Tensor:
    """The chunks of the logits. Backward joins their gradients."""
    size = logits.num_bytes
    output = Output(size, view_of=logits, category=Category.LOGITS)
    return tape.operation("logits.chunks", [logits], output, gradients=[(logits, size)])


def _cut_and_copied(tape: Tape, logits: Tensor) -> Tensor:
    """The chunks of the logits without each row's last, a copy. Backward joins the chunks' gradients, and then has them in
    full size."""
    size = logits.num_bytes
    output = Output(size, category=Category.LOGITS)
    return tape.operation(
        "logits.chunks", [logits], output, gradients=[(logits, size)], backward_temporary_bytes=size
    )
