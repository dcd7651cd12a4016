"""The head of a Hugging Face network: the final norm, the lm_head, and the loss over all positions."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import lru_cache

from peakcast.core.units import FP32, INT64
from peakcast.models.ledger.huggingface.blocks.activations import activation
from peakcast.models.ledger.huggingface.blocks.builder import BlockBuilder
from peakcast.models.ledger.huggingface.blocks.chunked_loss import chunked_cross_entropy
from peakcast.models.ledger.huggingface.blocks.classifier_heads import class_scores
from peakcast.models.ledger.huggingface.blocks.context import HFContext
from peakcast.models.ledger.huggingface.blocks.fused_loss import fused_loss
from peakcast.models.ledger.huggingface.blocks.preference_heads import (
    token_log_probabilities,
    whole_log_probabilities,
)
from peakcast.models.ledger.huggingface.blocks.smoothed_loss import smoothed_loss
from peakcast.models.ledger.huggingface.blocks.tensor_parallel import enter_columns, gather_columns, gather_sequence
from peakcast.models.ledger.huggingface.blocks.token_table import tied_in_graph
from peakcast.models.ledger.huggingface.blocks.whole_logits import compiled_loss, logits_op, loss_of_whole_logits
from peakcast.models.ledger.tape import primitives as ops
from peakcast.models.ledger.tape.marks import Mark
from peakcast.models.ledger.tape.primitives import LinearKind, LinearLayer
from peakcast.models.ledger.tape.tape import Output, Tape, Tensor
from peakcast.models.ledger.tape.template import Template
from peakcast.networks.families import family_of
from peakcast.timelines.timeline import Category


@lru_cache(maxsize=256)
def head(context: HFContext) -> Template:
    """The template of the final norm, the lm_head and the loss over all positions."""
    tape = Tape(
        gpu=context.gpu,
        saves_on_cpu=context.backward.saves_on_cpu,
        splits_backward=context.backward.in_two_parts,
        modules={"final_norm": "norm"},
    )
    build = BlockBuilder(tape, context)
    final, sequence_output = _final_states(build)
    LOSSES[loss_of(context)](build, final, sequence_output)
    return tape.finish()


# -- the loss: one function for each way in which lm_head and loss are computed -------------------------------------------


def loss_of(context: HFContext) -> str:
    """Which of LOSSES the network has."""
    if context.architecture.head != "language_model":
        return "classifier"
    if context.loss.smooths_labels:
        return "smoothed"
    if context.kernels.loss == "tiles" or context.loss.kind != "cross_entropy":
        return "log_probabilities"
    if context.kernels.fused_loss:
        return "fused"
    if context.kernels.loss == "chunked_logits" and not context.group.loss:
        return "chunked_logits"
    if context.loss.token_scores:
        return "whole_log_probabilities"
    return "compiled" if "loss" in context.compiled else "whole_logits"


def _classes(build: BlockBuilder, final: Tensor, sequence_output: Tensor) -> None:
    """A classifier's scores."""
    class_scores(build, final)
    build.tape.hold(final)


def _log_probabilities(build: BlockBuilder, final: Tensor, sequence_output: Tensor) -> None:
    """TRL's log-probability of each token."""
    build.tape.begin_loss()
    with build.tape.marked(Mark.LM_HEAD):
        token_log_probabilities(build.tape, final, build.context)
    build.tape.hold(final)


def _fused(build: BlockBuilder, final: Tensor, sequence_output: Tensor) -> None:
    """One operation for lm_head and loss."""
    fused_loss(build, final)
    build.tape.hold(final)


def _chunked(build: BlockBuilder, final: Tensor, sequence_output: Tensor) -> None:
    """Chunks of the logits, one after the other."""
    chunked_cross_entropy(build.tape, _logits(build, final), build.context)
    build.tape.hold(final)


def _compiled(build: BlockBuilder, final: Tensor, sequence_output: Tensor) -> None:
    """A loss that torch.compile has compiled."""
    compiled_loss(build.tape, _logits(build, final), build.context)


