"""What a Hugging Face block depends on.

Source of what autocast caches: torch/csrc/autograd autocast_mode.cpp, `cached_cast`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from peakcast.architecture import Architecture
from peakcast.loss import LossKind
from peakcast.models.analytical.blocks.ring_attention import ALONE, Ring
from peakcast.models.analytical.blocks.tensor_parallel import WHOLE, TensorParallel
from peakcast.spec import Finetuning

FP32 = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """Which kernels run, by the conventions `norm_kernel`, `rotary_kernel`, `gated_activation_kernel`, `loss_kernel` and
    `lora_kernel`: False and "eager" are the family's own code."""

    norm: bool = False
    rotary: bool = False
    gated_activation: bool = False
    loss: str = "eager"
    lora: str = "eager"

    def layer_compiled(self) -> Kernels:
        """What a compiled layer has: all that is fused inside one."""
        return replace(self, norm=True, rotary=True, gated_activation=True)


EAGER = Kernels()


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
    end_weight_bytes: int
    """Bytes of one element of the token table and the lm_head: wider than `weight_bytes` where a trainer casts them."""
    norm_weight_bytes: int
    """Bytes of one element of the norms' weights: wider than `weight_bytes` where a trainer casts norms to fp32."""
    attention: str
    finetuning: Finetuning
    unpacks_in_place: bool = False
    """Whether quantised matrices are unpacked in a buffer that stands all along (exllama), not in one of each call's."""
    adapter_bytes: int
    adapter_input_bytes: int
    """Bytes of one element of what peft hands to an adapter, whose weight it has asked for the dtype: wider than the
    adapter computes in where the weight is gathered in another dtype after that."""
    logits_upcast: str
    slices_whole_dimensions: bool = False
    """Whether `x[..., :-1, :]` is two slices to autograd, each with a gradient of its own: the last one takes everything
    (torch before 2.9)."""
    first_layer: bool = False
    """The first layer reads what the embedding gives, in the weights' dtype, where later ones read a wider stream."""
    repeats_key_value: bool = False
    """Whether flash attention is given a copy of each key and value head for every query head (older transformers)."""
    sdpa_repeats_key_value: bool = False
    """Whether sdpa is given such copies where nothing is masked too (transformers before 4.54)."""
    sdpa_copies: bool = False
    """Whether sdpa is given contiguous copies, and so hands on one (transformers 4.48 to 4.55)."""
    mask_is_additive: bool = False
    """Whether sdpa's mask is of numbers in the embeddings' dtype, as before transformers 4.53, and not of bools."""
    input_requires_grad: bool = True
    """False for the first layer of a network with adapters and no checkpointing: nothing before an adapter is kept."""
    rotates: bool = True
    """Whether the layer rotates queries and keys, where positions are told so."""
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
    """Selective checkpointing keeps one in so many matrix products of a checkpointed layer; 0: nothing."""
    cached_kinds: frozenset[str] = frozenset({"attention"})
    """... and the results of these operations (`operations.KINDS`)."""
    expert_ranks: int = 1
    """Ranks that have other experts."""
    experts: str = "grouped_mm"
    """How experts run: in grouped matrix products ("grouped_mm"), one after the other ("loop"), or torchtitan's module."""
    fullest_expert_load: int = 1
    """Of experts one after the other: rows of the fullest expert, in equal shares; 1: all take as many."""
    kernels: Kernels = EAGER
    """Which kernels run in place of the family's own code."""
    compiled: frozenset[str] = frozenset()
    """What torch.compile compiles, of COMPILED in `hf_blocks.py`. Inductor fuses a layer's norms, rotation and silu·up as
    Liger's kernels do, and keeps the same (`Kernels.layer_compiled`)."""
    reduced_bytes: int = 0
    """Bytes of one element of a gradient while FSDP reduces it under mixed precision; 0 without."""
    loss_chunks: int = 0
    """Chunks in which torchtitan's or Unsloth's fused loss goes in place of Liger's; 0 without."""
    logits_chunks: int = 1
    """Chunks of the logits that a chunked loss takes one after the other."""
    logits_chunks_apart: bool = False
    """Whether each of these is a product of its own."""
    loss: LossKind = "cross_entropy"
    """Of the others, what the head makes (`preference_heads.py`)."""
    fused_loss_temporary_bytes: int = 0
    """Bytes per element of the lm_head that each chunk of the fused loss makes in passing."""
    quantized_linears_keep_input: bool = False
    """Whether bitsandbytes keeps the input of a frozen 4-bit matrix, for a gradient that nobody takes (before 0.43.2)."""
    linears_keep_input: bool = False
    """Also under a frozen weight: DeepSpeed's stage 3 has a Linear of its own (0.19 `runtime/zero/linear.py`)."""
    splits_backward: bool = False
    in_stages: bool = False
    """Whether a pipeline's schedule computes the loss: the model's forward has then returned."""
    saves_on_cpu: bool = False
    """Whether everything that autograd keeps goes to the host."""
    narrows_final_norm: bool = False
    """FSDP2 gives the last norm's result in the dtype that it gathers, where the norm is of a group of its own."""
    gpu: tuple[int, int] | None = None
    """Multiprocessors and threads of each, of the GPU whose kernels' own allocations count; None: no trace sees them."""
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
    """In generation: what the layer's cache does with new keys and values (`kv_cache.py`); "" without a cache."""
    latent_cache: bool = True
    """Whether multi-latent attention caches what it expands, and not what it has expanded."""
    cache_length: int = 0
    """Length of the keys that the cache gives."""
    key_length: int = 0
    """Length of those that attention sees of them; 0 for the sequence itself."""

    @property
    def rows(self) -> int:
        """Tokens of one micro-batch."""
        return self.batch * self.sequence

    @property
    def keys(self) -> int:
        """Length of the keys that attention sees."""
        return self.key_length or self.sequence

    @property
    def stream_rows(self) -> int:
        """Of these, the ones that this rank has of the residual stream."""
        return self.rows // self.group.ranks if self.group.sequence else self.rows

    @property
    def input_bytes(self) -> int:
        """Bytes of one layer's input."""
        size = self.end_weight_bytes if self.first_layer else self.stream_bytes
        return self.stream_rows * self.architecture.hidden_size * size

    @property
    def fused_loss(self) -> bool:
        """Whether lm_head and loss are one kernel."""
        return self.kernels.loss in ("fused_linear", "chunked")

    @property
    def trainable(self) -> bool:
        """Whether the base weights train."""
        return self.finetuning.method == "full"

    @property
    def norms_train(self) -> bool:
        """Whether norms do, at least."""
        return self.trainable or self.finetuning.method == "ln_tuning"

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


def autocast_copy_bytes(context: HFContext) -> int:
    """Bytes per element of the narrow copies of wide trained matrices that autocast caches in a forward, until its
    context exits: also where no graph would keep them (torch/csrc/autograd autocast_mode.cpp, `cached_cast`)."""
    wide = context.adapter_bytes if context.finetuning.method != "full" else context.weight_bytes
    return context.compute_bytes if context.autocast and wide > context.compute_bytes else 0


def is_cast_by_autocast(context: HFContext, name: str, shape: tuple[int, ...]) -> bool:
    """Whether autocast makes a narrow copy of this weight: of matrices, but not of experts in grouped products, which are
    on none of its lists (transformers 5.17 `integrations/moe.py` _grouped_mm)."""
    return len(shape) > 1 and (context.experts == "loop" or not name.startswith("mlp.experts."))
