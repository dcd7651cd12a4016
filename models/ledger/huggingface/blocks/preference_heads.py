"""The heads of preference training in TRL's trainers: log-probabilities of tokens, with and without whole logits.

Source: trl 1.16.0 `trainer/utils.py` add_fused_lm_head, `kernels/chunked_logprob.py` ChunkedLogProbFunction; the same since
1.15.0. Positions of the prompt are not scored (`completion_mask`); without `loss.completion_length` a prompt is empty.
"""

from __future__ import annotations

from collections.abc import Iterator

from peakcast.core.units import FP32, INT64
from peakcast.jobs.architecture import Architecture
from peakcast.models.ledger.huggingface.blocks.context import IN_PASSES, SHIFTED, VIEWED, HFContext
from peakcast.models.ledger.huggingface.blocks.whole_logits import ENTROPY_CHUNK, shift_logits
from peakcast.models.ledger.tape.marks import Mark
from peakcast.models.ledger.tape.tape import Output, Saved, Tape, Tensor, WeightGradient
from peakcast.timelines.timeline import Category

TOKEN_CHUNK = 4096
"""TOKEN_CHUNK_SIZE of chunked_logprob.py."""
VOCABULARY_CHUNK = 32768
"""_CHUNKED_LOGPROB_CHUNK_SIZE of trainer/utils.py. A tile has this width even for a smaller vocabulary."""
STATISTICS = 7
"""fp32 numbers per token in which tiles are accumulated while the head runs forward."""


def token_log_probabilities(tape: Tape, hidden: Tensor, context: HFContext) -> None:
    """Append the head of `hidden`, the last norm's output. The scored positions are copied, projected tile by tile, and
    projected again in backward, whose gradients are fp32 until they are complete."""
    architecture, width = context.architecture, context.architecture.hidden_size
    scored, vocabulary = scored_rows(context), architecture.vocab_size
    element, trains = context.stream_bytes, context.head_trains
    shifted = tape.operation("lm_head.shift", [hidden], Output.view(hidden))
    copied = tape.operation("lm_head.scored", [shifted], scored * width * element)
    tile = min(scored, TOKEN_CHUNK) * VOCABULARY_CHUNK * context.precision.compute_bytes
    cast = context.precision.compute_bytes if context.precision.compute_bytes != element else 0
    passing = 0 if element == FP32 else FP32 * width * (scored + (vocabulary if trains else 0))
    weights = [WeightGradient("lm_head.weight.grad", vocabulary * width * context.precision.weight_bytes)] if trains else []
    if trains and architecture.lm_head_bias:
        weights.append(WeightGradient("lm_head.bias.grad", vocabulary * context.precision.weight_bytes))
    with tape.marked(Mark.LOG_PROBABILITIES):
        tape.operation(
            "lm_head.log_probabilities",
            [copied],
            Output(scored * FP32, category=Category.LOGITS),
            saves=Saved([copied], extra_bytes=[scored * INT64, scored * FP32, scored * FP32]),
            weight_gradients=weights,
            forward_temporary_bytes=STATISTICS * scored * FP32 + tile + cast * width * _cast(scored, vocabulary),
            backward_temporary_bytes=passing + tile + cast * width * _cast(scored, vocabulary, keeps_weight=True),
        )


def whole_log_probabilities(tape: Tape, logits: Tensor, context: HFContext) -> None:
    """Append what reads whole `logits` and keeps the log-probability of each token. Under autocast accelerate widens them
    first (convert_outputs_to_fp32)."""
    wide = widened_bytes(context)
    softmax = context.loss.token_scores not in IN_PASSES
    if logits.num_bytes < wide and (softmax or context.precision.autocast):
        logits = tape.operation("logits.to_float32", [logits], Output(wide, category=Category.LOGITS))
    with tape.marked(Mark.LOG_PROBABILITIES):
        if softmax:
            _whole_softmax(tape, logits, context)
            return
        scored = shift_logits(tape, logits, context) if context.loss.token_scores == SHIFTED else logits
        if logits.num_bytes == wide:
            _logarithms_of_sums(tape, scored, context)
        else:
            _softmax_of_sequences(tape, scored, context)
        _metrics(tape, [logits, scored], context)


def widened_bytes(context: HFContext) -> int:
    """Bytes of all logits in fp32."""
    return context.rows * context.group.part(context.architecture.vocab_size) * FP32


def variables_bytes(context: HFContext) -> int:
    """Bytes of the policy's logits that variables of the trainer's loss refer to while the reference runs, beyond what the
    graph saves: before 0.29 they were another function's."""
    how, part = context.loss.token_scores, context.group.part(context.architecture.vocab_size)
    if how not in (SHIFTED, VIEWED):
        return 0
    if context.precision.autocast or context.precision.compute_bytes == FP32:  # the graph saves what the scores are of
        return widened_bytes(context) if how == SHIFTED and context.batch > 1 else 0
    of_all = context.rows * part * context.precision.compute_bytes
    copy = of_all // context.sequence * (context.sequence - 1)
    return of_all + (copy if how == SHIFTED and context.batch > 1 else 0)


