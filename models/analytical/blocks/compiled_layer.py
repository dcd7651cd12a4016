"""A decoder layer that torch.compile compiles by itself: the operations of its two graphs, and so its buffers.

Forward keeps what the partitioner chose: without checkpointing what the kernels before and after each matrix product made,
nothing under full checkpointing, what the policy says under selective. Backward computes the rest again, just before it is
first needed. Between matrix products everything elementwise is one kernel, of which only results are buffers.

Source: graphs that torch 2.13 lowers of transformers' Llama, Mistral, Qwen2 and Qwen3 (`TORCH_LOGS=output_code`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from peakcast.models.allocator_sizes import MIN_BLOCK_BYTES
from peakcast.models.analytical.blocks.attention_kernels import attention_kernel
from peakcast.models.analytical.blocks.hf_builder import HFContext
from peakcast.models.analytical.blocks.inductor_graph import InductorGraph, Op
from peakcast.models.analytical.blocks.tensor_parallel import WHOLE
from peakcast.models.analytical.template import HANDED_IN, Template
from peakcast.timeline import Category

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")
"""RMSNorm, rotary positions, silu·up."""
FP32 = 4
ROWS_SUMMED = 128
"""A norm's weight and a bias get their gradients in two steps; the first sums so many rows each (read off the traces)."""
INPUT, OUTPUT = "hidden_states", "output"


def is_compiled_alone(context: HFContext) -> bool:
    """Whether these are the graphs of the context's layer."""
    dense = context.architecture.model_type in FAMILIES and not (context.routed or context.num_sequences)
    plain = dense and context.trainable and not context.masked and context.weight_bytes == context.compute_bytes
    whole = context.group == WHOLE and not (context.splits_backward or context.saves_on_cpu)
    return "layers" in context.compiled and plain and whole and attention_kernel(context) == "flash"


@lru_cache(maxsize=256)
def compiled_layer(context: HFContext, recomputes: bool) -> Template:
    """One layer, forward and backward: [micro_batch_size, sequence_length, hidden_size] in and out. `recomputes`: with
    checkpointing inside it, of which `context.cached_matmuls` says what it keeps; around it, the context is `checkpointed`:
    somebody else holds the layer's input."""
    return _template(context, *graphs(context, recomputes))


def graphs(context: HFContext, recomputes: bool) -> tuple[InductorGraph, InductorGraph]:
    """Its forward and backward."""
    forward, backward = _forward(context), _backward(context)
    sizes = {name: size for op in forward for name, size in op.writes.items()}
    kept = _kept(context, forward, recomputes)
    again = _recomputed(forward, backward, kept)
    needed = {name for op in again for name in op.reads} & kept
    first = InductorGraph(forward, {}, needed | {OUTPUT})
    return first, InductorGraph(again, {name: sizes[name] for name in sizes if name in needed})


def _kept(context: HFContext, forward: Sequence[Op], recomputes: bool) -> set[str]:
    """What forward may keep: of what backward reads, with checkpointing only what the policy keeps."""
    if not recomputes:
        return {name for op in forward for name in op.writes}
    if not context.cached_matmuls:
        return set()
    products = [op.name for op in forward if op.name in _PRODUCTS]
    chosen = {name for index, name in enumerate(products) if index % context.cached_matmuls == 0}
    return chosen | {name for op in forward if op.parts for name in op.writes}


_PRODUCTS = ("q", "k", "v", "o", "gate", "up", "down")


def _recomputed(forward: Sequence[Op], backward: Sequence[Op], kept: set[str]) -> list[Op]:
    """`backward`, and of `forward` what it needs and does not find, each just before its first reader
    (`_functorch/partitioners.py` reordering_to_mimic_autograd_engine)."""
    maker = {name: op for op in forward for name in op.writes if name not in kept}
    place = {op.name: index for index, op in enumerate(forward)}
    ordered: dict[str, Op] = {}
    for op in backward:
        missing, stack = set[str](), [op]
        while stack:
            for name in stack.pop().reads:
                if name in maker and maker[name].name not in ordered and maker[name].name not in missing:
                    missing.add(maker[name].name)
                    stack.append(maker[name])
        for name in sorted(missing, key=place.__getitem__):
            ordered[name] = forward[place[name]]
        ordered[op.name] = op
    return list(ordered.values())


# -- the operations -----------------------------------------------------------------------------------------------------


