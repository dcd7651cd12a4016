"""The operations of a decoder layer's backward in a graph that torch.compile compiles. Source: as `forward.py`."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from peakcast.core.units import FP32
from peakcast.models.ledger.compiled.forward import LayerForward, modules_of, products
from peakcast.models.ledger.compiled.inductor_kernels import Op
from peakcast.models.ledger.compiled.ops import NARROWED, Names, library_call, names, op
from peakcast.models.ledger.huggingface.blocks.attention_kernels import flash_backward_bytes
from peakcast.models.ledger.tape.template import OUTPUT_GRADIENT
from peakcast.networks.families import family_of

ROWS_SUMMED = 128
"""The gradients of a norm's weight and of a bias are computed in two steps; the first sums groups of this many rows (read
off the traces)."""

READS_AGAIN = 4
"""An intermediate that is used more than once becomes a buffer if it reads more buffers than this (torch 2.13
`_inductor/config.py` realize_reads_threshold)."""


class StreamGradient(NamedTuple):
    """The gradient of the residual stream, as the backward of a norm computes it."""

    name: str
    added: Names
    """The gradients that reach the stream past the norm."""
    replaces: Names
    """The buffers that it may be written into."""
    is_result: bool = False
    """Whether the graph returns it."""


class LayerOps(LayerForward):
    """The operations of one layer, forward and backward. `d_x` is the gradient of the buffer `x`; `x.wide` is in fp32 where
    products are narrower; `middle` is the residual stream between attention and feed-forward."""

    def _inside_backward(self) -> dict[str, int]:
        """Bytes that attention's backward kernel allocates for itself, by name."""
        if not self.context.gpu:
            return {}
        sums = FP32 * self.context.rows * self.context.architecture.num_attention_heads  # "delta" (attention_backward.cu)
        return {"d_attention.temporary": sums if self.masked else flash_backward_bytes(self.context)}

    def backward(self, *, is_result: bool = True) -> list[Op]:
        """The operations of the layer's backward. It begins with the gradient of the layer's output (OUTPUT_GRADIENT; also
        NARROWED, its copy for products, if these are narrower) and ends with `d_input`. `is_result`: whether the graph
        returns `d_input`."""
        incoming, narrow = (NARROWED, "d_middle.narrow") if self.casts else (OUTPUT_GRADIENT, "d_middle")
        if "down" in self.adapted and self.widens:
            incoming = f"{OUTPUT_GRADIENT}.copy"
        if "o" in self.adapted and self.widens:
            narrow = "d_middle.copy"
        if self.changes_sums:
            incoming, narrow = "d_down", "d_o.narrow"
        ops = [*self._after_sum(), *self._feed_forward_back(incoming)]
        of_products = tuple(f"d_norm_2_of_{name}" for name in self._inside)
        of_adapters = tuple(f"d_norm_2.wide_of_{name}" for name in ("gate", "up") if name in self.adapted)
        replaced = (OUTPUT_GRADIENT, *of_products, *self.middle)
        joined: Names = ("post_2.partial",) if self.normed_apart else ()
        of_norm = of_products + of_adapters
        of_middle = StreamGradient("d_middle", (OUTPUT_GRADIENT,), replaced)
        ops += self.through_norm("2", of_norm, self.middle, of_middle, joined)
        added = ("d_middle", OUTPUT_GRADIENT) if self.normed_apart else ("d_middle",)
        if self.sandwiched:
            joined = ("norm_2.partial",) if self.normed_apart else ()
            ops += self._norm_weight("post_1", (*added, "o", "post_1.rstd"), joined)
        ops += self._adapter_back("o", self._of_adapter("d_middle"), self.attended, "d_attended.wide", self.q)
        ops += self.back("o", (narrow, self.attended), "d_attended", narrow, self.q)
        ops += self._bias("o", narrow, self.context.architecture.attention_output_bias)
        ops += self._attention_back()
        projections = ("qkv",) if self.context.architecture.fused_qkv else ("v", "k", "q")
        of_products = tuple(f"d_norm_1_of_{name}" for name in projections)
        of_adapters = tuple(f"d_norm_1.wide_of_{name}" for name in "vkq" if name in self.adapted)
        joined = (
            ("post_1.partial",) if self.normed_apart else () if self.centers or self.sandwiched else ("norm_2.partial",)
        )
        of_input = StreamGradient("d_input", added, ("d_middle", *of_products), is_result)
        joined = joined if self.sums_again else ()
        return ops + self.through_norm("1", of_products + of_adapters, self.given, of_input, joined)

    def through_norm(
        self, norm: str, of_products: Names, stream: Names, result: StreamGradient, fuses: Names = ()
    ) -> list[Op]:
        """The backward of a norm: the gradient of the residual stream, and that of the norm's weight. `of_products`: the
        gradients of the norm's output, one from each product that read it; `stream`: the buffers that the norm's input is
        computed from; `fuses`: operations whose kernel also sums the weight's gradient."""
        reads = (*of_products, *self.statistics(norm), *stream)
        kept = self.centers and len(stream) + len(self.statistics(norm)) > READS_AGAIN
        normed = f"norm_{norm}.normed.wide" if kept else ""
        added = result.added
        if result.name == "d_middle" and self.changes_sums:
            added += ("o", "post_1.rstd") if self.sandwiched else ("o.dropped",)
        gradient = self.stream_gradient(result, reads + added, normed)
        if not self.centers:
            if norm == "2" and self.sandwiched and self.recomputes:
                reads = (*of_products, "norm_2.normed.wide")
            return [*self._norm_weight(f"norm_{norm}", reads, fuses), gradient]
        return [gradient, *self._norm_weight(f"norm_{norm}", (*of_products, normed) if kept else reads)]

    @property
    def normed_apart(self) -> bool:
        """Whether `d_middle` is only what comes through the second norm, in fp32, so that each reader adds the incoming
        gradient to it. That is so if the stream is not a buffer, but a sum that each reader computes."""
        return self.sandwiched and self.sums_again and not self.recomputes

    @property
    def changes_sums(self) -> bool:
        """Whether a sub-layer's output is changed before it is added to the stream."""
        return self.sandwiched or self.drops

    @property
    def _inside(self) -> Names:
        """The names of the products that read the second norm's output."""
        if self.context.architecture.fused_gate_up:
            return ("gate_up",)
        return ("up", "gate") if self.context.architecture.gated_mlp else ("up",)

    def _after_sum(self) -> list[Op]:
        """The gradient of the feed-forward's output, if a norm or dropout lies between it and the stream."""
        if self.sandwiched:
            reads, fuses = (OUTPUT_GRADIENT, "down", "post_2.rstd"), (OUTPUT_GRADIENT, "post_2.rstd")
            return [*self._norm_weight("post_2", reads), op("d_down", reads, self.hidden, fuses=fuses)]
        return [op("d_down", (OUTPUT_GRADIENT, "down.dropped"), self.hidden, fuses=OUTPUT_GRADIENT)] if self.drops else []

    def _feed_forward_back(self, incoming: str) -> list[Op]:
        """From the gradient of the feed-forward's output to those of the products' inputs."""
        architecture, hidden, inner = self.context.architecture, self.hidden, self.inner
        through = [
            *self._adapter_back("down", self._of_adapter(OUTPUT_GRADIENT), "product", "d_product.wide", inner),
            *self.back("down", ("product", incoming), "d_product", incoming, inner),
            *self._bias("down", incoming, architecture.mlp_bias),
        ]
        if len(self._inside) == 1:
            (name,) = self._inside
            through_activation = ("d_product", name)
            joined = architecture.gated_mlp  # the gradients of gate and up are parts of one buffer
            size, replaces = (2 * inner, ()) if joined else (inner, through_activation)
            return [
                *through,
                op(f"d_{name}", through_activation, size, replaces=replaces, elementwise=not joined),
                *self.back(name, (f"d_{name}", "norm_2"), f"d_norm_2_of_{name}", f"d_{name}", hidden),
                *self._bias(name, f"d_{name}", architecture.mlp_bias),
            ]
        gate, up = self._added("gate"), self._added("up")
        d_product = ("d_product", "d_product.wide") if "down" in self.adapted else ("d_product",)
        in_place = not self.adapted.intersection(("gate", "up", "down"))
        of_up, of_gate = (*d_product, gate), (*d_product, gate, up)
        return [
            *through,
            op("d_up", of_up, inner, replaces=of_up if in_place else (), elementwise=True),
            *self._scaled("d_up", of_up, inner, ("up",)),
            *self._adapter_back("up", self._of_adapter("d_up"), "norm_2", "d_norm_2.wide_of_up", hidden),
            *self.back("up", ("d_up", "norm_2"), "d_norm_2_of_up", "d_up", hidden),
            op("d_gate", of_gate, inner, fuses="d_up", replaces=of_gate if in_place else (), elementwise=True),
            *self._scaled("d_gate", of_gate, inner, ("gate",)),
            *self._adapter_back("gate", self._of_adapter("d_gate"), "norm_2", "d_norm_2.wide_of_gate", hidden),
            *self.back("gate", ("d_gate", "norm_2"), "d_norm_2_of_gate", "d_gate", hidden),
        ]

    def _attention_back(self) -> list[Op]:
        """From the gradient of attention's output to those of the projections' inputs."""
        architecture, hidden = self.context.architecture, self.hidden
        d_attended = "d_attended_added" if "o" in self.adapted else "d_attended"
        both = ("d_attended", "d_attended.wide")
        ops = [op(d_attended, both, self.q, replaces="d_attended")] if "o" in self.adapted else []
        attended_with = (d_attended, *self._attention_reads, "attended", "statistics", "seed", "offset")
        if self.grouped:
            gradients = {"d_q_rotary": self.q, "d_k_expanded": self.q, "d_v_expanded": self.q}
        else:
            gradients = {"d_q_rotary": self.q, "d_k_rotary": self.k, "d_v": self.k}
        ops.append(library_call("d_attention", attended_with, gradients | self._inside_backward()))
        if architecture.fused_qkv:
            given, size = tuple(gradients), self.q + 2 * self.k
            turned = architecture.position_embedding == "rope"
            if turned:  # in two kernels if they compute the rotary tables too; else in one, whose parts are not buffers
                of_sines = {"d_k_of_sines": self.k, "d_q_of_sines": self.q}
                parts = of_sines if self.masked else {"d_qkv_of_sines": size, "d_qkv_by_head": size}
                ops.append(op("d_of_sines", given if self.masked else given[:2], parts))
                given = (*(given if self.masked else given[2:]), *parts)
            return [
                *ops,
                op("d_qkv", given, size, fuses=() if self.masked else "d_of_sines", elementwise=True),
                *self.back("qkv", ("d_qkv", "norm_1"), "d_norm_1_of_qkv", "d_qkv", hidden),
                *self._bias("qkv", "d_qkv", architecture.attention_bias),
            ]
        if self.masked or self.grouped:
            ops += self._rotated_back("k", self.k) + self._rotated_back("q", self.q)
            ops += [op("d_v", "d_v_expanded", self.k)] if self.grouped else []
            ops += self._scaled("d_v", "d_v_expanded" if self.grouped else "d_v", self.k, ("v",))
        for name in ("v", "k", "q"):
            size = self.q if name == "q" else self.k
            if name != "v" and not (self.masked or self.grouped):
                ops += self._rotated_back(name, size)
            elif name != "v" and self.lays_out(name):
                ops.append(op(f"d_{name}", f"d_{name}_by_head", size, replaces=f"d_{name}_by_head"))
            ops += self._adapter_back(name, self._of_adapter(f"d_{name}"), "norm_1", f"d_norm_1.wide_of_{name}", hidden)
            ops += self.back(name, (f"d_{name}", "norm_1"), f"d_norm_1_of_{name}", f"d_{name}", hidden)
            ops += self._bias(name, f"d_{name}", architecture.attention_bias)
        return ops

    def back(self, name: str, reads: Names, result: str, gradient: str, size: int, elements: int | None = None) -> list[Op]:
        """The backward of a product: the gradients of its weight and of its input. `elements`: how many the weight has, if
        it is not a layer's."""
        if not self.trains:
            return [op(result, gradient, size)]
        elements = self._weight(name) if elements is None else elements
        weight = elements * self.context.precision.weight_bytes
        if not self.casts:
            both = [self._gradient(name, "weight", reads, weight), op(result, gradient, size)]
            # `addmm` computes the input's gradient first, then that of its transposed weight
            return both[::-1] if family_of(self.context.architecture).linear.conv1d else both
        return [
            op(f"{name}.grad", reads, elements * self.context.precision.compute_bytes),
            op(result, (gradient, f"{name}.cast"), size),
            self._gradient(name, "weight", f"{name}.grad", weight, wide=True),
        ]

    def _gradient(self, of: str, part: str, reads: str | Names, size: int, *, wide: bool = False) -> Op:
        """The operation that computes the gradient of the parameter `part` ("weight", "bias", "lora_A") that the forward
        operation `of` uses."""
        module = modules_of(self.context.architecture).get(of, of)
        return op(f"{of}.{part}.grad", reads, size, wide=wide).leaving(f"{module}.{part}")

    def _adapter_back(self, name: str, gradient: str, read: str, result: str, size: int) -> list[Op]:
        """The backward of a product's adapter, which read a copy of the buffer `read`."""
        if name not in self.adapted:
            return []
        context, row = self.context, self.rank * self.context.adapters.weight_bytes
        inputs = size // (context.rows * context.precision.compute_bytes)
        outputs, inner = self._weight(name) // inputs, f"d_{name}.lora_A"
        return [
            self._gradient(name, "lora_B", (gradient, f"{name}.lora_A"), outputs * row, wide=True),
            op(inner, gradient, context.rows * row, wide=True),
            self._gradient(name, "lora_A", (inner, self._copied(read)), inputs * row, wide=True),
            op(result, inner, size // context.precision.compute_bytes * context.adapters.weight_bytes, wide=True),
        ]

    def stream_gradient(self, result: StreamGradient, reads: Names, normed: str = "") -> Op:
        """The operation that computes `result`. Its kernel also writes copies for the product that reads it: a narrow one
        if products are narrower, a wide one (and a further copy) if that product has an adapter. `normed`: the name of the
        norm's output before its weight is applied, if that is a buffer."""
        name = result.name
        read_by = "o" if name == "d_middle" else "down"
        apart = name == "d_middle" and self.normed_apart
        writes = {name: self.hidden * FP32 // self.context.precision.compute_bytes if apart else self.stream}
        narrow, copied = f"{name}.narrow", self._of_adapter(name)
        if name == "d_middle" and self.changes_sums:
            writes["d_o.narrow"] = self.hidden
        if normed:
            writes[normed] = self.hidden * FP32 // self.context.precision.compute_bytes
        if self.casts:
            writes[narrow] = self.hidden
        if read_by in self.adapted:
            writes[copied] = self.hidden // self.context.precision.compute_bytes * self.context.adapters.weight_bytes
            writes |= {f"{name}.copy": self.hidden} if self.widens else {}
        always = {copied if self.widens else "", normed} & writes.keys()
        widened = writes.keys() - {narrow, "d_o.narrow"} if self.casts or apart else always
        made = op(name, reads, writes, wide=widened, replaces=result.replaces)
        return made.leaving() if result.is_result else made

    def _norm_weight(self, name: str, reads: Names, fuses: Names = ()) -> list[Op]:
        """The gradients of a norm's weight and bias."""
        width = self.context.architecture.hidden_size
        both = self.summed(name, "weight", f"{name}.partial", reads, width, fuses)
        if not (self.centers and both):
            return both
        first, second = both
        bias = f"{name}.bias.partial"
        return [
            replace(first, writes={**first.writes, bias: first.writes[f"{name}.partial"]}, wide=first.wide | {bias}),
            second,
            self._gradient(name, "bias", bias, width * self.context.precision.weight_bytes, wide=self.casts),
        ]

    def _bias(self, name: str, reads: str, has: bool) -> list[Op]:
        """The gradient of a product's bias, if it `has` one."""
        _, columns = products(self.context.architecture)[name]
        return self.summed(name, "bias", f"{name}.bias.partial", (reads,), columns) if has else []

    def summed(self, of: str, part: str, partial: str, reads: Names, width: int, fuses: Names = ()) -> list[Op]:
        """The gradient of a parameter of `width` elements by which every token is multiplied or which is added to it, such
        as a norm's weight or a bias: a sum over tokens, in two steps. `of`, `part`: as in `_gradient`."""
        if not self.trains:
            return []
        size = -(-self.context.rows // ROWS_SUMMED) * width * FP32
        return [
            op(partial, reads, size, wide=True, fuses=fuses),
            self._gradient(of, part, partial, width * self.context.precision.weight_bytes, wide=self.casts),
        ]

    def _rotated_back(self, name: str, size: int) -> list[Op]:
        """From the gradient of rotated queries or keys to that of their projection, through the norm of each head if there
        is one."""
        given, ops = names(f"d_{name}_rotary"), list[Op]()
        by_head = self.context.architecture.qk_norm != "none"
        widens = self.casts or family_of(self.context.architecture).norm.weight_in_float32
        wide = widens and by_head  # a norm's weight widens what it multiplies, and so what is rotated
        through = size // self.context.precision.compute_bytes * FP32 if wide else size
        if self.grouped and name == "k":  # summed over the query heads of each key head, for both halves of the rotation
            ops, given = [op("d_k_of_sines", "d_k_expanded", through, wide=wide)], ("d_k_of_sines", "d_k_expanded")
        if not by_head:
            result = f"d_{name}_by_head" if self.lays_out(name) else f"d_{name}"
            return [*ops, op(result, given, size), *self._scaled(f"d_{name}", given, size, (name,))]
        head, weight = self.context.architecture.head_dim, self.context.precision.weight_bytes
        partial = size // (self.context.precision.compute_bytes * ROWS_SUMMED) * FP32
        return [
            *ops,
            op(f"d_{name}_normed", given, through, wide=wide, fuses=f"d_{name}"),
            op(f"{name}_norm.partial", (f"d_{name}_normed", name, f"{name}_rstd"), partial, wide=True),
            self._gradient(f"{name}_norm", "weight", f"{name}_norm.partial", head * weight, wide=self.casts),
            op(f"d_{name}", (f"d_{name}_normed", name, f"{name}_rstd"), size, replaces=f"d_{name}_normed"),
        ]
