"""What a Hugging Face family's code does that its shapes do not show: one row per `model_type`, read line by line.

Source of every row: transformers 5.17 `models/<model_type>/modeling_<model_type>.py`, unless stated otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from peakcast.jobs.architecture import Architecture
from peakcast.networks.windows import ALTERNATES, attends_to_everything


@dataclass(frozen=True, slots=True, kw_only=True)
class HFTraits:
    """Traits of a family's modelling code; the defaults are Llama's."""

    norm_weight_in_float32: bool = False
    """RMSNorm multiplies by the weight before it converts back (Gemma, OLMo-2)."""
    norm_names_product: bool = False
    """RMSNorm's code reassigns its variable to the product with the weight, so the normalised tensor is freed (Gemma)."""
    norm_of_input: bool = False
    """RMSNorm multiplies the input itself, not its fp32 copy (T5)."""
    norm_without_autocast: bool = False
    """The norm casts its arguments to autocast's dtype and runs without autocast (Nemotron)."""
    layer_norm_in_python: bool = False
    """LayerNorm is written out in Python, in fp32 (Cohere)."""
    rotary: Literal["narrow", "cast", "promoted"] = "narrow"
    """`cast`: q and k are converted to fp32 for the rotation (Cohere); `promoted`: fp32 tables widen the products
    (OLMo)."""
    rotary_tables: int = 1
    """Number of sets of cosines and sines (Gemma 3, OLMo 3: one for layers with a sliding window, one for the others)."""
    rotary_tables_per_layer: int = 0
    """Number of copies of the tables that each layer makes and saves (GLM interleaves their elements)."""
    unrotated_every: int = 0
    """Every n-th layer does not rotate; 0: all rotate."""
    rotates_in_windows: bool = False
    """If there are layers with and without a window, those without do not rotate."""
    rotary_inline: bool = False
    """Attention's own forward splits and joins q and k, so its variables refer to the parts until it returns."""
    rotary_complex: bool = False
    """Pairs are rotated as complex numbers in fp32; the one table is complex too (DeepSeek-V2)."""
    rotary_in_halves: bool = False
    """The halves of q and k are rotated separately and joined; the tables are half as wide (gpt-oss)."""
    norms_after_projections: bool = False
    """q, k and v are all projected before any is normalised."""
    norms_together: bool = False
    """A parallel block with two norms computes both before attention."""
    keeps_sublayer_outputs: bool = False
    """The layer's forward has a separate variable for each sub-layer's output."""
    keeps_sublayer_inputs: bool = False
    """The layer's forward has a separate variable for each sub-layer's input, which it does not reassign."""
    feed_forward_inline: bool = False
    """The layer's forward runs the feed-forward itself and reassigns one variable."""
    parallel_sum_in_place: bool = False
    norm_after_residual: bool = False
    """Each sub-layer's output is added to its input before the norm (BERT)."""
    positions_per_sequence: bool = False
    """Learned positions are looked up for every sequence, not once for all."""
    scaled_embedding: bool = False
    embedding_scales_itself: bool = False
    """The scaling is inside the embedding module (Gemma), not in the model's forward."""
    scaled_residual: bool = False
    scaled_logits: bool = False
    masks_for_both_kinds: bool = False
    """The model builds a mask for layers with a sliding window too, even if there are none (Qwen2-MoE, whose window is then
    0)."""
    always_masked: bool = False
    """The model builds a mask even if the kernel's own causal mask would do."""
    grouped_query_kernel: bool = True
    """The attention kernel shares key heads; otherwise they are copied, or attention falls back to the step-by-step
    kernel."""
    expands_key_value: bool = False
    """A fused projection is split into copies, with every key head repeated for each of its query heads (if there are
    several)."""
    names_fused_projection: bool = False
    """A variable of attention's forward refers to the fused projection's output until it returns."""
    attention_softcap: bool = False
    """Eager attention (and no other) applies tanh to the scores."""
    mask_by_position: bool = False
    """The model passes the mask to layers as a positional argument, which a reentrant checkpoint saves like any tensor."""
    returns_attention_weights: bool = False
    """A layer returns its attention's weights, and a variable of the model's loop refers to them until the next layer
    returns."""
    joins_heads_first: bool = False
    """Eager attention lays out q, k and v head by head before any product; variables refer to them, and to the unmasked
    scores, until it returns."""
    scores_in_float32: bool = False
    """Eager attention converts q and k to fp32 before it multiplies them (GPT-J and similar)."""
    scores_scaled_in_place: bool = False
    scores_biased_and_filled: bool = False
    """Eager attention adds an fp32 bias of positions and fills in a bool mask, which autograd saves (MPT)."""
    eager_softmax: Literal["float32", "native", "wide"] = "float32"
    """`float32`: the softmax is in fp32 and then converted; `native`: in the scores' dtype; `wide`: native, and if autocast
    widens its output, only the next product converts it."""
    linears_transpose_weight: bool = False
    """Its Linear multiplies by `weight.T`, which is not a leaf, so autocast caches no copy of it (Falcon)."""
    conv1d: bool = False
    """Its matrices are Conv1D, whose `addmm` returns the bias's gradient before the weight's."""
    router_in_float32: bool = False
    routing_weights: Literal["narrow", "float32"] = "narrow"
    """The dtype of the chosen experts' weights; fp32 weights widen the rows that they multiply."""
    scores_of_top_experts: Literal["", "narrow", "float32"] = ""
    """If not "": the router's softmax is over the chosen experts' logits only, and this is their dtype."""
    normalises_routing: bool = False
    """The chosen experts' weights are divided by their sum."""
    clamped_experts: bool = False
    """Experts clamp gate and up, which are interleaved, before they multiply them (gpt-oss)."""
    liger_qk_norm: bool = True
    """Whether Liger replaces a norm over all heads at once (liger_kernel 0.8 `monkey_patch.py`)."""
    fused_loss_budget: int = 1
    """How many times larger than the hidden states a chunk's logits are in Liger's fused loss (liger_kernel 0.8.5
    `model/gpt_oss.py`)."""
    liger_rope: bool = True
    """Whether Liger has a kernel for the family's rotary embedding."""
    whole_parts: frozenset[str] = frozenset()
    """Under tensor parallelism: parts of a layer (`self_attn`, `mlp`) whose split matrices' outputs are gathered at once
    (`base_model_tp_plan`: colwise_gather_output and rowwise_split_input)."""
    causal_mask_buffer: bool = False
    """The model has a bool buffer [max_position_embeddings, max_position_embeddings]."""
    causal_mask_buffers: bool = False
    """Every layer has such a buffer (GPT-Neo)."""
    loss_apart: bool = False
    """For a class not named `...ForCausalLM`, transformers warns that it does not know the loss, and the warning breaks the
    compiled graph (`modeling_utils.py` loss_function): the loss is a graph of its own. A reference cycle that compiling
    leaves keeps the first step's logits."""
    position_tables: bool = False
    """Every layer has an fp32 table of all positions, as wide as what is rotated (GPT-J and similar)."""


