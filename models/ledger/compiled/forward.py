"""The operations of a decoder layer's forward in a graph that torch.compile compiles, from which its buffers follow.

Between matrix products, everything elementwise is one kernel, and only its results are buffers. Names are those of one
layer; `ops.prefixed` puts them into a network's graph.

Source: graphs that torch 2.13 lowers for transformers' Llama, Mistral, Qwen2, Qwen3 and Gemma (`TORCH_LOGS=output_code`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache

from peakcast.core.units import FP32, INT64, round_up
from peakcast.jobs.architecture import Architecture
from peakcast.models.ledger.compiled.inductor_kernels import Op
from peakcast.models.ledger.compiled.ops import INPUT, MASK, OUTPUT, SEEDS, Names, library_call, names, op
from peakcast.models.ledger.huggingface.blocks.builder import is_adapter_target
from peakcast.models.ledger.huggingface.blocks.context import HFContext
from peakcast.networks.families import family_of


@cache
def products(architecture: Architecture) -> dict[str, tuple[int, int]]:
    """A layer's matrix products in order: name -> (in_features, out_features)."""
    hidden, inner, q, k = (
        architecture.hidden_size,
        architecture.intermediate_size,
        architecture.query_size,
        architecture.key_value_size,
    )
    projections = {"q": (hidden, q), "k": (hidden, k), "v": (hidden, k)}
    if architecture.fused_qkv:
        projections = {"qkv": (hidden, q + 2 * k)}
    if architecture.fused_gate_up:
        inside = {"gate_up": (hidden, 2 * inner)}
    else:
        inside = dict.fromkeys(("gate", "up") if architecture.gated_mlp else ("up",), (hidden, inner))
    return {**projections, "o": (q, hidden), **inside, "down": (inner, hidden)}


@cache
def modules_of(architecture: Architecture) -> dict[str, str]:
    """By name of an operation with parameters, the module that it is."""
    leaves, sandwiched = family_of(architecture).names, architecture.norm_placement == "pre_and_post"
    inside = {name: f"mlp.{getattr(leaves, name)}" for name in ("gate_up", "gate", "up", "down")}
    return {
        **{name: f"self_attn.{getattr(leaves, name)}" for name in ("qkv", "q", "k", "v")},
        "o": f"self_attn.{leaves.out}",
        "q_norm": "self_attn.q_norm",
        "k_norm": "self_attn.k_norm",
        **inside,
        "norm_1": "input_layernorm",
        "norm_2": "pre_feedforward_layernorm" if sandwiched else "post_attention_layernorm",
        "post_1": "post_attention_layernorm",
        "post_2": "post_feedforward_layernorm",
        "norm_final": "norm",
    }


def adapted(context: HFContext) -> frozenset[str]:
    """Names of the products that have adapters."""
    if context.trainable:
        return frozenset()
    leaves = family_of(context.architecture).names
    targets = {name: getattr(leaves, "out" if name == "o" else name) for name in products(context.architecture)}
    return frozenset(
        name for name, leaf in targets.items() if is_adapter_target(leaf, context.finetuning, context.architecture)
    )


