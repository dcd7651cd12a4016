"""Operations that all Hugging Face blocks share: projections with their adapters, quantised or cast by autocast, and norms.

Source: peft 0.13-0.21 `tuners/lora/{layer,bnb}.py`, bitsandbytes 0.43 `nn/modules.py`, torch autocast_mode.cpp.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, field, replace

from peakcast.core.units import FP32
from peakcast.jobs.architecture import Architecture
from peakcast.jobs.spec import Finetuning
from peakcast.models.ledger.huggingface.blocks.context import ALL, HFContext
from peakcast.models.ledger.huggingface.blocks.dora import add_dora
from peakcast.models.ledger.huggingface.blocks.float8 import float8_linear
from peakcast.models.ledger.huggingface.blocks.quantized_linear import ProductSizes, quantized_linear
from peakcast.models.ledger.huggingface.blocks.tensor_parallel import (
    Split,
    enter_columns,
    gather_columns,
    leave_rows,
    split_columns,
)
from peakcast.models.ledger.huggingface.blocks.traits import multiplies_itself
from peakcast.models.ledger.parameters.adapter_methods import METHODS, ON_NETWORK, matrix_of
from peakcast.models.ledger.tape import primitives as ops
from peakcast.models.ledger.tape.marks import Mark
from peakcast.models.ledger.tape.primitives import LinearKind, LinearLayer, LowRankMatrices
from peakcast.models.ledger.tape.tape import Output, Saved, Tape, Tensor, WeightGradient
from peakcast.networks.adapter_targets import default_adapter_targets
from peakcast.networks.families import family_of

NOT_ADAPTED = ("lm_head", "mlp.gate")
"""What "all-linear" leaves out: the head, and a router, which is not an nn.Linear in transformers 5."""
LORA_CHAIN = ("lora", "qlora", "lora_fa")
"""Methods whose forward is written out operation by operation."""


@dataclass(slots=True)
class BlockBuilder:
    """A tape and its context, with the operations that every block of a model shares."""

    tape: Tape
    context: HFContext
    rows: int = 0
    """Number of rows of the current tensors; 0 for the context's."""
    num_matrices: int = 1
    """Number of equal matrices that one projection consists of, each used on an equal share of the rows (experts)."""
    variables: list[Tensor] = field(default_factory=list)
    """Tensors to which variables of the block's own code still refer when it ends."""
    attention_variables: list[Tensor] = field(default_factory=list)
    """Tensors to which variables of attention's code refer until that has also projected its output (MPT) and added it to
    the residual stream (BLOOM)."""
    attention_weights: Tensor | None = None
    """The attention weights that attention returns besides its output; None if it returns none."""

    def __post_init__(self) -> None:
        self.rows = self.rows or self.context.rows

    def for_rows(self, rows: int, num_matrices: int) -> BlockBuilder:
        """This builder with another number of rows, divided over `num_matrices` matrices."""
        return BlockBuilder(self.tape, self.context, rows, num_matrices, self.variables)

    def columns(self, x: Tensor, in_features: int, out_features: int, name: str, bias: bool) -> Tensor:
        """A projection that tensor parallelism splits by its outputs. If this part of the layer computes on whole tensors,
        the outputs are gathered."""
        group, whole = self.context.group, self.rows * out_features * self.context.precision.compute_bytes
        if not group.gathers(name):
            return self.projection(x, in_features, out_features, name, bias, split="columns")
        part = self.projection(x, in_features, out_features // group.ranks, name, bias, split="columns")
        return gather_columns(self.tape, part, whole, name)

    def rows_summed(self, x: Tensor, in_features: int, out_features: int, name: str, bias: bool) -> Tensor:
        """A projection that tensor parallelism splits by its inputs: each rank computes a term of the sum."""
        group, argument = self.context.group, x
        if group.gathers(name):
            x, in_features = split_columns(self.tape, x, group, name), in_features // group.ranks
        result = self.projection(x, in_features, out_features, name, bias, split="rows")
        if group.ranks > 1:
            self.tape.hold(argument)
        return result

    def projection(
        self, x: Tensor, in_features: int, out_features: int, name: str, bias: bool, split: Split = ""
    ) -> Tensor:
        """A Linear of the network, with an adapter if `finetuning` gives it one (peft `lora/layer.py`, `bnb.py`); whole, or
        `split` over the ranks of a tensor-parallel group."""
        context, tuning = self.context, self.context.finetuning
        adapted = tuning.method != "full" and is_adapter_target(name, tuning, context.architecture)
        if tuning.quantization is not None and name != context.linears.left_whole:
            result = self.quantized_linear(x, in_features, out_features, name)
            if adapted:  # "defensively clone" (peft lora/bnb.py)
                result = self.tape.operation(f"{name}.clone", [result], result.num_bytes, gradients=[(result, None)])
        else:
            # if equally wide, the adapter's product gives x a gradient first, a view of a 2-d tensor (`ViewBackward`); not
            # so stage 3's own Linear, which multiplies three (DeepSpeed 0.19.8 zero/linear.py)
            alike = x.num_bytes == self.rows * in_features * context.adapters.input_bytes and not context.linears.keep_input
            cast = context.precision.autocast and context.adapters.weight_bytes > context.precision.compute_bytes
            adds = adapted and alike and not (tuning.dropout or cast) and x.requires_grad
            layer = LinearLayer(
                name=name,
                in_features=in_features,
                out_features=out_features,
                element_bytes=context.precision.weight_bytes,
                bias=bias,
                trains=context.weights_get_gradients,
                adds_to_view=adds,
            )
            result = self._split_linear(x, layer, split)
        if not adapted:
            return result
        if tuning.method in LORA_CHAIN:
            return self._adapter(x, result, in_features, out_features, name, split)
        if tuning.method == "dora" and not tuning.dropout:
            return self._dora(x, result, in_features, out_features, name, bias=bias)
        return self._other_adapter(x, result, in_features, out_features, name)

    def _split_linear(self, x: Tensor, layer: LinearLayer, split: Split) -> Tensor:
        """A Linear with the collectives of its tensor-parallel `split`."""
        tape, group = self.tape, self.context.group
        x = enter_columns(tape, x, group, layer.name) if split == "columns" else x
        # the incoming gradient is the residual stream's own unless an operation in between makes another tensor
        family, placed = family_of(self.context.architecture), self.context.architecture.norm_placement
        stream = split == "rows" and placed == "pre" and not (family.layer.scales_outputs or group.sequence)
        result = self.linear(x, replace(layer, incoming_stays=True) if stream else layer)
        return leave_rows(tape, result, group, layer.name) if split == "rows" else result

    def _adapter(self, x: Tensor, result: Tensor, in_features: int, out_features: int, name: str, split: Split) -> Tensor:
        """Add a LoRA adapter's output to `result`. If the matrix is split by columns so is lora_B; if by rows, so is lora_A
        (peft 0.21 `lora/model.py` add_lora_tp_hooks_dtensor)."""
        context, tape, tuning = self.context, self.tape, self.context.finetuning
        rank, wide, rows = tuning.rank or 0, context.adapters.weight_bytes, self.rows
        narrow_bytes, variables, argument = result.num_bytes, [x], rows * in_features * context.adapters.input_bytes
        casts = x.num_bytes != argument and not (tuning.quantization and context.precision.autocast)
        if casts and context.adapters.narrow_again in (name, ALL):
            x = ops.cast_in_graph(tape, x, x.num_bytes, f"{name}.lora.to_adapter_dtype")
            x = ops.dropout(tape, x, tuning.dropout, rows * in_features, f"{name}.lora.dropout", argument)
            x = ops.cast_in_graph(tape, x, argument, f"{name}.lora_A.input_cast")
        else:
            # each adapted module makes its own copy
            x = ops.cast(tape, x, argument, f"{name}.lora.to_adapter_dtype") if casts else x
            variables.append(x)
            x = ops.dropout(tape, x, tuning.dropout, rows * in_features, f"{name}.lora.dropout")
        outer, inner = split if split == "rows" else "", split if split == "columns" else ""
        down, up = LowRankMatrices.of(name, in_features, out_features, rank, wide)
        y = self._split_linear(x, replace(down, trains=tuning.method != "lora_fa"), outer)
        summed = self.for_rows(context.stream_rows, self.num_matrices) if outer else self
        y = summed._split_linear(y, up, inner)
        y = ops.scale(tape, y, f"{name}.lora.scaling")
        of_bitsandbytes = tuning.quantization in ("nf4", "int8") and name != context.linears.left_whole
        if of_bitsandbytes and y.num_bytes != narrow_bytes:  # peft 0.21 lora/bnb.py casts first, gptq.py last
            y = ops.cast(tape, y, narrow_bytes, f"{name}.lora.to_result_dtype")
        result = ops.add(tape, result, y, f"{name}.lora.add")
        for variable in variables:  # variables of the adapter's forward refer to them
            tape.hold(variable)
        if result.num_bytes != narrow_bytes:
            result = ops.cast(tape, result, narrow_bytes, f"{name}.lora.to_result_dtype")
        return result

    def _dora(
        self, x: Tensor, result: Tensor, in_features: int, out_features: int, name: str, *, bias: bool
    ) -> Tensor:
        """Add the output of DoRA, whose input is cast to the dtype of its matrices (peft `lora/layer.py`)."""
        rank, wide, argument = self.context.finetuning.rank or 0, self.context.adapters.weight_bytes, x
        if x.num_bytes != self.rows * in_features * wide:
            x = ops.cast(self.tape, x, self.rows * in_features * wide, f"{name}.lora.to_adapter_dtype")
        matrices = LowRankMatrices.of(name, in_features, out_features, rank, wide)
        result = add_dora(self, x, result, name, matrices, bias=bias)
        for variable in (argument, x):
            self.tape.hold(variable)
        return result

    def _other_adapter(self, x: Tensor, result: Tensor, in_features: int, out_features: int, name: str) -> Tensor:
        """An adapter that is not LoRA, as one operation. What it saves is exact; its temporaries are assumed to be as
        large as its input and output in the adapter's dtype."""
        context, tuning, rows = self.context, self.context.finetuning, self.rows
        method, matrix = METHODS[tuning.method], matrix_of(tuning, name, (out_features, in_features))
        kept, wide, narrow = method.keeps(matrix, rows), context.adapters.weight_bytes, context.precision.compute_bytes
        made = [one for one in method.on_matrix(matrix) if one.trains]
        return self.tape.operation(
            f"{name}.adapter",
            [x, result],
            result.num_bytes,
            saves=Saved(
                [x] * kept.inputs + [result] * kept.result,
                extra_bytes=[*(size * wide for size in kept.wide), *(size * narrow for size in kept.narrow)],
            ),
            gradients=[(x, x.num_bytes), (result, None)],
            weight_gradients=[WeightGradient(f"{name}.{one.name}.grad", one.numel * wide) for one in made],
            forward_temporary_bytes=rows * (in_features + out_features) * wide,
            backward_temporary_bytes=rows * (in_features + out_features) * wide,
        )

    def quantized_linear(
        self, x: Tensor, in_features: int, out_features: int, name: str, *, in_chunks: bool = False
    ) -> Tensor:
        """A product with a frozen quantised matrix."""
        sizes = ProductSizes(self.rows, in_features, out_features)
        return quantized_linear(self.tape, self.context, x, sizes, name, in_chunks=in_chunks)

    def linear(self, x: Tensor, layer: LinearLayer) -> Tensor:
        """A Linear over `rows`, in the dtype that autocast or the weight decides."""
        context = self.context
        plain = layer.kind is not LinearKind.PROJECTION
        calls_linear = plain or not multiplies_itself(context.architecture)
        if self._computes_in_float8(layer) and layer.trains:
            return float8_linear(self.tape, x, self.rows, layer)
        compute = context.precision.compute_bytes if context.precision.autocast else layer.element_bytes
        if layer.element_bytes <= compute:
            kept, narrow = context.linears.keep_input and calls_linear, self._input_cast(x, layer, compute)
            if (layer.element_bytes, layer.keeps_input, layer.num_matrices) != (compute, kept, self.num_matrices):
                layer = replace(layer, element_bytes=compute, keeps_input=kept, num_matrices=self.num_matrices)
            result = ops.linear(self.tape, narrow, self.rows, layer)
        else:
            transposed = family_of(context.architecture).linear.transposes_weight and not plain
            cached = layer.trains and not transposed and not context.group.makes_weights
            result = self._narrowed_linear(x, layer, compute, cached=cached)
        self.tape.hold(x)  # the module's argument, until it returns
        return result

    def _narrowed_linear(self, x: Tensor, layer: LinearLayer, compute: int, *, cached: bool) -> Tensor:
        """A Linear whose weight is wider than the dtype in which autocast computes: it uses a narrow copy of the weight.
        Autocast keeps the copy until forward ends if it is `cached`; otherwise it is freed after the product, unless a
        graph saves it. Arguments are cast from right to left, so in backward the input's gradient is widened first."""
        tape, name, rows = self.tape, layer.name, self.rows
        numel = layer.in_features * layer.out_features * self.num_matrices
        gradients = [layer.weight_gradient(numel * layer.element_bytes)] if layer.trains else []
        with tape.marked(Mark.CACHED_CAST) if cached else nullcontext():
            copied, copies = (f"{name}.weight_cast", 1) if cached else (f"{name}.weight_copy", layer.num_products)
            weight = tape.operation(copied, [], copies * numel * compute, weight_gradients=gradients)
        if cached:
            self.variables.append(weight)
        narrow = self._input_cast(x, layer, compute)
        bias_bytes, of_bias = layer.out_features * layer.element_bytes, []
        if layer.bias and layer.trains:
            of_bias = [tape.summed(f"{name}.bias.grad", layer.out_features, rows, bias_bytes)]
        return tape.operation(
            name,
            [narrow, weight],
            Output(rows * layer.out_features * compute, kind="matmul"),
            saves=([narrow] if layer.trains else []) + ([weight] if narrow.requires_grad else []),
            weight_gradients=of_bias,
        )

    def _input_cast(self, x: Tensor, layer: LinearLayer, element_bytes: int) -> Tensor:
        """Under autocast, the narrow copy that each Linear makes of a wide input; else x itself."""
        size = self.rows * layer.in_features * element_bytes
        return ops.cast(self.tape, x, size, f"{layer.name}.input_cast") if x.num_bytes > size else x

    def _computes_in_float8(self, layer: LinearLayer) -> bool:
        """Whether a Linear computes in float8. accelerate 1.15 utils/ao.py filter_linear_layers: an nn.Linear whose sizes
        are multiples of 16."""
        context = self.context
        fits = layer.in_features % 16 == layer.out_features % 16 == 0 and self.num_matrices == 1
        eager = context.linears.float8 and "layers" not in context.compiled
        return eager and fits and layer.name not in context.linears.float8_skips

    def norm(self, x: Tensor, width: int, name: str, rows: int | None = None, *, fused: bool = True) -> Tensor:
        """The architecture's norm over the last `width` elements. `fused`: by a fused kernel if the job has one."""
        with self.tape.marked(Mark.NORM):
            output = self._norm(x, width, name, self.rows if rows is None else rows, fused=fused)
        self.tape.hold(x)  # the module's argument, until it returns
        return output

    def _norm(self, x: Tensor, width: int, name: str, rows: int, *, fused: bool) -> Tensor:
        """`norm`, without its argument's lifetime."""
        context = self.context
        if context.architecture.normalization == "rmsnorm":
            return self._rms_norm(x, width, name, rows, fused=fused and context.kernels.norm)
        if family_of(context.architecture).norm.written_in_python:
            return ops.python_layer_norm(self.tape, x, self._norm_layer(x, width, name, rows))
        return self._layer_norm(x, width, name, rows)

    def _norm_layer(self, x: Tensor, width: int, name: str, rows: int) -> ops.NormLayer:
        """A norm of `x` whose weight is as wide as `x`."""
        element = x.num_bytes // (rows * width)
        trains = self.context.norms_train
        return ops.NormLayer(
            name=name, rows=rows, width=width, element_bytes=element, weight_bytes=element, trains=trains
        )

    def _rms_norm(self, x: Tensor, width: int, name: str, rows: int, *, fused: bool) -> Tensor:
        """RMSNorm, in one kernel if `fused`, else as the family's Python code computes it."""
        context, family = self.context, family_of(self.context.architecture)
        norm = replace(self._norm_layer(x, width, name, rows), weight_bytes=context.precision.norm_weight_bytes)
        if fused:
            return ops.fused_rms_norm(self.tape, x, norm, in_place=context.architecture.norm_placement == "pre")
        return ops.python_rms_norm(
            self.tape,
            x,
            norm,
            weight_in_fp32=family.norm.weight_in_float32 or context.kernels.wide_norm,
            of_input=family.norm.multiplies_input,
            names_product=family.norm.names_product,
        )

    def _layer_norm(self, x: Tensor, width: int, name: str, rows: int) -> Tensor:
        """torch's LayerNorm, whose input is converted if autocast or the family's code does so."""
        context, kind, narrow = self.context, self.context.architecture.normalization, x.num_bytes
        compute = rows * width * context.precision.compute_bytes
        if family_of(context.architecture).norm.without_autocast and context.precision.autocast:
            x = ops.cast(self.tape, x, compute, f"{name}.to_compute_dtype") if x.num_bytes > compute else x
        elif (context.native_norm_in_float32 or kind == "nonparametric") and x.num_bytes < rows * width * FP32:
            x = ops.cast(self.tape, x, rows * width * FP32, f"{name}.to_float32")
        norm = self._norm_layer(x, width, name, rows)
        output = ops.layer_norm(self.tape, x, norm, affine=kind != "nonparametric", bias=kind == "layernorm")
        if output.num_bytes != narrow and kind == "nonparametric":  # OLMo: F.layer_norm in fp32, converted back
            output = ops.cast(self.tape, output, narrow, f"{name}.to_narrow")
        return output

    def dropout(self, x: Tensor, probability: float, elements: int, name: str) -> Tensor:
        """Dropout of `x`."""
        return ops.dropout(self.tape, x, probability, elements, name)


def is_adapter_target(name: str, tuning: Finetuning, architecture: Architecture) -> bool:
    """Whether the projection `name` ("self_attn.q_proj") gets an adapter."""
    leaf = name.rsplit(".", 1)[-1]
    if tuning.method in ON_NETWORK:
        return False
    if names_experts_alone(leaf, tuning, architecture):
        return False
    if tuning.targets:
        return leaf in tuning.targets or ("all-linear" in tuning.targets and name not in NOT_ADAPTED)
    return leaf in default_adapter_targets(architecture, tuning.method)


def names_experts_alone(leaf: str, tuning: Finetuning, architecture: Architecture) -> bool:
    """Whether peft takes `leaf`, the name of a projection, for the stacked experts, and not for the Linears of that name in
    dense layers and shared experts (peft 0.21 `utils/transformers_weight_conversion.py` _convert_peft_config_moe)."""
    adapts = architecture.moe is not None and tuning.method in ("lora", "qlora")
    return adapts and leaf in family_of(architecture).libraries.peft_adapts_experts