def _whole_log_probabilities(build: BlockBuilder, final: Tensor, sequence_output: Tensor) -> None:
    """Preference training's log-probability of each token, from whole logits."""
    logits = _logits(build, final)
    build.tape.begin_loss()
    whole_log_probabilities(build.tape, logits, build.context)
    build.tape.hold(final)


def _whole(build: BlockBuilder, final: Tensor, sequence_output: Tensor) -> None:
    """Whole logits, widened and shifted as the release does it."""
    loss_of_whole_logits(build, _logits(build, final), final, sequence_output)


def _smoothed(build: BlockBuilder, final: Tensor, sequence_output: Tensor) -> None:
    """The loss of transformers' label smoother, which is computed after the network has returned."""
    logits = _logits(build, final)
    build.tape.hold(final)
    smoothed_loss(build.tape, logits, build.context)


LOSSES: dict[str, Callable[[BlockBuilder, Tensor, Tensor], None]] = {
    "classifier": _classes,
    "log_probabilities": _log_probabilities,
    "fused": _fused,
    "chunked_logits": _chunked,
    "compiled": _compiled,
    "whole_log_probabilities": _whole_log_probabilities,
    "smoothed": _smoothed,
    "whole_logits": _whole,
}


# -- what the loss reads --------------------------------------------------------------------------------------------------


def _final_states(build: BlockBuilder) -> tuple[Tensor, Tensor]:
    """The last norm's output, which the head reads, and the network's sequence output."""
    context, tape = build.context, build.tape
    architecture, rows, width = context.architecture, context.rows, context.architecture.hidden_size
    hidden = tape.input(context.stream_rows * width * context.stream_bytes)
    sequence_output = hidden
    if architecture.kind == "encoder" and architecture.head != "language_model":
        return hidden, sequence_output
    if architecture.kind == "encoder":  # the masked-token head's own projection
        with tape.marked(Mark.LM_HEAD):
            hidden = build.projection(hidden, width, width, "lm_head.dense", True)
            hidden = activation(build, hidden, rows * width)
    final = build.norm(hidden, width, "final_norm", context.stream_rows)
    tape.hold(hidden)  # the model's variable refers to it while the last norm runs
    if context.precision.narrows_final_norm and final.num_bytes > rows * width * context.precision.weight_bytes:
        final = ops.cast(tape, final, rows * width * context.precision.weight_bytes, "final_norm.output_cast")
    if architecture.kind == "encoder_decoder":
        normed, final = final, build.dropout(final, architecture.hidden_dropout, rows * width, "final_dropout")
        sequence_output = final
        tape.hold(normed)
        if architecture.scale_decoder_outputs:
            with tape.marked(Mark.OUTPUT_SCALING):
                final = ops.scale(tape, final, "decoder_output_scaling")
    return final, sequence_output


def _logits(build: BlockBuilder, final: Tensor) -> Tensor:
    """The lm_head's product, whole or this rank's part of the vocabulary, scaled as the network does."""
    context, tape, group = build.context, build.tape, build.context.group
    architecture, rows = context.architecture, context.rows
    trains = context.head_trains and not tied_in_graph(context)
    apart = loss_of(context) == "chunked_logits" and context.loss.logits_chunks_apart
    part, size = group.part(architecture.vocab_size), context.precision.end_weight_bytes
    with tape.marked(Mark.LM_HEAD):
        inputs = enter_columns(tape, gather_sequence(tape, final, group, "lm_head"), group, "lm_head")
        layer = _lm_head_layer(context, part, size)
        products = context.loss.logits_chunks if apart else 1
        layer = replace(layer, trains=trains, sums_weight_gradients=apart, num_products=products)
        logits = _lm_head(build, inputs, layer)
        logits.storage.category = Category.LOGITS
        if group.ranks > 1 and not group.loss:
            whole = rows * architecture.vocab_size * context.precision.compute_bytes
            logits = gather_columns(tape, logits, whole, "lm_head")
            logits.storage.category = Category.LOGITS
            tape.hold(inputs)  # the argument of the module whose hook gathers
    if family_of(architecture).ends.scales_logits:
        logits = ops.scale(tape, logits, "logits_scaling")
    if architecture.final_logit_softcapping is not None:
        logits = ops.scale(tape, logits, "softcap.divide")
        logits = ops.scale(tape, ops.unary_of_result(tape, logits, "softcap.tanh"), "softcap.multiply")
    return logits