class LayerForward:
    """The forward of one layer. `sums_again`: every kernel that reads the residual stream after attention adds the layer's
    input and attention's output itself, so their sum is not a buffer. torch does so if the input comes from outside the
    graph or from a lookup. If another sum made the input, that sum and its reader after attention are too far apart to
    recompute it (`_functorch/partitioners.py`, ban_recompute_used_far_apart)."""

    def __init__(
        self, context: HFContext, *, sums_again: bool = True, recomputes: bool = False, given: Names = (INPUT,)
    ) -> None:
        architecture, rows, size = context.architecture, context.rows, context.precision.compute_bytes
        self.context = context
        self.sums_again = sums_again
        self.recomputes = recomputes
        self.given = given
        """The layer's input, or the buffers from which its readers compute it."""
        self.trains = context.trainable
        self.casts = context.precision.autocast and context.precision.weight_bytes > size
        """Whether weights are wider than products: each is converted before its product, and its gradient after."""
        self.hidden, self.inner = rows * architecture.hidden_size * size, rows * architecture.intermediate_size * size
        self.stream = rows * architecture.hidden_size * context.stream_bytes
        self.q, self.k = rows * architecture.query_size * size, rows * architecture.key_value_size * size
        self.masked = "mask" in context.compiled
        self.grouped = (self.masked or context.attention.sdpa_repeats_key_value) and self.q != self.k
        self.expands = self.grouped and architecture.num_key_value_heads > 1
        """Whether keys and values are copied for every head, as the kernel with a mask needs them and some networks do
        themselves; a single head is expanded as a view."""
        self.sandwiched = architecture.norm_placement == "pre_and_post"
        """Whether a sub-layer's output is normalised before it is added to the stream."""
        self.drops = architecture.hidden_dropout > 0
        """Whether dropout is applied to a sub-layer's output before it is added to the stream."""
        self.centers = architecture.normalization == "layernorm"
        self.adapted = adapted(context)
        self.widens = context.adapters.weight_bytes > size
        """Whether adapters are wider than products, so that each reads a copy of what its product reads."""
        fused = architecture.fused_qkv and architecture.position_embedding == "rope"
        self.parts_read = {"qkv": self.k} if fused else {}
        """Name -> bytes of the part of a saved tensor that backward reads: values are a part of the fused projection's
        output, and the only part read unchanged."""

    def forward(self, *, again: bool = False) -> list[Op]:
        """The operations from INPUT to OUTPUT; `again`: as recomputed in the backward graph."""
        again = again and self.recomputes and self.sandwiched
        kept = "norm_2.normed.wide" if again else ""  # the norm's weight gradient reads it
        added, after = names(self.given, self._added_to_stream("o")), ("post_1.rstd", "o.dropped")
        summed = op("middle", added, self.stream, wide=self.casts, replaces="o", fuses=after)
        return [
            *self.norm("1", self.given, ("d_middle", *self.given), ("d_input", "d_middle", "rstd_1"), ("q", "k", "v")),
            *self._queries_keys_values(),
            self._attention(),
            *([op(self.attended, "attended", self.q, elementwise=True)] if self.attended != "attended" else []),
            *self._projected("o", self.attended, self.hidden, self._widened(self.attended, self.attended, self.q, ("o",))),
            *self._before_sum("o", 1),
            *([] if self.sums_again else [summed]),
            *self.norm("2", self.middle, (*after, "d_middle", "middle"), ("d_middle", "rstd_2"), ("gate", "up"), kept),
            *self._feed_forward(),
            *self._before_sum("down", 2),
            op(
                OUTPUT,
                names(self.middle, self._added_to_stream("down")),
                self.stream,
                wide=self.casts,
                replaces=("o", "down"),
                fuses=("post_2.rstd", "down.dropped"),
            ),
        ]

    @property
    def middle(self) -> Names:
        """The stream after attention, or the buffers whose sum it is."""
        return (*self._added_to_stream("o"), *self.given) if self.sums_again else ("middle",)

    def lays_out(self, name: str) -> bool:
        """Whether the gradient of the product `name`, laid out head by head, is rearranged token by token in place, in a
        kernel of its own, for the matrix products that read it."""
        return self.masked and self.trains and self.context.architecture.qk_norm == "none"

    def _added_to_stream(self, name: str) -> Names:
        """The buffers from which a kernel computes what is added to the stream for the product `name`: the product's output
        and, if that is normalised or dropped out on the way, the norm's factors or the dropout mask."""
        later = {"o": "post_1.rstd", "down": "post_2.rstd"}[name] if self.sandwiched else f"{name}.dropped"
        return (*self._result(name), later) if self.sandwiched or self.drops else self._result(name)

    def _before_sum(self, name: str, number: int) -> list[Op]:
        """The operations that make those factors or that mask."""
        if self.sandwiched:
            return [op(f"post_{number}.rstd", name, self.context.rows * FP32, wide=True)]
        return [op(f"{name}.dropped", SEEDS, self.hidden // self.context.precision.compute_bytes)] if self.drops else []

    def norm(self, name: str, stream: Names, fuses: Names, fuses_result: Names, of: Names = (), kept: str = "") -> list[Op]:
        """A norm of `stream`; its factors and, for LayerNorm, its means are saved. `of`: the products that read the output.
        `kept`: the name of the fp32 tensor before the weight, if that is a buffer."""
        made = dict.fromkeys(self.statistics(name), self.context.rows * FP32)
        reads, results = (*stream, *self.statistics(name)), {f"norm_{name}": self.hidden}
        if kept:
            results[kept] = self.hidden // self.context.precision.compute_bytes * FP32
        return [
            op(f"rstd_{name}", stream, made, wide=True, fuses=fuses),
            op(
                f"norm_{name}",
                reads,
                results,
                fuses=fuses_result,
                wide=(kept,) if kept else (),
                elementwise=True,
            ),
            *self._widened(f"norm_{name}", reads, self.hidden, of),
        ]

    def statistics(self, name: str) -> Names:
        """What a norm saves besides its input."""
        return (f"rstd_{name}", f"mean_{name}") if self.centers else (f"rstd_{name}",)

    def _queries_keys_values(self) -> list[Op]:
        """The projections and the rotation."""
        if self.context.architecture.fused_qkv:
            rotated = {"q_rotary": self.q, "k_rotary": self.q if self.expands else self.k}
            turns = self.context.architecture.position_embedding == "rope"
            return [
                *self._projected("qkv", "norm_1", self.q + 2 * self.k),
                *([op("q_rotary", "qkv", rotated)] if turns else []),
                *([op("v_expanded", "qkv", self.q)] if self.expands else []),
            ]
        return [
            *self._projected("q", "norm_1", self.q),
            *self._rotated_by_head("q", self.q),
            *self._projected("k", "norm_1", self.k),
            *self._rotated_by_head("k", self.k),
            *self._projected("v", "norm_1", self.k),
            *self._rotated("q", self.q),
            *self._rotated("k", self.q if self.expands else self.k),
            *([op("k_of_sines", ("k", "k.lora_B"), self.k)] if self.expands and "k" in self.adapted else []),
            *([op(self._value, self._result("v"), self.q if self.expands else self.k)] if self._value != "v" else []),
        ]

    def _feed_forward(self) -> list[Op]:
        """The feed-forward."""
        architecture, inner = self.context.architecture, self.inner
        if architecture.fused_gate_up or not architecture.gated_mlp:
            name, columns = ("gate_up", 2) if architecture.gated_mlp else ("up", 1)
            return [
                *self._projected(name, "norm_2", columns * inner),
                op("product", name, inner, fuses="d_up", elementwise=True),
                *self._projected("down", "product", self.hidden),
            ]
        gate, up = self._added("gate"), self._added("up")
        return [
            *self._projected("gate", "norm_2", inner),
            *self._projected("up", "norm_2", inner),
            *([op(gate, self._result("gate"), inner, replaces="gate")] if "gate" in self.adapted else []),
            *([op(up, self._result("up"), inner, fuses=gate, replaces="up")] if "up" in self.adapted else []),
            op(
                "product",
                (gate, up),
                inner,
                fuses=("d_up", "d_gate", "up_added", "gate_added"),
                replaces=("gate", "up"),
                elementwise=True,
            ),
            *self._projected("down", "product", self.hidden, self._widened("product", (gate, up), inner, ("down",))),
        ]

    def _projected(self, name: str, reads: str, size: int, widened: Sequence[Op] = ()) -> list[Op]:
        """A matrix product with its cast weight or its adapter."""
        if name in self.adapted:
            rows, wide = self.context.rows, self.context.adapters.weight_bytes
            return [
                op(name, reads, size),
                *widened,
                op(f"{name}.lora_A", self._copied(reads), rows * self.rank * wide, wide=True),
                op(f"{name}.lora_B", f"{name}.lora_A", size // self.context.precision.compute_bytes * wide, wide=True),
            ]
        if not self.casts:
            return [op(name, reads, size)]
        cast = op(f"{name}.cast", (), self._weight(name) * self.context.precision.compute_bytes)
        return [cast, op(name, (reads, f"{name}.cast"), size)]

    def _result(self, name: str) -> Names:
        """A product's output and, with an adapter, the adapter's output, which the reader adds."""
        return (name, f"{name}.lora_B") if name in self.adapted else (name,)

    def _added(self, name: str) -> str:
        """The name of a product's output with its adapter's output added."""
        return f"{name}_added" if name in self.adapted else name

    def _widened(self, name: str, reads: str | Names, size: int, of: Iterable[str]) -> list[Op]:
        """The fp32 copy of `name` that the adapters of products `of` read; the same kernel makes it."""
        return self._scaled(name, reads, size, of) if self.widens else []

    def _scaled(self, name: str, reads: str | Names, size: int, of: Iterable[str]) -> list[Op]:
        """The copy of the gradient `name`, times the adapters' factor, that the adapters of products `of` get."""
        copied = size // self.context.precision.compute_bytes * self.context.adapters.weight_bytes
        made = op(self._of_adapter(name), reads, copied, wide=self.widens, fuses=name)
        return [made] if self.adapted.intersection(of) else []

    def _copied(self, name: str) -> str:
        """The name of what an adapter reads where its product reads `name`."""
        return f"{name}.wide" if self.widens else name

    def _of_adapter(self, name: str) -> str:
        """The name of the copy of a gradient that an adapter gets."""
        return f"{name}.wide" if self.widens else f"{name}.scaled"

    @property
    def rank(self) -> int:
        """The rank of the adapters."""
        return self.context.finetuning.rank or 0

    def _weight(self, name: str) -> int:
        """Number of elements of a product's weight."""
        inputs, outputs = products(self.context.architecture)[name]
        return inputs * outputs

    def _rotated(self, name: str, size: int) -> list[Op]:
        """The rotation of queries or keys that have no norm."""
        return [] if self.context.architecture.qk_norm != "none" else [op(f"{name}_rotary", self._result(name), size)]

    def _rotated_by_head(self, name: str, size: int) -> list[Op]:
        """The norm of each head and the rotation, which are one kernel."""
        if self.context.architecture.qk_norm == "none":
            return []
        rows = size // (self.context.architecture.head_dim * self.context.precision.compute_bytes)
        size = self.q if self.expands else size
        return [op(f"{name}_rotary", name, {f"{name}_rstd": rows * FP32, f"{name}_rotary": size})]

    def _attention(self) -> Op:
        """The attention kernel."""
        heads, context = self.context.architecture.num_attention_heads, self.context
        if self.masked:  # the memory-efficient kernel: statistics of whole blocks of 32 queries
            statistics = context.batch * heads * round_up(context.sequence, 32) * FP32
            results = {"attended": self.q, "statistics": statistics, "seed": INT64, "offset": INT64}
        else:
            results = {"attended": self.q, "statistics": context.rows * heads * FP32, "seed": 16, "offset": INT64}
        return library_call("attention", self._attention_reads, results)

    @property
    def attended(self) -> str:
        """What the output projection reads: attention's result, token by token."""
        return "attended_by_token" if self.context.attention.cudnn and not self.masked else "attended"

    @property
    def _value(self) -> str:
        """The name of the buffer that attention reads as values."""
        if self.expands:
            return "v_expanded"
        if self.context.architecture.fused_qkv:
            return "qkv"
        return self._added("v")

    @property
    def _attention_reads(self) -> Names:
        """The buffers that attention reads."""
        turned = ("q_rotary", "k_rotary") if self.context.architecture.position_embedding == "rope" else ()
        return (*turned, self._value, *((MASK,) if self.masked else ()))
