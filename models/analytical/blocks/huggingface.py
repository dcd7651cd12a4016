"""Decoder layers, embedding and head as Hugging Face transformers runs them, written on the tape.

One mechanism for all dense families: what differs between Llama, GPT-2, GPT-NeoX, Gemma, ... are fields of `Architecture`.
Read line by line from transformers 4.48-5.17 `modeling_*.py`; the saved set equals the table in where-memory-goes F1.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from peakcast.architecture import Architecture
from peakcast.models.analytical.blocks import primitives as ops
from peakcast.models.analytical.blocks.routed import routed_feed_forward
from peakcast.models.analytical.tape import Tape, Template, Tensor, WeightGradient
from peakcast.spec import Finetuning
from peakcast.timeline import Category
from peakcast.units import round_up

FP32 = 4
INT64 = 8


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
    norm_weight_bytes: int
    """Bytes of one element of the norms' weights: wider than `weight_bytes` where a trainer casts norms to fp32."""
    attention: str
    finetuning: Finetuning
    adapter_bytes: int
    logits_upcast: str
    first_layer: bool = False
    """The first layer reads what the embedding gives, in the weights' dtype, where later ones read a wider stream."""
    routed: bool = False
    """Whether the layer's feed-forward is a mixture of experts."""
    checkpointed: bool = False
    """Whether a layer's input is held by the checkpoint, which then owns it, instead of by the layer."""
    kernel_temporaries: bool = False
    """Whether to count what CUDA kernels allocate inside themselves (no trace sees it)."""

    @property
    def rows(self) -> int:
        """Tokens of one micro-batch."""
        return self.batch * self.sequence

    @property
    def input_bytes(self) -> int:
        """Bytes of one layer's input."""
        size = self.weight_bytes if self.first_layer else self.stream_bytes
        return self.rows * self.architecture.hidden_size * size

    @property
    def trainable(self) -> bool:
        """Whether the base weights train."""
        return self.finetuning.method == "full"

    @property
    def stream_bytes(self) -> int:
        """Bytes of one element of the residual stream between layers: what the embedding gives, or wider where an
        fp32 norm makes a quantised Linear answer in fp32 (bitsandbytes `Linear4bit.forward` returns its input's dtype)."""
        return self.norm_weight_bytes if self.finetuning.quantization else self.weight_bytes


