"""The two ends of a Hugging Face decoder: the embedding, and the head with the loss over all positions.

Where the logits are converted to fp32 decides how many copies of them exist (where-memory-goes F2; transformers
`loss/loss_utils.py` and, before 4.46, each `modeling_*.py`).
"""

from __future__ import annotations

from functools import lru_cache

from peakcast.models.ledger.huggingface.blocks.adapter_tensors import network_tensors
from peakcast.models.ledger.huggingface.blocks.builder import BlockBuilder
from peakcast.models.ledger.huggingface.blocks.chunked_loss import chunked_cross_entropy
from peakcast.models.ledger.huggingface.blocks.context import HFContext
from peakcast.models.ledger.huggingface.blocks.fused_loss import fused_loss
from peakcast.models.ledger.huggingface.blocks.preference_heads import score, token_log_probabilities
from peakcast.models.ledger.huggingface.blocks.tensor_parallel import (
    enter_columns,
    gather_columns,
    gather_sequence,
    leave_rows,
)
from peakcast.models.ledger.tape import primitives as ops
from peakcast.models.ledger.tape.tape import Tape, Tensor, WeightGradient
from peakcast.models.ledger.tape.template import Template
from peakcast.networks.families import family_of
from peakcast.timelines.timeline import Category

FP32 = 4
INT64 = 8


@lru_cache(maxsize=256)
def embedding(context: HFContext) -> Template:
    """The template of the token (and learned position) embedding: ids in, [micro_batch_size, sequence_length, hidden_size]
    out."""
    architecture, tape = context.architecture, Tape(gpu=context.gpu, saves_on_cpu=context.saves_on_cpu)
    build = BlockBuilder(tape, context)
    rows, width = context.rows, architecture.hidden_size
    size = context.end_weight_bytes
    trains, group = context.trainable, context.group
    weight = architecture.vocab_size * width * context.end_weight_bytes  # its gradient is whole on every rank
    part = group.part(architecture.vocab_size) * width * context.end_weight_bytes
    tied = trains and architecture.tie_word_embeddings
    summed_last: list[tuple[Tensor, int | None]] = []
    if tied_in_graph(context):  # backward ends with the lm_head's product, which adds the embedding's gradient
        both = [WeightGradient("embed_tokens.weight.grad", weight)]
        product = tape.operation("lm_head.addmm", [], 0, weight_gradients=both)
        summed_last = [(product, weight)]
    elif tied:  # the lm_head's gradient exists; it and this one (or this rank's part of it) are summed into a third
        summed = 2 * weight if group.ranks == 1 else weight + 2 * part
        tape.operation("tied_weight", [], 0, gradients=[], backward_temporary_bytes=summed).requires_grad = True
    elif trains and group.table_reduced:
        rows_taken = WeightGradient("embed_tokens.weight.grad", part)
        tape.operation("embed_tokens.rows", [], 0, weight_gradients=[rows_taken], backward_temporary_bytes=weight)
    later = tied or (trains and group.table_reduced)
    taken = [WeightGradient("embed_tokens.weight.grad", weight)] if trains and not later else []
    passing = weight if later and not summed_last else 0
    if trains and context.gpu:
        passing += embedding_backward_bytes(rows, width, architecture.vocab_size)
    if "ends" in context.compiled and trains and size != FP32:
        # compiled, the rows' gradients are summed in fp32 (torch `_decomp` embedding_dense_backward), then converted
        narrow = tape.operation(
            "embed_tokens.table", [], 0, weight_gradients=taken, gradients=summed_last, backward_temporary_bytes=passing
        )
        narrow.requires_grad = True
        wide = weight // size * FP32
        hidden = tape.operation("embed_tokens", [narrow], rows * width * size, gradients=[(narrow, wide)])
    else:
        hidden = tape.operation(
            "embed_tokens", [], rows * width * size, weight_gradients=taken, backward_temporary_bytes=passing
        )
    hidden.requires_grad = trains
    if group.table:
        hidden = leave_rows(tape, hidden, group, "embed_tokens")
    if made := [one for one in network_tensors(architecture, context.finetuning) if one.trains]:
        taught = [WeightGradient(f"{one.name}.grad", one.numel * context.adapter_bytes) for one in made]
        hidden = tape.operation("adapters", [hidden], hidden.num_bytes, weight_gradients=taught)
    elif context.input_requires_grad and not trains and not hands_on_itself(context):
        hidden.requires_grad = True  # enable_input_require_grads(): a leaf, which its own node keeps
        tape.keep(hidden)
    if context.neftune:  # transformers integrations/neftune.py: output + torch.zeros_like(output).uniform_(...)
        noise = tape.operation("neftune.noise", [], hidden.num_bytes)
        hidden = ops.add(tape, hidden, noise, "neftune.add")
    hidden = _with_positions(build, hidden)
    if architecture.embedding_norm:
        hidden = build.norm(hidden, width, "embedding_layernorm")
    if family_of(architecture).ends.scales_embedding:
        hidden = ops.scale(tape, hidden, "embedding_multiplier")
    hidden = build.dropout(hidden, architecture.embedding_dropout, rows * width, "embedding_dropout")
    hidden.requires_grad = context.input_requires_grad
    return tape.finish(hidden)