def _whole_softmax(tape: Tape, logits: Tensor, context: HFContext) -> None:
    """The log-softmax of all logits, and the tokens' (trl before 0.15). Before 0.12 and in LLaMA-Factory
    (`get_batch_logps`) it is of all logits but each sequence's last, of which torch first makes a contiguous copy."""
    size = logits.num_bytes
    copy = size if context.loss.shifts_logits else 0
    result = tape.operation(
        "log_softmax",
        [logits],
        Output(size, category=Category.LOGITS),
        saves=Saved(output=True),
        forward_temporary_bytes=copy,
    )
    kept = Saved(extra_bytes=[context.rows * INT64])
    tape.operation("log_probabilities", [result], context.rows * FP32, saves=kept)


def _logarithms_of_sums(tape: Tape, logits: Tensor, context: HFContext) -> None:
    """The tokens' logits less the logarithm of each sum, taken for each sequence alone (trl 0.15 to 1.14 `trainer/utils.py`
    selective_log_softmax). Backward has the gradients of all sequences before it stacks them into one."""
    tokens, index = context.rows * FP32, context.rows * INT64
    chosen = tape.operation("log_probabilities.gather", [logits], tokens, saves=Saved(extra_bytes=[index]))
    kept = Saved([logits], output=True)
    sums = tape.operation(
        "log_probabilities.logsumexp", [logits], tokens, saves=kept, backward_temporary_bytes=logits.num_bytes
    )
    tape.operation("log_probabilities", [chosen, sums], tokens)


def _softmax_of_sequences(tape: Tape, logits: Tensor, context: HFContext) -> None:
    """Each sequence's log-softmax, and its tokens': as above in 16 bits, in which sums of exponentials are too coarse.
    Without a graph each is freed before the next but one; backward frees each as it makes its gradient."""
    count = context.batch
    parts = []
    for sequence in tape.split(logits, [logits.num_bytes // count] * count, "log_probabilities.unbind"):
        kept = Saved(extra_bytes=[sequence.num_bytes, context.sequence * INT64])
        parts.append(tape.operation("log_probabilities.gather", [sequence], context.sequence * FP32, saves=kept))
    tape.operation("log_probabilities", parts, context.rows * FP32)


def _metrics(tape: Tape, variables: list[Tensor], context: HFContext) -> None:
    """What a DPOTrainer computes for its logs while `variables` still refer to whole logits: the mean logit of each half's
    completions, of which indexing by a mask makes a copy, and from 0.29 on the entropy in chunks of 128 tokens, for which
    reshaping copies the logits if they are a view without each sequence's last token (trl 0.24.0, 0.29.1, 1.5.1, 1.13.0
    `trainer/dpo_trainer.py` concatenated_forward and _compute_loss, `trainer/utils.py` entropy_from_logits). The trainer
    does this once, after the reference's forward; adding it to both heads gives the same peak."""
    logits, how = variables[-1], context.loss.token_scores
    row = logits.num_bytes // context.rows
    chunk = 3 * min(ENTROPY_CHUNK, context.rows) * row  # the log-softmax, its exponentials, and their product
    copied = logits.num_bytes if how == VIEWED and context.batch > 1 else 0
    entropy = chunk + copied if how in (SHIFTED, VIEWED) else 0
    passing = max(entropy, scored_rows(context) // 2 * row)
    tape.operation("metrics", [logits], 0, gradients=[], forward_temporary_bytes=passing)
    for tensor in variables:
        tape.hold(tensor)


def scored_rows(context: HFContext) -> int:
    """Number of positions whose next token is scored: those of the completions, else all that have one."""
    return context.batch * min(context.loss.completion or context.sequence, context.sequence - 1)


def vocabulary_part_bytes(architecture: Architecture, element_bytes: int) -> int:
    """Bytes of the largest part of the head's weight that is multiplied at a time."""
    return min(architecture.vocab_size, VOCABULARY_CHUNK) * architecture.hidden_size * element_bytes


def _cast(rows: int, vocabulary: int, *, keeps_weight: bool = False) -> int:
    """The most rows, of tokens and of the head's weight together, that exist in autocast's dtype at a time. A variable
    refers to a chunk until the next one exists; to the weight's only in backward (`keeps_weight`)."""
    most = tokens = weight = 0
    for chunk in _chunks(rows, TOKEN_CHUNK):
        most, tokens = max(most, tokens + chunk + weight), chunk
        for part in _chunks(vocabulary, VOCABULARY_CHUNK):
            most = max(most, tokens + weight + part)
            weight = part if keeps_weight else 0
    return most


def _chunks(total: int, size: int) -> Iterator[int]:
    """Sizes of the chunks of `size` in `total`."""
    return (min(size, total - start) for start in range(0, total, size))