def _op(
    name: str,
    reads: str,
    size: int = 0,
    *,
    writes: dict[str, int] | None = None,
    fuses: str = "",
    replaces: str = "",
    parts: bool = False,
    is_result: bool = False,
) -> Op:
    return Op(
        name=name,
        reads=tuple(reads.split()),
        writes=writes or {name: size},
        fuses=tuple(fuses.split()),
        replaces=tuple(replaces.split()),
        parts=parts,
        is_result=is_result,
    )


def _forward(context: HFContext) -> list[Op]:
    architecture, rows, size = context.architecture, context.rows, context.compute_bytes
    hidden, inner = rows * architecture.hidden_size * size, rows * architecture.intermediate_size * size
    q, k = rows * architecture.query_size * size, rows * architecture.key_value_size * size
    statistics = rows * architecture.num_attention_heads * FP32
    return [
        _op("rstd_1", INPUT, rows * FP32, fuses="d_middle"),
        _op("norm_1", f"{INPUT} rstd_1", hidden, fuses="d_input d_middle rstd_1"),
        _op("q", "norm_1", q),
        *_rotated_by_head(context, "q", q),
        _op("k", "norm_1", k),
        *_rotated_by_head(context, "k", k),
        _op("v", "norm_1", k),
        *_rotated(context, "q", q),
        *_rotated(context, "k", k),
        _op(
            "attention",
            "q_rotary k_rotary v",
            writes={"attended": q, "statistics": statistics, "seed": 16, "offset": 8},
            parts=True,
        ),
        _op("o", "attended", hidden),
        _op("rstd_2", f"{INPUT} o", rows * FP32, fuses="d_middle"),
        _op("norm_2", f"{INPUT} o rstd_2", hidden, fuses="d_middle rstd_2"),
        _op("gate", "norm_2", inner),
        _op("up", "norm_2", inner),
        _op("product", "gate up", inner, fuses="d_up d_gate", replaces="gate up"),
        _op("down", "product", hidden),
        _op(OUTPUT, f"{INPUT} o down", hidden, replaces="o down"),
    ]


def _rotated(context: HFContext, name: str, size: int) -> list[Op]:
    return [] if context.architecture.qk_norm != "none" else [_op(f"{name}_rotary", name, size)]


def _rotated_by_head(context: HFContext, name: str, size: int) -> list[Op]:
    """With a norm of each head, which is one kernel with the rotation."""
    if context.architecture.qk_norm == "none":
        return []
    rows = size // (context.architecture.head_dim * context.compute_bytes)
    return [_op(f"{name}_rotary", name, writes={f"{name}_rstd": rows * FP32, f"{name}_rotary": size})]


