"""All that the tensors of a Megatron-LM block depend on, per rank. Equal contexts share one template."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

AttentionCore = Literal["unfused", "flash", "fused", "local"]


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
    heads: int
    key_value_heads: int
    head_dim: int
    ffn: int
    """Width of the activation on this rank (the first projection is twice as wide when `gated`)."""
    vocabulary: int
    """Padded vocabulary on this rank."""
    positions: int
    """Rows of the learned position embedding, 0 for none."""
    tensor_parallel_size: int
    context_parallel_size: int
    sequence_parallel: bool
    element_bytes: int
    normalization: Literal["layernorm", "rmsnorm"]
    activation: Literal["gelu", "squared_relu", "other"]
    gated: bool
    linear_bias: bool
    qkv_bias: bool
    qk_norm: bool
    rotary_dim: int
    """Elements of a head that are rotated, 0 without rotary embedding."""
    rotary_fused: bool
    attention_dropout: float
    hidden_dropout: float
    transformer_engine: bool
    attention: AttentionCore
    fused_softmax: bool
    bias_activation_fusion: bool
    bias_dropout_fusion: bool
    gradient_accumulation_fusion: bool
    cached_placeholders: bool
    """Whether Transformer Engine caches the placeholders that fused weight gradients hand to autograd."""
    cached_output_placeholder: bool
    """The same for the output layer, which is megatron-core's."""
    fused_cross_entropy: bool
    recompute_attention: bool
    """`recompute-granularity: selective` with the attention core."""
    checkpointed: bool
    """Whether a layer's input is held by a checkpoint instead of by the layer."""
    kernel_temporaries: bool
    """Whether to count what CUDA kernels allocate inside themselves (no trace sees it)."""

    @property
    def rows(self) -> int:
        """Tokens inside a tensor-parallel region."""
        return self.batch * self.sequence

    @property
    def stream_rows(self) -> int:
        """Tokens of the residual stream on this rank."""
        return self.rows // self.tensor_parallel_size if self.sequence_parallel else self.rows

    @property
    def stream_bytes(self) -> int:
        """Bytes of the residual stream."""
        return self.stream_rows * self.hidden * self.element_bytes

    @property
    def gathered_bytes(self) -> int:
        """Bytes of the residual stream gathered over the tensor-parallel group."""
        return self.rows * self.hidden * self.element_bytes

    @property
    def query(self) -> int:
        """Width of the query heads on this rank."""
        return self.heads * self.head_dim

    @property
    def key_value(self) -> int:
        """Width of the key heads on this rank."""
        return self.key_value_heads * self.head_dim

    @property
    def score_elements(self) -> int:
        """Elements of the attention scores [batch, heads, sequence, sequence] on this rank."""
        return self.batch * self.heads * self.sequence * self.sequence