_GEMMA = HFTraits(norm_weight_in_float32=True, norm_names_product=True, scaled_embedding=True, embedding_scales_itself=True)
_GEMMA3 = HFTraits(
    norm_weight_in_float32=True,
    norm_names_product=True,
    scaled_embedding=True,
    embedding_scales_itself=True,
    rotary_tables=2,
    norms_after_projections=True,
)
_T5 = HFTraits(norm_of_input=True, eager_softmax="native")
_GRANITE = HFTraits(scaled_embedding=True, scaled_residual=True, scaled_logits=True)

FAMILY_TRAITS: dict[str, HFTraits] = {
    "gemma": _GEMMA,
    "gemma2": HFTraits(
        norm_weight_in_float32=True,
        norm_names_product=True,
        scaled_embedding=True,
        embedding_scales_itself=True,
        attention_softcap=True,
    ),
    "gemma3": _GEMMA3,
    "gemma3_text": _GEMMA3,
    "olmo": HFTraits(rotary="promoted"),
    "olmo2": HFTraits(
        norm_weight_in_float32=True, rotary="promoted", liger_qk_norm=False, whole_parts=frozenset({"self_attn"})
    ),
    "phi3": HFTraits(names_fused_projection=True, whole_parts=frozenset({"self_attn", "mlp"})),
    "olmo3": HFTraits(
        norm_weight_in_float32=True, rotary="promoted", rotary_tables=2, liger_qk_norm=False
    ),
    "exaone4": HFTraits(rotates_in_windows=True, norms_after_projections=True),
    "gpt_oss": HFTraits(
        norm_weight_in_float32=True,
        rotary_in_halves=True,
        scores_of_top_experts="narrow",
        clamped_experts=True,
        fused_loss_budget=8,
    ),
    "smollm3": HFTraits(unrotated_every=4),
    "granite": _GRANITE,
    "granitemoe": replace(_GRANITE, scores_of_top_experts="float32"),
    "granitemoeshared": replace(_GRANITE, scores_of_top_experts="float32"),
    "cohere": HFTraits(layer_norm_in_python=True, rotary="cast", scaled_logits=True, norms_after_projections=True),
    "cohere2": HFTraits(
        layer_norm_in_python=True, rotary="cast", scaled_logits=True, rotates_in_windows=True
    ),
    "gpt2": HFTraits(
        keeps_sublayer_outputs=True, eager_softmax="native", loss_apart=True, conv1d=True, mask_by_position=True
    ),
    "gpt_bigcode": HFTraits(keeps_sublayer_outputs=True, causal_mask_buffer=True),
    "gpt_neox": HFTraits(names_fused_projection=True),
    "phi": HFTraits(rotary_inline=True),
    "stablelm": HFTraits(rotary_inline=True, keeps_sublayer_outputs=True, keeps_sublayer_inputs=True),
    "nemotron": HFTraits(norm_without_autocast=True, liger_rope=False),
    "mixtral": HFTraits(routing_weights="float32", normalises_routing=True),
    "qwen2_moe": HFTraits(masks_for_both_kinds=True),
    "qwen3_moe": HFTraits(normalises_routing=True),
    "deepseek_v2": HFTraits(rotary_complex=True, router_in_float32=True, routing_weights="float32"),
    "deepseek_v3": HFTraits(router_in_float32=True, routing_weights="float32", normalises_routing=True),
    "glm4_moe": HFTraits(
        norms_after_projections=True,
        router_in_float32=True,
        routing_weights="float32",
        normalises_routing=True,
    ),
    "t5": _T5,
    "mt5": _T5,
    "bert": HFTraits(norm_after_residual=True, eager_softmax="wide"),
    "gptj": HFTraits(scores_in_float32=True, returns_attention_weights=True, position_tables=True),
    "codegen": HFTraits(
        names_fused_projection=True, scores_in_float32=True, returns_attention_weights=True, position_tables=True
    ),
    "gpt_neo": HFTraits(
        scores_in_float32=True, returns_attention_weights=True, keeps_sublayer_outputs=True, causal_mask_buffers=True
    ),
    "bloom": HFTraits(names_fused_projection=True, returns_attention_weights=True, joins_heads_first=True),
    "mpt": HFTraits(
        names_fused_projection=True,
        returns_attention_weights=True,
        scores_biased_and_filled=True,
        keeps_sublayer_outputs=True,
    ),
    "opt": HFTraits(feed_forward_inline=True, positions_per_sequence=True),
    "ernie4_5": HFTraits(rotary="promoted", rotary_tables_per_layer=2),
    "helium": HFTraits(norm_weight_in_float32=True, rotary_tables_per_layer=2),
    "glm": HFTraits(rotary_tables_per_layer=2, whole_parts=frozenset({"mlp"})),
    "glm4": HFTraits(rotary_tables_per_layer=2, liger_rope=False),
    "falcon": HFTraits(
        always_masked=True,
        grouped_query_kernel=False,
        expands_key_value=True,
        names_fused_projection=True,
        norms_together=True,
        parallel_sum_in_place=True,
        scores_scaled_in_place=True,
        linears_transpose_weight=True,
        eager_softmax="wide",
        returns_attention_weights=True,
    ),
}
"""`model_type` -> its traits; every other family has Llama's."""

