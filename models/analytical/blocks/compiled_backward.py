"""The operations of a decoder layer's backward in a graph that torch.compile compiles. Source: as `compiled_forward.py`."""

from __future__ import annotations

from peakcast.models.analytical.blocks.attention_kernels import flash_backward_bytes
from peakcast.models.analytical.blocks.compiled_forward import LayerForward
from peakcast.models.analytical.blocks.compiled_ops import FP32, INPUT, NARROWED, op
from peakcast.models.analytical.blocks.inductor_kernels import Op
from peakcast.models.analytical.template import HANDED_IN

ROWS_SUMMED = 128
"""A norm's weight and a bias get their gradients in two steps; the first sums so many rows each (read off the traces)."""


class LayerOps(LayerForward):
    """Of one layer, forward and backward."""

    def _inside_backward(self) -> dict[str, int]:
        """What the attention's backward kernel allocates for itself."""
        if not self.context.kernel_temporaries:
            return {}
        sums = FP32 * self.context.rows * self.context.architecture.num_attention_heads  # "delta" (attention_backward.cu)
        return {"d_attention.temporary": sums if self.masked else flash_backward_bytes(self.context)}

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
                f"{HANDED_IN} d_norm_2_of_up d_norm_2_of_gate {middle}",
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
        by_head = self.context.architecture.qk_norm != "none"
        wide = self.casts and by_head  # a norm's weight widens what it multiplies, and so what is rotated
        through = size // self.context.compute_bytes * FP32 if wide else size
        if self.grouped and name == "k":  # summed over the query heads of each key head, for both halves of the rotation
            ops, given = [op("d_k_of_sines", "d_k_expanded", through, wide=wide)], "d_k_of_sines d_k_expanded"
        if not by_head:
            result = f"d_{name}_by_head" if self.lays_out else f"d_{name}"
            return [*ops, op(result, given, size), *self._widened(f"d_{name}", given, size, name)]
        head, weight = self.context.architecture.head_dim, self.context.weight_bytes
        partial = size // (self.context.compute_bytes * ROWS_SUMMED) * FP32
        return [
            *ops,
            op(f"d_{name}_normed", given, through, wide=wide, fuses=f"d_{name}"),
            op(f"{name}_norm.partial", f"d_{name}_normed {name} {name}_rstd", partial, wide=True),
            op(f"{name}_norm.weight.grad", f"{name}_norm.partial", head * weight, wide=self.casts, is_result=True),
            op(f"d_{name}", f"d_{name}_normed {name} {name}_rstd", size, replaces=f"d_{name}_normed"),
        ]
