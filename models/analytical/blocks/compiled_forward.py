"""The operations of a decoder layer's forward in a graph that torch.compile compiles, and so its buffers.

Between matrix products everything elementwise is one kernel, of which only results are buffers. Names are those of one
layer; `compiled_ops.named` puts it into a network's graph.

Source: graphs that torch 2.13 lowers of transformers' Llama, Mistral, Qwen2, Qwen3 and Gemma (`TORCH_LOGS=output_code`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from peakcast.models.analytical.blocks.compiled_ops import FP32, INPUT, INT64, MASK, OUTPUT, PRODUCTS, op
from peakcast.models.analytical.blocks.hf_builder import HFContext, is_adapter_target
from peakcast.models.analytical.blocks.inductor_kernels import Op
from peakcast.models.analytical.parameters import leaf_names
from peakcast.units import round_up


def adapted(context: HFContext) -> frozenset[str]:
    """The products with adapters."""
    if context.trainable:
        return frozenset()
    leaves = leaf_names(context.architecture)
    targets = {name: getattr(leaves, "out" if name == "o" else name) for name in PRODUCTS}
    return frozenset(
        name for name, leaf in targets.items() if is_adapter_target(leaf, context.finetuning, context.architecture)
    )


class LayerForward:
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
