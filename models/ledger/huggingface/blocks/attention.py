"""Self-attention of a Hugging Face decoder layer: projections, norms of q and k, rotary embedding, the attention kernel,
the output projection."""

from __future__ import annotations

from collections.abc import Sequence

from peakcast.core.units import FP32
from peakcast.models.ledger.huggingface.blocks.attention_kernels import attention, attention_kernel
from peakcast.models.ledger.huggingface.blocks.builder import BlockBuilder
from peakcast.models.ledger.huggingface.blocks.eager_attention import repeat_key_value
from peakcast.models.ledger.huggingface.blocks.fused_lora import fused_projections, is_fused
from peakcast.models.ledger.huggingface.blocks.joined_lora import joined_projection
from peakcast.models.ledger.huggingface.blocks.kv_cache import update_cache
from peakcast.models.ledger.huggingface.blocks.tensor_parallel import gather_sequence
from peakcast.models.ledger.huggingface.blocks.traits import attention_output_dropout
from peakcast.models.ledger.tape import primitives as ops
from peakcast.models.ledger.tape.marks import Mark
from peakcast.models.ledger.tape.tape import Output, Tape, Tensor
from peakcast.networks.families import family_of
from peakcast.networks.rotary import rotated_width


def self_attention(build: BlockBuilder, x: Tensor) -> Tensor:
    """Attention of one layer: [micro_batch_size, sequence_length, hidden_size] in and out."""
    context, architecture, tape = build.context, build.context.architecture, build.tape
    rows, width, family = context.rows, architecture.hidden_size, family_of(architecture)
    x = gather_sequence(tape, x, context.group, "self_attn")
    fused, q, k, v = _projected(build, x)
    variables = [x, q, k] if family.rotary.inline else [x]
    variables += [fused] if family.attention.names_fused_projection else []
    if architecture.position_embedding == "rope" and context.layer.rotates:
        with tape.marked(Mark.ROTATION):
            q, k, parts = _rotary(build, q, k)
        variables += parts if family.rotary.inline else []
    if context.cache.does:
        k, v = update_cache(build, k, v)
    if context.attention.repeats_key_value and attention_kernel(context) == "flash_attention_2":
        k, v = repeat_key_value(build, q, k, v)
    output = attention(build, q, k, v)
    # flash attention's output has the layout of the queries, and so has a ring's that is not copied anyway
    kernel, copied = attention_kernel(context), context.ring.copies_output
    by_head = kernel in ("flash", "flash_attention_2") and not context.packing.mask_of_batch
    by_head = by_head or (kernel == "ring" and not copied)
    if architecture.rotary_in_parts and by_head and not _rotates_in_place(build):
        output = ops.copy(tape, output, "self_attn.contiguous")
    bias, name = architecture.attention_output_bias, f"self_attn.{family.names.out}"
    if is_fused(build, [name], bias):
        (output,) = fused_projections(build, output, architecture.query_size, [(name, width)])
    else:
        output = build.rows_summed(output, architecture.query_size, width, name, bias)
    if family.eager_attention.joins_heads_first:
        build.attention_variables.extend((*variables, q, k, v))
    for variable in (*variables, q, k, v, *build.attention_variables):  # variables of attention's forward refer to them
        tape.hold(variable)
    return build.dropout(output, attention_output_dropout(architecture), rows * width, "self_attn.dropout")


