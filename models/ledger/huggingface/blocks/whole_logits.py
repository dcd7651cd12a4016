"""Cross entropy over logits that exist as a whole.

Where the logits become fp32 decides how many copies of them exist (where-memory-goes F2; transformers `loss/loss_utils.py`
and, before 4.46, each `modeling_*.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from peakcast.core.units import FP32, INT64
from peakcast.models.ledger.huggingface.blocks.builder import BlockBuilder
from peakcast.models.ledger.huggingface.blocks.context import HFContext
from peakcast.models.ledger.tape.marks import Mark
from peakcast.models.ledger.tape.tape import Output, Saved, Tape, Tensor
from peakcast.timelines.timeline import Category

ENTROPY_CHUNK = 128
"""Tokens whose entropy is computed at a time (trl 0.23.1 to 1.14.2 `trainer/utils.py` entropy_from_logits)."""


@dataclass(frozen=True, slots=True)
class LossInput:
    """What the loss reads: [micro_batch_size · sequence_length, vocab_size], shifted by one position or not."""

    logits: Tensor
    variables: list[Tensor]
    """Tensors to which variables of the model's and the loss's code refer meanwhile."""
    labels: list[Tensor] = field(default_factory=list)
    """Labels that were shifted instead of the logits, if they were."""


def loss_of_whole_logits(build: BlockBuilder, logits: Tensor, final: Tensor, sequence_output: Tensor) -> None:
    """Append the loss, with the logits widened and shifted as the release does it, and hold what variables refer to
    meanwhile."""
    context, tape, group = build.context, build.tape, build.context.group
    upcast = context.loss.logits_upcast
    whole = group.ranks > 1 and not group.loss
    vocabulary = context.architecture.vocab_size if whole else group.part(context.architecture.vocab_size)
    wide_bytes = context.rows * vocabulary * FP32
    given = UPCASTS[upcast](tape, logits, context, wide_bytes)
    if group.loss:
        _loss_over_parts(tape, given.logits)
    elif context.kernels.loss == "in_place":
        _loss_in_place(tape, given.logits, context)
    else:
        _eager_loss(tape, given, context, wide_bytes)
    # an encoder's head reassigns a variable from its states to the logits
    unnamed = context.loss.in_stages or context.architecture.kind == "encoder"
    outputs, narrow = [sequence_output] if upcast == "none" else [], upcast in NARROW
    for tensor in (*given.variables, *outputs, *build.variables, *([] if unnamed else [final])):
        tape.hold(tensor)
    # a loss that widened the logits itself had larger temporaries
    late = narrow or (context.kernels.loss == "in_place" and upcast != "model") or bool(context.loss.metrics)
    returned = given.variables[0]
    if context.loss.widens_outputs and context.precision.autocast and (late or context.cache.widened):
        size = wide_bytes if returned.num_bytes < wide_bytes else 0
        with tape.marked(Mark.WIDENED_OUTPUTS):
            made = Output(size, category=Category.LOGITS)
            widened = tape.operation("outputs.to_float32", [returned], made, gradients=[])
        returned = widened if size else returned
    if context.loss.metrics:
        _metrics(tape, returned, context)


# -- where logits are widened and shifted: one function for each value of the convention `logits_upcast` ----------------


def _widened_by_model(tape: Tape, logits: Tensor, context: HFContext, wide_bytes: int) -> LossInput:
    """The model returns fp32 logits; the loss shifts them."""
    wide = logits_op(tape, logits, wide_bytes, "logits.to_float32")
    tape.begin_loss()
    return LossInput(shift_logits(tape, wide, context), [wide])


def _widened_by_model_alone(tape: Tape, logits: Tensor, context: HFContext, wide_bytes: int) -> LossInput:
    """The model returns fp32 logits; the loop shifts the labels."""
    wide = widened_by_model(tape, logits, context)
    tape.begin_loss()
    return LossInput(wide, [wide], _shifted_labels(tape, context))


def _as_they_are(tape: Tape, logits: Tensor, context: HFContext, wide_bytes: int) -> LossInput:
    """Neither widened nor shifted: a training loop of its own has labels that are shifted already."""
    tape.begin_loss()
    return LossInput(logits, [logits])


def _shifted_alone(tape: Tape, logits: Tensor, context: HFContext, wide_bytes: int) -> LossInput:
    """Shifted, but not widened."""
    tape.begin_loss()
    shifted = shift_logits(tape, logits, context)
    return LossInput(shifted, [logits, shifted])


def _widened_and_shifted(tape: Tape, logits: Tensor, context: HFContext, wide_bytes: int) -> LossInput:
    """The loss widens the logits, then shifts them."""
    tape.begin_loss()
    wide = logits if logits.num_bytes == wide_bytes else logits_op(tape, logits, wide_bytes, "logits.to_float32")
    return LossInput(shift_logits(tape, wide, context), [logits, wide])


def _widened_with_shifted_labels(tape: Tape, logits: Tensor, context: HFContext, wide_bytes: int) -> LossInput:
    """The loss widens the logits and shifts the labels, unless they were shifted before ranks divided the sequence."""
    tape.begin_loss()
    wide, variables = logits, [logits]
    if context.precision.compute_bytes != FP32:
        wide = logits if logits.num_bytes == wide_bytes else logits_op(tape, logits, wide_bytes, "logits.to_float32")
        variables.append(wide)
    labels = _shifted_labels(tape, context) if context.ring.ranks == 1 else []
    return LossInput(wide, variables + ([] if context.loss.in_stages else labels), labels)


UPCASTS: dict[str, Callable[[Tape, Tensor, HFContext, int], LossInput]] = {
    "model": _widened_by_model,
    "wrapper": _widened_by_model,
    "model_unshifted": _widened_by_model_alone,
    "none": _as_they_are,
    "none_shifted": _shifted_alone,
    "loss_shifted": _widened_and_shifted,
    "loss": _widened_with_shifted_labels,
}


NARROW = ("none", "none_shifted")
"""Values with which the loss reads logits as they are."""


def shift_logits(tape: Tape, x: Tensor, context: HFContext) -> Tensor:
    """logits[..., :-1, :].contiguous(): a copy, unless there is one row, whose slice is contiguous. Backward scatters its
    gradient into one of full size; if slicing the whole last dimension counts as a slice too, first into another of the
    slice's size."""
    size, shared = x.num_bytes // context.rows * context.batch * (context.sequence - 1), context.batch == 1
    if not context.loss.slices_whole_dimensions:
        made = Output(size, view_of=x if shared else None, category=Category.LOGITS)
        return tape.operation("shift_logits", [x], made)
    part = tape.operation("shift_logits.rows", [x], Output(size, view_of=x))
    whole = tape.operation("shift_logits.vocabulary", [part], Output(size, view_of=part))
    if shared:
        return whole
    return tape.operation("shift_logits", [whole], Output(size, category=Category.LOGITS), gradients=[(whole, None)])