def _with_positions(build: BlockBuilder, hidden: Tensor) -> Tensor:
    """`hidden` plus learned positions and token types, if the network has them."""
    context, tape, trains = build.context, build.tape, build.context.trainable
    architecture, rows, size = context.architecture, context.rows, context.end_weight_bytes
    width = architecture.hidden_size
    if architecture.position_embedding == "learned":
        num_positions = architecture.max_position_embeddings + architecture.position_embedding_offset
        table = WeightGradient("embed_positions.weight.grad", num_positions * width * size)
        looked_up = rows if family_of(architecture).ends.positions_per_sequence else context.sequence
        positions = tape.operation(
            "embed_positions", [], looked_up * width * size, weight_gradients=[table] if trains else []
        )
        hidden = ops.add(tape, hidden, positions, "add_positions")
    if architecture.type_vocab_size:
        table = WeightGradient("token_type_embeddings.weight.grad", architecture.type_vocab_size * width * size)
        types = tape.operation("token_type_embeddings", [], rows * width * size, weight_gradients=[table] if trains else [])
        hidden = ops.add(tape, hidden, types, "add_token_types")
    return hidden


def tied_in_graph(context: HFContext) -> bool:
    """Whether embedding and lm_head share a table inside one compiled graph. Inductor fuses the lm_head's product and the
    sum with the embedding's gradient into one `addmm` (torch 2.13 `_inductor/fx_passes/post_grad.py` addmm). So it runs
    last, and the logits' gradient and the final norm's output live until then."""
    tied = context.trainable and context.architecture.tie_word_embeddings
    whole = context.loss == "cross_entropy" and not context.fused_loss  # else no product of its own makes the logits
    return tied and whole and context.compiled.issuperset(("ends", "loss"))


def hands_on_itself(context: HFContext) -> bool:
    """Whether the first layer's input is the embedding module's output itself, not something computed from it."""
    architecture = context.architecture
    code = family_of(architecture).ends
    scaled_later = code.scales_embedding and not code.embedding_scales_itself
    learned = architecture.position_embedding == "learned"
    changed = learned or scaled_later or context.neftune  # NEFTune's hook comes after peft's
    return not (changed or architecture.embedding_norm or architecture.embedding_dropout)


def embedding_variables(context: HFContext) -> tuple[bool, list[int]]:
    """(whether it is the first layer's input, bytes of each) of the tensors to which variables of the model's forward refer
    while its layers run."""
    architecture = context.architecture
    tokens = context.stream_rows * architecture.hidden_size * context.end_weight_bytes
    if architecture.position_embedding == "learned" and architecture.kind == "decoder":
        once = tokens if family_of(architecture).ends.positions_per_sequence else tokens // context.batch
        return False, [tokens, once]
    in_module = architecture.kind == "encoder"  # BERT's embeddings are a module, to whose output the model refers
    return in_module or not (architecture.embedding_norm or architecture.embedding_dropout), [tokens]