def _backward(context: HFContext) -> list[Op]:
    architecture, rows, size = context.architecture, context.rows, context.compute_bytes
    width, inner_width, weight = architecture.hidden_size, architecture.intermediate_size, context.weight_bytes
    hidden, inner = rows * width * size, rows * inner_width * size
    q, k = rows * architecture.query_size * size, rows * architecture.key_value_size * size

    def weight_of(name: str, reads: str, columns: int) -> Op:
        return _op(f"{name}.weight.grad", reads, width * columns * weight, is_result=True)

    def norm_weight(name: str, reads: str, fuses: str = "") -> list[Op]:
        partial = -(-rows // ROWS_SUMMED) * width * FP32
        return [
            _op(f"{name}.partial", reads, partial, fuses=fuses),
            _op(f"{name}.weight.grad", f"{name}.partial", width * weight, is_result=True),
        ]

    ops = [
        weight_of("down", f"product {HANDED_IN}", inner_width),
        _op("d_product", HANDED_IN, inner),
        _op("d_up", "d_product gate", inner, replaces="d_product gate"),
        weight_of("up", "d_up norm_2", inner_width),
        _op("d_norm_2_of_up", "d_up", hidden),
        _op("d_gate", "d_product gate up", inner, fuses="d_up", replaces="d_product gate up"),
        weight_of("gate", "d_gate norm_2", inner_width),
        _op("d_norm_2_of_gate", "d_gate", hidden),
    ]
    of_middle = f"d_norm_2_of_up d_norm_2_of_gate o rstd_2 {INPUT}"
    ops += norm_weight("norm_2", of_middle)
    ops += [
        _op(
            "d_middle",
            f"{of_middle} {HANDED_IN}",
            hidden,
            replaces=f"d_norm_2_of_up d_norm_2_of_gate o {HANDED_IN}",
        ),
        weight_of("o", "d_middle attended", architecture.query_size),
        _op("d_attended", "d_middle", q),
        _op(
            "d_attention",
            "d_attended q_rotary k_rotary v attended statistics seed offset",
            writes={"d_q_rotary": q, "d_k_rotary": k, "d_v": k},
            parts=True,
        ),
    ]
    widths = {"v": architecture.key_value_size, "k": architecture.key_value_size, "q": architecture.query_size}
    for name, columns in widths.items():
        incoming = f"d_{name}"
        if name != "v":
            ops += _rotated_back(context, name, rows * columns * size)
        ops += [weight_of(name, f"{incoming} norm_1", columns), _op(f"d_norm_1_of_{name}", incoming, hidden)]
        if architecture.attention_bias:
            partial = -(-rows // ROWS_SUMMED) * columns * FP32
            ops += [
                _op(f"{name}.bias.partial", incoming, partial),
                _op(f"{name}.bias.grad", f"{name}.bias.partial", columns * weight, is_result=True),
            ]
    of_input = f"d_norm_1_of_v d_norm_1_of_k d_norm_1_of_q rstd_1 {INPUT}"
    ops += norm_weight("norm_1", of_input, "norm_2.partial")
    return [
        *ops,
        _op(
            "d_input",
            f"{of_input} d_middle",
            hidden,
            replaces="d_middle d_norm_1_of_v d_norm_1_of_k d_norm_1_of_q",
            is_result=True,
        ),
    ]


def _rotated_back(context: HFContext, name: str, size: int) -> list[Op]:
    """The gradient of a projection from that of what was rotated, and normalised before where each head is."""
    if context.architecture.qk_norm == "none":
        return [_op(f"d_{name}", f"d_{name}_rotary", size)]
    head, weight = context.architecture.head_dim, context.weight_bytes
    partial = size // (context.compute_bytes * ROWS_SUMMED) * FP32
    return [
        _op(f"d_{name}_normed", f"d_{name}_rotary", size, fuses=f"d_{name}"),
        _op(f"{name}_norm.partial", f"d_{name}_normed {name} {name}_rstd", partial),
        _op(f"{name}_norm.weight.grad", f"{name}_norm.partial", head * weight, is_result=True),
        _op(f"d_{name}", f"d_{name}_normed {name} {name}_rstd", size, replaces=f"d_{name}_normed"),
    ]


# -- the template -------------------------------------------------------------------------------------------------------


def _template(context: HFContext, first: InductorGraph, second: InductorGraph) -> Template:
    """Both graphs as one block. A parameter's gradient leaves the backward graph when that ends."""
    lives, _ = first.lives()
    backward, kept_until = second.lives()
    ends = len(second.order)
    hidden, owned = context.input_bytes, 0 if context.checkpointed else context.input_bytes
    activation, passing, gradient = int(Category.ACTIVATIONS), int(Category.TEMPORARIES), int(Category.GRADIENTS)
    rows: list[tuple[str, int, int, int, bool, int, bool, bool]] = [
        (INPUT, activation, owned, 0, False, max(second.last_read(INPUT), 1), True, False),
        (HANDED_IN, passing, hidden, 0, True, max(second.last_read(HANDED_IN), 1), True, False),
    ]
    for life in lives:
        kept = life.name in kept_until
        until = kept_until[life.name] if kept else life.dies
        rows.append((life.name, activation, life.num_bytes, life.born, False, until, kept, False))
    for life in backward:
        trained = life.name.endswith((".weight.grad", ".bias.grad"))
        category = gradient if trained else passing
        rows.append((life.name, category, life.num_bytes, life.born, True, life.dies, True, trained))
    names, categories, sizes, born, born_backward, dies, dies_backward, trains = zip(*rows, strict=True)
    return Template(
        names=list(names),
        categories=np.array(categories, dtype=np.int8),
        num_bytes=-(-np.array(sizes, dtype=np.int64) // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES,
        born=np.array(born, dtype=np.int64),
        dies=np.array(dies, dtype=np.int64),
        born_backward=np.array(born_backward, dtype=bool),
        dies_backward=np.array(dies_backward, dtype=bool),
        weight_gradient=np.array(trains, dtype=bool),
        dies_without_graph=np.where(dies_backward, len(first.order), dies).astype(np.int64),
        cached=np.zeros(len(names), dtype=bool),
        num_forward=len(first.order),
        num_recomputed=len(first.order),
        num_backward=ends,
        forward_labels=first.labels(),
        backward_labels=second.labels(),
        input_bytes=hidden,
        keeps_input=True,
        asks_late_bytes=0,
        saved_bytes=[],
        loss_from=len(first.order),
        added_to_handed_in=ends,
    )