def _shifted_labels(tape: Tape, context: HFContext) -> list[Tensor]:
    """The padded labels, and the labels without each row's first, a copy unless there is one row."""
    padded = tape.operation(
        "pad_labels", [], Output(context.batch * (context.sequence + 1) * INT64, category=Category.INPUTS)
    )
    shared = padded if context.batch == 1 else None
    size = context.rows * INT64
    return [padded, tape.operation("shift_labels", [padded], Output(size, view_of=shared, category=Category.INPUTS))]


def widened_by_model(tape: Tape, logits: Tensor, context: HFContext) -> Tensor:
    """The fp32 logits that the model, or what wraps it, makes of its own; the same if they are fp32 already."""
    wide_bytes = logits.num_bytes // context.precision.compute_bytes * FP32
    return logits if logits.num_bytes == wide_bytes else logits_op(tape, logits, wide_bytes, "logits.to_float32")


def logits_op(tape: Tape, x: Tensor, num_bytes: int, name: str) -> Tensor:
    """An operation whose result, of `num_bytes`, is logits too."""
    return tape.operation(name, [x], Output(num_bytes, category=Category.LOGITS))


# -- the loss itself ------------------------------------------------------------------------------------------------------


def _eager_loss(tape: Tape, given: LossInput, context: HFContext, wide_bytes: int) -> None:
    """torch's cross entropy: log-softmax, which is saved, and the negative log-likelihood."""
    size, labels = given.logits.num_bytes, given.labels[-1:]
    result = tape.operation("log_softmax", [given.logits], Output(size, category=Category.LOGITS), saves=Saved(output=True))
    wide = size // context.precision.compute_bytes * FP32
    if context.loss.logits_upcast in NARROW and context.precision.autocast and size < wide <= wide_bytes:
        # autocast has nll_loss on its fp32 list; cross_entropy_loss gives log_softmax, which is there too, a dtype
        result = logits_op(tape, result, wide, "nll_loss.to_float32")
    tape.operation("nll_loss", [result, *labels], FP32, saves=[result, *labels])


