"""Everything on which the tensors of a Megatron-LM block on one rank depend. Equal contexts share one template."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from peakcast.models.ledger.megatron.blocks.expert_context import ExpertContext

AttentionCore = Literal["unfused", "flash", "fused", "local"]
ContextExchange = Literal["p2p", "a2a", "all_gather", "a2a+p2p"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentContext:
    """Widths of multi-latent attention; none is divided by the tensor-parallel size."""

    q_lora_rank: int
    """0 if the query is projected directly."""
    kv_lora_rank: int
    nope_dim: int
    """Elements of a query or key head that are not rotated."""
    rope_dim: int
    rotary_dim: int
    """How many of the `rope_dim` elements after them are really rotated."""
    v_dim: int
    qk_norm: bool
    rotary_fused: bool
    recompute_up_projection: bool = False
    """`recompute-modules mla_up_proj`: query, key and value are recomputed from their down projections."""

    @property
    def qk_dim(self) -> int:
        """Elements of a query or key head."""
        return self.nope_dim + self.rope_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class MambaContext:
    """One rank's share of a Mamba-2 mixer; everything but `state` and `kernel` is divided by the tensor-parallel size."""

    inner: int
    """Width of the stream that the scan reads."""
    heads: int
    groups: int
    state: int
    kernel: int
    """Number of tokens that the convolution reads."""

    @property
    def convolved(self) -> int:
        """Channels of the convolution: the stream, B and C."""
        return self.inner + 2 * self.groups * self.state

    @property
    def input(self) -> int:
        """Width of the projection before it: gate, stream, B, C and time steps."""
        return self.inner + self.convolved + self.heads


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelGroups:
    """The ranks that share a sequence and a layer, and what they exchange."""

    tensor_parallel_size: int
    context_parallel_size: int
    sequence_parallel: bool
    context_parallel_rank: int
    exchange: ContextExchange
    """What context parallelism exchanges (`cp-comm-type`): keys and values in a ring; heads; all keys and values; or heads
    within groups of ranks and then keys and values in a ring of groups."""
    ranks_exchanging_heads: int
    """Number of ranks in such a group (the first of `hierarchical-context-parallel-sizes`); else 1."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionContext:
    """One rank's share of attention; head counts are already divided by the tensor-parallel size."""

    heads: int
    key_value_heads: int
    head_dim: int
    qkv_bias: bool
    qk_norm: bool
    qk_norm_copies: Literal["none", "passing", "saved"]
    """Contiguous copies of queries and keys, parts of the projection's output, that their norms make: none, for the kernel
    alone, or in place of what is saved."""
    rotary_dim: int
    """Elements of a head that are rotated; 0 without rotary embedding."""
    rotary_fused: bool
    dropout: float
    core: AttentionCore
    expands_groups: bool
    """Whether keys and values are repeated for every query head before a flash kernel reads them."""
    fused_softmax: bool
    wide_softmax: bool
    """Whether an unfused softmax is computed in fp32."""
    recompute: bool
    """`recompute-granularity: selective` with the attention core."""

    @property
    def query(self) -> int:
        """Width of the query heads on this rank."""
        return self.heads * self.head_dim

    @property
    def key_value(self) -> int:
        """Width of the key heads on this rank."""
        return self.key_value_heads * self.head_dim


