"""What a Hugging Face family's code does that its shapes do not say: one row per `model_type`, read line by line.

Source of every row: transformers 5.17 `models/<model_type>/modeling_<model_type>.py`, where not said otherwise.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from peakcast.architecture import Architecture


@dataclass(frozen=True, slots=True, kw_only=True)
class HFTraits:
    """The defaults are Llama's code."""

    norm_weight_in_float32: bool = False
    """RMSNorm multiplies by the weight before converting back (Gemma, OLMo-2)."""
    norm_names_product: bool = False
    """... and has one name for what it was and for the product (Gemma)."""
    norm_of_input: bool = False
    """RMSNorm multiplies the input itself, not its fp32 copy (T5)."""
    norm_without_autocast: bool = False
    """Casts the norm's arguments to autocast's dtype and runs it without autocast (Nemotron)."""
    layer_norm_in_python: bool = False
    """Cohere's LayerNorm is written out in fp32."""
    rotary: Literal["narrow", "cast", "promoted"] = "narrow"
    """`cast`: q and k are converted to fp32 for it (Cohere); `promoted`: fp32 tables widen the products (OLMo)."""
    rotary_tables: int = 1
    """Sets of cosines and sines (Gemma 3, OLMo 3: one for sliding layers, one for the others)."""
    rotary_tables_per_layer: int = 0
    """... and copies of them that each layer makes and keeps (GLM interleaves their elements)."""
    rotary_fraction: float = 1.0
    """Share of head_dim that is rotated, where the rest is concatenated to it."""
    unrotated_every: int = 0
    """Every so many layers one does not rotate; of layers with and without a window, those without."""
    rotary_inline: bool = False
    """Splits and joins q and k in the attention's own forward, whose variables then keep the parts."""
    rotary_complex: bool = False
    """Rotates pairs as complex numbers in fp32; the one table is complex too (DeepSeek-V2)."""
    rotary_in_halves: bool = False
    """Rotates the halves of q and k apart and joins them; its tables are half as wide (gpt-oss)."""
    norms_after_projections: bool = False
    """Projects all of q, k and v before it normalises any."""
    norms_together: bool = False
    """A parallel block with two norms computes both first."""
    keeps_sublayer_outputs: bool = False
    """The layer's forward has its own variable for each sub-layer's output."""
    keeps_sublayer_inputs: bool = False
    """... and for its input, not assigned again."""
    feed_forward_inline: bool = False
    """The layer's forward runs the feed-forward itself, on one variable."""
    parallel_sum_in_place: bool = False
    norm_after_residual: bool = False
    """Each sub-layer's output is added to its input before the norm (BERT)."""
    positions_per_sequence: bool = False
    """Learned positions are looked up for every sequence, not once."""
    scaled_embedding: bool = False
    embedding_scales_itself: bool = False
    """... inside the embedding module (Gemma), not in the model's forward."""
    scaled_residual: bool = False
    scaled_logits: bool = False
    full_attention_every: int = 0
    """With a sliding window: every so many layers one attends to everything (0: none does)."""
    masks_for_both_kinds: bool = False
    """Builds a mask for sliding layers too where there are none (Qwen2-MoE, whose window then is 0)."""
    always_masked: bool = False
    """Builds a mask even where the kernel's own causal one would do."""
    grouped_query_kernel: bool = True
    """Lets the attention kernel share key heads, instead of copying them or falling to the step-by-step path."""
    expands_key_value: bool = False
    """Splits a fused projection into copies, with every key head for each of its query heads (where there are several)."""
    names_fused_projection: bool = False
    """Attention's forward has a variable for the fused projection's result."""
    attention_softcap: bool = False
    """tanh of the scores, in eager attention only."""
    mask_by_position: bool = False
    """The model hands layers its mask as an argument without a name: a reentrant checkpoint saves it as any tensor."""
    returns_attention_weights: bool = False
    """A layer's outputs name its attention's weights, and the model's loop names those until the next layer returns."""
    joins_heads_first: bool = False
    """Eager attention lays out q, k and v before it multiplies any, and names them and the unmasked scores to its end."""
    scores_in_float32: bool = False
    """Eager attention converts q and k to fp32 before it multiplies them (GPT-J and its kin)."""
    scores_scaled_in_place: bool = False
    scores_biased_and_filled: bool = False
    """Eager attention adds an fp32 bias of positions and fills in a bool mask, which autograd keeps (MPT)."""
    eager_softmax: Literal["float32", "native", "wide"] = "float32"
    """`wide`: native, and what autocast widens is converted by the product that takes it."""
    linears_transpose_weight: bool = False
    """Its Linear multiplies by `weight.T`, which is no leaf: autocast caches no copy (Falcon)."""
    conv1d: bool = False
    """Its matrices are Conv1D, whose `addmm` has the bias's gradient before the weight's."""
    router_in_float32: bool = False
    routing_weights: Literal["narrow", "float32"] = "narrow"
    """Dtype of the chosen experts' weights; fp32 ones widen the weighted rows."""
    scores_of_top_experts: Literal["", "narrow", "float32"] = ""
    """The router's softmax is that of the chosen experts' logits only; of what dtype these are."""
    normalises_routing: bool = False
    """The chosen experts' weights are divided by their sum."""
    clamped_experts: bool = False
    """Experts bound gate and up, which lie beside each other by turns, before they multiply (gpt-oss)."""
    liger_qk_norm: bool = True
    """Whether Liger replaces norms over all heads at once (liger_kernel 0.8 `monkey_patch.py`)."""
    fused_loss_budget: int = 1
    """Times as many logits as hidden states in a chunk of Liger's fused loss (liger_kernel 0.8.5 `model/gpt_oss.py`)."""
    liger_rope: bool = True
    """Whether it has a kernel for the rotary embedding there."""
    whole_parts: frozenset[str] = frozenset()
    """Under tensor parallelism: parts of a layer, of `self_attn` and `mlp`, whose split matrices are gathered at once
    (`base_model_tp_plan`: colwise_gather_output and rowwise_split_input)."""
    causal_mask_buffer: bool = False
    """A bool [max_position_embeddings, max_position_embeddings] buffer for the whole model."""
    causal_mask_buffers: bool = False
    """... for every layer (GPT-Neo)."""
    loss_apart: bool = False
    """Of a class that is no `...ForCausalLM` transformers warns that it does not know the loss, and what warns is in no
    compiled graph (`modeling_utils.py` loss_function): the loss is a graph of its own. The first step's logits then hang in
    a cycle of references that compiling leaves."""
    position_table_width: int = 0
    """Width of an fp32 table of all positions that every layer has: `rotary_dim` (GPT-J and its kin)."""


