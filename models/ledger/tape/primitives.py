"""The operations of which transformers' code consists, as PyTorch runs them eagerly: what each allocates and what autograd
saves for it.

`rows` counts the elements of all leading dimensions (micro_batch_size × sequence_length on the rank); a width is the last
dimension. Every rule follows torch's own derivative formula (tools/autograd/derivatives.yaml, torch 2.11-2.13).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import NamedTuple

from peakcast.core.units import FP32
from peakcast.models.ledger.tape.tape import Output, Saved, Tape, Tensor, WeightGradient


class LinearKind(Enum):
    """What a Linear is in its network."""

    PROJECTION = auto()
    """The network's own. It may be of a class of the family's, such as GPT-2's Conv1D, which does not call `F.linear`."""
    LM_HEAD = auto()
    """The lm_head, an nn.Linear in every family."""
    ADAPTER = auto()
    """A matrix of an adapter, an nn.Linear whatever it adapts. Its weight is stored under the name of its module."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearLayer:
    """A Linear, x·Wᵀ (+ b): its weight, and what its surroundings make of its input and its gradients."""

    name: str
    in_features: int
    out_features: int
    element_bytes: int
    """Bytes of an element of the weight, and of the input and output where the operation itself is written down."""
    kind: LinearKind = LinearKind.PROJECTION
    bias: bool = False
    trains: bool = True
    keeps_input: bool = False
    """The input is saved even if the weight does not train."""
    num_matrices: int = 1
    """Number of weights in a row, each used on its share of the rows."""
    adds_to_view: bool = False
    """The input already has a gradient that is a view, to which autograd does not add in place
    (torch/csrc/autograd/input_buffer.cpp can_accumulate_inplace): both gradients and their sum exist together after the
    incoming gradient is freed."""
    incoming_stays: bool = False
    """The incoming gradient is also the residual stream's and is not freed."""
    sums_weight_gradients: bool = False
    """The product is made in parts, each with a gradient of the whole weight, and these are added."""
    num_products: int = 1
    """The number of these parts; autocast narrows the weight for each anew, unless it keeps the copy."""

    @property
    def weight_bytes(self) -> int:
        return self.in_features * self.out_features * self.element_bytes

    def weight_gradient(self, num_bytes: int) -> WeightGradient:
        """The gradient of its weight."""
        stored = self.name if self.kind is LinearKind.ADAPTER else ""
        return WeightGradient(f"{self.name}.weight.grad", num_bytes, parameter=stored)


class LowRankMatrices(NamedTuple):
    """The two matrices of a LoRA adapter: one to its rank, one from it."""

    down: LinearLayer
    up: LinearLayer

    @classmethod
    def of(cls, module: str, in_features: int, out_features: int, rank: int, element_bytes: int) -> LowRankMatrices:
        """Those of the adapter on `module`, under the names that peft gives them."""
        down = LinearLayer(
            name=f"{module}.lora_A",
            in_features=in_features,
            out_features=rank,
            element_bytes=element_bytes,
            kind=LinearKind.ADAPTER,
        )
        return cls(down, replace(down, name=f"{module}.lora_B", in_features=rank, out_features=out_features))


def linear(tape: Tape, x: Tensor, rows: int, layer: LinearLayer) -> Tensor:
    """x·Wᵀ (+ b). Saves its input if the weight trains; the weight is a parameter and exists anyway."""
    name, size = layer.name, layer.element_bytes
    gradients = [layer.weight_gradient(layer.weight_bytes)] * layer.num_matrices
    if layer.bias:
        gradients.append(tape.summed(f"{name}.bias.grad", layer.out_features, rows, layer.out_features * size))
    summed = layer.in_features if layer.incoming_stays else max(layer.in_features - layer.out_features, 0)
    second = layer.weight_bytes if layer.sums_weight_gradients and layer.trains else 0
    return tape.operation(
        name,
        [x],
        Output(rows * layer.out_features * size, kind="matmul"),
        saves=Saved(
            [x] if layer.trains or layer.keeps_input else [], parameter_bytes=layer.weight_bytes if x.requires_grad else 0
        ),
        gradients=[(x, rows * layer.in_features * size)],
        weight_gradients=gradients if layer.trains else [],
        backward_temporary_bytes=second + (summed * rows * size if layer.adds_to_view else 0),
    )


