"""What a Hugging Face block depends on, in groups of settings that belong together.

Source for what autocast caches: torch/csrc/autograd autocast_mode.cpp, `cached_cast`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from peakcast.core.units import FP32
from peakcast.jobs.architecture import Architecture
from peakcast.jobs.loss import LossKind
from peakcast.jobs.spec import Finetuning
from peakcast.models.ledger.huggingface.blocks.dtypes import IN_BFLOAT16, ElementBytes, QuantizedLinears
from peakcast.models.ledger.huggingface.blocks.ring_attention import ALONE, Ring
from peakcast.models.ledger.huggingface.blocks.tensor_parallel import WHOLE, TensorParallel
from peakcast.models.ledger.huggingface.blocks.traits import has_mask_of_heads
from peakcast.networks.families import family_of


@dataclass(frozen=True, slots=True, kw_only=True)
class Linears:
    """How Linear layers compute: their number format, and tensors that they keep although no gradient needs them."""

    float8: bool = False
    """Whether Linears compute in float8, except those in `float8_skips`."""
    float8_skips: frozenset[str] = frozenset({"lm_head"})
    float8_kept: str = "none"
    """Which weights compiled layers keep in float8 for backward: "all", some of those "gathered" in float8, or "none"."""
    gathered_in_float8: bool = False
    """Whether FSDP2 gathers the weights of products in float8 already in float8."""
    keep_input: bool = False
    """Whether a Linear saves its input even if its weight is frozen: DeepSpeed's stage 3 has a Linear of its own (0.19
    `runtime/zero/linear.py`)."""
    quantized_keep_input: bool = False
    """Whether bitsandbytes keeps the input of a frozen 4-bit matrix, for a gradient that nothing needs (before 0.43.2)."""
    quantized_head: bool = False
    """Whether the lm_head is quantised like the layers' matrices."""
    left_whole: str = ""
    """The matrix of this layer that is not quantised with the others; "": none."""
    quantized: QuantizedLinears = IN_BFLOAT16
    unpack_in_place: bool = False
    """Whether quantised matrices are unpacked into one buffer that always exists (exllama), instead of a new one for each
    call."""


ALL = "*"


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapters:
    """Bytes of one element of adapters and of what they read, and how adapters of queries, keys and values are joined."""

    weight_bytes: int
    input_bytes: int
    """Of an adapter's input, which peft casts to the dtype of the adapter's weight. It is wider than the adapter computes
    in if the weight is gathered in another dtype afterwards."""
    narrow_again: str = ""
    """The matrix whose adapter has been gathered when a checkpoint runs the layer again (ALL: every one; "": none), so that
    peft need not widen its input then. Backward does, with the graph of the first forward."""
    joined_parts: str = ""
    """The letters of queries, keys and values for which one adapter of a joined matrix may have parts (`joined_lora.py`);
    "": each adapted matrix has its own adapter."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """Which attention runs, and which copies the release of transformers makes for it."""

    implementation: str
    """As `attn_implementation`: "eager", "sdpa", "flash_attention_2" or "flex"."""
    drops_weights: bool = False
    """Whether attention returns no weights unless it is asked for them."""
    repeats_key_value: bool = False
    """Whether flash attention gets a copy of each key and value head for every query head (older transformers)."""
    sdpa_repeats_key_value: bool = False
    """Whether sdpa gets such copies even if nothing is masked (transformers before 4.54)."""
    sdpa_copies: bool = False
    """Whether sdpa gets contiguous copies, so that its output is contiguous too (transformers 4.48 to 4.55)."""
    cudnn: bool = False
    """Whether sdpa runs cuDNN's kernel instead of flash attention: its output lies head by head, and the output projection
    reads a copy."""
    mask_is_additive: bool = False
    """Whether sdpa's mask has numbers in the embeddings' dtype, as before transformers 4.53, instead of bools."""

    @property
    def copies_key_value(self) -> bool:
        """Whether the kernel gets a copy of each key and value head for every query head."""
        return self.repeats_key_value or self.sdpa_repeats_key_value


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """How a mixture of experts runs."""

    implementation: str = "grouped_mm"
    """In grouped matrix products ("grouped_mm"), one after the other ("loop"), or as torchtitan's module."""
    ranks: int = 1
    """Number of ranks with different experts."""
    fullest_load: float = 1
    """For experts that run one after the other: the rows of the fullest expert, as a multiple of an equal share."""


