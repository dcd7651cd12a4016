"""What a Hugging Face block depends on, and the operations that all its blocks share: projections with their adapters,
quantised or cast by autocast, and norms.

Source: peft 0.13-0.21 `tuners/lora/{layer,bnb}.py`, bitsandbytes 0.43 `nn/modules.py`, torch autocast_mode.cpp.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from peakcast.architecture import Architecture
from peakcast.loss import LossKind
from peakcast.models.analytical.blocks import primitives as ops
from peakcast.models.analytical.blocks.float8 import float8_linear
from peakcast.models.analytical.blocks.hf_traits import traits
from peakcast.models.analytical.blocks.ring_attention import ALONE, Ring
from peakcast.models.analytical.blocks.tensor_parallel import (
    WHOLE,
    Split,
    TensorParallel,
    enter_columns,
    gather_columns,
    leave_rows,
    split_columns,
)
from peakcast.models.analytical.parameters import default_adapter_targets
from peakcast.models.analytical.tape import Tape, Tensor, WeightGradient
from peakcast.spec import Finetuning

FP32 = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class HFContext:
    """All that a block's tensors depend on. Hashable: equal contexts share one template."""

    architecture: Architecture
    batch: int
    sequence: int
    weight_bytes: int
    """Bytes of one element of the (unquantised) base weights."""
    compute_bytes: int
    """Bytes of one element inside matrix products; narrower than the weights' or inputs' only under autocast."""
    autocast: bool
    float16: bool = False
    """Whether matrix products are in float16, which CUDA's softmax widens by itself (torch `native/SoftMax.cpp`
    half_to_float)."""
    norm_weight_bytes: int
    """Bytes of one element of the norms' weights: wider than `weight_bytes` where a trainer casts norms to fp32."""
    attention: str
    finetuning: Finetuning
    adapter_bytes: int
    logits_upcast: str
    first_layer: bool = False
    """The first layer reads what the embedding gives, in the weights' dtype, where later ones read a wider stream."""
    input_requires_grad: bool = True
    """False for the first layer of a network with adapters and no checkpointing: nothing before an adapter is kept."""
    masked: bool = False
    """Whether the layer's attention gets an explicit mask."""
    mask_of_batch: bool = False
    """Whether every sequence of the batch has a mask of its own (padding, packed sequences)."""
    valid_rows: int = 0
    """Tokens that are no padding, where rows have some: flash attention takes these alone; 0: it takes all."""
    num_sequences: int = 0
    """Sequences that are joined in one row, where they are."""
    routed: bool = False
    """Whether the layer's feed-forward is a mixture of experts."""
    parts: str = ""
    """Of a hybrid's layer: its parts, as `Architecture.layer_types` has them."""
    checkpointed: bool = False
    """Whether a layer's input is held by the checkpoint, which then owns it, instead of by the layer."""
    reentrant: bool = False
    """Of a checkpointed layer: whether its recomputation is a graph of its own, which keeps what it saves."""
    cached_matmuls: int = 0
    """Selective checkpointing keeps attention and one in so many matrix products of a checkpointed layer; 0: nothing."""
    expert_ranks: int = 1
    """Ranks that have other experts."""
    experts: str = "grouped_mm"
    """How experts run: in grouped matrix products ("grouped_mm"), one after the other ("loop"), or torchtitan's module."""
    liger: bool = False
    """Liger's RMSNorm, SwiGLU and rotary kernels instead of the family's own code."""
    compiled: frozenset[str] = frozenset()
    """What torch.compile compiles, of COMPILED in `hf_blocks.py`. Inductor fuses a layer's norms, rotation and silu·up as
    Liger's kernels do, and keeps the same."""
    fused_loss: bool = False
    """Liger's fused linear cross entropy."""
    reduced_bytes: int = 0
    """Bytes of one element of a gradient while FSDP reduces it under mixed precision; 0 without."""
    loss_chunks: int = 0
    """Chunks of the sequence in which torchtitan's loss goes in place of Liger's; 0 without."""
    loss: LossKind = "cross_entropy"
    """Of the others, what the head makes (`preference_heads.py`)."""
    fused_loss_temporary_bytes: int = 0
    """Bytes per element of the lm_head that each chunk of the fused loss makes in passing."""
    linears_keep_input: bool = False
    """Also under a frozen weight: DeepSpeed's stage 3 has a Linear of its own (0.19 `runtime/zero/linear.py`)."""
    splits_backward: bool = False
    in_stages: bool = False
    """Whether a pipeline's schedule computes the loss: the model's forward has then returned."""
    saves_on_cpu: bool = False
    """Whether everything that autograd keeps goes to the host."""
    kernel_temporaries: bool = False
    """Whether to count what CUDA kernels allocate inside themselves (no trace sees it)."""
    float8: bool = False
    """Whether Linears compute in float8; `float8_skips` names those that do not."""
    float8_skips: frozenset[str] = frozenset({"lm_head"})
    group: TensorParallel = WHOLE
    """Of a layer's context, `architecture` is then that of a rank's part."""
    ring: Ring = ALONE
    """The ranks that share each sequence; `sequence` is then this rank's part."""
    neftune: bool = False
    """Whether training adds noise to the token embeddings."""
    cache: str = ""
    """In generation: "dynamic" or "static"; "" without a cache."""
    key_length: int = 0
    """Length of the keys that attention sees; 0 for the sequence itself."""

    @property
    def rows(self) -> int:
        """Tokens of one micro-batch."""
        return self.batch * self.sequence

    @property
    def stream_rows(self) -> int:
        """Of these, the ones that this rank has of the residual stream."""
        return self.rows // self.group.ranks if self.group.sequence else self.rows

    @property
    def input_bytes(self) -> int:
        """Bytes of one layer's input."""
        size = self.weight_bytes if self.first_layer else self.stream_bytes
        return self.stream_rows * self.architecture.hidden_size * size

    @property
    def trainable(self) -> bool:
        """Whether the base weights train."""
        return self.finetuning.method == "full"

    @property
    def stream_bytes(self) -> int:
        """Bytes of one element of the residual stream between layers: what the embedding gives, or wider where an
        fp32 norm makes a quantised Linear answer in fp32 (bitsandbytes `Linear4bit.forward` returns its input's dtype)."""
        if not self.finetuning.quantization:
            return self.weight_bytes
        return FP32 if self.native_norm_in_float32 else self.norm_weight_bytes

    @property
    def lets_go(self) -> bool:
        """Whether what is recomputed for a node's backward is gone as soon as the node has run: non-reentrant checkpointing
        hands it out once (torch `utils/checkpoint.py` _checkpoint_hook)."""
        return self.checkpointed and not self.reentrant

    @property
    def native_norm_in_float32(self) -> bool:
        """Whether norms run in fp32 because torch's own layer_norm is on autocast's fp32 list."""
        return self.autocast and self.architecture.normalization != "rmsnorm"


