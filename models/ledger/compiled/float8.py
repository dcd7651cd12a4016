"""A compiled layer with products in float8: torchao's Float8Linear with dynamic tensorwise scales, as Inductor fuses it.

Each operand of a product is converted with a scale for which all of it is read first, so a conversion is a kernel after the
one that computes the operand. What is computed element by element (a norm's result, silu·up, their gradients) is computed
again by each kernel that measures or converts it, and has no buffer: forward keeps only what it is computed from. Backward
converts weights again, and inputs and gradients in the other layout too, with one scale for both.

Source: torchao 0.18 float8/float8_linear.py matmul_with_hp_or_float8_args; graphs that torch 2.13 lowers for it
(`TORCH_LOGS=output_code`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property

from peakcast.core.units import BF16, FP32
from peakcast.models.ledger.compiled.backward import READS_AGAIN, LayerOps
from peakcast.models.ledger.compiled.forward import modules_of, products
from peakcast.models.ledger.compiled.inductor_kernels import Float8Operand, Float8Step, Op
from peakcast.models.ledger.compiled.ops import Names, names, op
from peakcast.models.ledger.huggingface.blocks.context import HFContext
from peakcast.models.ledger.tape.template import OUTPUT_GRADIENT

E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
"""The dtypes of operands, and of gradients (torchao 0.18 float8/config.py CastConfig)."""

GROUPS = 512
"""The absolute maximum is taken in this many parts first (read off the traces)."""

ROWS = "embed_tokens.rows"
"""In a network that is compiled whole, what adds the first layer's gradient to the rows of the table."""

CONVERTED_WITH = {
    "norm_1": ("d_input", ROWS),
    "norm_2": ("d_middle",),
    "product": ("d_up.f8",),
    OUTPUT_GRADIENT: ("d_middle",),
    "d_middle": ("d_input", ROWS),
    "d_gate": ("d_up.f8", "d_gate.f8"),
}
"""By buffer, the operations in whose kernel it is converted for weights' gradients: those that read the same."""

CONVERTED_OF_SEVERAL = {
    "norm_1": ("d_input", "d_middle"),
    OUTPUT_GRADIENT: (f"{OUTPUT_GRADIENT}.f8",),
    "d_middle": ("d_middle.f8",),
}
"""The same, where they differ, of several sequences: a kernel over sequences and tokens does not take in a conversion over
all rows of what another kernel made (torch 2.13 `_inductor/scheduler.py` _try_reorder_loops_for_candidates)."""

MANY_STEPS = frozenset({"gelu_pytorch_tanh", "gelu_new", "gelu_fast"})
"""Activation functions of so many elementary operations that what is computed with them becomes a buffer where it is used
more than once (torch 2.13 `_inductor/config.py` realize_opcount_threshold, 30): fp32 values before they are rounded."""

FAR = ("qkv", "q", "k", "v")
"""The projections. Their weights, in a graph that recomputes them, are converted a second time by kernels of their own:
Inductor joins no kernels that are more than 64 apart (torch 2.13 `_inductor/scheduler.py` are_long_distant_nodes)."""

FAR_IN_LAST = frozenset({"o.f8t", "attended.f8t", "norm_1.partial"})
"""What is that far as well in the last layer of a network, which is recomputed to its end: conversions from those of
forward, and the sums of the first norm's gradient from those of the final norm's."""

KEPT_OF_GATHERED = ("v", "qkv", "gate", "up", "gate_up", "down")
"""Products of which Inductor's partitioner keeps the float8 weight in backward's layout where FSDP2 has gathered it in
float8: such a weight is no parameter that a graph keeps for nothing, and a copy costs as much (read off the trace of a
Llama; with others it may choose otherwise)."""

MEASURED_WITH = {"norm_1": "rstd_1", "norm_2": "rstd_2", "d_gate": "d_up.amax", "product": "d_up.amax"}
"""By buffer, the operation in whose kernel its maximum is taken, if that is not the one that makes it."""


def in_float8(context: HFContext) -> frozenset[str]:
    """Names of the products that are in float8. torchao's filters take sizes that are multiples of 16."""
    if not context.linears.float8:
        return frozenset()
    modules, skips = modules_of(context.architecture), context.linears.float8_skips
    sizes = products(context.architecture).items()
    return frozenset(name for name, size in sizes if modules[name] not in skips and size[0] % 16 == size[1] % 16 == 0)