def cast(tape: Tape, x: Tensor, num_bytes: int, name: str) -> Tensor:
    """A dtype conversion: a new tensor of `num_bytes`; its gradient is converted back."""
    return tape.operation(name, [x], num_bytes)


def cast_in_graph(tape: Tape, x: Tensor, gradient_bytes: int, name: str) -> Tensor:
    """A dtype conversion that a recomputation need not make, of which only the backward runs: the graph is that of the
    first forward, which made it. `gradient_bytes`: of the gradient of what was converted."""
    return tape.operation(name, [x], Output.view(x), gradients=[(x, gradient_bytes)])


def add(tape: Tape, x: Tensor, y: Tensor, name: str) -> Tensor:
    """x + y: saves nothing and passes the gradient on; a narrower operand gets a converted gradient of its own."""
    size = max(x.num_bytes, y.num_bytes)
    gradients = [(operand, None if operand.num_bytes == size else operand.num_bytes) for operand in (x, y)]
    return tape.operation(name, [x, y], size, gradients=gradients)


def multiply(tape: Tape, x: Tensor, y: Tensor, name: str, *, recomputed: bool = False) -> Tensor:
    """x · y of one shape: saves each factor that the other's gradient needs. The output is as wide as the wider factor. The
    narrower factor's gradient is computed wide and then converted; factors that checkpointing has `recomputed` are freed by
    then."""
    saves = ([y] if x.requires_grad else []) + ([x] if y.requires_grad else [])
    size = max(x.num_bytes, y.num_bytes)
    narrow = min(x.num_bytes, y.num_bytes)
    converted = 0 if narrow == size else size - narrow * recomputed
    return tape.operation(name, [x, y], size, saves=saves, backward_temporary_bytes=converted)


def matmul(tape: Tape, x: Tensor, y: Tensor, num_bytes: int, name: str, *, forward_temporary_bytes: int = 0) -> Tensor:
    """x @ y of two activations: saves each factor that the other's gradient needs."""
    saves = ([x] if y.requires_grad else []) + ([y] if x.requires_grad else [])
    return tape.operation(name, [x, y], num_bytes, saves=saves, forward_temporary_bytes=forward_temporary_bytes)


def scale(tape: Tape, x: Tensor, name: str, *, in_place: bool = False) -> Tensor:
    """x times a number or a constant tensor that exists elsewhere: saves nothing; the gradient is a new tensor.
    `in_place`: the product overwrites x."""
    return tape.operation(name, [x], Output(x.num_bytes, view_of=x if in_place else None))


def in_place(tape: Tape, x: Tensor, name: str) -> Tensor:
    """x changed in place by something that needs no gradient (a mask); the gradient is passed on."""
    return tape.operation(name, [x], Output.view(x), gradients=[(x, None)])


def copy(tape: Tape, x: Tensor, name: str) -> Tensor:
    """`contiguous()` of a tensor with another layout; the gradient is passed on."""
    return tape.operation(name, [x], x.num_bytes, gradients=[(x, None)])


def unary(tape: Tape, x: Tensor, name: str, *, backward_temporary_bytes: int = 0) -> Tensor:
    """An elementwise function that saves its input (silu, gelu, pow)."""
    return tape.operation(name, [x], x.num_bytes, saves=[x], backward_temporary_bytes=backward_temporary_bytes)


def unary_of_result(tape: Tape, x: Tensor, name: str) -> Tensor:
    """An elementwise function that saves its output (tanh, sigmoid, rsqrt, softmax)."""
    return tape.operation(name, [x], x.num_bytes, saves=Saved(output=True))