def _projected(build: BlockBuilder, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The output of one projection for queries, keys and values together (without one: `x`), and its three parts."""
    context, architecture, tape = build.context, build.context.architecture, build.tape
    query, key_value, bias = architecture.query_size, architecture.key_value_size, architecture.attention_bias
    attention_of, names = family_of(architecture).attention, family_of(architecture).names
    if architecture.fused_qkv or context.adapters.joined_parts:
        fused = _joined(build, x, bias)
        token = fused.num_bytes // (query + 2 * key_value)  # bytes of one element of all tokens
        q, k, v = tape.split(fused, [query * token, key_value * token, key_value * token], "qkv_split")
        if attention_of.expands_key_value and architecture.num_key_value_heads > 1:
            whole = q.num_bytes
            q, k, v = (tape.operation("self_attn.expand", [part], whole) for part in (q, k, v))
        elif attention_of.expands_key_value:  # selected by an index, which copies
            k, v = (tape.operation("self_attn.pick", [part], part.num_bytes) for part in (k, v))
        return fused, q, k, v
    each = [f"self_attn.{name}" for name in (names.q, names.k, names.v)]
    if is_fused(build, each, bias):
        sizes = zip(each, (query, key_value, key_value), strict=True)
        q, k, v = fused_projections(build, x, architecture.hidden_size, list(sizes))
        return x, q, k, v
    return x, *_projected_one_by_one(build, x, bias)


def _joined(build: BlockBuilder, x: Tensor, bias: bool) -> Tensor:
    """Queries, keys and values of `x` in rows of all three, by one matrix."""
    if build.context.adapters.joined_parts:
        return joined_projection(build, x, bias)
    architecture = build.context.architecture
    whole = architecture.query_size + 2 * architecture.key_value_size
    return build.columns(x, architecture.hidden_size, whole, f"self_attn.{family_of(architecture).names.qkv}", bias)


def _projected_one_by_one(build: BlockBuilder, x: Tensor, bias: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of `x`, each by its own matrix, with the norms of queries and keys if the family has
    them."""
    architecture = build.context.architecture
    width, query, key_value = architecture.hidden_size, architecture.query_size, architecture.key_value_size
    names, after = family_of(architecture).names, family_of(architecture).attention.norms_after_projections
    q = build.columns(x, width, query, f"self_attn.{names.q}", bias)
    q = q if after else _qk_norm(build, q, query, "self_attn.q_norm")
    k = build.columns(x, width, key_value, f"self_attn.{names.k}", bias)
    k = k if after else _qk_norm(build, k, key_value, "self_attn.k_norm")
    v = build.columns(x, width, key_value, f"self_attn.{names.v}", bias)
    if after:
        q = _qk_norm(build, q, query, "self_attn.q_norm")
        k = _qk_norm(build, k, key_value, "self_attn.k_norm")
    return q, k, v


def _qk_norm(build: BlockBuilder, x: Tensor, width: int, name: str) -> Tensor:
    """The norm of queries or keys, if the architecture has one."""
    architecture = build.context.architecture
    if architecture.qk_norm == "none":
        return x
    if architecture.qk_norm in ("head", "per_head"):
        rows = build.context.rows * width // architecture.head_dim
        normed = build.norm(x, architecture.head_dim, name, rows)
    else:
        normed = build.norm(x, width, name, fused=family_of(architecture).liger.replaces_full_qk_norm)
    build.tape.hold(x)  # the norm's argument, until it returns
    return normed


def _rotates_in_place(build: BlockBuilder) -> bool:
    """Whether a fused kernel rotates: Liger's, if it has one for the family, or a compiled one."""
    context = build.context
    return context.kernels.rotary and (bool(context.compiled) or family_of(context.architecture).liger.has_rotary)


def _rotary(build: BlockBuilder, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
    """`apply_rotary_pos_emb`: rotated q and k, computed in fp32 if the family's code says so, and the rotated parts that
    were joined with parts that are not rotated. Variables refer to the arguments until both are rotated."""
    tape, element = build.tape, build.context.precision.compute_bytes
    architecture, family = build.context.architecture, family_of(build.context.architecture)
    if _rotates_in_place(build):  # forward and backward, on contiguous tensors (liger_kernel 0.8 ops/rope.py)
        rotated = ops.copy if architecture.fused_qkv else ops.in_place
        q, k = rotated(tape, q, "self_attn.rotary_q"), rotated(tape, k, "self_attn.rotary_k")
        q.requires_grad = k.requires_grad = q.requires_grad or k.requires_grad  # they are outputs of one function
        return q, k, []
    kind = family.rotary.products if element != FP32 else "narrow"
    # the tables have the embeddings' dtype; wide ones widen q and k, which stay wide until attention
    tables_wide = kind == "promoted" or (kind == "narrow" and build.context.precision.weight_bytes > element)
    arguments, narrow, parts = [q, k], [q.num_bytes, k.num_bytes], list[Tensor]()
    wide = [build.context.rows * width * FP32 for width in (architecture.query_size, architecture.key_value_size)]
    if kind == "cast":
        q = ops.cast(tape, q, wide[0], "self_attn.rotary_q.to_float32")
        k = ops.cast(tape, k, wide[1], "self_attn.rotary_k.to_float32")
        arguments += [q, k]
    promoted = [max(x.num_bytes, size) if tables_wide else x.num_bytes for x, size in zip((q, k), wide, strict=True)]
    tables: list[Tensor] = []
    if family.rotary.in_halves:
        q = rotate_in_halves(tape, q, promoted[0], "self_attn.rotary_q")
        k = rotate_in_halves(tape, k, promoted[1], "self_attn.rotary_k")
    elif architecture.rotary_in_parts:
        tables = _tables_of_layer(build)
        q, k, parts = _rotated_in_parts(build, (q, k), promoted, tables)
    else:
        tables = _tables_of_layer(build)
        q = rotate(tape, q, promoted[0], "self_attn.rotary_q", tables)
        tables = tables if family.rotary.tables_per_layer else _tables_of_layer(build)
        k = rotate(tape, k, promoted[1], "self_attn.rotary_k", tables)
    arguments += [q, k, *(tables if family.rotary.tables_per_layer else ())]
    if kind != "narrow":
        q = ops.cast(tape, q, narrow[0], "self_attn.rotary_q.to_narrow")
        k = ops.cast(tape, k, narrow[1], "self_attn.rotary_k.to_narrow")
    for variable in arguments:
        tape.hold(variable)
    return q, k, parts


def _rotated_in_parts(
    build: BlockBuilder, queries_keys: tuple[Tensor, Tensor], sizes: Sequence[int], tables: list[Tensor]
) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Queries and keys of which the first columns of each head are rotated: both, of `sizes` bytes, and their rotated
    parts."""
    tape, architecture, turned = build.tape, build.context.architecture, []
    width = rotated_width(architecture)
    for x, name, whole in zip(queries_keys, "qk", sizes, strict=True):
        size = x.num_bytes * width // architecture.head_dim
        part = tape.operation(f"self_attn.rotary_{name}.part", [x], Output(size, view_of=x))
        rest = tape.operation(f"self_attn.rotary_{name}.rest", [x], Output(x.num_bytes - size, view_of=x))
        size = whole * width // architecture.head_dim
        turned.append((rotate(tape, part, size, f"self_attn.rotary_{name}", tables), rest, whole))
    q, k = (_join(tape, *each) for each in turned)
    return q, k, [part for part, _, _ in turned]


def _join(tape: Tape, part: Tensor, rest: Tensor, num_bytes: int) -> Tensor:
    """The rotated part and the rest, concatenated. If one is wider, the other is converted (autocast promotes `cat`)."""
    size = num_bytes - part.num_bytes
    converted = 0 if rest.num_bytes == size else size
    gradients = [(part, None), (rest, rest.num_bytes if converted else None)]
    return tape.operation(
        "self_attn.rotary.join", [part, rest], num_bytes, gradients=gradients, forward_temporary_bytes=converted
    )


def _tables_of_layer(build: BlockBuilder) -> list[Tensor]:
    """The cosines and sines that the layer makes itself, if its family does: once for both q and k, or for each (GPT-J and
    similar)."""
    architecture, family = build.context.architecture, family_of(build.context.architecture)
    width = rotated_width(architecture) * (2 if family.rotary.tables_of_all_positions else family.rotary.tables_per_layer)
    element = FP32 if family.rotary.products == "promoted" else build.context.precision.weight_bytes
    size = build.context.sequence * width * element
    return [build.tape.operation("self_attn.rotary_tables", [], size, gradients=[])] if size else []


def rotate(tape: Tape, x: Tensor, num_bytes: int, name: str, tables: Sequence[Tensor] = ()) -> Tensor:
    """x·cos + rotate_half(x)·sin, with products of `num_bytes`. Saves `tables`, the layer's own cosines and sines, if
    given; otherwise those are the model's."""
    widened = num_bytes if num_bytes > x.num_bytes else 0  # the gradient is wide before it is converted
    straight = tape.operation(f"{name}.cos", [x], num_bytes, saves=tables, backward_temporary_bytes=widened)
    rotated = tape.operation(
        f"{name}.rotate_half",
        [x],
        x.num_bytes,
        forward_temporary_bytes=x.num_bytes // 2,
        backward_temporary_bytes=x.num_bytes,  # both halves' gradients, each as large as x, exist together
    )
    rotated = tape.operation(f"{name}.sin", [rotated], num_bytes, backward_temporary_bytes=widened)
    return ops.add(tape, straight, rotated, f"{name}.add")


def rotate_in_halves(tape: Tape, x: Tensor, num_bytes: int, name: str) -> Tensor:
    """(a·cos - b·sin, b·cos + a·sin) for the halves a and b of x, joined. Saves nothing of its own."""
    half = num_bytes // 2
    first, second = tape.split(x, [x.num_bytes // 2] * 2, f"{name}.chunk")
    straight, turned = (tape.operation(f"{name}.{part}", [of], half) for part, of in (("cos", first), ("sin", second)))
    left = tape.operation(f"{name}.subtract", [straight, turned], half, gradients=[(straight, None), (turned, half)])
    straight, turned = (tape.operation(f"{name}.{part}", [of], half) for part, of in (("cos", second), ("sin", first)))
    right = ops.add(tape, straight, turned, f"{name}.add")
    return tape.operation(f"{name}.join", [left, right], num_bytes, gradients=[(left, None), (right, None)])