@dataclass(slots=True)
class BlockBuilder:
    """A tape and its context, with the operations that every block of a model shares."""

    tape: Tape
    context: HFContext
    rows: int = 0
    """Rows of the tensors at hand; 0 for the context's."""
    num_matrices: int = 1
    """Equal matrices that one projection stands for, used one after the other on equal shares of the rows (experts)."""

    def __post_init__(self) -> None:
        self.rows = self.rows or self.context.rows

    def for_rows(self, rows: int, num_matrices: int) -> BlockBuilder:
        """The same builder for tensors of other rows, split over `num_matrices` matrices."""
        return BlockBuilder(self.tape, self.context, rows, num_matrices)

    def projection(self, x: Tensor, in_features: int, out_features: int, name: str, bias: bool) -> Tensor:
        """A Linear of the network, with its adapter where `finetuning` gives it one (peft `lora/layer.py`, `bnb.py`)."""
        context, tuning = self.context, self.context.finetuning
        adapted = tuning.method != "full" and is_adapter_target(name, tuning, context.architecture)
        if tuning.quantization is not None:
            result = self._quantized_linear(x, in_features, out_features, name)
            if adapted:  # "defensively clone" (peft lora/bnb.py)
                result = self.tape.operation(f"{name}.clone", [result], result.num_bytes, gradients=[(result, None)])
        else:
            result = self._linear(x, in_features, out_features, name, bias, context.trainable, context.weight_bytes)
        return self._adapter(x, result, in_features, out_features, name) if adapted else result

    def _adapter(self, x: Tensor, result: Tensor, in_features: int, out_features: int, name: str) -> Tensor:
        context, tape, tuning = self.context, self.tape, self.context.finetuning
        rank, wide, rows = tuning.rank or 0, context.adapter_bytes, self.rows
        narrow_bytes = result.num_bytes
        if x.num_bytes != rows * in_features * wide and not (tuning.quantization and context.autocast):
            x = ops.cast(tape, x, rows * in_features * wide, f"{name}.lora.to_adapter_dtype")  # a copy per target
        x = ops.dropout(tape, x, tuning.dropout, rows * in_features, f"{name}.lora.dropout")
        y = self._linear(x, in_features, rank, f"{name}.lora_A", False, True, wide)
        y = self._linear(y, rank, out_features, f"{name}.lora_B", False, True, wide)
        y = ops.scale(tape, y, f"{name}.lora.scaling")
        result = ops.add(tape, result, y, f"{name}.lora.add")
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
        )
        if wide > rows * in_features * compute:
            result = ops.cast(tape, result, rows * out_features * (wide // (rows * in_features)), f"{name}.to_input_dtype")
        return result

    def _linear(
        self, x: Tensor, in_features: int, out_features: int, name: str, bias: bool, trainable: bool, weight_bytes: int
    ) -> Tensor:
        context = self.context
        rows, tape = self.rows, self.tape
        compute = context.compute_bytes if context.autocast else weight_bytes
        if x.num_bytes > rows * in_features * compute:  # autocast: each Linear makes its own narrow copy of a wide input
            x = ops.cast(tape, x, rows * in_features * compute, f"{name}.input_cast")
        if weight_bytes <= compute:
            return ops.linear(
                tape,
                x,
                rows,
                in_features,
                out_features,
                name,
                element_bytes=compute,
                bias=bias,
                trainable=trainable,
                num_matrices=self.num_matrices,
            )
        numel = in_features * out_features * self.num_matrices
        weight = tape.operation(  # and a narrow copy of a wide weight, which autocast caches
            f"{name}.weight_cast",
            [],
            numel * compute,
            weight_gradients=[WeightGradient(f"{name}.weight.grad", numel * weight_bytes)] if trainable else [],
        )
        return tape.operation(
            name,
            [x, weight],
            rows * out_features * compute,
            saves=([x] if trainable else []) + [weight],
            weight_gradients=[WeightGradient(f"{name}.bias.grad", out_features * weight_bytes)]
            if bias and trainable
            else [],
        )

    def norm(self, x: Tensor, width: int, name: str, rows: int | None = None) -> Tensor:
        """The architecture's norm over the last `width` elements."""
        context, kind = self.context, self.context.architecture.normalization
        rows = self.rows if rows is None else rows
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
                weight_offset_in_fp32=context.architecture.model_type.startswith("gemma"),
            )
        return ops.layer_norm(
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

    def dropout(self, x: Tensor, probability: float, elements: int, name: str) -> Tensor:
        return ops.dropout(self.tape, x, probability, elements, name)


def is_adapter_target(name: str, tuning: Finetuning, architecture: Architecture) -> bool:
    """Whether the projection `name` ("self_attn.q_proj") gets an adapter; peft's default is q and v (or the fused qkv)."""
    leaf = name.rsplit(".", 1)[-1]
    if tuning.targets:
        return leaf in tuning.targets or ("all-linear" in tuning.targets and leaf != "lm_head")
    return leaf in (("c_attn", "query_key_value", "qkv_proj") if architecture.fused_qkv else ("q_proj", "v_proj"))


# -- decoder layer ----------------------------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def decoder_layer(context: HFContext) -> Template:
    """One dense decoder layer: [micro_batch_size, sequence_length, hidden_size] in and out."""
    architecture = context.architecture
    tape = Tape()
    build = BlockBuilder(tape, context)
    hidden = tape.input(context.input_bytes, owned=not context.checkpointed)
    if architecture.parallel_block:
        output = _parallel_block(build, hidden)
    else:
        output = _sublayer(build, hidden, _attention, "input_layernorm", "post_attention_layernorm")
        output = _sublayer(build, output, _feed_forward, "pre_feedforward_layernorm", "post_feedforward_layernorm")
    tape.hold(hidden)  # the model's loop variable keeps the layer's input until the layer returns
    return tape.finish(output)


def autocast_cache_bytes(context: HFContext, trained_numel: int) -> int:
    """Bytes of the narrow weight copies that autocast caches in one forward: also under no_grad, where no graph would
    keep them, until the outermost context exits (torch/csrc/autograd autocast_mode.cpp, `cached_cast`)."""
    wide = context.adapter_bytes if context.finetuning.method != "full" else context.weight_bytes
    return trained_numel * context.compute_bytes if context.autocast and wide > context.compute_bytes else 0


def _sublayer(build: BlockBuilder, x: Tensor, body: object, norm_before: str, norm_after: str) -> Tensor:
    architecture, width = build.context.architecture, build.context.architecture.hidden_size
    placement = architecture.norm_placement
    y = build.norm(x, width, norm_before) if placement != "post" else x
    y = body(build, y)  # type: ignore[operator]
    if placement != "pre":
        y = build.norm(y, width, norm_after)
    return ops.add(build.tape, x, y, "residual_add")


def _parallel_block(build: BlockBuilder, x: Tensor) -> Tensor:
    """Attention and feed-forward side by side (GPT-NeoX, Falcon, Phi, Cohere)."""
    architecture, width = build.context.architecture, build.context.architecture.hidden_size
    first = build.norm(x, width, "input_layernorm")
    second = build.norm(x, width, "post_attention_layernorm") if architecture.norms_per_parallel_block == 2 else first
    attention = _attention(build, first)
    feed_forward = _feed_forward(build, second)
    return ops.add(build.tape, ops.add(build.tape, feed_forward, attention, "parallel_add"), x, "residual_add")


def _attention(build: BlockBuilder, x: Tensor) -> Tensor:
    context, architecture, tape = build.context, build.context.architecture, build.tape
    rows, width = context.rows, architecture.hidden_size
    query, key_value = architecture.query_size, architecture.key_value_size
    size = context.compute_bytes
    bias = architecture.attention_bias
    if architecture.fused_qkv:
        name = "self_attn." + _FUSED_QKV_NAMES.get(architecture.model_type, "qkv_proj")
        fused = build.projection(x, width, query + 2 * key_value, name, bias)
        q, k, v = tape.split(fused, [rows * query * size, rows * key_value * size, rows * key_value * size], "qkv_split")
    else:
        q = build.projection(x, width, query, "self_attn.q_proj", bias)
        if architecture.qk_norm != "none":
            q = _qk_norm(build, q, query, "self_attn.q_norm")
        k = build.projection(x, width, key_value, "self_attn.k_proj", bias)
        if architecture.qk_norm != "none":
            k = _qk_norm(build, k, key_value, "self_attn.k_norm")
        v = build.projection(x, width, key_value, "self_attn.v_proj", bias)
    if architecture.position_embedding == "rope":
        q = _rotate(tape, q, "self_attn.rotary_q")
        k = _rotate(tape, k, "self_attn.rotary_k")
    output = _attention_core(build, q, k, v)
    out = "self_attn." + _OUTPUT_NAMES.get(architecture.model_type, "o_proj")
    output = build.projection(output, query, width, out, architecture.attention_output_bias)
    return build.dropout(output, architecture.hidden_dropout, rows * width, "self_attn.dropout")


_FUSED_QKV_NAMES = {
    "gpt2": "c_attn",
    "gpt_bigcode": "c_attn",
    "gpt_neox": "query_key_value",
    "falcon": "query_key_value",
    "bloom": "query_key_value",
    "mpt": "Wqkv",
}
_OUTPUT_NAMES = {"gpt2": "c_proj", "gpt_bigcode": "c_proj", "gpt_neox": "dense", "falcon": "dense", "bloom": "dense"}


def _qk_norm(build: BlockBuilder, x: Tensor, width: int, name: str) -> Tensor:
    architecture = build.context.architecture
    if architecture.qk_norm == "head":
        rows = build.context.rows * width // architecture.head_dim
        return build.norm(x, architecture.head_dim, name, rows)
    return build.norm(x, width, name)


def _rotate(tape: Tape, x: Tensor, name: str) -> Tensor:
    """x·cos + rotate_half(x)·sin: keeps nothing of its own (cos and sin belong to the model)."""
    straight = ops.scale(tape, x, f"{name}.cos")
    rotated = tape.operation(
        f"{name}.rotate_half",
        [x],
        x.num_bytes,
        forward_temporary_bytes=x.num_bytes // 2,
        backward_temporary_bytes=x.num_bytes + x.num_bytes // 2,
    )
    rotated = ops.scale(tape, rotated, f"{name}.sin")
    return ops.add(tape, straight, rotated, f"{name}.add")


def _attention_core(build: BlockBuilder, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    context, architecture = build.context, build.context.architecture
    if context.attention == "eager":
        return _eager_attention(build, q, k, v)
    if context.autocast:  # flash and sdpa run in the compute dtype and keep narrow copies of wide q, k, v
        q, k, v = (
            ops.cast(build.tape, x, context.rows * width * context.compute_bytes, f"self_attn.{name}_cast")
            if x.num_bytes > context.rows * width * context.compute_bytes
            else x
            for x, width, name in (
                (q, architecture.query_size, "q"),
                (k, architecture.key_value_size, "k"),
                (v, architecture.key_value_size, "v"),
            )
        )
    heads = architecture.num_attention_heads
    log_sum_exp = FP32 * context.rows * heads
    hidden_bytes = flash_backward_bytes(context) if context.kernel_temporaries else 0
    return build.tape.operation(
        "self_attn.scaled_dot_product_attention",
        [q, k, v],
        q.num_bytes,
        saves=[q, k, v],
        saves_output=True,
        extra_saved_bytes=[log_sum_exp, INT64, INT64],  # softmax statistics, random seed and offset
        backward_temporary_bytes=hidden_bytes,
    )


def flash_backward_bytes(context: HFContext) -> int:
    """Bytes that the flash-attention backward allocates inside itself: fp32 dq accumulator and row sums, and for grouped
    queries dk, dv at all heads. Source: flash-attention 2.8.3 csrc/flash_attn/flash_api.cpp mha_bwd."""
    architecture = context.architecture
    heads, dim = architecture.num_attention_heads, architecture.head_dim
    padded = round_up(context.sequence, 128)
    accumulator = FP32 * context.batch * heads * padded * round_up(dim, 64 if dim > 128 else 32)
    row_sums = FP32 * context.batch * heads * padded
    expanded = 0
    if architecture.num_key_value_heads != heads:
        expanded = 2 * context.compute_bytes * context.rows * heads * dim
    return accumulator + row_sums + expanded


def _eager_attention(build: BlockBuilder, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """`eager_attention_forward`: scores, fp32 softmax, converted back, times v; k and v repeated to all heads."""
    context, architecture, tape = build.context, build.context.architecture, build.tape
    heads, size = architecture.num_attention_heads, context.compute_bytes
    scores_elements = context.batch * heads * context.sequence * context.sequence
    if architecture.num_key_value_heads != heads:
        k = tape.operation("self_attn.repeat_k", [k], q.num_bytes)
        v = tape.operation("self_attn.repeat_v", [v], q.num_bytes)
    scores = tape.operation("self_attn.scores", [q, k], scores_elements * size, saves=[q, k])
    scores = ops.scale(tape, scores, "self_attn.scaling")
    scores = tape.operation("self_attn.add_mask", [scores], scores.num_bytes, gradients=[(scores, None)])
    if size != FP32:
        scores = ops.cast(tape, scores, scores_elements * FP32, "self_attn.softmax.to_float32")
    probabilities = ops.unary_of_result(tape, scores, "self_attn.softmax")
    if size != FP32:
        probabilities = ops.cast(tape, probabilities, scores_elements * size, "self_attn.softmax.to_narrow")
    probabilities = build.dropout(
        probabilities, architecture.attention_dropout, scores_elements, "self_attn.attention_dropout"
    )
    return tape.operation(
        "self_attn.weighted_sum",
        [probabilities, v],
        q.num_bytes,
        saves=[probabilities, v],
        forward_temporary_bytes=q.num_bytes,  # the product before .transpose(1, 2).contiguous()
    )


def _feed_forward(build: BlockBuilder, x: Tensor) -> Tensor:
    if build.context.routed:
        return routed_feed_forward(build, x)
    architecture, tape = build.context.architecture, build.tape
    width, inner = architecture.hidden_size, architecture.intermediate_size
    bias = architecture.mlp_bias
    rows, size = build.context.rows, build.context.compute_bytes
    if architecture.gated_mlp:
        if architecture.model_type in ("phi3", "glm", "glm4"):  # gate_up_proj is one matrix; the halves are views
            fused = build.projection(x, width, 2 * inner, "mlp.gate_up_proj", bias)
            gate, up = tape.split(fused, [rows * inner * size] * 2, "mlp.chunk")
            activated = _activation(build, gate)
        else:
            gate = build.projection(x, width, inner, "mlp.gate_proj", bias)
            activated = _activation(build, gate)
            up = build.projection(x, width, inner, "mlp.up_proj", bias)
        product = ops.multiply(tape, activated, up, "mlp.product")
    else:
        product = _activation(build, build.projection(x, width, inner, "mlp.up_proj", bias))
    output = build.projection(product, inner, width, "mlp.down_proj", bias)
    return build.dropout(output, architecture.hidden_dropout, rows * width, "mlp.dropout")


def _activation(build: BlockBuilder, x: Tensor) -> Tensor:
    """The activation function. gelu_new is Python code in transformers (activations.py NewGELUActivation)."""
    tape, name = build.tape, build.context.architecture.hidden_act
    if name in ("gelu_new", "gelu_fast"):
        half = ops.scale(tape, x, "mlp.gelu_new.half")
        cube = ops.unary(tape, x, "mlp.gelu_new.pow", backward_temporary_bytes=2 * x.num_bytes)
        cube = ops.scale(tape, cube, "mlp.gelu_new.coefficient")
        inner = ops.add(tape, x, cube, "mlp.gelu_new.add")
        inner = ops.scale(tape, inner, "mlp.gelu_new.scale")
        tanh = ops.unary_of_result(tape, inner, "mlp.gelu_new.tanh")
        shifted = tape.operation("mlp.gelu_new.one_plus", [tanh], tanh.num_bytes, gradients=[(tanh, None)])
        return ops.multiply(tape, half, shifted, "mlp.gelu_new.product")
    if name == "relu2":
        return ops.unary(
            tape, ops.unary_of_result(tape, x, "mlp.relu"), "mlp.square", backward_temporary_bytes=2 * x.num_bytes
        )
    if name == "relu":
        return ops.unary_of_result(tape, x, "mlp.relu")
    return ops.unary(tape, x, f"mlp.{name}")


# -- embedding and head -------------------------------------------------------------------------------------------------


@lru_cache(maxsize=256)
def embedding(context: HFContext) -> Template:
    """Token (and learned position) embedding: ids in, [micro_batch_size, sequence_length, hidden_size] out."""
    architecture, tape = context.architecture, Tape()
    build = BlockBuilder(tape, context)
    rows, width = context.rows, architecture.hidden_size
    size = context.weight_bytes
    weight = architecture.vocab_size * width * context.weight_bytes
    trains = context.trainable
    hidden = tape.operation(
        "embed_tokens",
        [],
        rows * width * size,
        weight_gradients=[WeightGradient("embed_tokens.weight.grad", weight)]
        if trains and not architecture.tie_word_embeddings
        else [],
        backward_temporary_bytes=(weight if trains and architecture.tie_word_embeddings else 0)
        + (embedding_backward_bytes(context) if trains and context.kernel_temporaries else 0),
    )
    hidden.requires_grad = True  # with adapters, enable_input_require_grads() makes it so
    if architecture.position_embedding == "learned":
        positions = tape.operation(
            "embed_positions",
            [],
            context.sequence * width * size,
            weight_gradients=[
                WeightGradient(
                    "embed_positions.weight.grad", architecture.max_position_embeddings * width * context.weight_bytes
                )
            ]
            if trains
            else [],
        )
        hidden = ops.add(tape, hidden, positions, "add_positions")
    if architecture.embedding_norm:
        hidden = build.norm(hidden, width, "embedding_layernorm")
    if architecture.model_type.startswith("gemma"):
        hidden = ops.scale(tape, hidden, "normalizer")
    hidden = build.dropout(hidden, architecture.embedding_dropout, rows * width, "embedding_dropout")
    return tape.finish(hidden)


def embedding_backward_bytes(context: HFContext) -> int:
    """Bytes that the embedding's CUDA backward allocates inside itself above 3072 tokens: fp32 partial sums and index
    arrays. Source: aten/src/ATen/native/cuda/EmbeddingBackwardKernel.cu (where-memory-goes F5)."""
    rows, width = context.rows, context.architecture.hidden_size
    if rows <= 3072:
        return 0
    return FP32 * width * (rows // 10 + min(rows, context.architecture.vocab_size)) + 4 * INT64 * rows


@lru_cache(maxsize=256)
def head(context: HFContext) -> Template:
    """Final norm, lm_head and the loss over all positions; where the logits are converted decides their copies
    (where-memory-goes F2; transformers `loss/loss_utils.py`)."""
    architecture, tape = context.architecture, Tape()
    build = BlockBuilder(tape, context)
    rows, width, vocabulary = context.rows, architecture.hidden_size, architecture.vocab_size
    hidden = tape.input(rows * width * context.stream_bytes)
    final = build.norm(hidden, width, "final_norm")
    logits = build._linear(
        final, width, vocabulary, "lm_head", architecture.lm_head_bias, context.trainable, context.weight_bytes
    )
    logits.storage.category = Category.LOGITS
    if architecture.final_logit_softcapping is not None:
        logits = ops.scale(tape, logits, "softcap.divide")
        logits = ops.scale(tape, ops.unary_of_result(tape, logits, "softcap.tanh"), "softcap.multiply")
    narrow = logits
    wide, shifted_rows = rows * vocabulary * FP32, context.batch * (context.sequence - 1)
    upcast = context.logits_upcast
    if upcast == "model":
        logits = _logits_op(tape, logits, wide, "logits.to_float32")
        tape.begin_loss()
        kept = [logits]
        logits = _shift(tape, logits, shifted_rows, rows)
    elif upcast == "none_shifted":
        tape.begin_loss()
        kept = [narrow]
        logits = _shift(tape, logits, shifted_rows, rows)
    else:
        tape.begin_loss()
        kept = [narrow]
        if context.compute_bytes != FP32 or upcast == "loss_shifted":
            logits = _logits_op(tape, logits, wide, "logits.to_float32") if logits.num_bytes != wide else logits
            kept.append(logits)
        if upcast == "loss_shifted":
            logits = _shift(tape, logits, shifted_rows, rows)
        else:
            tape.operation("pad_labels", [], rows * INT64, category=Category.INPUTS)
    log_probabilities = tape.operation(
        "log_softmax",
        [logits],
        logits.num_bytes,
        saves_output=True,
        category=Category.LOGITS,
        output_name="log_softmax",
    )
    tape.operation("nll_loss", [log_probabilities], FP32, saves=[log_probabilities])
    for tensor in (*kept, final):  # variables of the model's and the loss's forward
        tape.hold(tensor)
    return tape.finish()


def _logits_op(tape: Tape, x: Tensor, num_bytes: int, name: str) -> Tensor:
    return tape.operation(name, [x], num_bytes, category=Category.LOGITS, output_name=name)


def _shift(tape: Tape, x: Tensor, shifted_rows: int, rows: int) -> Tensor:
    """logits[..., :-1, :].contiguous(): a copy; its gradient is scattered into a full-size one."""
    return _logits_op(tape, x, x.num_bytes // rows * shifted_rows, "shift_logits")


def logits_bytes_kept_by_outputs(context: HFContext) -> int:
    """Bytes of the logits that live on in the model's outputs when the caller keeps them."""
    element = FP32 if context.logits_upcast == "model" else context.compute_bytes
    return context.rows * context.architecture.vocab_size * element