@dataclass(slots=True)
class BlockBuilder:
    """A tape and its context, with the operations that every block of a model shares."""

    tape: Tape
    context: HFContext
    rows: int = 0
    """Rows of the tensors at hand; 0 for the context's."""
    num_matrices: int = 1
    """Equal matrices that one projection stands for, used one after the other on equal shares of the rows (experts)."""
    variables: list[Tensor] = field(default_factory=list)
    """What the block's own code still holds by name when it ends."""

    def __post_init__(self) -> None:
        self.rows = self.rows or self.context.rows

    def for_rows(self, rows: int, num_matrices: int) -> BlockBuilder:
        """The same builder for tensors of other rows, split over `num_matrices` matrices."""
        return BlockBuilder(self.tape, self.context, rows, num_matrices, self.variables)

    def columns(self, x: Tensor, in_features: int, out_features: int, name: str, bias: bool) -> Tensor:
        """A projection that tensor parallelism splits by its outputs; where its part of the layer computes on whole
        tensors, these are gathered."""
        group, whole = self.context.group, self.rows * out_features * self.context.compute_bytes
        if not group.gathers(name):
            return self.projection(x, in_features, out_features, name, bias, split="columns")
        part = self.projection(x, in_features, out_features // group.ranks, name, bias, split="columns")
        return gather_columns(self.tape, part, whole, name)

    def rows_summed(self, x: Tensor, in_features: int, out_features: int, name: str, bias: bool) -> Tensor:
        """A projection that tensor parallelism splits by its inputs: each rank has a part of the sum."""
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
        """A Linear of the network, with its adapter where `finetuning` gives it one (peft `lora/layer.py`, `bnb.py`), whole
        or `split` over the ranks of a tensor-parallel group."""
        context, tuning = self.context, self.context.finetuning
        adapted = tuning.method != "full" and is_adapter_target(name, tuning, context.architecture)
        if tuning.quantization is not None:
            result = self._quantized_linear(x, in_features, out_features, name)
            if adapted:  # "defensively clone" (peft lora/bnb.py)
                result = self.tape.operation(f"{name}.clone", [result], result.num_bytes, gradients=[(result, None)])
        else:
            trains, size = context.trainable, context.weight_bytes
            result = self._split_linear(x, in_features, out_features, name, bias, trains, size, split)
        return self._adapter(x, result, in_features, out_features, name, split) if adapted else result

    def _split_linear(
        self,
        x: Tensor,
        in_features: int,
        out_features: int,
        name: str,
        bias: bool,
        trainable: bool,
        weight_bytes: int,
        split: Split,
    ) -> Tensor:
        tape, group = self.tape, self.context.group
        x = enter_columns(tape, x, group, name) if split == "columns" else x
        result = self.linear(x, in_features, out_features, name, bias, trainable, weight_bytes)
        return leave_rows(tape, result, group, name) if split == "rows" else result

    def _adapter(
        self, x: Tensor, result: Tensor, in_features: int, out_features: int, name: str, split: Split
    ) -> Tensor:
        """Of a matrix that is split by columns lora_B is split so, of one that is split by rows lora_A (peft 0.21
        `lora/model.py` add_lora_tp_hooks_dtensor)."""
        context, tape, tuning = self.context, self.tape, self.context.finetuning
        rank, wide, rows = tuning.rank or 0, context.adapter_bytes, self.rows
        narrow_bytes, variables = result.num_bytes, [x]
        if x.num_bytes != rows * in_features * wide and not (tuning.quantization and context.autocast):
            x = ops.cast(tape, x, rows * in_features * wide, f"{name}.lora.to_adapter_dtype")  # a copy per target
        variables.append(x)
        x = ops.dropout(tape, x, tuning.dropout, rows * in_features, f"{name}.lora.dropout")
        outer, inner = split if split == "rows" else "", split if split == "columns" else ""
        y = self._split_linear(x, in_features, rank, f"{name}.lora_A", False, True, wide, outer)
        summed = self.for_rows(context.stream_rows, self.num_matrices) if outer else self
        y = summed._split_linear(y, rank, out_features, f"{name}.lora_B", False, True, wide, inner)
        y = ops.scale(tape, y, f"{name}.lora.scaling")
        result = ops.add(tape, result, y, f"{name}.lora.add")
        for variable in variables:  # of the adapter's forward
            tape.hold(variable)
        if result.num_bytes != narrow_bytes:
            result = ops.cast(tape, result, narrow_bytes, f"{name}.lora.to_result_dtype")
        return result

    def _quantized_linear(self, x: Tensor, in_features: int, out_features: int, name: str) -> Tensor:
        """bitsandbytes MatMul4Bit / GPTQ: keeps no input; the whole matrix is dequantised in forward and backward."""
        context, tape = self.context, self.tape
        rows, compute = self.rows, context.compute_bytes
        wide = x.num_bytes
        if wide > rows * in_features * compute:
            x = ops.cast(tape, x, rows * in_features * compute, f"{name}.to_compute_dtype")
        matrix = in_features * out_features * compute
        result = tape.operation(
            name,
            [x],
            rows * out_features * compute,
            forward_temporary_bytes=matrix,
            backward_temporary_bytes=matrix,
            kind="matmul",
        )
        if wide > rows * in_features * compute:
            result = ops.cast(tape, result, rows * out_features * (wide // (rows * in_features)), f"{name}.to_input_dtype")
        return result

    def linear(
        self, x: Tensor, in_features: int, out_features: int, name: str, bias: bool, trainable: bool, weight_bytes: int
    ) -> Tensor:
        context = self.context
        rows, tape = self.rows, self.tape
        if self._computes_in_float8(in_features, out_features, name) and trainable:
            return float8_linear(
                tape, x, rows, in_features, out_features, name, element_bytes=weight_bytes, bias=bias
            )
        compute = context.compute_bytes if context.autocast else weight_bytes
        if weight_bytes <= compute:
            result = ops.linear(
                tape,
                self._input_cast(x, in_features, compute, name),
                rows,
                in_features,
                out_features,
                name,
                element_bytes=compute,
                bias=bias,
                trainable=trainable,
                keeps_input=context.linears_keep_input,
                num_matrices=self.num_matrices,
            )
            tape.hold(x)  # the module's argument, until it returns
            return result
        numel = in_features * out_features * self.num_matrices
        # a narrow copy of a wide weight, which autocast caches; arguments are cast from right to left, so in backward the
        # input's gradient is widened first
        weight = tape.operation(
            f"{name}.weight_cast",
            [],
            numel * compute,
            weight_gradients=[WeightGradient(f"{name}.weight.grad", numel * weight_bytes)] if trainable else [],
        )
        transposed = traits(context.architecture).linears_transpose_weight and name != "lm_head"
        if trainable and not transposed:  # else nobody keeps it beyond the product, where no graph does
            self.variables.append(weight)
        narrow = self._input_cast(x, in_features, compute, name)
        result = tape.operation(
            name,
            [narrow, weight],
            rows * out_features * compute,
            saves=([narrow] if trainable else []) + [weight],
            weight_gradients=[WeightGradient(f"{name}.bias.grad", out_features * weight_bytes)]
            if bias and trainable
            else [],
            kind="matmul",
        )
        tape.hold(x)  # the module's argument, until it returns
        return result

    def _input_cast(self, x: Tensor, in_features: int, element_bytes: int, name: str) -> Tensor:
        """Each Linear's own narrow copy of a wide input, under autocast."""
        size = self.rows * in_features * element_bytes
        return ops.cast(self.tape, x, size, f"{name}.input_cast") if x.num_bytes > size else x

    def _computes_in_float8(self, in_features: int, out_features: int, name: str) -> bool:
        """accelerate 1.15 utils/ao.py filter_linear_layers: an nn.Linear whose sides are multiples of 16."""
        context = self.context
        fits = in_features % 16 == out_features % 16 == 0 and self.num_matrices == 1
        return context.float8 and fits and name not in context.float8_skips

    def norm(self, x: Tensor, width: int, name: str, rows: int | None = None, *, fused: bool = True) -> Tensor:
        """The architecture's norm over the last `width` elements; `fused`: by Liger's kernel, where the job has it."""
        output = self._norm(x, width, name, self.rows if rows is None else rows, fused=fused)
        self.tape.hold(x)  # the module's argument, until it returns
        return output

    def _norm(self, x: Tensor, width: int, name: str, rows: int, *, fused: bool) -> Tensor:
        context, kind = self.context, self.context.architecture.normalization
        family = traits(context.architecture)
        narrow = x.num_bytes
        if kind == "rmsnorm" and context.liger and fused:
            return ops.fused_rms_norm(
                self.tape,
                x,
                rows,
                width,
                name,
                weight_bytes=context.norm_weight_bytes,
                trainable=context.trainable,
                in_place=context.architecture.norm_placement == "pre",
            )
        if kind == "rmsnorm":
            return ops.python_rms_norm(
                self.tape,
                x,
                rows,
                width,
                name,
                element_bytes=x.num_bytes // (rows * width),
                weight_bytes=context.norm_weight_bytes,
                trainable=context.trainable,
                weight_in_fp32=family.norm_weight_in_float32,
                of_input=family.norm_of_input,
                names_product=family.norm_names_product,
            )
        if family.layer_norm_in_python:
            return ops.python_layer_norm(
                self.tape, x, rows, width, name, element_bytes=narrow // (rows * width), trainable=context.trainable
            )
        compute = rows * width * context.compute_bytes
        if family.norm_without_autocast and context.autocast:
            x = ops.cast(self.tape, x, compute, f"{name}.to_compute_dtype") if x.num_bytes > compute else x
        elif (self.context.native_norm_in_float32 or kind == "nonparametric") and x.num_bytes < rows * width * FP32:
            x = ops.cast(self.tape, x, rows * width * FP32, f"{name}.to_float32")
        output = ops.layer_norm(
            self.tape,
            x,
            rows,
            width,
            name,
            element_bytes=x.num_bytes // (rows * width),
            trainable=context.trainable,
            affine=kind != "nonparametric",
            bias=kind == "layernorm",
        )
        if kind == "nonparametric":  # OLMo: F.layer_norm in fp32, converted back
            output = ops.cast(self.tape, output, narrow, f"{name}.to_narrow")
        return output

    def dropout(self, x: Tensor, probability: float, elements: int, name: str) -> Tensor:
        return ops.dropout(self.tape, x, probability, elements, name)


def is_adapter_target(name: str, tuning: Finetuning, architecture: Architecture) -> bool:
    """Whether the projection `name` ("self_attn.q_proj") gets an adapter."""
    leaf = name.rsplit(".", 1)[-1]
    if tuning.targets:
        return leaf in tuning.targets or ("all-linear" in tuning.targets and leaf != "lm_head")
    return leaf in default_adapter_targets(architecture)


def autocast_copy_bytes(context: HFContext) -> int:
    """Bytes per element of the narrow copies of wide trained matrices that autocast caches in a forward, until its
    context exits: also where no graph would keep them (torch/csrc/autograd autocast_mode.cpp, `cached_cast`)."""
    wide = context.adapter_bytes if context.finetuning.method != "full" else context.weight_bytes
    return context.compute_bytes if context.autocast and wide > context.compute_bytes else 0