SHIFTED, VIEWED = "shifted", "viewed"
"""Values of the convention `preference_logits` of trl 0.29 to 1.5 and of 1.6 to 1.13."""
IN_PASSES = ("whole", SHIFTED, VIEWED)
"""Values with which the log-softmax of all logits never exists as a whole."""
SHIFTED_WITH_NLL = "shifted_log_softmax_and_nll"
"""The value of the convention `preference_logits` with which the cross entropy of the chosen sequences is computed too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LossRules:
    """Which loss is computed, from logits in which dtype, in which pieces."""

    kind: LossKind = "cross_entropy"
    """For all but cross entropy, `preference_heads.py` has the head."""
    logits_upcast: str = "loss"
    """Where logits become fp32, as the convention `logits_upcast` says."""
    token_scores: str = ""
    """How preference training takes the log-probability of each token from whole logits, as the convention
    `preference_logits` says; "" if it does not."""
    slices_whole_dimensions: bool = False
    """Whether autograd records `x[..., :-1, :]` as two slices, each with a gradient of its own; the last one covers the
    whole dimension (torch before 2.9)."""
    in_stages: bool = False
    """Whether a pipeline's schedule computes the loss, after the model's forward has returned."""
    logits_chunks: int = 1
    """Number of chunks of whole logits that a chunked loss processes one after the other."""
    logits_chunks_apart: bool = False
    """Whether each of these chunks is a matrix product of its own."""
    fused_chunks: int = 0
    """Number of chunks of torchtitan's or Unsloth's fused loss; 0: the fused loss is Liger's."""
    fused_temporary_bytes: int = 0
    """Bytes, per element of the lm_head, of a temporary that each chunk of the fused loss makes."""
    reduced_bytes: int = 0
    """Bytes of one element of a gradient while FSDP reduces it under mixed precision; 0 without mixed precision."""
    completion: int = 0
    """Tokens at the end of each sequence that the loss scores; 0: all but the first."""
    smooths_labels: bool = False
    """Whether transformers' label smoother computes the loss from the logits that the network returns."""
    widens_outputs: bool = False
    """Whether accelerate makes the model's outputs fp32 under autocast, after the loss (`convert_outputs_to_fp32`)."""
    metrics: str = ""
    """What SFTTrainer computes from whole logits for its logs, as the convention `sft_metrics` says."""

    @property
    def shifts_logits(self) -> bool:
        """Whether `token_scores` are of the logits without each sequence's last one."""
        return self.token_scores in ("shifted_log_softmax", SHIFTED_WITH_NLL)