def dropout(tape: Tape, x: Tensor, probability: float, elements: int, name: str, gradient_bytes: int = 0) -> Tensor:
    """nn.Dropout on CUDA (native_dropout): saves a 1-byte mask per element; x itself at probability 0. `gradient_bytes`: of
    the gradient of x, if not as many as x has."""
    if probability <= 0:
        return x
    gradient = (x, gradient_bytes or x.num_bytes)
    return tape.operation(name, [x], x.num_bytes, saves=Saved(extra_bytes=[elements]), gradients=[gradient])


@dataclass(frozen=True, slots=True, kw_only=True)
class NormLayer:
    """A norm over the last `width` elements of each of `rows`: its weight, and how wide its numbers are."""

    name: str
    rows: int
    width: int
    element_bytes: int
    """Bytes of an element of the input."""
    weight_bytes: int
    """Bytes of an element of the weight."""
    trains: bool

    @property
    def wide(self) -> int:
        """Bytes of the input in fp32."""
        return self.rows * self.width * FP32

    @property
    def narrow(self) -> int:
        """Bytes of the input as it comes."""
        return self.rows * self.width * self.element_bytes


def python_rms_norm(
    tape: Tape,
    x: Tensor,
    norm: NormLayer,
    *,
    weight_in_fp32: bool = False,
    of_input: bool = False,
    names_product: bool = False,
) -> Tensor:
    """Hugging Face's RMSNorm, line by line (modeling_llama.py): fp32 copy, x·rsqrt(mean(x²) + eps), back, times weight. If
    the weight is wider than the input, the output is as wide as the weight.

    `weight_in_fp32`: the variant of Gemma and OLMo-2, which multiplies by the weight in fp32 before it converts back.
    `names_product`: the variable is reassigned to the product with the weight (Gemma); otherwise it refers to the
    normalised tensor until the end, and another one to the mean. `of_input`: T5's variant, which multiplies the input
    itself, not its fp32 copy, by rsqrt, and reassigns one variable.
    """
    mean, normalized = _by_root_mean_square(tape, x, norm, of_input=of_input)
    variables = [] if names_product else [mean] if of_input else [mean, normalized]
    if weight_in_fp32:
        output = _narrowed(tape, _times_weight(tape, normalized, norm, FP32, norm.element_bytes), norm)
    else:
        compute = max(norm.element_bytes, norm.weight_bytes)
        output = _times_weight(tape, _narrowed(tape, normalized, norm), norm, compute, norm.weight_bytes)
    for variable in variables:
        tape.hold(variable)
    return output


def _by_root_mean_square(tape: Tape, x: Tensor, norm: NormLayer, *, of_input: bool) -> tuple[Tensor, Tensor]:
    """(mean(x²), x·rsqrt(mean(x²) + eps)), both in fp32."""
    name, wide, row = norm.name, norm.wide, norm.rows * FP32
    x32 = _widened(tape, x, norm)
    # pow(2): besides the gradient, backward makes x.pow(1) and twice that
    squared = unary(tape, x32, f"{name}.pow", backward_temporary_bytes=2 * wide)
    mean = tape.operation(f"{name}.mean", [squared], row, gradients=[(squared, wide)])
    rsqrt = unary_of_result(tape, mean, f"{name}.rsqrt")
    # x32 · rsqrt broadcasts: the gradient of rsqrt is computed at full size and then summed
    factor = x if of_input else x32
    normalized = tape.operation(
        f"{name}.normalize",
        [factor, rsqrt],
        wide,
        saves=[factor, rsqrt],
        gradients=[(factor, factor.num_bytes), (rsqrt, row)],
        backward_temporary_bytes=2 * wide if of_input and norm.element_bytes != FP32 else wide,
    )
    return mean, normalized


def _widened(tape: Tape, x: Tensor, norm: NormLayer) -> Tensor:
    """The norm's input in fp32."""
    return x if norm.element_bytes == FP32 else cast(tape, x, norm.wide, f"{norm.name}.to_float32")