_GEMMA = HFTraits(norm_weight_in_float32=True, norm_names_product=True, scaled_embedding=True, embedding_scales_itself=True)
_GEMMA3 = HFTraits(
    norm_weight_in_float32=True,
    norm_names_product=True,
    scaled_embedding=True,
    embedding_scales_itself=True,
    full_attention_every=6,
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
        full_attention_every=2,
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
        norm_weight_in_float32=True, rotary="promoted", rotary_tables=2, liger_qk_norm=False, full_attention_every=4
    ),
    "exaone4": HFTraits(full_attention_every=4, unrotated_every=4, norms_after_projections=True),
    "gpt_oss": HFTraits(
        norm_weight_in_float32=True,
        rotary_in_halves=True,
        full_attention_every=2,
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
        layer_norm_in_python=True, rotary="cast", scaled_logits=True, full_attention_every=4, unrotated_every=4
    ),
    "gpt2": HFTraits(
        keeps_sublayer_outputs=True, eager_softmax="native", loss_apart=True, conv1d=True, mask_by_position=True
    ),
    "gpt_bigcode": HFTraits(keeps_sublayer_outputs=True, causal_mask_buffer=True),
    "gpt_neox": HFTraits(names_fused_projection=True, rotary_fraction=0.25),
    "phi": HFTraits(rotary_fraction=0.5, rotary_inline=True),
    "stablelm": HFTraits(rotary_fraction=0.25, rotary_inline=True, keeps_sublayer_outputs=True, keeps_sublayer_inputs=True),
    "nemotron": HFTraits(rotary_fraction=0.5, norm_without_autocast=True, liger_rope=False),
    "mixtral": HFTraits(routing_weights="float32", normalises_routing=True),
    "qwen2_moe": HFTraits(masks_for_both_kinds=True),
    "qwen3_moe": HFTraits(normalises_routing=True),
    "deepseek_v2": HFTraits(rotary_complex=True, router_in_float32=True, routing_weights="float32"),
    "deepseek_v3": HFTraits(router_in_float32=True, routing_weights="float32", normalises_routing=True),
    "glm4_moe": HFTraits(
        rotary_fraction=0.5,
        norms_after_projections=True,
        router_in_float32=True,
        routing_weights="float32",
        normalises_routing=True,
    ),
    "t5": _T5,
    "mt5": _T5,
    "bert": HFTraits(norm_after_residual=True, eager_softmax="wide"),
    "gptj": HFTraits(scores_in_float32=True, returns_attention_weights=True, position_table_width=64),
    "codegen": HFTraits(
        names_fused_projection=True, scores_in_float32=True, returns_attention_weights=True, position_table_width=64
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
    "glm": HFTraits(rotary_fraction=0.5, rotary_tables_per_layer=2, whole_parts=frozenset({"mlp"})),
    "glm4": HFTraits(rotary_fraction=0.5, rotary_tables_per_layer=2, liger_rope=False),
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
    """Whether its layers' matrices multiply without `F.linear`: Conv1D, FalconLinear."""
    family = traits(architecture)
    return family.conv1d or family.linears_transpose_weight


def attention_key_heads(architecture: Architecture) -> int:
    """Key heads that the attention kernel is given."""
    heads, key_heads = architecture.num_attention_heads, architecture.num_key_value_heads
    return heads if architecture.mla or (traits(architecture).expands_key_value and key_heads > 1) else key_heads


def joins_heads(architecture: Architecture) -> bool:
    """Whether queries and keys are laid out head by head: what is concatenated of a rotated and another part."""
    family = traits(architecture)
    in_parts = architecture.rotary_in_parts or family.rotary_fraction < 1 or family.rotary_in_halves
    return architecture.mla is not None or in_parts


def kinds_of_layers(architecture: Architecture) -> int:
    """2 where layers with and without a sliding window take turns, and both kinds are there."""
    return 1 + (0 < traits(architecture).full_attention_every <= architecture.num_hidden_layers)


def kinds_of_masks(architecture: Architecture) -> int:
    """Masks that the model builds where it builds any: one for each kind of layer that its code knows."""
    family = traits(architecture)
    alternates = architecture.sliding_window is not None and bool(family.full_attention_every)
    return 1 + (alternates or family.masks_for_both_kinds)


def window_of(architecture: Architecture, layer: int) -> int | None:
    """The window through which layer `layer` (from 0) attends, where it has one."""
    every = traits(architecture).full_attention_every
    return None if every and (layer + 1) % every == 0 else architecture.sliding_window


def rotates(architecture: Architecture, layer: int) -> bool:
    """Whether layer `layer` (from 0) rotates its queries and keys, where positions are told so."""
    family = traits(architecture)
    alike = bool(family.full_attention_every) and architecture.sliding_window is None
    return alike or not family.unrotated_every or (layer + 1) % family.unrotated_every != 0


def slides(architecture: Architecture, layer: int, sequence: int) -> bool:
    """Whether layer `layer` (from 0) attends through a window that `sequence` fills: it then gets an explicit mask.

    Source: transformers 5.17 `masking_utils.py` `_ignore_causal_mask_sdpa`: a window of exactly the sequence counts too.
    """
    window = window_of(architecture, layer)
    return window is not None and sequence >= window