class Float8LayerOps(LayerOps):
    """The operations of a layer with products in float8: `x.f8` is the buffer x in float8, `x.f8t` in the other layout. The
    caller still has to apply `inlined` and `recomputed_inputs` to them."""

    def forward(self, *, again: bool = False) -> list[Op]:
        """The operations of forward; `again`: those that backward may run again, with conversions that it alone reads."""
        ops = super().forward(again=again)
        kept = set[str]() if self.recomputes else self._read_by_others()
        wanted = set(self._inputs()) if again else kept
        made = {name: self._transposed(name) for name in wanted}
        ops = [each for one in ops for each in (one, *made.pop(_scaled_by(one), ()))]
        return ops + [self._weight_back(name) for name in products(self.context.architecture) if name in self._kept_weights]

    def _projected(self, name: str, reads: str, size: int, widened: Sequence[Op] = ()) -> list[Op]:
        if name not in self._float8:
            return super()._projected(name, reads, size, widened)
        copy, given = self._copy(reads, "f8", name), self.context.linears.gathered_in_float8
        operands = copy if given else (copy, f"{name}.f8")
        measured = [
            op(f"{name}.amax", (), GROUPS * FP32, wide=True, float8=_of_weight(Float8Step.MEASURE, name)),
            _scales(_of_weight(Float8Step.SCALE, name), f"{name}.amax"),
        ]
        of_weight = _of_weight(Float8Step.CONVERT, name, E4M3)
        converted = op(f"{name}.f8", f"{name}.weight.most", self._weight(name), float8=of_weight)
        return [
            *self._scale(reads),
            *([] if given else measured),
            *self._unrounded(reads, self._elements(name, 0)),
            op(
                copy,
                self._converted(reads),
                self._elements(name, 0),
                fuses=(f"{reads}.f8", f"{reads}.fp32"),
                float8=Float8Operand(Float8Step.CONVERT, reads, dtype=E4M3),
            ),
            *([] if given else [converted]),
            op(name, names(operands, f"{reads}.scale", f"{name}.weight.scale"), size),
        ]

    def back(self, name: str, reads: Names, result: str, gradient: str, size: int, elements: int | None = None) -> list[Op]:
        if name not in self._float8:
            return super().back(name, reads, result, gradient, size, elements)
        (read,) = set(reads) - {gradient}
        weight = self._weight(name) * self.context.precision.weight_bytes
        both, outputs = self._converted(gradient), self._elements(name, 1)
        return [
            *self._scale(gradient),
            *self._unrounded(gradient, outputs),
            op(
                f"{gradient}.f8",
                both,
                outputs,
                fuses="d_up.f8" if gradient == "d_gate" else f"{gradient}.fp32",
                float8=Float8Operand(Float8Step.CONVERT, gradient, dtype=E5M2),
            ),
            *([] if name in self._kept_weights else [self._weight_back(name)]),
            op(result, (f"{gradient}.f8", f"{name}.f8t", f"{gradient}.scale", f"{name}.weight.scale"), size),
            op(
                f"{gradient}.f8t",
                both,
                outputs,
                fuses=self._converted_with(gradient),
                float8=Float8Operand(Float8Step.TRANSPOSE, gradient, dtype=E5M2),
            ),
            self._gradient(
                *(name, "weight"),
                (f"{gradient}.f8t", self._copy(read, "f8t", name), f"{gradient}.scale", f"{read}.scale"),
                weight,
            ),
        ]

    def _feed_forward_back(self, incoming: str) -> list[Op]:
        """With an activation of many steps, the gradient of `gate` is a buffer, which is measured, and so are its fp32
        values, which are converted; they are made with all that reads the same."""
        ops = super()._feed_forward_back(incoming)
        if not self._of_many_steps("d_gate"):
            return ops
        size = self.inner // self.context.precision.compute_bytes * FP32
        both = op("d_gate", "", {"d_gate": self.inner, "d_gate.fp32": size}, fuses="d_up.f8", wide=("d_gate.fp32",))
        return [replace(both, reads=one.reads) if one.name == "d_gate" else one for one in ops]

    def _of_many_steps(self, x: str) -> bool:
        """Whether `x` is computed with an activation of many steps, for products in float8."""
        reader = {"product": "down", "d_up": "up", "d_gate": "gate"}.get(x)
        return self.context.architecture.hidden_act in MANY_STEPS and reader in self._float8

    def _converted(self, x: str) -> Names:
        """The buffers that conversions of `x` read."""
        if not self._of_many_steps(x):
            return x, f"{x}.most"
        return ("d_gate.fp32", "d_gate.most") if x == "d_gate" else (f"{x}.fp32",)  # which is scaled already

    def _unrounded(self, x: str, elements: int) -> list[Op]:
        """The scaled fp32 values of `x` before they are rounded, if these are a buffer."""
        if x == "d_gate" or not self._of_many_steps(x):
            return []
        fuses, does = "d_up.f8" if x == "product" else (), Float8Operand(Float8Step.WIDEN, x)
        return [op(f"{x}.fp32", (x, f"{x}.most"), elements * FP32, wide=True, fuses=fuses, float8=does)]

    def lays_out(self, name: str) -> bool:
        """A conversion rearranges what it reads."""
        return name not in self._float8 and super().lays_out(name)

    def _weight_back(self, name: str) -> Op:
        """The weight of `name` in the layout that backward reads."""
        near = name not in FAR or name in self._kept_weights
        fuses = f"{name}.f8" if near and not self.context.linears.gathered_in_float8 else ()
        does = _of_weight(Float8Step.TRANSPOSE, name, E4M3)
        return op(f"{name}.f8t", f"{name}.weight.most", self._weight(name), fuses=fuses, float8=does)

    @cached_property
    def _kept_weights(self) -> frozenset[str]:
        """Products whose weight forward converts for backward, unless the layer is recomputed."""
        rules = self.context.linears
        if self.recomputes or rules.float8_kept == "none":
            return frozenset()
        some = KEPT_OF_GATHERED if rules.gathered_in_float8 else ()
        return self._float8 if rules.float8_kept == "all" else self._float8.intersection(some)

    @cached_property
    def _float8(self) -> frozenset[str]:
        return in_float8(self.context)

    def _elements(self, name: str, of: int) -> int:
        """Elements of what the product `name` reads (0) or makes (1)."""
        return self.context.rows * products(self.context.architecture)[name][of]

    def _inputs(self) -> dict[str, list[str]]:
        """What products in float8 read -> the names of these products."""
        read = {"norm_1": FAR, self.attended: ("o",), "norm_2": self._inside, "product": ("down",)}
        found = {x: [name for name in of if name in self._float8] for x, of in read.items()}
        return {x: of for x, of in found.items() if of}

    def _read_by_others(self) -> set[str]:
        """What products of both kinds read; forward converts it for backward too."""
        kinds = {"norm_1": FAR, "norm_2": self._inside}
        there = products(self.context.architecture).keys()
        return {x for x, of in kinds.items() if 0 < len(self._float8.intersection(of)) < len(there & set(of))}

    def _copy(self, x: str, kind: str, name: str) -> str:
        """The name of the copy of `x` that the product `name` reads. It has one of its own, unless forward keeps the copy
        or a conversion reads more than a few buffers (the norm's weight and the scale beside the stream, its factors)."""
        of = self._inputs()[x]
        stream = {"norm_1": self.given, "norm_2": self.middle}.get(x, ())
        kept = kind == "f8t" and x in self._read_by_others()
        shared = kept or len(stream) + len(self.statistics("1")) + 2 > READS_AGAIN
        return f"{x}.{kind}" if shared or name == of[0] else f"{x}.{kind}_of_{name}"

    def _converted_with(self, x: str) -> Names:
        """The operations in whose kernel `x` is converted for weights' gradients, the most wanted first."""
        of_several = CONVERTED_OF_SEVERAL if self.context.batch > 1 else {}
        found = of_several.get(x) or CONVERTED_WITH.get(x) or (f"{x}.f8",)
        if x not in ("norm_1", "norm_2"):
            return found
        if self._sums_both_ways:
            return (f"{x}.f8",)
        if not self._norms_are_joined:
            return found
        return ("norm_2.f8t" if x == "norm_1" else "norm_2.f8", *found)

    @property
    def _sums_both_ways(self) -> bool:
        """Whether the kernel of the second norm's backward, in which a selective policy computes the first norm's factors
        again, sums over rows as well: with several sequences it takes in no conversion (torch 2.13 `_inductor/scheduler.py`
        MixOrderReduction.can_fuse)."""
        rows, width = self.context.rows, self.context.architecture.hidden_size
        again = self.recomputes and self.context.backward.cached_matmuls and self.context.batch > 1
        return bool(again) and rows >= max(4096, 2 * width) and rows * width >= 5 * 2**20

    @cached_property
    def _norms_are_joined(self) -> bool:
        """Whether the conversions of both norms' results, one of each that read the layer's input, are joined before other
        kernels are considered; a single sequence's that are recomputed are taken in by those kernels."""
        beside = self.sums_again and (self.context.batch > 1 or not self.recomputes)
        return beside and all(len(self._inputs().get(norm, ())) == 1 for norm in ("norm_1", "norm_2"))

    def _transposed(self, x: str) -> list[Op]:
        """The conversions of `x` that the gradients of weights read."""
        of, where = self._inputs()[x], self._converted_with(x)
        copies = dict.fromkeys(self._copy(x, "f8t", name) for name in of)
        if x == self.attended and self._of_many_steps("product"):  # whose kernels lie between the two conversions
            where = ()
        fuses = f"{x}.f8" if x in self._read_by_others() and not self.recomputes else where
        reads, elements = self._converted(x), self._elements(of[0], 0)
        does = Float8Operand(Float8Step.TRANSPOSE, x, dtype=E4M3)
        return [op(copy, reads, elements, fuses=fuses, float8=does) for copy in copies]

    def _scale(self, x: str) -> list[Op]:
        """The absolute maximum of `x`, in parts and whole."""
        rows = self.context.rows if x in ("norm_1", "norm_2", "d_middle") else GROUPS
        return [
            op(
                f"{x}.amax",
                x,
                rows * FP32,
                wide=True,
                fuses=MEASURED_WITH.get(x, x),
                float8=Float8Operand(Float8Step.MEASURE, x),
            ),
            _scales(Float8Operand(Float8Step.SCALE, x), f"{x}.amax"),
        ]


