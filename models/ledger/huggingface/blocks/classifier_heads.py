"""The heads of classifiers: a few outputs for each sequence or each token, in the place of the vocabulary's logits.

Source: transformers 5.17 `modeling_layers.py` GenericForSequenceClassification and GenericForTokenClassification,
`models/bert/modeling_bert.py` BertPooler and BertForSequenceClassification, `models/roberta/modeling_roberta.py`
RobertaClassificationHead, `loss/loss_utils.py`. A reward model's head is a decoder's with one output.
"""

from __future__ import annotations

from peakcast.core.units import FP32, INT32
from peakcast.models.ledger.huggingface.blocks.builder import BlockBuilder
from peakcast.models.ledger.parameters.inventory import CLASSIFIER, CLASSIFIER_DENSE, CLASSIFIER_OUT, POOLER, SCORE
from peakcast.models.ledger.tape import primitives as ops
from peakcast.models.ledger.tape.marks import Mark
from peakcast.models.ledger.tape.primitives import LinearLayer
from peakcast.models.ledger.tape.tape import Output, Saved, Tensor
from peakcast.networks.families import family_of

DECODERS_DROPOUT = 0.1
"""Dropout before the classes of tokens if the network's configuration names none."""


def class_scores(build: BlockBuilder, hidden: Tensor) -> None:
    """A classifier's head over `hidden`, the last states, and its loss."""
    network = build.context.architecture
    if build.context.loss.kind == "reward":  # its trainer computes the loss from what the network returns
        build.tape.begin_loss()
    if network.head == "token_classifier":
        _of_tokens(build, hidden)
    elif network.kind == "encoder":
        _of_first_position(build, hidden)
    else:
        _of_last_position(build, hidden)


def _of_tokens(build: BlockBuilder, hidden: Tensor) -> None:
    """Classes of each token, after dropout."""
    context = build.context
    network, rows = context.architecture, context.rows
    drops = network.hidden_dropout or (0.0 if network.kind == "encoder" else DECODERS_DROPOUT)
    dropped = build.dropout(hidden, drops, rows * network.hidden_size, "classifier_dropout")
    with build.tape.marked(Mark.LM_HEAD):
        scores = _linear(build, dropped, CLASSIFIER if network.kind == "encoder" else SCORE, network.num_labels, bias=True)
    _cross_entropy(build, scores, rows)


def _of_last_position(build: BlockBuilder, hidden: Tensor) -> None:
    """The scores of a decoder: of every position, of which the last one's are used. Their matrix trains even if the rest of
    the network trains adapters."""
    context, tape = build.context, build.tape
    rows, labels = context.rows, context.architecture.num_labels
    with tape.marked(Mark.LM_HEAD):
        scores = _linear(build, hidden, SCORE, labels, bias=False)
        tape.operation("lm_head.last_position", [], rows * INT32, gradients=[], forward_temporary_bytes=2 * rows * INT32)
        pooled = tape.operation("lm_head.pooled", [scores], context.batch * labels * context.precision.compute_bytes)
    _cross_entropy(build, pooled, context.batch)


def _of_first_position(build: BlockBuilder, hidden: Tensor) -> None:
    """The scores of an encoder, from the states of the first position: a view, whose gradient is as large as all states."""
    context, width = build.context, build.context.architecture.hidden_size
    pools = family_of(context.architecture).ends.classifier == "pooled"
    one, drops, elements = build.for_rows(context.batch, 1), context.architecture.hidden_dropout, context.batch * width
    with build.tape.marked(Mark.LM_HEAD):
        view, whole = Output.view(hidden), hidden.num_bytes
        first = build.tape.operation("first_position", [hidden], view, gradients=[(hidden, whole)])
        first.num_bytes = hidden.num_bytes // context.sequence
        first = first if pools else one.dropout(first, drops, elements, "classifier_dropout")
        dense = one.projection(first, width, width, POOLER if pools else CLASSIFIER_DENSE, True)
        squashed = ops.unary_of_result(build.tape, dense, "classifier_tanh")
        dropped = one.dropout(squashed, drops, elements, "classifier_dropout")
        last = CLASSIFIER if pools else CLASSIFIER_OUT
        scores = _linear(one, dropped, last, context.architecture.num_labels, bias=True)
    _cross_entropy(one, scores, context.batch)


def _linear(build: BlockBuilder, x: Tensor, name: str, labels: int, *, bias: bool) -> Tensor:
    """The Linear of the classes."""
    width, size = build.context.architecture.hidden_size, build.context.precision.weight_bytes
    return build.linear(x, LinearLayer(name=name, in_features=width, out_features=labels, element_bytes=size, bias=bias))


def _cross_entropy(build: BlockBuilder, scores: Tensor, rows: int) -> None:
    """The loss of `rows` rows of `scores`, whose log-softmax it keeps; a reward model's has one score of each."""
    labels = build.context.architecture.num_labels
    if build.context.loss.kind != "reward":
        build.tape.begin_loss()
    if labels > 1:
        kept = Saved(output=True)
        size = scores.num_bytes if not build.context.precision.autocast else rows * labels * FP32
        scores = build.tape.operation("log_softmax", [scores], size, saves=kept)
    build.tape.operation("loss", [scores], FP32, saves=Saved(extra_bytes=[FP32]))