def _narrowed(tape: Tape, x: Tensor, norm: NormLayer) -> Tensor:
    """`x`, which is in fp32, in the dtype of the norm's input."""
    return x if norm.element_bytes == FP32 else cast(tape, x, norm.narrow, f"{norm.name}.to_narrow")


def _times_weight(tape: Tape, x: Tensor, norm: NormLayer, compute_bytes: int, weight_bytes: int) -> Tensor:
    """x times the norm's weight, of elements of `weight_bytes`."""
    size, weight = norm.rows * norm.width * compute_bytes, norm.width * weight_bytes
    return tape.operation(
        f"{norm.name}.weight",
        [x],
        size,
        saves=Saved([x] if norm.trains else [], parameter_bytes=weight),
        weight_gradients=[tape.summed(f"{norm.name}.weight.grad", norm.width, norm.rows, weight)] if norm.trains else [],
        backward_temporary_bytes=size if norm.trains else 0,  # grad · x at full size, before it is summed over the rows
    )


def python_layer_norm(tape: Tape, x: Tensor, norm: NormLayer) -> Tensor:
    """Cohere's LayerNorm, line by line (modeling_cohere.py): in fp32, computing x - mean twice, times the weight, back."""
    name, wide, row = norm.name, norm.wide, norm.rows * FP32
    x32 = _widened(tape, x, norm)
    mean = tape.operation(f"{name}.mean", [x32], row, gradients=[(x32, wide)])
    centered = _subtract_mean(tape, x32, mean, f"{name}.center_for_variance")
    squared = unary(tape, centered, f"{name}.pow", backward_temporary_bytes=2 * wide)
    variance = tape.operation(f"{name}.variance", [squared], row, gradients=[(squared, wide)])
    centered = _subtract_mean(tape, x32, mean, f"{name}.center")
    rsqrt = unary_of_result(tape, variance, f"{name}.rsqrt")
    normalized = tape.operation(
        f"{name}.normalize", [centered, rsqrt], wide, saves=[centered, rsqrt], backward_temporary_bytes=wide
    )
    return _narrowed(tape, _times_weight(tape, normalized, norm, FP32, norm.weight_bytes), norm)


def _subtract_mean(tape: Tape, x: Tensor, mean: Tensor, name: str) -> Tensor:
    """x - mean, a number for each row."""
    return tape.operation(name, [x, mean], x.num_bytes, gradients=[(x, None), (mean, mean.num_bytes)])


def fused_rms_norm(tape: Tape, x: Tensor, norm: NormLayer, *, in_place: bool) -> Tensor:
    """Liger's RMSNorm (liger_kernel 0.8 `ops/rms_norm.py`): saves x and an fp32 number per row. If `in_place`, backward
    overwrites the incoming gradient. Its fp32 partial sums, one row per multiprocessor, are left out."""
    weight = norm.width * norm.weight_bytes
    return tape.operation(
        norm.name,
        [x],
        x.num_bytes,
        saves=Saved([x], extra_bytes=[norm.rows * FP32], parameter_bytes=weight),
        gradients=[(x, None if in_place else x.num_bytes)],
        weight_gradients=[WeightGradient(f"{norm.name}.weight.grad", weight)] if norm.trains else [],
    )


def layer_norm(tape: Tape, x: Tensor, norm: NormLayer, *, affine: bool = True, bias: bool = True) -> Tensor:
    """nn.LayerNorm (native_layer_norm): saves its input and, in fp32, the mean and rstd of each row."""
    trained = (["weight", "bias"] if bias else ["weight"]) if affine and norm.trains else []
    return tape.operation(
        norm.name,
        [x],
        norm.narrow,
        saves=Saved([x], extra_bytes=[norm.rows * FP32, norm.rows * FP32]),
        weight_gradients=[WeightGradient(f"{norm.name}.{name}.grad", norm.width * norm.weight_bytes) for name in trained],
    )
