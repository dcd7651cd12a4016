"""`Architecture`: the network that is trained, in Hugging Face's names for shapes. A frozen value."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from peakcast.core.errors import SpecError
from peakcast.core.fields import HashedOnce, require_at_most, require_not_negative, require_positive, unsaid

Normalization = Literal["rmsnorm", "layernorm", "layernorm_no_bias", "nonparametric"]
MOST_LAYERS = 2**11
MOST_EXPERTS = 2**12
MOST_ELEMENTS = 2**24
"""Sizes above this are refused as mistakes, so that an answer takes a bounded time. The largest size of a published network
is an eighth of it (for numbers of experts, a half)."""
PositionEmbedding = Literal["rope", "learned", "alibi", "relative", "none"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MixtureOfExperts:
    """The routed feed-forward of a mixture-of-experts layer."""

    num_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    shared_expert_intermediate_size: int = 0
    """Total width of all shared experts, which every token uses; 0 for none."""
    shared_expert_gate: bool = False
    """Qwen2-MoE's sigmoid gate on the shared expert: one [1, hidden_size] weight."""
    first_k_dense_replace: int = 0
    """Layers at the start that keep a dense feed-forward of `intermediate_size`."""
    moe_layer_freq: int = 1
    """After those, every `moe_layer_freq`-th layer has a routed feed-forward; the others have a dense one."""
    dense_layers: tuple[int, ...] = unsaid(())
    """Numbers (from 0) of further dense layers, if they do not follow that order."""
    router_correction_bias: bool = False
    """DeepSeek-V3's per-expert correction bias (a buffer of num_experts fp32 values, not trained by gradient)."""
    expert_bias: bool = False
    """Whether expert projections carry biases (gpt-oss)."""
    router_bias: bool = False

    def __post_init__(self) -> None:
        require_positive(
            self, "num_experts", "num_experts_per_tok", "moe_intermediate_size", "moe_layer_freq", where="moe."
        )
        require_not_negative(self, "shared_expert_intermediate_size", "first_k_dense_replace", where="moe.")
        require_at_most(MOST_EXPERTS, self, "num_experts", where="moe.")
        require_at_most(MOST_ELEMENTS, self, "moe_intermediate_size", "shared_expert_intermediate_size", where="moe.")
        if self.num_experts_per_tok > self.num_experts:
            raise SpecError(
                f"moe.num_experts_per_tok={self.num_experts_per_tok} exceeds num_experts={self.num_experts}; "
                "a token is routed to at most every expert.",
                parameter="moe.num_experts_per_tok",
                value=self.num_experts_per_tok,
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class MultiLatentAttention:
    """DeepSeek's low-rank attention."""

    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    q_lora_rank: int | None = None

    def __post_init__(self) -> None:
        names = ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "q_lora_rank")
        require_positive(self, *names, where="mla.")
        require_at_most(MOST_ELEMENTS, self, *names, where="mla.")


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSpace:
    """The mixer of a state-space layer: Mamba's selective scan, or Mamba-2's."""

    version: Literal[1, 2]
    inner_size: int
    """Width of the stream that the scan reads."""
    state_size: int
    conv_kernel: int
    num_heads: int = 0
    """Heads of Mamba-2, each with one decay."""
    num_groups: int = 0
    """Groups of heads of Mamba-2 that share the input-dependent B and C."""
    time_step_rank: int = 0
    """Rank of the time step's projection in Mamba."""
    projection_bias: bool = False
    conv_bias: bool = True
    norm: Literal["none", "gated", "time_step_and_states"] = "none"
    """`gated`: a norm of the output before its projection (Mamba-2); `time_step_and_states`: norms of dt, B and C
    (Jamba)."""

    def __post_init__(self) -> None:
        sizes = ("inner_size", "state_size", "conv_kernel")
        parts = ("num_heads", "num_groups") if self.version == 2 else ("time_step_rank",)
        require_positive(self, *sizes, *parts, where="ssm.")
        require_at_most(MOST_ELEMENTS, self, *sizes, *parts, where="ssm.")

    @property
    def conv_size(self) -> int:
        """Channels of the convolution; in Mamba-2 they include B and C."""
        return self.inner_size + 2 * self.num_groups * self.state_size

    @property
    def input_size(self) -> int:
        """Width of the input's projection: the stream and its gate; in Mamba-2 also B, C and time steps."""
        return 2 * self.inner_size if self.version == 1 else self.inner_size + self.conv_size + self.num_heads


