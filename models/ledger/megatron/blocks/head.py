"""The end of a Megatron-LM model on its last stage: final norm, multi-token prediction, output layer and losses.

Sources: megatron-core 0.16.1 `models/gpt/gpt_model.py` (`_postprocess`), `transformer/multi_token_prediction.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from peakcast.core.units import FP32
from peakcast.models.ledger.megatron.blocks.context import MegatronContext
from peakcast.models.ledger.megatron.blocks.ends import cross_entropy, embed, output_layer
from peakcast.models.ledger.megatron.blocks.gradients import trained
from peakcast.models.ledger.megatron.blocks.layer import layer_operations, offload_of
from peakcast.models.ledger.megatron.blocks.primitives import column_linear, norm
from peakcast.models.ledger.tape.offloading import NO_OFFLOAD
from peakcast.models.ledger.tape.tape import Output, Tape, Tensor, WeightGradient
from peakcast.models.ledger.tape.template import Template


@lru_cache(maxsize=256)
def head(context: MegatronContext, num_nextn_predict_layers: int = 0) -> Template:
    """The template of the final norm, output layer [rows, vocabulary] and cross-entropy. With multi-token prediction, for
    each token predicted ahead: a further decoder layer of this `context`, an output layer and a loss.

    The last narrow logits live until the model's forward returns; in older releases so do the last of those predicted
    ahead, which now end with the function that has their loss (`process_mtp_loss`). So does the final norm's output, which
    a frozen output layer does not save.
    """
    tape = Tape()
    hidden = tape.input(context.stream_bytes, owned=not context.runs.input_held)
    states = [_final_norm(tape, hidden, context)]
    if num_nextn_predict_layers:
        states = _predict_ahead(tape, states[0], context, num_nextn_predict_layers)
    return _outputs(tape, states, context)


@lru_cache(maxsize=64)
def parted_head(
    context: MegatronContext, attention: MegatronContext, feed_forward: MegatronContext, *, offloads: bool
) -> tuple[Template, Template, Template]:
    """`head` with one token predicted ahead as the three blocks in which it runs where micro-batches overlap: the final
    norm and the further layer up to its attention; its feed-forward; output layers and losses. The first block's norm is
    saved, so that the second has it in its output without keeping it. `attention`, `feed_forward`: the contexts of a layer
    that consists of that part. `offloads`: whether the layer's saved tensors go to the host, as `context` says about
    other layers."""
    offload = offload_of(context) if offloads else NO_OFFLOAD
    tape = Tape(offload=offload)
    final = _final_norm(tape, tape.input(context.stream_bytes), context)
    joined = _join(tape, final, embed(tape, context), context)
    attended = tape.finish(layer_operations(tape, joined, attention))
    tape, size = Tape(offload=offload), context.stream_bytes
    output = layer_operations(tape, tape.input(size), feed_forward)
    predicted = norm(tape, output, context, context.stream_rows, context.hidden, "mtp.final_layernorm")
    together = tape.operation("mtp.concatenate_states", [predicted], 2 * size, gradients=[(predicted, None)])
    fed_forward = tape.finish(together)
    tape = Tape()
    states = tape.split(tape.input(2 * size), [size] * 2, "mtp.chunk")
    return attended, fed_forward, _outputs(tape, states, context)


def _outputs(tape: Tape, states: Sequence[Tensor], context: MegatronContext) -> Template:
    """Output layers and losses of `states`, the network's own and those predicted ahead, and with them the template."""
    final, *ahead = states
    logits: list[Tensor] = []
    for prediction in ahead:
        logits = [*logits[-1:], output_layer(tape, prediction, context)]
        tape.hold(logits[0])  # until its variable is reassigned to the next
        final = _attach_loss(tape, final, cross_entropy(tape, logits[-1], context))
    if ahead and not context.ends.predicted_logits_outlive_loss:
        tape.hold(logits.pop())
    if context.ends.masked_tokens:
        final = _masked_token_head(tape, final, context)
    logits = [*logits[-1:], output_layer(tape, final, context)]
    tape.begin_loss()
    loss = cross_entropy(tape, logits[-1], context)
    for variable in (final, *logits):
        tape.hold(variable)
    tape.operation("loss_function", [loss], FP32, forward_temporary_bytes=2 * context.rows * FP32)
    return tape.finish()