def _loss_in_place(tape: Tape, logits: Tensor, context: HFContext) -> None:
    """Unsloth's cross entropy: saves the logits and one number per row, and overwrites the logits with their gradient
    (fms-acceleration `kernels/unsloth/cross_entropy_loss.py`, Fast_CrossEntropyLoss)."""
    losses = tape.operation(
        "cross_entropy",
        [logits],
        Output(context.rows * FP32, category=Category.LOGITS),
        saves=Saved([logits], extra_bytes=[context.rows * FP32], by_function=True, become_gradients=True),
    )
    tape.operation("cross_entropy.sum", [losses], FP32)


def _loss_over_parts(tape: Tape, logits: Tensor) -> None:
    """torch's loss parallel over this rank's part of the vocabulary (torch 2.13 `distributed/tensor/parallel/loss.py`
    _log_softmax, _nll_loss_and_log_softmax_backward): shifted logits, their exponentials as a temporary, and the output."""
    shifted = tape.operation(
        "log_softmax.shift", [logits], Output(logits.num_bytes, category=Category.LOGITS), gradients=[(logits, None)]
    )
    tape.operation("log_softmax.exp", [shifted], 0, gradients=[], forward_temporary_bytes=logits.num_bytes)
    result = tape.operation(
        "log_softmax", [shifted], Output(logits.num_bytes, category=Category.LOGITS), gradients=[(shifted, None)]
    )
    tape.operation(  # (grad_input + torch.exp(x)) * grad_output
        "nll_loss", [result], FP32, saves=[result], backward_temporary_bytes=2 * logits.num_bytes
    )


def _metrics(tape: Tape, logits: Tensor, context: HFContext) -> None:
    """What SFTTrainer computes for its logs from the logits that the network returned (the convention `sft_metrics`; trl
    `trainer/sft_trainer.py` compute_loss, `trainer/utils.py` entropy_from_logits). The accuracy is of a copy without each
    sequence's last token, which one sequence needs not. The entropy makes a log-softmax, its exponentials and their product
    of 128 tokens at a time, in trl 0.22 of a sequence; in 1.3 to 1.5 of a copy that outlives the making of the next."""
    sequence = logits.num_bytes // context.batch
    copy = 0 if context.batch == 1 else logits.num_bytes // context.sequence * (context.sequence - 1)
    chunk = 3 * sequence // context.sequence * min(ENTROPY_CHUNK, context.sequence)
    passing = {
        "accuracy": copy,
        "entropy_of_sequences": max(3 * sequence, copy),
        "entropy": max(chunk, copy),
        "entropy_of_a_copy": copy + max(chunk, copy),
        "entropy_of_a_view": copy + chunk,
    }[context.loss.metrics]
    tape.operation("metrics", [logits], 0, gradients=[], forward_temporary_bytes=passing)


def compiled_loss(tape: Tape, logits: Tensor, context: HFContext) -> None:
    """Append the compiled loss, which saves the logits as they are and two fp32 numbers per token; its backward computes
    their gradient at once. If the whole network is compiled, the logits are an output of its graph, with zeros as their
    gradient."""
    whole = "network" in context.compiled
    if context.loss.logits_upcast == "model_unshifted":  # the model's end is not compiled with the loss
        logits = widened_by_model(tape, logits, context)
    if not whole:
        tape.begin_loss()
    tape.operation(
        "cross_entropy",
        [logits],
        FP32,
        saves=Saved([logits], extra_bytes=[context.rows * FP32] * 2),
        backward_temporary_bytes=logits.num_bytes if whole else 0,
    )