def _of_weight(step: Float8Step, name: str, dtype: str = "") -> Float8Operand:
    """The step of the weight of the product `name`."""
    return Float8Operand(step, f"{name}.weight", True, dtype)


def _scales(operand: Float8Operand, amax: str) -> Op:
    """The absolute maximum of all of an operand, which its conversions read, and its scale, which products read."""
    x = operand.buffer
    made = {f"{x}.most": BF16, f"{x}.scale": FP32}
    return op(f"{x}.scale", amax, made, wide=(f"{x}.scale",), float8=operand)


def _scaled_by(one: Op) -> str:
    """The buffer whose scale the operation computes; "" if it computes none."""
    return one.float8.buffer if one.float8 is not None and one.float8.step is Float8Step.SCALE else ""


def recomputed_inputs(forward: Sequence[Op]) -> set[str]:
    """Names of what backward computes again, whatever the policy: what has no buffer, and the scales of inputs."""
    measured = (one for one in forward if one.float8 is not None and _is_made_again(one.float8))
    return _without_buffer(forward) | {name for one in measured for name in one.writes}


def _is_made_again(operand: Float8Operand) -> bool:
    """Whether what a step makes of its operand is made again in backward. A weight's scale is kept, its conversions are
    not results of this kind."""
    if operand.step is Float8Step.SCALE:
        return not operand.is_weight
    return operand.step in (Float8Step.MEASURE, Float8Step.WIDEN)