def embedding_backward_bytes(rows: int, width: int, vocabulary: int) -> int:
    """Bytes that an embedding's CUDA backward allocates for itself, above 3072 looked-up rows: fp32 partial sums and index
    arrays. Source: aten/src/ATen/native/cuda/EmbeddingBackwardKernel.cu (where-memory-goes F5)."""
    if rows <= 3072:
        return 0
    return FP32 * width * (rows // 10 + min(rows, vocabulary)) + 4 * INT64 * rows


@lru_cache(maxsize=256)
def head(context: HFContext) -> Template:
    """The template of the final norm, the lm_head and the loss over all positions."""
    tape = Tape(gpu=context.gpu, saves_on_cpu=context.saves_on_cpu, splits_backward=context.splits_backward)
    build = BlockBuilder(tape, context)
    final, sequence_output = _final_states(build)
    if context.loss == "reward":
        tape.begin_loss()
        score(build, final)
    elif context.loss != "cross_entropy":
        tape.begin_loss()
        token_log_probabilities(tape, final, context)
    elif context.fused_loss:
        fused_loss(build, final)
    else:
        logits = _logits(build, final)
        if _is_chunked(context):
            chunked_cross_entropy(tape, logits, context)
        elif "loss" in context.compiled:
            return _compiled_loss(tape, logits, context)
        else:
            _loss_of_whole_logits(build, logits, final, sequence_output)
            return tape.finish()
    tape.hold(final)
    return tape.finish()


def _final_states(build: BlockBuilder) -> tuple[Tensor, Tensor]:
    """The last norm's output, which the head reads, and the network's sequence output."""
    context, tape = build.context, build.tape
    architecture, rows, width = context.architecture, context.rows, context.architecture.hidden_size
    hidden = tape.input(context.stream_rows * width * context.stream_bytes)
    sequence_output = hidden
    if architecture.kind == "encoder":  # the masked-token head's own projection
        hidden = build.projection(hidden, width, width, "lm_head.dense", True)
        hidden = ops.unary(tape, hidden, "lm_head.act")
    final = build.norm(hidden, width, "final_norm", context.stream_rows)
    tape.hold(hidden)  # the model's variable refers to it while the last norm runs
    if context.narrows_final_norm and final.num_bytes > rows * width * context.weight_bytes:
        final = ops.cast(tape, final, rows * width * context.weight_bytes, "final_norm.output_cast")
    if architecture.kind == "encoder_decoder":
        normed, final = final, build.dropout(final, architecture.hidden_dropout, rows * width, "final_dropout")
        sequence_output = final
        tape.hold(normed)
        if architecture.scale_decoder_outputs:
            final = ops.scale(tape, final, "decoder_output_scaling")
    return final, sequence_output


def _is_chunked(context: HFContext) -> bool:
    """Whether the loss runs over chunks of whole logits."""
    return context.kernels.loss == "chunked_logits" and not context.group.loss


def _logits(build: BlockBuilder, final: Tensor) -> Tensor:
    """The lm_head's product, whole or this rank's part of the vocabulary, scaled as the network does."""
    context, tape, group = build.context, build.tape, build.context.group
    architecture, rows, width = context.architecture, context.rows, context.architecture.hidden_size
    inputs = enter_columns(tape, gather_sequence(tape, final, group, "lm_head"), group, "lm_head")
    trains = context.trainable and not tied_in_graph(context)
    apart, bias = _is_chunked(context) and context.logits_chunks_apart, architecture.lm_head_bias
    part, size = group.part(architecture.vocab_size), context.end_weight_bytes
    logits = build.linear(inputs, width, part, "lm_head", bias, trains, size, sums_weight_gradients=apart)
    logits.storage.category = Category.LOGITS
    if group.ranks > 1 and not group.loss:
        logits = gather_columns(tape, logits, rows * architecture.vocab_size * context.compute_bytes, "lm_head")
        logits.storage.category = Category.LOGITS
        tape.hold(inputs)  # the argument of the module whose hook gathers
    if family_of(architecture).ends.scales_logits:
        logits = ops.scale(tape, logits, "logits_scaling")
    if architecture.final_logit_softcapping is not None:
        logits = ops.scale(tape, logits, "softcap.divide")
        logits = ops.scale(tape, ops.unary_of_result(tape, logits, "softcap.tanh"), "softcap.multiply")
    return logits


def _loss_of_whole_logits(build: BlockBuilder, logits: Tensor, final: Tensor, sequence_output: Tensor) -> None:
    """Append the loss, with the logits widened and shifted as the release does it, and hold what variables refer to
    meanwhile."""
    context, tape, group = build.context, build.tape, build.context.group
    whole = group.ranks > 1 and not group.loss
    vocabulary = context.architecture.vocab_size if whole else group.part(context.architecture.vocab_size)
    wide = context.rows * vocabulary * FP32
    narrow, upcast = logits, context.logits_upcast
    logits, kept, labels = _widened_and_shifted(tape, logits, context, wide, sequence_output)
    if group.loss:
        _loss_over_parts(tape, logits)
    elif context.kernels.loss == "in_place":
        _loss_in_place(tape, logits, context)
    else:
        name, size = "log_softmax", logits.num_bytes
        result = tape.operation(name, [logits], size, saves_output=True, category=Category.LOGITS, output_name=name)
        if upcast == "none" and context.autocast and size != wide:
            result = _logits_op(tape, result, wide, "nll_loss.to_float32")  # autocast's fp32 list
        tape.operation("nll_loss", [result, *labels[-1:]], FP32, saves=[result, *labels[-1:]])
    # variables of the model's and the loss's forward; an encoder's head reassigns one from its states to the logits
    unnamed = context.in_stages or context.architecture.kind == "encoder"
    for tensor in (*kept, *build.variables, *([] if unnamed else [final])):
        tape.hold(tensor)
    if context.kernels.loss == "in_place" and upcast != "model" and context.autocast and narrow.num_bytes < wide:
        # accelerate's convert_outputs_to_fp32; with other losses, their own temporaries were larger
        tape.operation("outputs.to_float32", [narrow], wide, gradients=[], category=Category.LOGITS)


def _widened_and_shifted(
    tape: Tape, logits: Tensor, context: HFContext, wide: int, sequence_output: Tensor
) -> tuple[Tensor, list[Tensor], list[Tensor]]:
    """(logits that the loss reads, tensors that variables refer to meanwhile, shifted labels if any). `wide`: bytes in
    fp32."""
    narrow, upcast, shifted_rows = logits, context.logits_upcast, context.batch * (context.sequence - 1)
    if upcast == "model":
        wide_logits = _logits_op(tape, logits, wide, "logits.to_float32")
        tape.begin_loss()
        return _shift(tape, wide_logits, shifted_rows, context), [wide_logits], []
    tape.begin_loss()
    if upcast == "none":
        return logits, [narrow, sequence_output], []
    if upcast == "none_shifted":
        logits = _shift(tape, logits, shifted_rows, context)
        kept = [narrow, logits]
        eager = context.kernels.loss == "eager"
        if eager and context.autocast and context.compute_bytes != FP32:  # cross_entropy is on autocast's fp32 list
            logits = _logits_op(tape, logits, logits.num_bytes // context.compute_bytes * FP32, "logits.to_float32")
        return logits, kept, []
    kept, labels = [narrow], list[Tensor]()
    if context.compute_bytes != FP32 or upcast == "loss_shifted":
        logits = _logits_op(tape, logits, wide, "logits.to_float32") if logits.num_bytes != wide else logits
        kept.append(logits)
    if upcast == "loss_shifted":
        logits = _shift(tape, logits, shifted_rows, context)
    elif context.ring.ranks == 1:  # else the labels were shifted before the sequence was divided
        labels = _shifted_labels(tape, context)
        kept += [] if context.in_stages else labels
    return logits, kept, labels


def _shifted_labels(tape: Tape, context: HFContext) -> list[Tensor]:
    """The padded labels, and the labels without each row's first, a copy unless there is one row."""
    padded = tape.operation("pad_labels", [], context.batch * (context.sequence + 1) * INT64, category=Category.INPUTS)
    shared = padded if context.batch == 1 else None
    size = context.rows * INT64
    return [padded, tape.operation("shift_labels", [padded], size, view_of=shared, category=Category.INPUTS)]


def _compiled_loss(tape: Tape, logits: Tensor, context: HFContext) -> Template:
    """The compiled loss saves the logits as they are and two fp32 numbers per token; its backward computes their gradient
    at once. If the whole network is compiled, the logits are an output of its graph, with zeros as their gradient."""
    whole = "ends" in context.compiled
    if not whole:
        tape.begin_loss()
    tape.operation(
        "cross_entropy",
        [logits],
        FP32,
        saves=[logits],
        extra_saved_bytes=[context.rows * FP32] * 2,
        backward_temporary_bytes=logits.num_bytes if whole else 0,
    )
    return tape.finish()


def _loss_in_place(tape: Tape, logits: Tensor, context: HFContext) -> None:
    """Unsloth's cross entropy: saves the logits and one number per row, and overwrites the logits with their gradient
    (fms-acceleration `kernels/unsloth/cross_entropy_loss.py`, Fast_CrossEntropyLoss)."""
    losses = tape.operation(
        "cross_entropy",
        [logits],
        context.rows * FP32,
        saves=[logits],
        extra_saved_bytes=[context.rows * FP32],
        gradients_in_place=True,
        category=Category.LOGITS,
        is_function=True,
    )
    tape.operation("cross_entropy.sum", [losses], FP32)


def _loss_over_parts(tape: Tape, logits: Tensor) -> None:
    """torch's loss parallel over this rank's part of the vocabulary (torch 2.13 `distributed/tensor/parallel/loss.py`
    _log_softmax, _nll_loss_and_log_softmax_backward): shifted logits, their exponentials as a temporary, and the output."""
    shifted = tape.operation(
        "log_softmax.shift", [logits], logits.num_bytes, gradients=[(logits, None)], category=Category.LOGITS
    )
    tape.operation("log_softmax.exp", [shifted], 0, gradients=[], forward_temporary_bytes=logits.num_bytes)
    result = tape.operation(
        "log_softmax",
        [shifted],
        logits.num_bytes,
        gradients=[(shifted, None)],
        category=Category.LOGITS,
        output_name="log_softmax",
    )
    tape.operation(  # (grad_input + torch.exp(x)) * grad_output
        "nll_loss", [result], FP32, saves=[result], backward_temporary_bytes=2 * logits.num_bytes
    )


def _logits_op(tape: Tape, x: Tensor, num_bytes: int, name: str) -> Tensor:
    return tape.operation(name, [x], num_bytes, category=Category.LOGITS, output_name=name)


def _shift(tape: Tape, x: Tensor, shifted_rows: int, context: HFContext) -> Tensor:
    """logits[..., :-1, :].contiguous(): a copy. Backward scatters its gradient into one of full size; if slicing the whole
    last dimension counts as a slice too, first into another of the slice's size."""
    size = x.num_bytes // context.rows * shifted_rows
    if not context.slices_whole_dimensions:
        return _logits_op(tape, x, size, "shift_logits")
    part = tape.operation("shift_logits.rows", [x], size, view_of=x)
    whole = tape.operation("shift_logits.vocabulary", [part], size, view_of=part)
    return tape.operation("shift_logits", [whole], size, gradients=[(whole, None)], category=Category.LOGITS)


def logits_bytes_kept_by_outputs(context: HFContext, *, widened: bool) -> int:
    """Bytes of the logits in the model's outputs, which the caller may keep; 0 with a fused loss. `widened`: accelerate's
    `convert_outputs_to_fp32` has made them fp32 under autocast."""
    if context.fused_loss or context.loss != "cross_entropy":
        return 0
    element = FP32 if context.logits_upcast == "model" or (widened and context.autocast) else context.compute_bytes
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
    last = tape.operation("last_position", [final], 0, view_of=final)
    last.num_bytes = build.rows * width * context.stream_bytes
    logits = build.linear(last, width, vocabulary, "lm_head", architecture.lm_head_bias, False, context.weight_bytes)
    logits.storage.category = Category.LOGITS
    if architecture.final_logit_softcapping is not None:
        for name in ("softcap.divide", "softcap.tanh", "softcap.multiply"):
            logits = _logits_op(tape, logits, logits.num_bytes, name)
    if kept == "all":
        logits = _logits_op(tape, logits, build.rows * vocabulary * FP32, "logits.to_float32")
        chosen = tape.operation("next_token_logits", [logits], 0, view_of=logits)
    else:
        chosen = _logits_op(tape, logits, context.batch * vocabulary * FP32, "next_token_logits")
    tape.operation("argmax", [chosen], context.batch * INT64)
    for tensor in (logits, final):
        tape.hold(tensor)
    return tape.finish()
