"""The embedding of a Hugging Face network: token ids in, the first layer's input out."""

from __future__ import annotations

from functools import lru_cache

from peakcast.core.units import FP32
from peakcast.models.ledger.huggingface.blocks.adapter_tensors import network_tensors
from peakcast.models.ledger.huggingface.blocks.builder import BlockBuilder
from peakcast.models.ledger.huggingface.blocks.context import HFContext
from peakcast.models.ledger.huggingface.blocks.tensor_parallel import leave_rows
from peakcast.models.ledger.huggingface.blocks.token_table import table_bytes, table_gradient
from peakcast.models.ledger.tape import primitives as ops
from peakcast.models.ledger.tape.tape import Tape, Tensor, WeightGradient
from peakcast.models.ledger.tape.template import Template
from peakcast.networks.families import family_of


@lru_cache(maxsize=256)
def embedding(context: HFContext) -> Template:
    """The template of the token (and learned position) embedding: ids in, [micro_batch_size, sequence_length, hidden_size]
    out."""
    architecture, tape = context.architecture, Tape(gpu=context.gpu, saves_on_cpu=context.backward.saves_on_cpu)
    build = BlockBuilder(tape, context)
    hidden = _looked_up(tape, context)
    if context.group.table:
        hidden = leave_rows(tape, hidden, context.group, "embed_tokens")
    hidden = _taught_or_leaf(tape, context, hidden)
    if context.neftune:  # transformers integrations/neftune.py: output + torch.zeros_like(output).uniform_(...)
        noise = tape.operation("neftune.noise", [], hidden.num_bytes)
        hidden = ops.add(tape, hidden, noise, "neftune.add")
    hidden = _with_positions(build, hidden)
    if architecture.embedding_norm:
        hidden = build.norm(hidden, architecture.hidden_size, "embedding_layernorm")
    if family_of(architecture).ends.scales_embedding:
        hidden = ops.scale(tape, hidden, "embedding_multiplier")
    elements = context.rows * architecture.hidden_size
    hidden = build.dropout(hidden, architecture.embedding_dropout, elements, "embedding_dropout")
    hidden.requires_grad = context.layer.input_requires_grad
    return tape.finish(hidden)


def _looked_up(tape: Tape, context: HFContext) -> Tensor:
    """Rows of the token table: [micro_batch_size, sequence_length, hidden_size]."""
    gradient, size = table_gradient(tape, context), context.precision.end_weight_bytes
    output_bytes = context.rows * context.architecture.hidden_size * size
    if "embedding" in context.compiled and context.table_trains and size != FP32:
        # compiled, the rows' gradients are summed in fp32 (torch `_decomp` embedding_dense_backward), then converted
        narrow = tape.operation(
            "embed_tokens.table",
            [],
            0,
            weight_gradients=gradient.weights,
            gradients=gradient.added,
            backward_temporary_bytes=gradient.temporary_bytes,
        )
        narrow.requires_grad = True
        wide = table_bytes(context) // size * FP32
        hidden = tape.operation("embed_tokens", [narrow], output_bytes, gradients=[(narrow, wide)])
    else:
        hidden = tape.operation(
            "embed_tokens",
            [],
            output_bytes,
            weight_gradients=gradient.weights,
            backward_temporary_bytes=gradient.temporary_bytes,
        )
    hidden.requires_grad = context.table_trains
    return hidden


def _taught_or_leaf(tape: Tape, context: HFContext, hidden: Tensor) -> Tensor:
    """`hidden` after adapters of the whole network, such as prompts; or a leaf, if adapters further on need a gradient."""
    made = [one for one in network_tensors(context.architecture, context.finetuning) if one.trains]
    if made:
        taught = [WeightGradient(f"{one.name}.grad", one.numel * context.adapters.weight_bytes) for one in made]
        return tape.operation("adapters", [hidden], hidden.num_bytes, weight_gradients=taught)
    if context.layer.input_requires_grad and not context.table_trains and not hands_on_itself(context):
        hidden.requires_grad = True  # enable_input_require_grads(): a leaf, which its own node keeps
        tape.keep(hidden)
    return hidden


def _with_positions(build: BlockBuilder, hidden: Tensor) -> Tensor:
    """`hidden` plus learned positions and token types, if the network has them."""
    context, tape, trains = build.context, build.tape, build.context.trainable
    architecture, rows, size = context.architecture, context.rows, context.precision.end_weight_bytes
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
    tokens = context.stream_rows * architecture.hidden_size * context.precision.end_weight_bytes
    if architecture.position_embedding == "learned" and architecture.kind == "decoder":
        once = tokens if family_of(architecture).ends.positions_per_sequence else tokens // context.batch
        return False, [tokens, once]
    if architecture.kind == "encoder":  # BERT's embeddings are a module, to whose output the model refers
        return True, [context.input_bytes]
    return not (architecture.embedding_norm or architecture.embedding_dropout), [tokens]