@dataclass(frozen=True, kw_only=True)
class Architecture(HashedOnce):
    """A transformer: by `kind` a decoder, an encoder, an encoder with a decoder, or another network, of which less is
    known."""

    __hash__ = HashedOnce.__hash__

    name: str
    model_type: str
    """Hugging Face's `model_type`, which names the family. Accuracy is judged on families that the fit has not seen."""
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int = 0
    position_embedding_offset: int = 0
    """Rows of a learned position table beyond `max_position_embeddings` (OPT: 2)."""
    type_vocab_size: int = 0
    """Rows of a token-type table (BERT: 2)."""
    tie_word_embeddings: bool = False
    position_embedding: PositionEmbedding = "rope"
    rotary_in_parts: bool = False
    """The rotary embedding concatenates a rotated and a plain part, which lays queries out head by head; the attention
    output then has that layout and is copied before the output projection (GPT-NeoX, Phi, StableLM, GLM)."""
    normalization: Normalization = "rmsnorm"
    norm_placement: Literal["pre", "post", "pre_and_post"] = "pre"
    """`pre` (Llama), `post` (OLMo-2: norm on each sub-layer's output), `pre_and_post` (Gemma 2/3: both)."""
    parallel_block: bool = False
    """Attention and feed-forward read the same input, and their outputs are added (GPT-NeoX, Falcon, Phi, Cohere)."""
    norms_per_parallel_block: int = 1
    """1: one shared input norm (Falcon-7B, Phi, Cohere); 2: one each (GPT-NeoX, Falcon-40B)."""
    hidden_act: str = "silu"
    gated_mlp: bool = True
    """Three matrices (gate, up, down) instead of two."""
    fused_gate_up: bool = False
    """gate and up are one [2·intermediate_size, hidden_size] matrix (Phi-3, GLM)."""
    fused_qkv: bool = False
    """One projection for q, k and v (GPT-2, GPT-NeoX, Falcon, Phi-3)."""
    attention_bias: bool = False
    """Bias on the q, k and v projections."""
    attention_output_bias: bool = False
    mlp_bias: bool = False
    lm_head_bias: bool = False
    embedding_norm: bool = False
    """A norm right after the token embedding (BLOOM)."""
    qk_norm: Literal["none", "head", "full", "per_head"] = "none"
    """`head`: one [head_dim] weight each for q and k (Qwen3); `full`: [heads·head_dim] (OLMo-2);
    `per_head`: [heads, head_dim], a weight of its own for every head (Command R+)."""
    attention_dropout: float = 0.0
    hidden_dropout: float = 0.0
    embedding_dropout: float = 0.0
    sliding_window: int | None = None
    full_attention_layers: tuple[int, ...] | None = unsaid(None)  # a dataclass field
    """With a sliding window: numbers of the layers (from 0) whose attention has none; None: as in the family's pattern."""
    rotary_fraction: float | None = unsaid(None)  # a dataclass field
    """Fraction of head_dim that is rotated; None: the family's."""
    final_logit_softcapping: float | None = None
    attention_sinks: bool = False
    """One learned logit per head (gpt-oss)."""
    moe: MixtureOfExperts | None = None
    mla: MultiLatentAttention | None = None
    ssm: StateSpace | None = unsaid(None)  # noqa: RUF009  # a dataclass field
    layer_types: tuple[str, ...] = unsaid(())
    """For a hybrid: the parts of each layer (`mamba`, `attention`, `mlp`, `moe`). `+` joins parts that follow each other,
    each with its own norm; `|` joins parts that read the same input and whose outputs are added."""
    num_decoder_layers: int = unsaid(0)
    """Layers of the decoder, in addition to the `num_hidden_layers` of the encoder (T5)."""
    relative_attention_num_buckets: int = unsaid(0)
    """Rows of the table of relative positions; the first layer of the encoder and of the decoder has one each (T5)."""
    scale_decoder_outputs: bool = unsaid(False)
    """The decoder's output is multiplied by hidden_size ** -0.5 before the lm_head (T5, not T5 v1.1 nor Flan-T5)."""
    num_nextn_predict_layers: int = 0
    """Multi-token-prediction layers (DeepSeek-V3)."""
    head: Literal["language_model", "sequence_classifier", "token_classifier"] = unsaid("language_model")
    """What follows the last layer: logits of the vocabulary, or those of `num_labels` classes, of each sequence
    (`...ForSequenceClassification`) or of each token (`...ForTokenClassification`)."""
    num_labels: int = unsaid(2)
    """Classes of a classifier's head."""
    configuration: str = unsaid("")
    """For an `undescribed` network: the config.json from which transformers builds it."""
    kind: Literal["decoder", "encoder", "encoder_decoder", "hybrid", "multimodal", "undescribed"] = "decoder"
    """Networks that are neither decoders nor BERT nor T5 are refused or marked out of scope by name. For a hybrid (with
    state-space layers) all parameters are counted."""

    def __post_init__(self) -> None:
        heads = ("num_attention_heads", "num_key_value_heads", "head_dim")
        shapes = ("hidden_size", *heads, "intermediate_size", "vocab_size")
        require_positive(self, *shapes, "num_hidden_layers", "sliding_window", "num_labels")
        require_at_most(MOST_LAYERS, self, "num_hidden_layers", "num_decoder_layers", "num_nextn_predict_layers")
        require_at_most(MOST_ELEMENTS, self, *shapes, "max_position_embeddings", "type_vocab_size", "num_labels")
        require_at_most(MOST_ELEMENTS, self, "position_embedding_offset", "relative_attention_num_buckets")
        require_not_negative(
            self,
            "max_position_embeddings",
            "position_embedding_offset",
            "type_vocab_size",
            "attention_dropout",
            "hidden_dropout",
            "embedding_dropout",
            "num_nextn_predict_layers",
            "num_decoder_layers",
            "relative_attention_num_buckets",
        )
        self._check_layer_types()
        if self.fused_gate_up and not self.gated_mlp:
            raise SpecError(
                f"fused_gate_up=True joins the gate and up matrices of a gated feed-forward, and gated_mlp=False of "
                f"{self.name!r} has none; change one of them.",
                parameter="fused_gate_up",
                value=self.fused_gate_up,
            )
        if self.num_attention_heads % self.num_key_value_heads:
            raise SpecError(
                f"num_key_value_heads={self.num_key_value_heads} does not divide "
                f"num_attention_heads={self.num_attention_heads} of {self.name!r}; "
                f"use a divisor of {self.num_attention_heads}.",
                parameter="num_key_value_heads",
                value=self.num_key_value_heads,
            )

    def _check_layer_types(self) -> None:
        if self.layer_types and len(self.layer_types) != self.num_hidden_layers:
            raise SpecError(
                f"layer_types lists {len(self.layer_types)} layers and num_hidden_layers={self.num_hidden_layers} of "
                f"{self.name!r}; make them agree.",
                parameter="layer_types",
                value=list(self.layer_types),
            )
        for parts in dict.fromkeys(self.layer_types):
            described = {"mamba": self.ssm is not None, "moe": self.moe is not None, "attention": True, "mlp": True}
            for part in parts.replace("|", "+").split("+"):
                if not described.get(part):
                    raise SpecError(
                        f"layer_types of {self.name!r} has {part!r}, which is none of {', '.join(described)}, or "
                        "is not described (ssm, moe); correct it.",
                        parameter="layer_types",
                        value=parts,
                    )

    @property
    def num_layers(self) -> int:
        """Number of layers, the decoder's included if an encoder has one."""
        return self.num_hidden_layers + self.num_decoder_layers

    @property
    def most_positions(self) -> int | None:
        """The longest sequence for which a table of learned positions has rows; None if the network has no such table."""
        return self.max_position_embeddings if self.position_embedding == "learned" else None

    @property
    def query_size(self) -> int:
        """Number of elements of all query heads together."""
        return self.num_attention_heads * self.head_dim

    @property
    def key_value_size(self) -> int:
        """Number of elements of all key heads together (values have as many, except with MLA)."""
        return self.num_key_value_heads * self.head_dim

    def is_moe_layer(self, layer: int) -> bool:
        """Whether decoder layer `layer` (from 0) has a routed feed-forward."""
        if self.layer_types:
            return "moe" in self.layer_types[layer]
        if self.moe is None or layer < self.moe.first_k_dense_replace or layer in self.moe.dense_layers:
            return False
        return (layer - self.moe.first_k_dense_replace) % self.moe.moe_layer_freq == self.moe.moe_layer_freq - 1