@dataclass(frozen=True, slots=True, kw_only=True)
class FeedForwardContext:
    """One rank's share of a dense feed-forward."""

    width: int
    """Width of the activation on this rank (the first projection is twice as wide when `gated`)."""
    activation: Literal["gelu", "squared_relu", "other"]
    gated: bool
    fused_activation: bool
    """Whether one kernel applies bias and activation."""
    glu_adds_offset: bool
    """Whether an unfused gated activation adds an offset to its second factor, even if the offset is 0."""
    recompute: bool
    """`recompute-modules mlp`: it is recomputed in backward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndsContext:
    """What comes before the layers and after them."""

    vocabulary: int
    """Padded vocabulary on this rank."""
    positions: int
    """Rows of the learned position embedding, 0 for none."""
    token_types: int
    """Rows of the token type embedding; 0 for none. A BERT that has them also has a pooler and two logits."""
    predicted_logits_outlive_loss: bool
    """Whether the last narrow logits of multi-token prediction live until the model's forward returns."""
    masked_tokens: bool
    """Whether it is BERT, which has a head before its output layer."""
    output_bias: bool
    final_norms: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossEntropyContext:
    """How the loss is computed."""

    fused: bool
    copies_logits: bool
    """Whether there are two fp32 copies of the logits at once in forward."""
    in_place: bool
    """Whether Transformer Engine's kernel computes the loss, and overwrites the logits with their gradient."""
    wide_gradient: bool
    """Whether that kernel instead saves the gradient as an fp32 tensor of its own."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightGradients:
    """How the gradients of projections' weights are made."""

    fused: bool
    """`gradient-accumulation-fusion`: they are added into the gradient buffers, and autograd gets placeholders."""
    cached_placeholders: bool
    """Whether Transformer Engine caches those placeholders."""
    cached_output_placeholder: bool
    """Whether megatron-core's own projections cache theirs; the output layer is always one of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Offloading:
    """Which saved tensors go to the host. `modules`: the parts of `offload-modules`. `least_elements`: smaller tensors stay
    on the GPU (`min-offloaded-tensor-size`)."""

    modules: frozenset[str]
    least_elements: int


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterContext:
    """LoRA on projections. `targets`: their names in megatron-core (`linear_qkv`). `library`: whose layers adapters are;
    Megatron-Bridge's are megatron-core's own, mcore-bridge's are Transformer Engine's."""

    rank: int
    targets: frozenset[str]
    dropout: bool
    library: Literal["megatron_bridge", "mcore_bridge"]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRun:
    """In which surroundings a layer runs."""

    input_held: bool = False
    """Whether a checkpoint or a receive buffer, not the layer, holds the layer's input."""
    makes_mask: bool = False
    """Whether an unfused softmax gets no mask, and makes a causal one itself."""
    without_graph: bool = False
    """Whether a checkpoint runs the layer without a graph; in FP8, nothing is then quantised for a backward."""
    input_is_constant: bool = False
    """Whether the layer's input needs no gradient: it is the output of a frozen embedding."""
    in_parts: bool = False
    """Whether the layer's parts have graphs of their own, so that what one hands to another is a leaf: micro-batches
    overlap (megatron-core 0.16.1 `models/gpt/fine_grained_callables.py`, `TransformerLayerNode.detach`)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronContext:
    """One rank's share of a layer. Widths and head counts are already divided by the tensor-parallel size.

    Shapes: activations inside a tensor-parallel region are [sequence, batch, width]; outside it they are
    [sequence / tensor_parallel_size, batch, hidden] under sequence parallelism, else [sequence, batch, hidden].
    """

    batch: int
    sequence: int
    """Tokens of one sample on this rank's tensor-parallel group: sequence_length / context_parallel_size."""
    hidden: int
    element_bytes: int
    fp8_recipe: str
    """How Transformer Engine's projections scale their FP8 operands; "" if they multiply in the parameters' dtype."""
    transformer_engine: bool
    kernel_temporaries: bool
    """Whether to count what CUDA kernels allocate for themselves, which no trace sees."""
    groups: ParallelGroups
    attention: AttentionContext
    feed_forward: FeedForwardContext
    ends: EndsContext
    cross_entropy: CrossEntropyContext
    weight_gradients: WeightGradients
    offloading: Offloading
    adapters: AdapterContext | None = None
    """Adapters, which alone train; None if all parameters do."""
    runs: LayerRun = LayerRun()
    normalization: Literal["layernorm", "rmsnorm"]
    recompute_norms: bool
    """`recompute-modules layernorm`: outputs of norms that are modules of their own are recomputed in backward."""
    linear_bias: bool
    hidden_dropout: float
    bias_dropout_fusion: bool
    experts: ExpertContext | None = None
    """The routed feed-forward, which replaces the dense one; None for a dense layer."""
    latent: LatentContext | None = None
    """Multi-latent attention, which replaces the fused projection of query, key and value; None without it."""
    mamba: MambaContext | None = None
    """The mixer of a hybrid's state-space layers."""
    part: Literal["", "mamba", "attention", "mlp"] = ""
    """For a hybrid: the one part that a layer consists of; "" for a whole layer. Routed experts are an "mlp" with
    `experts`."""
    padding: bool = False
    """Whether attention's mask marks padding, instead of being causal."""
    source_sequence: int = 0
    """Tokens per sample that a decoder layer's cross-attention reads from the encoder; 0 for a layer without it."""
    key_sequence: int = 0
    """Tokens per sample in the keys; 0 if as many as in the queries."""

    @property
    def frozen(self) -> bool:
        """Whether the network's own parameters do not train."""
        return self.adapters is not None

    @property
    def rows(self) -> int:
        """Tokens inside a tensor-parallel region."""
        return self.batch * self.sequence

    @property
    def stream_rows(self) -> int:
        """Tokens of the residual stream on this rank."""
        return self.rows // self.groups.tensor_parallel_size if self.groups.sequence_parallel else self.rows

    @property
    def stream_bytes(self) -> int:
        """Bytes of the residual stream."""
        return self.stream_rows * self.hidden * self.element_bytes

    @property
    def gathered_bytes(self) -> int:
        """Bytes of the residual stream gathered over the tensor-parallel group."""
        return self.rows * self.hidden * self.element_bytes

    @property
    def attended(self) -> int:
        """Width of the context layer on this rank: the output of the attention core, which its output projection reads."""
        return self.attention.heads * (self.latent.v_dim if self.latent is not None else self.attention.head_dim)

    @property
    def score_elements(self) -> int:
        """Elements of the attention scores [batch, heads, sequence, key_sequence] on this rank."""
        return self.batch * self.attention.heads * self.sequence * (self.key_sequence or self.sequence)
