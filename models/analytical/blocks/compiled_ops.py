"""The operations of a decoder layer in a graph that torch.compile compiles, forward and backward, and so its buffers.

Between matrix products everything elementwise is one kernel, of which only results are buffers. Names are those of one
layer; `named` puts it into a network's graph.

Source: graphs that torch 2.13 lowers of transformers' Llama, Mistral, Qwen2 and Qwen3 (`TORCH_LOGS=output_code`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from peakcast.models.analytical.blocks.attention_kernels import flash_backward_bytes
from peakcast.models.analytical.blocks.hf_builder import HFContext, is_adapter_target
from peakcast.models.analytical.blocks.inductor_kernels import Op
from peakcast.models.analytical.parameters import leaf_names
from peakcast.models.analytical.template import HANDED_IN
from peakcast.units import round_up

FP32 = 4
INT64 = 8
ROWS_SUMMED = 128
"""A norm's weight and a bias get their gradients in two steps; the first sums so many rows each (read off the traces)."""
INPUT, OUTPUT = "hidden_states", "output"
MASK, NARROWED = "attention_mask", f"{HANDED_IN}.narrow"
OF_HANDED_IN = (HANDED_IN, NARROWED, f"{HANDED_IN}.wide", f"{HANDED_IN}.copy")
PRODUCTS = ("q", "k", "v", "o", "gate", "up", "down")


def op(
    name: str,
    reads: str,
    size: int = 0,
    *,
    writes: dict[str, int] | None = None,
    fuses: str = "",
    replaces: str = "",
    parts: bool = False,
    is_result: bool = False,
    wide: bool = False,
) -> Op:
    """An operation whose names are written in one string."""
    return Op(
        name=name,
        reads=tuple(reads.split()),
        writes=writes or {name: size},
        fuses=tuple(fuses.split()),
        replaces=tuple(replaces.split()),
        parts=parts,
        is_result=is_result,
        wide=wide,
    )


def named(ops: Iterable[Op], prefix: str, others: Mapping[str, str]) -> list[Op]:
    """`ops` with `prefix` before every name but `others`, which get theirs."""

    def name(one: str) -> str:
        return others.get(one) or prefix + one

    return [
        Op(
            name=name(one.name),
            reads=tuple(map(name, one.reads)),
            writes={name(result): size for result, size in one.writes.items()},
            fuses=tuple(map(name, one.fuses)),
            replaces=tuple(map(name, one.replaces)),
            parts=one.parts,
            is_result=one.is_result,
            wide=one.wide,
        )
        for one in ops
    ]


def adapted(context: HFContext) -> frozenset[str]:
    """The products with adapters."""
    if context.trainable:
        return frozenset()
    leaves = leaf_names(context.architecture)
    targets = {name: getattr(leaves, "out" if name == "o" else name) for name in PRODUCTS}
    return frozenset(
        name for name, leaf in targets.items() if is_adapter_target(leaf, context.finetuning, context.architecture)
    )