def kept_late(forward: Sequence[Op]) -> tuple[list[Op], list[Op]]:
    """The operations of a layer's forward in a network, and the conversions that forward makes for backward alone. As part
    of the traced backward they come at the end of the graph, too far from the others to be one kernel with them."""
    at_once, late = list[Op](), list[Op]()
    for one in forward:
        is_late = one.float8 is not None and one.float8.step is Float8Step.TRANSPOSE
        (late if is_late else at_once).append(replace(one, fuses=()) if is_late else one)
    return at_once, late


def inlined(ops: Sequence[Op]) -> list[Op]:
    """`ops` without those whose results only conversions read, which compute them themselves; each name is made once."""
    without, reads_of, found = _without_buffer(ops), dict[str, Names](), dict[str, Op]()
    for one in ops:
        reads = names(*(reads_of.get(name, (name,)) for name in one.reads))
        if one.name in without:
            reads_of[one.name] = reads
        elif one.name not in found:
            found[one.name] = replace(one, reads=tuple(dict.fromkeys(reads)))
    return list(found.values())


def _without_buffer(ops: Sequence[Op]) -> set[str]:
    """Names of what only conversions to float8 read, computed by itself of a few buffers."""
    few = [one for one in ops if len(one.writes) == 1 and len(one.reads) <= READS_AGAIN]
    readers: dict[str, list[Op]] = {name: [] for one in few if one.elementwise for name in one.writes}
    for one in ops:
        for name in one.reads:
            if name in readers:
                readers[name].append(one)
    return {name for name, of in readers.items() if of and all(_prepares(one, name) for one in of)}


def _prepares(reader: Op, name: str) -> bool:
    """Whether the operation measures or converts the buffer `name`."""
    return reader.float8 is not None and reader.float8.buffer == name