def _lm_head_layer(context: HFContext, out_features: int, element_bytes: int) -> LinearLayer:
    """The lm_head's matrix, or this rank's part of it."""
    return LinearLayer(
        name="lm_head",
        in_features=context.architecture.hidden_size,
        out_features=out_features,
        element_bytes=element_bytes,
        kind=LinearKind.LM_HEAD,
        bias=context.architecture.lm_head_bias,
    )


def _lm_head(build: BlockBuilder, x: Tensor, layer: LinearLayer) -> Tensor:
    """The product of the lm_head, whose matrix may be quantised: LitGPT's, which takes 128 positions at a time (litgpt
    0.4.0 finetune/lora.py, `lm_head_chunk_size`)."""
    if build.context.finetuning.quantization and build.context.linears.quantized_head:
        return build.quantized_linear(x, layer.in_features, layer.out_features, layer.name, in_chunks=True)
    return build.linear(x, layer)


def logits_bytes_kept_by_outputs(context: HFContext, *, widened: bool) -> int:
    """Bytes of the logits in the model's outputs, which the caller may keep; 0 with a fused loss. `widened`: accelerate's
    `convert_outputs_to_fp32` has made them fp32 under autocast."""
    if context.kernels.fused_loss or loss_of(context) in ("log_probabilities", "classifier"):
        return 0
    wide = context.loss.logits_upcast in ("model", "model_unshifted", "wrapper") or (widened and context.precision.autocast)
    element = FP32 if wide else context.precision.compute_bytes
    size = context.architecture.vocab_size
    return context.rows * (context.group.part(size) if context.group.loss else size) * element


@lru_cache(maxsize=256)
def next_token_head(context: HFContext, kept: str) -> Template:
    """Generation's head: the final norm over all positions, the logits of the last position, and their fp32 copy from which
    the next token is chosen. `kept`: "last", or "all": the logits of all positions are widened, and those of the last are a
    view (before transformers 4.45 kept only the last)."""
    architecture, tape = context.architecture, Tape()
    rows, width, vocabulary = context.rows, architecture.hidden_size, architecture.vocab_size
    hidden = tape.input(rows * width * context.stream_bytes)
    final = BlockBuilder(tape, context).norm(hidden, width, "final_norm")
    build = BlockBuilder(tape, context, rows if kept == "all" else context.batch)
    with tape.marked(Mark.LAST_POSITION):
        last = tape.operation("last_position", [final], Output(0, view_of=final))
    last.num_bytes = build.rows * width * context.stream_bytes
    layer = _lm_head_layer(context, vocabulary, context.precision.weight_bytes)
    logits = _lm_head(build, last, replace(layer, trains=False))
    logits.storage.category = Category.LOGITS
    if architecture.final_logit_softcapping is not None:
        for name in ("softcap.divide", "softcap.tanh", "softcap.multiply"):
            logits = logits_op(tape, logits, logits.num_bytes, name)
    if kept == "all":
        logits = logits_op(tape, logits, build.rows * vocabulary * FP32, "logits.to_float32")
    with tape.marked(Mark.NEXT_TOKEN_LOGITS):
        if kept == "all":
            chosen = tape.operation("next_token_logits", [logits], Output(0, view_of=logits))
        else:
            chosen = logits_op(tape, logits, context.batch * vocabulary * FP32, "next_token_logits")
    tape.operation("argmax", [chosen], context.batch * INT64)
    for tensor in (logits, final):
        tape.hold(tensor)
    return tape.finish()