@dataclass(frozen=True, slots=True, kw_only=True)
class FusedKernels:
    """Which fused kernels run, by the conventions `norm_kernel`, `rotary_kernel`, `gated_activation_kernel`, `loss_kernel`
    and `lora_kernel`. False or "eager": the family's own code."""

    norm: bool = False
    wide_norm: bool = False
    """Whether RMSNorm's weight multiplies in fp32, before the result is narrowed."""
    rotary: bool = False
    gated_activation: bool = False
    gelu: bool = False
    """Whether torch's own function replaces transformers' gelu_new."""
    loss: str = "eager"
    lora: str = "eager"

    @property
    def fused_loss(self) -> bool:
        """Whether lm_head and loss are one operation that makes no whole logits."""
        return self.loss in ("fused_linear", "chunked")

    def layer_compiled(self) -> FusedKernels:
        """These kernels in a compiled layer, which fuses norms, rotation and gated activation too."""
        return replace(self, norm=True, rotary=True, gated_activation=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class BackwardRules:
    """How backward gets what forward computed: kept on the GPU, kept on the host, or computed again."""

    checkpointed: bool = False
    """Whether the checkpoint, not the layer, owns the layer's input."""
    reentrant: bool = False
    """For a checkpointed layer: whether its recomputation is a graph of its own, which keeps its saved tensors to its
    end."""
    cached_matmuls: int = 0
    """n if selective checkpointing keeps the first of every n matrix products of a checkpointed layer; 0: none."""
    cached_kinds: frozenset[str] = frozenset({"attention"})
    """The kinds of operations (`operations.KINDS`) whose outputs selective checkpointing keeps."""
    saves_on_cpu: bool = False
    """Whether all saved tensors are offloaded to the host."""
    in_two_parts: bool = False
    """Whether gradients of weights are computed after those of all inputs, as in a zero-bubble pipeline."""

    @property
    def frees_recomputed(self) -> bool:
        """Whether a tensor recomputed for a node's backward is freed as soon as the node has run: non-reentrant
        checkpointing returns each only once (torch `utils/checkpoint.py` _checkpoint_hook)."""
        return self.checkpointed and not self.reentrant


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRules:
    """What differs between the layers of one network."""

    reads_embedding: bool = False
    """Whether the layer reads the embedding's output in the weights' dtype, while later ones read a wider residual
    stream."""
    input_requires_grad: bool = True
    """False for the first layer of a network with adapters and no checkpointing: nothing before an adapter is saved."""
    rotates: bool = True
    """Whether the layer rotates queries and keys, if the architecture has rotary positions."""
    masked: bool = False
    """Whether the layer's attention gets an explicit mask."""
    routed: bool = False
    """Whether the layer's feed-forward is a mixture of experts."""
    parts: str = ""
    """The parts of a hybrid's layer, as in `Architecture.layer_types`."""
    frozen_get_gradients: bool = False
    """Whether backward computes the gradients of frozen weights too (`layouts.frozen_get_gradients`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """How sequences of different lengths share a micro-batch: padded, or joined in one row."""

    mask_of_batch: bool = False
    """Whether every sequence of the batch has its own mask."""
    comes_with_mask: bool = False
    """Whether collators send a mask of ones with the tokens, so that a mask that is needed anyway has a part for each
    sequence (transformers 5.17 `masking_utils.py` padding_mask_function)."""
    valid_rows: int = 0
    """Number of tokens that are not padding, to which flash attention is restricted; 0 if there is no padding."""
    num_sequences: int = 0
    """Number of sequences that are joined in one row; 0 if they are not joined."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cache:
    """Generation's key-value cache in one layer."""

    does: str = ""
    """What the cache does with new keys and values (`kv_cache.py`); "" without a cache."""
    latent: bool = True
    """Whether multi-latent attention caches the compressed form, not the expanded keys and values."""
    length: int = 0
    """Number of tokens in the keys that the cache returns."""
    key_length: int = 0
    """Number of those tokens that attention reads; 0 for the sequence itself."""
    widened: bool = False
    """Whether accelerate makes fp32 copies of what a training's forward returns of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HFContext:
    """Everything that a block's tensors depend on. Hashable: blocks with equal contexts share one template."""

    architecture: Architecture
    """The network; under tensor parallelism, one rank's part of a layer."""
    batch: int
    sequence: int
    """Number of tokens of each sequence; if `ring` shares sequences, of this rank's part of each."""
    precision: ElementBytes
    attention: Attention
    finetuning: Finetuning
    adapters: Adapters
    copies: frozenset[str] = frozenset()
    """Which ends of the network peft trains a copy of beside its adapters: "embedding", "head"."""
    linears: Linears = Linears()
    experts: Experts = Experts()
    loss: LossRules = LossRules()
    kernels: FusedKernels = FusedKernels()
    """Which fused kernels replace the family's own code."""
    compiled: frozenset[str] = frozenset()
    """What torch.compile compiles: names from COMPILED in `contexts.py`. Inductor fuses a layer's norms, rotation and
    silu·up as Liger's kernels do, and saves the same (`FusedKernels.layer_compiled`)."""
    compiles_adapters: bool = False
    """Whether the graph of a layer that is compiled by itself is known with its adapters."""
    backward: BackwardRules = BackwardRules()
    layer: LayerRules = LayerRules()
    packing: Packing = Packing()
    cache: Cache = Cache()
    group: TensorParallel = WHOLE
    """The tensor-parallel group."""
    ring: Ring = ALONE
    """The ranks that share each sequence."""
    neftune: bool = False
    """Whether training adds noise to the token embeddings."""
    gpu: tuple[int, int] | None = None
    """(multiprocessors, threads of each) of the GPU, to count what kernels allocate for themselves; None: not counted, as
    traces do not see it."""

    @property
    def returns_weights(self) -> bool:
        """Whether a layer returns its attention's weights, to which the model's loop then refers."""
        return family_of(self.architecture).attention.returns_weights and not self.attention.drops_weights

    @property
    def divided_by_hooks(self) -> bool:
        """Whether hooks divide a network that is compiled in one call, so that each layer is a graph of its own."""
        return "mask" in self.compiled and "network" not in self.compiled

    @property
    def rows(self) -> int:
        """Tokens of one micro-batch."""
        return self.batch * self.sequence

    @property
    def keys(self) -> int:
        """Number of tokens in the keys that attention reads."""
        return self.cache.key_length or self.sequence

    @property
    def stream_rows(self) -> int:
        """Number of tokens of a micro-batch that this rank has of the residual stream."""
        return self.rows // self.group.ranks if self.group.sequence else self.rows

    @property
    def input_bytes(self) -> int:
        """Bytes of one layer's input."""
        size = self.precision.end_weight_bytes if self.layer.reads_embedding else self.stream_bytes
        return self.stream_rows * self.architecture.hidden_size * size

    @property
    def trainable(self) -> bool:
        """Whether the base weights train."""
        return self.finetuning.method == "full"

    @property
    def table_trains(self) -> bool:
        """Whether the token table that is looked up trains."""
        return self.trainable or "embedding" in self.copies

    @property
    def head_trains(self) -> bool:
        """Whether the matrix of the lm_head trains."""
        return self.trainable or "head" in self.copies

    @property
    def weights_get_gradients(self) -> bool:
        """Whether backward computes gradients of the layer's own weights."""
        return self.trainable or self.layer.frozen_get_gradients

    @property
    def norms_train(self) -> bool:
        """Whether backward computes gradients of norms, with or without those of the other weights."""
        return self.weights_get_gradients or self.finetuning.method == "ln_tuning"

    @property
    def stream_bytes(self) -> int:
        """Bytes of one element of the residual stream between layers: as the embedding's output, or wider if it is an fp32
        norm's own output, or if such a norm makes a quantised Linear return fp32 (bitsandbytes `Linear4bit.forward` returns
        its input's dtype)."""
        normed = self.architecture.embedding_norm or family_of(self.architecture).layer.norm_after_residual
        if normed and self.native_norm_in_float32:
            return FP32
        if not self.finetuning.quantization:
            return self.precision.weight_bytes
        return FP32 if self.native_norm_in_float32 else self.precision.norm_weight_bytes

    @property
    def layer_mask_bytes(self) -> int:
        """Bytes of the mask of numbers that a layer makes for sdpa of the model's: one for each sequence or, if the model's
        has numbers for every head already, one that autocast has narrowed, if it does."""
        sequences = self.batch * self.sequence * self.keys * self.precision.compute_bytes
        if not has_mask_of_heads(self.architecture):
            return sequences
        return 0 if self.saves_mask_of_heads else sequences * self.architecture.num_attention_heads

    @property
    def saves_mask_of_heads(self) -> bool:
        """Whether layers save the model's own mask of all heads, because nothing narrows it."""
        return has_mask_of_heads(self.architecture) and self.precision.weight_bytes == self.precision.compute_bytes

    @property
    def native_norm_in_float32(self) -> bool:
        """Whether norms run in fp32 because torch's own layer_norm is on autocast's fp32 list."""
        return self.precision.autocast and self.architecture.normalization != "rmsnorm"


def autocast_copy_bytes(context: HFContext) -> int:
    """Bytes per element of the narrow copies of wide trained matrices, which autocast caches until its context exits, even
    if no graph saves them (torch/csrc/autograd autocast_mode.cpp, `cached_cast`); 0 if there are none."""
    precision = context.precision
    wide = precision.weight_bytes if context.trainable else context.adapters.weight_bytes
    return precision.compute_bytes if precision.autocast and wide > precision.compute_bytes else 0


def is_cast_by_autocast(context: HFContext, name: str, shape: tuple[int, ...]) -> bool:
    """Whether autocast makes a narrow copy of this weight: of matrices, except experts in grouped products, which are on
    none of its lists (transformers 5.17 `integrations/moe.py` _grouped_mm)."""
    return len(shape) > 1 and (context.experts.implementation == "loop" or not name.startswith("mlp.experts."))