_DEFAULT = HFTraits()


def traits(architecture: Architecture) -> HFTraits:
    """The traits of `architecture`'s family."""
    return FAMILY_TRAITS.get(architecture.model_type, _DEFAULT)


def multiplies_itself(architecture: Architecture) -> bool:
    """Whether the matrices of its layers do not use `F.linear`: Conv1D, FalconLinear."""
    family = traits(architecture)
    return family.conv1d or family.linears_transpose_weight


def attention_key_heads(architecture: Architecture) -> int:
    """Number of key heads that the attention kernel gets."""
    heads, key_heads = architecture.num_attention_heads, architecture.num_key_value_heads
    return heads if architecture.mla or (traits(architecture).expands_key_value and key_heads > 1) else key_heads


def joins_heads(architecture: Architecture) -> bool:
    """Whether queries and keys are laid out head by head, because each is concatenated from a rotated and another part."""
    family = traits(architecture)
    return architecture.mla is not None or architecture.rotary_in_parts or family.rotary_in_halves


def kinds_of_layers(architecture: Architecture) -> int:
    """2 if there are layers with and without a sliding window, else 1."""
    return len(set(attends_to_everything(architecture)))


def kinds_of_masks(architecture: Architecture) -> int:
    """How many masks the model builds if it builds any: one for each kind of layer that its code knows."""
    alternates = architecture.sliding_window is not None and architecture.model_type in ALTERNATES
    return 1 + (alternates or traits(architecture).masks_for_both_kinds)


def window_of(architecture: Architecture, layer: int) -> int | None:
    """The sliding window of layer `layer` (from 0); None if it attends to everything."""
    return None if attends_to_everything(architecture)[layer] else architecture.sliding_window


def rotates(architecture: Architecture, layer: int) -> bool:
    """Whether layer `layer` (from 0) rotates its queries and keys, if the architecture has rotary positions."""
    family = traits(architecture)
    if family.rotates_in_windows:
        return architecture.sliding_window is None or not attends_to_everything(architecture)[layer]
    return not family.unrotated_every or (layer + 1) % family.unrotated_every != 0


def slides(architecture: Architecture, layer: int, sequence: int) -> bool:
    """Whether layer `layer` (from 0) has a sliding window that `sequence` fills; it then gets an explicit mask.

    Source: transformers 5.17 `masking_utils.py` `_ignore_causal_mask_sdpa`: a window of exactly the sequence's length
    counts too.
    """
    window = window_of(architecture, layer)
    return window is not None and sequence >= window


def slides_anywhere(architecture: Architecture, sequence: int) -> bool:
    """Whether any layer has a sliding window that `sequence` fills."""
    window = architecture.sliding_window
    return window is not None and sequence >= window and not all(attends_to_everything(architecture))