@lru_cache(maxsize=64)
def encoder_end(context: MegatronContext) -> Template:
    """The template of an encoder's final norm, whose output the decoder's layers own; without a norm, they own the output
    of the encoder's last layer."""
    tape = Tape()
    states = _final_norm(tape, tape.input(context.stream_bytes), context)
    states.storage.num_bytes = 0
    return tape.finish(states)


def _final_norm(tape: Tape, hidden: Tensor, context: MegatronContext) -> Tensor:
    """The final norm, if the network has one."""
    if not context.ends.final_norms:
        return tape.operation("final_states", [hidden], Output.view(hidden), gradients=[(hidden, None)])
    return norm(tape, hidden, context, context.stream_rows, context.hidden, "final_layernorm")


def _masked_token_head(tape: Tape, final: Tensor, context: MegatronContext) -> Tensor:
    """BERT's projection, GELU and norm before the output layer, whole on every rank. The pooler for sentence pairs reads
    each sample's first token. Source: megatron-core 0.16.1 `models/bert/bert_model.py`, `bert_lm_head.py`, `pooler.py`."""
    square, size = context.hidden * context.hidden * context.element_bytes, context.hidden * context.element_bytes
    if context.ends.token_types:
        whole = final
        if context.groups.sequence_parallel:
            whole = tape.operation("pooler.gather", [final], context.gathered_bytes)
        tape.operation(
            "pooler",
            [whole],
            context.batch * size,
            saves=[whole],
            weight_gradients=trained(context, WeightGradient("pooler.dense.weight.grad", square)),
        )
    gradients = [WeightGradient("lm_head.dense.weight.grad", square), WeightGradient("lm_head.dense.bias.grad", size)]
    trains = trained(context, *gradients)
    hidden = tape.operation("lm_head.dense", [final], final.num_bytes, saves=[final], weight_gradients=trains)
    hidden = tape.operation("lm_head.gelu", [hidden], final.num_bytes, saves=[hidden])
    return norm(tape, hidden, context, context.stream_rows, context.hidden, "lm_head.layer_norm")


def _predict_ahead(tape: Tape, final: Tensor, context: MegatronContext, depth: int) -> list[Tensor]:
    """[final, prediction 1, ..., prediction `depth`], views of one concatenated tensor."""
    states = [final]
    for _ in range(depth):
        joined = _join(tape, states[-1], embed(tape, context), context)
        output = layer_operations(tape, joined, context)
        states.append(norm(tape, output, context, context.stream_rows, context.hidden, "mtp.final_layernorm"))
    together = tape.operation(
        "mtp.concatenate_states",
        states,
        len(states) * context.stream_bytes,
        gradients=[(state, None) for state in states],
    )
    return tape.split(together, [context.stream_bytes] * len(states), "mtp.chunk")


def _join(tape: Tape, hidden: Tensor, embedded: Tensor, context: MegatronContext) -> Tensor:
    """Both, each after a norm, concatenated and projected to [rows, hidden / tensor parallel size], then gathered and
    scattered."""
    tensor, size = context.groups.tensor_parallel_size, context.stream_bytes
    embedded = norm(tape, embedded, context, context.stream_rows, context.hidden, "mtp.enorm")
    hidden = norm(tape, hidden, context, context.stream_rows, context.hidden, "mtp.hnorm")
    both = tape.operation("mtp.concatenate", [embedded, hidden], 2 * size, gradients=[(embedded, size), (hidden, size)])
    width = context.hidden // tensor
    joined = column_linear(tape, both, context, width, "mtp.eh_proj", False, in_features=2 * context.hidden)
    if tensor > 1:  # gathering along the last dimension makes a copy of all ranks' parts, then one in order
        full = context.gathered_bytes
        joined = tape.operation("mtp.gather", [joined], full, forward_temporary_bytes=full)
    if context.groups.sequence_parallel:
        joined = tape.operation(
            "mtp.scatter", [joined], Output(size, view_of=joined), gradients=[(joined, joined.num_bytes)]
        )
    return joined


def _attach_loss(tape: Tape, final: Tensor, loss: Tensor) -> Tensor:
    """`MTPLossAutoScaler`: passes the states on and saves the loss per token."""
    masked = tape.operation("mtp.loss", [loss], loss.num_bytes, forward_temporary_bytes=loss.num_bytes)
    return tape.operation(
        "mtp.attach_loss",
        [final, masked],
        Output.view(final),
        saves=[masked],
        gradients=[(final, None), (masked, masked.num_bytes)],
    )
