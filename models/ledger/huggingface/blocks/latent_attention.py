"""Multi-latent attention (DeepSeek-V2 and V3) as Hugging Face runs it: low-rank projections, expanded before the kernel.

Source: transformers 5.17 `models/deepseek_v3/modeling_deepseek_v3.py` DeepseekV3Attention.
"""

from __future__ import annotations

from peakcast.core.units import FP32
from peakcast.jobs.architecture import MultiLatentAttention
from peakcast.models.ledger.huggingface.blocks.attention_kernels import attention
from peakcast.models.ledger.huggingface.blocks.builder import BlockBuilder
from peakcast.models.ledger.huggingface.blocks.kv_cache import update_cache
from peakcast.models.ledger.tape import primitives as ops
from peakcast.models.ledger.tape.marks import Mark
from peakcast.models.ledger.tape.tape import Tape, Tensor
from peakcast.networks.families import family_of


def latent_attention(build: BlockBuilder, x: Tensor) -> Tensor:
    """Attention of one layer: [micro_batch_size, sequence_length, hidden_size] in and out."""
    context, architecture, tape = build.context, build.context.architecture, build.tape
    mla = architecture.mla
    assert mla is not None
    rows, size, heads = context.rows, context.precision.compute_bytes, architecture.num_attention_heads
    plain, rotated, bias = mla.qk_nope_head_dim, mla.qk_rope_head_dim, architecture.attention_bias
    query = _queries(build, x, mla)
    q_pass, q_rot = tape.split(query, [rows * heads * plain * size, rows * heads * rotated * size], "self_attn.q_split")
    down = mla.kv_lora_rank + rotated
    compressed = build.projection(x, architecture.hidden_size, down, "self_attn.kv_a_proj_with_mqa", bias)
    latent, k_rot = tape.split(compressed, [rows * mla.kv_lora_rank * size, rows * rotated * size], "self_attn.kv_split")
    latent = build.norm(latent, mla.kv_lora_rank, "self_attn.kv_a_layernorm")
    with tape.marked(Mark.ROTATION):
        if family_of(architecture).rotary.complex:
            q_rot, k_rot = _rotate_complex(tape, q_rot, k_rot, FP32 // size)
        else:  # the tables have the embeddings' dtype, and wide ones widen what they turn
            widens = max(1, context.precision.weight_bytes // size)
            q_rot, k_rot = (
                _rotate_pairs(tape, x, x.num_bytes * widens, f"self_attn.rotary_{name}")
                for x, name in ((q_rot, "q"), (k_rot, "k"))
            )
    if context.cache.does and context.cache.latent:  # compressed
        latent, k_rot = update_cache(build, latent, k_rot)
    queries = _joined_queries(tape, q_pass, q_rot, rows * heads * plain * (q_rot.num_bytes // (rows * heads * rotated)))
    keys, values = _expanded(build, latent, k_rot, mla)
    output = attention(build, queries, keys, values)
    output = build.projection(output, heads * mla.v_head_dim, architecture.hidden_size, "self_attn.o_proj", bias)
    for variable in (x, q_pass, q_rot, compressed, k_rot, latent, queries, keys, values):
        tape.hold(variable)
    return ops.dropout(tape, output, architecture.hidden_dropout, rows * architecture.hidden_size, "self_attn.dropout")


def _queries(build: BlockBuilder, x: Tensor, mla: MultiLatentAttention) -> Tensor:
    """The queries of all heads, through a narrow projection if the network has one."""
    architecture = build.context.architecture
    query = architecture.num_attention_heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim)
    if mla.q_lora_rank is None:
        return build.projection(x, architecture.hidden_size, query, "self_attn.q_proj", False)
    bias = architecture.attention_bias
    low = build.projection(x, architecture.hidden_size, mla.q_lora_rank, "self_attn.q_a_proj", bias)
    low = build.norm(low, mla.q_lora_rank, "self_attn.q_a_layernorm")
    return build.projection(low, mla.q_lora_rank, query, "self_attn.q_b_proj", False)


def _joined_queries(tape: Tape, q_pass: Tensor, q_rot: Tensor, pass_bytes: int) -> Tensor:
    """Both parts of the queries, concatenated. Where the rotated part is wide, the other one, which then has `pass_bytes`,
    is converted before, and its gradient after (autocast promotes `cat`)."""
    converted = pass_bytes if pass_bytes > q_pass.num_bytes else 0
    return tape.operation(
        "self_attn.join_q",
        [q_pass, q_rot],
        pass_bytes + q_rot.num_bytes,
        gradients=[(q_pass, q_pass.num_bytes if converted else None), (q_rot, None)],
        forward_temporary_bytes=converted,
    )


def _expanded(build: BlockBuilder, latent: Tensor, k_rot: Tensor, mla: MultiLatentAttention) -> tuple[Tensor, Tensor]:
    """The keys and values of all heads, computed from the compressed tensor `latent` and the rotated part of the keys. A
    compressed cache has the earlier tokens in it too, which are expanded again."""
    context, tape = build.context, build.tape
    heads, size = context.architecture.num_attention_heads, context.precision.compute_bytes
    plain, value = mla.qk_nope_head_dim, mla.v_head_dim
    query = heads * (plain + mla.qk_rope_head_dim)
    tokens, expand = context.rows, build
    if context.cache.does and context.cache.latent:
        tokens = context.batch * context.cache.length
        expand = build.for_rows(tokens, 1)
    expanded = expand.projection(latent, mla.kv_lora_rank, heads * (plain + value), "self_attn.kv_b_proj", False)
    parts = [tokens * heads * plain * size, tokens * heads * value * size]
    k_pass, values = tape.split(expanded, parts, "self_attn.split_kv")
    keys = tape.operation(  # one tensor, filled by two copies; each copy's backward clones the gradient
        "self_attn.join_k",
        [k_pass, k_rot],
        tokens * query * size,
        gradients=[(k_pass, k_pass.num_bytes), (k_rot, k_rot.num_bytes)],
        backward_temporary_bytes=context.rows * query * size,
    )
    if context.cache.does and not context.cache.latent:
        keys, values = update_cache(build, keys, values)
    return keys, values


def _rotate_complex(tape: Tape, q: Tensor, k: Tensor, widens: int) -> tuple[Tensor, Tensor]:
    """`apply_rotary_emb` (modeling_deepseek_v2.py): pairs as complex numbers, in a dtype `widens` times as wide, times the
    table."""
    rotated, wide, names = [], [q, k], ("self_attn.rotary_q", "self_attn.rotary_k")
    if widens > 1:
        sized = zip((q, k), names, strict=True)
        wide = [ops.cast(tape, x, x.num_bytes * widens, f"{name}.to_float32") for x, name in sized]
    for x, narrow, name in zip(wide, (q, k), names, strict=True):
        turned = tape.operation(name, [x], x.num_bytes)
        if widens > 1:
            turned = ops.cast(tape, turned, narrow.num_bytes, f"{name}.to_narrow")
        rotated.append(turned)
    for variable in wide:
        tape.hold(variable)
    return rotated[0], rotated[1]


def _rotate_pairs(tape: Tape, x: Tensor, num_bytes: int, name: str) -> Tensor:
    """`apply_rotary_pos_emb_interleave`: two halves, each the sum of two products, concatenated to `num_bytes`."""
    half, narrow, parts = num_bytes // 2, x.num_bytes // 2, []
    for part in ("real", "imaginary"):
        first = tape.operation(f"{name}.{part}_cos", [x], half, backward_temporary_bytes=narrow)
        second = tape.operation(f"{name}.{part}_sin", [x], half, backward_temporary_bytes=narrow)
        parts.append(ops.add(tape, first, second, f"{name}.{part}"))
    return tape.operation(f"{name}.cat", parts, num_bytes, gradients=[(part, None) for part in parts])