class LayerOps:
    """Of one layer. `sums_again`: whoever reads the stream after attention adds up the layer's input and what attention
    gave, so it is no buffer. torch does so where the input comes from outside or from a lookup; where another sum made it,
    that and its reader on the other side of attention are too far apart for a recomputation
    (`_functorch/partitioners.py`, ban_recompute_used_far_apart)."""

    def __init__(self, context: HFContext, *, sums_again: bool = True) -> None:
        architecture, rows, size = context.architecture, context.rows, context.compute_bytes
        self.context = context
        self.sums_again = sums_again
        self.trains = context.trainable
        self.casts = context.autocast and context.weight_bytes > size
        """Whether weights are wider than products: each is converted before, and its gradient after."""
        self.hidden, self.inner = rows * architecture.hidden_size * size, rows * architecture.intermediate_size * size
        self.stream = rows * architecture.hidden_size * context.stream_bytes
        self.q, self.k = rows * architecture.query_size * size, rows * architecture.key_value_size * size
        self.masked = "mask" in context.compiled
        self.grouped = self.masked and self.q != self.k
        self.expands = self.grouped and architecture.num_key_value_heads > 1
        """Whether keys and values are copied for every head, as the kernel wants them that takes a mask; of a single one
        the heads are views."""
        self.lays_out = self.masked and self.trains and architecture.qk_norm == "none"
        """Whether what comes back by head is laid out by token in a kernel of its own, in place."""
        self.adapted = adapted(context)

    # -- forward ------------------------------------------------------------------------------------------------------

    def forward(self) -> list[Op]:
        """From INPUT to OUTPUT."""
        rows, hidden, inner = self.context.rows, self.hidden, self.inner
        middle = f"{INPUT} o" if self.sums_again else "middle"
        summed = [op("middle", f"{INPUT} {self._result('o')}", self.stream, wide=self.casts, replaces="o")]
        gate, up = self._added("gate"), self._added("up")
        return [
            op("rstd_1", INPUT, rows * FP32, wide=True, fuses=f"d_middle {INPUT}"),
            op("norm_1", f"{INPUT} rstd_1", hidden, fuses="d_input d_middle rstd_1"),
            *self._widened("norm_1", f"{INPUT} rstd_1", hidden, "qkv"),
            *self._projected("q", "norm_1", self.q),
            *self._rotated_by_head("q", self.q),
            *self._projected("k", "norm_1", self.k),
            *self._rotated_by_head("k", self.k),
            *self._projected("v", "norm_1", self.k),
            *self._rotated("q", self.q),
            *self._rotated("k", self.q if self.expands else self.k),
            *([op("k_of_sines", "k k.lora_B", self.k)] if self.expands and "k" in self.adapted else []),
            *([op(self._value, self._result("v"), self.q if self.expands else self.k)] if self._value != "v" else []),
            self._attention(),
            *self._projected("o", "attended", hidden, self._widened("attended", "attended", self.q, "o")),
            *([] if self.sums_again else summed),
            op("rstd_2", middle, rows * FP32, wide=True, fuses="d_middle middle"),
            op("norm_2", f"{middle} rstd_2", hidden, fuses="d_middle rstd_2"),
            *self._widened("norm_2", f"{middle} rstd_2", hidden, ("gate", "up")),
            *self._projected("gate", "norm_2", inner),
            *self._projected("up", "norm_2", inner),
            *([op(gate, self._result("gate"), inner, replaces="gate")] if "gate" in self.adapted else []),
            *([op(up, self._result("up"), inner, fuses=gate, replaces="up")] if "up" in self.adapted else []),
            op("product", f"{gate} {up}", inner, fuses="d_up d_gate up_added gate_added", replaces="gate up"),
            *self._projected("down", "product", hidden, self._widened("product", f"{gate} {up}", inner, ("down",))),
            op(OUTPUT, f"{middle} {self._result('down')}", self.stream, wide=self.casts, replaces="o down"),
        ]

    def _projected(self, name: str, reads: str, size: int, widened: Sequence[Op] = ()) -> list[Op]:
        if name in self.adapted:
            rows, wide = self.context.rows, self.context.adapter_bytes
            return [
                op(name, reads, size),
                *widened,
                op(f"{name}.lora_A", f"{reads}.wide", rows * self.rank * wide, wide=True),
                op(f"{name}.lora_B", f"{name}.lora_A", size // self.context.compute_bytes * wide, wide=True),
            ]
        if not self.casts:
            return [op(name, reads, size)]
        cast = op(f"{name}.cast", "", self._weight(name) * self.context.compute_bytes)
        return [cast, op(name, f"{reads} {name}.cast", size)]

    def _result(self, name: str) -> str:
        """Of a product, with what its adapter adds, which whoever reads it does."""
        return f"{name} {name}.lora_B" if name in self.adapted else name

    def _added(self, name: str) -> str:
        return f"{name}_added" if name in self.adapted else name

    def _widened(self, name: str, reads: str, size: int, of: Iterable[str]) -> list[Op]:
        """The copy of `name` that the adapters of products `of` read, made by the same kernel."""
        wide = size // self.context.compute_bytes * self.context.adapter_bytes
        return [op(f"{name}.wide", reads, wide, wide=True, fuses=name)] if self.adapted.intersection(of) else []

    @property
    def rank(self) -> int:
        """Of the adapters."""
        return self.context.finetuning.rank or 0

    def _weight(self, name: str) -> int:
        """Elements of a product's weight."""
        architecture = self.context.architecture
        columns = {"q": architecture.query_size, "o": architecture.query_size}
        columns |= dict.fromkeys(("k", "v"), architecture.key_value_size)
        return architecture.hidden_size * columns.get(name, architecture.intermediate_size)

    def _rotated(self, name: str, size: int) -> list[Op]:
        return [] if self.context.architecture.qk_norm != "none" else [op(f"{name}_rotary", self._result(name), size)]

    def _rotated_by_head(self, name: str, size: int) -> list[Op]:
        """With a norm of each head, which is one kernel with the rotation."""
        if self.context.architecture.qk_norm == "none":
            return []
        rows = size // (self.context.architecture.head_dim * self.context.compute_bytes)
        size = self.q if self.expands else size
        return [op(f"{name}_rotary", name, writes={f"{name}_rstd": rows * FP32, f"{name}_rotary": size})]

    def _attention(self) -> Op:
        heads, context = self.context.architecture.num_attention_heads, self.context
        if self.masked:  # the memory-efficient kernel: statistics of whole blocks of 32 queries
            statistics = context.batch * heads * round_up(context.sequence, 32) * FP32
            results = {"attended": self.q, "statistics": statistics, "seed": INT64, "offset": INT64}
        else:
            results = {"attended": self.q, "statistics": context.rows * heads * FP32, "seed": 16, "offset": INT64}
        return op("attention", self._attention_reads, writes=results, parts=True)

    @property
    def _value(self) -> str:
        if self.expands:
            return "v_expanded"
        return self._added("v")

    @property
    def _attention_reads(self) -> str:
        return f"q_rotary k_rotary {self._value}" + (f" {MASK}" if self.masked else "")

    def _inside_backward(self) -> dict[str, int]:
        """What the attention's backward kernel allocates for itself."""
        if not self.context.kernel_temporaries:
            return {}
        sums = FP32 * self.context.rows * self.context.architecture.num_attention_heads  # "delta" (attention_backward.cu)
        return {"d_attention.temporary": sums if self.masked else flash_backward_bytes(self.context)}

    # -- backward -----------------------------------------------------------------------------------------------------

    def backward(self, *, is_result: bool = True) -> list[Op]:
        """From HANDED_IN, and NARROWED where products are narrower, to `d_input`, which `is_result` or not."""
        architecture, hidden, inner = self.context.architecture, self.hidden, self.inner
        middle = f"o {INPUT}" if self.sums_again else "middle"
        incoming, narrow = (NARROWED, "d_middle.narrow") if self.casts else (HANDED_IN, "d_middle")
        if "down" in self.adapted:
            incoming = f"{HANDED_IN}.copy"
        if "o" in self.adapted:
            narrow = "d_middle.copy"
        gate, up = self._added("gate"), self._added("up")
        d_product = "d_product d_product.wide" if "down" in self.adapted else "d_product"
        of_product = "" if self.adapted.intersection(("gate", "up", "down")) else f"d_product {gate}"
        ops = [
            *self._adapter_back("down", f"{HANDED_IN}.wide", "product", "d_product.wide", inner),
            *self.back("down", f"product {incoming}", "d_product", incoming, inner),
            op("d_up", f"{d_product} {gate}", inner, replaces=of_product),
            *self._widened("d_up", f"{d_product} {gate}", inner, ("up",)),
            *self._adapter_back("up", "d_up.wide", "norm_2", "d_norm_2.wide_of_up", hidden),
            *self.back("up", "d_up norm_2", "d_norm_2_of_up", "d_up", hidden),
            op("d_gate", f"{d_product} {gate} {up}", inner, fuses="d_up", replaces=of_product and f"{of_product} {up}"),
            *self._widened("d_gate", f"{d_product} {gate} {up}", inner, ("gate",)),
            *self._adapter_back("gate", "d_gate.wide", "norm_2", "d_norm_2.wide_of_gate", hidden),
            *self.back("gate", "d_gate norm_2", "d_norm_2_of_gate", "d_gate", hidden),
        ]
        of_middle = f"d_norm_2_of_up d_norm_2_of_gate rstd_2 {middle}"
        of_middle += "".join(f" d_norm_2.wide_of_{name}" for name in ("gate", "up") if name in self.adapted)
        ops += self._norm_weight("norm_2", of_middle)
        ops.append(
            self.stream_gradient(
                "d_middle",
                f"{of_middle} {HANDED_IN}",
                f"d_norm_2_of_up d_norm_2_of_gate {middle} {HANDED_IN}",
                read_by="o",
            )
        )
        ops += self._adapter_back("o", "d_middle.wide", "attended", "d_attended.wide", self.q)
        ops += self.back("o", f"{narrow} attended", "d_attended", narrow, self.q)
        d_attended = "d_attended_added" if "o" in self.adapted else "d_attended"
        if "o" in self.adapted:
            ops.append(op(d_attended, "d_attended d_attended.wide", self.q, replaces="d_attended"))
        attended_with = f"{d_attended} {self._attention_reads} attended statistics seed offset"
        if self.grouped:
            gradients = {"d_q_rotary": self.q, "d_k_expanded": self.q, "d_v_expanded": self.q}
        else:
            gradients = {"d_q_rotary": self.q, "d_k_rotary": self.k, "d_v": self.k}
        ops.append(op("d_attention", attended_with, writes=gradients | self._inside_backward(), parts=True))
        if self.masked:
            ops += self._rotated_back("k", self.k) + self._rotated_back("q", self.q)
            ops += [op("d_v", "d_v_expanded", self.k)] if self.grouped else []
            ops += self._widened("d_v", "d_v_expanded" if self.grouped else "d_v", self.k, "v")
        for name in ("v", "k", "q"):
            size = self.q if name == "q" else self.k
            if name != "v" and not self.masked:
                ops += self._rotated_back(name, size)
            elif name != "v" and self.lays_out:
                ops.append(op(f"d_{name}", f"d_{name}_by_head", size, replaces=f"d_{name}_by_head"))
            ops += self._adapter_back(name, f"d_{name}.wide", "norm_1", f"d_norm_1.wide_of_{name}", hidden)
            ops += self.back(name, f"d_{name} norm_1", f"d_norm_1_of_{name}", f"d_{name}", hidden)
            if self.trains and architecture.attention_bias:
                columns = size // (self.context.rows * self.context.compute_bytes)
                ops += self.summed(f"{name}.bias", f"{name}.bias.partial", f"d_{name}", columns)
        of_input = f"d_norm_1_of_v d_norm_1_of_k d_norm_1_of_q rstd_1 {INPUT}"
        of_input += "".join(f" d_norm_1.wide_of_{name}" for name in "vkq" if name in self.adapted)
        ops += self._norm_weight("norm_1", of_input, "norm_2.partial" if self.sums_again else "")
        replaced = "d_middle d_norm_1_of_v d_norm_1_of_k d_norm_1_of_q"
        return [*ops, self.stream_gradient("d_input", f"{of_input} d_middle", replaced, is_result=is_result)]

    def back(self, name: str, reads: str, result: str, gradient: str, size: int, elements: int | None = None) -> list[Op]:
        """Of a product: its weight's gradient, and that of what it read. `elements`: of a weight that is no layer's."""
        if not self.trains:
            return [op(result, gradient, size)]
        elements = self._weight(name) if elements is None else elements
        weight = elements * self.context.weight_bytes
        if not self.casts:
            return [op(f"{name}.weight.grad", reads, weight, is_result=True), op(result, gradient, size)]
        return [
            op(f"{name}.grad", reads, elements * self.context.compute_bytes),
            op(result, f"{gradient} {name}.cast", size),
            op(f"{name}.weight.grad", f"{name}.grad", weight, wide=True, is_result=True),
        ]

    def _adapter_back(self, name: str, gradient: str, read: str, result: str, size: int) -> list[Op]:
        """Of a product's adapter, which read a copy of `read`."""
        if name not in self.adapted:
            return []
        context, row = self.context, self.rank * self.context.adapter_bytes
        inputs = size // (context.rows * context.compute_bytes)
        outputs, inner = self._weight(name) // inputs, f"d_{name}.lora_A"
        return [
            op(f"{name}.lora_B.weight.grad", f"{gradient} {name}.lora_A", outputs * row, wide=True, is_result=True),
            op(inner, gradient, context.rows * row, wide=True),
            op(f"{name}.lora_A.weight.grad", f"{inner} {read}.wide", inputs * row, wide=True, is_result=True),
            op(result, inner, size // context.compute_bytes * context.adapter_bytes, wide=True),
        ]

    def stream_gradient(
        self, name: str, reads: str, replaces: str, *, is_result: bool = False, read_by: str = "down"
    ) -> Op:
        """Of the residual stream. By the same kernel the product that reads it gets a narrow one, where products are
        narrower, or where it has an adapter a copy and a wide one."""
        writes = {name: self.stream}
        if self.casts:
            writes[f"{name}.narrow"] = self.hidden
        if read_by in self.adapted:
            wide = self.hidden // self.context.compute_bytes * self.context.adapter_bytes
            writes |= {f"{name}.wide": wide, f"{name}.copy": self.hidden}
        return op(name, reads, writes=writes, wide=self.casts, replaces=replaces, is_result=is_result)

    def _norm_weight(self, name: str, reads: str, fuses: str = "") -> list[Op]:
        return self.summed(f"{name}.weight", f"{name}.partial", reads, self.context.architecture.hidden_size, fuses)

    def summed(self, name: str, partial: str, reads: str, width: int, fuses: str = "") -> list[Op]:
        """The gradient of `width` numbers with which every token's were multiplied, or to which they were added."""
        if not self.trains:
            return []
        size = -(-self.context.rows // ROWS_SUMMED) * width * FP32
        return [
            op(partial, reads, size, wide=True, fuses=fuses),
            op(f"{name}.grad", partial, width * self.context.weight_bytes, wide=self.casts, is_result=True),
        ]

    def _rotated_back(self, name: str, size: int) -> list[Op]:
        """The gradient of a projection from that of what was rotated, and normalised before where each head is."""
        given, ops = f"d_{name}_rotary", list[Op]()
        if self.grouped and name == "k":  # summed over the query heads of each key head, for both halves of the rotation
            ops, given = [op("d_k_of_sines", "d_k_expanded", size)], "d_k_of_sines d_k_expanded"
        if self.context.architecture.qk_norm == "none":
            result = f"d_{name}_by_head" if self.lays_out else f"d_{name}"
            return [*ops, op(result, given, size), *self._widened(f"d_{name}", given, size, name)]
        head, weight = self.context.architecture.head_dim, self.context.weight_bytes
        partial = size // (self.context.compute_bytes * ROWS_SUMMED) * FP32
        return [
            *ops,
            op(f"d_{name}_normed", given, size, fuses=f"d_{name}"),
            op(f"{name}_norm.partial", f"d_{name}_normed {name} {name}_rstd", partial, wide=True),
            op(f"{name}_norm.weight.grad", f"{name}_norm.partial", head * weight, wide=self.casts, is_result=True),
            op(f"d_{name}", f"d_{name}_normed {name} {name}_rstd", size, replaces=f"d_{name}_normed"),
        ]


def recomputed(forward: Sequence[Op], backward: Sequence[Op], kept: set[str]) -> list[Op]:
    """`backward`, and of `forward` what it needs and does not find, each just before its first reader
    (`_functorch/partitioners.py` reordering_to_mimic_autograd_engine)."""
    maker = {name: one for one in forward for name in one.writes if name not in kept}
    place = {one.name: index for index, one in enumerate(forward)}
    ordered: dict[str, Op] = {}
    for one in backward:
        missing, stack = set[str](), [one]
        while stack:
            for name in stack.pop().reads:
                if name in maker and maker[name].name not in ordered and maker[name].name not in missing:
                    missing.add(maker[name].name)
                    stack.append(maker[name])
        for name in sorted(missing, key=place.__getitem__):
            ordered[name] = forward[place[name]]
        ordered[one.name] = one
    return list(ordered.values())
