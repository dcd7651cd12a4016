"""The traits of a Hugging Face model family (`model_type`): how its code is written, what other libraries do with its
networks, and how its steps compare with traces. `catalog/families/<model_type>.toml` has the values, under the same groups
and names; `families.py` reads them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from peakcast.core.fields import FrozenMapping
from peakcast.networks.rules import ConfigRules


@dataclass(frozen=True, slots=True, kw_only=True)
class NormTraits:
    """The code of its norms."""

    weight_in_float32: bool
    """RMSNorm multiplies by the weight before it converts back."""
    names_product: bool
    """RMSNorm's code reassigns its variable to the product with the weight, so the normalised tensor is freed."""
    multiplies_input: bool
    """RMSNorm multiplies the input itself, not its fp32 copy."""
    without_autocast: bool
    """The norm casts its arguments to autocast's dtype and runs without autocast."""
    written_in_python: bool
    """LayerNorm is written out in Python, in fp32."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RotaryTraits:
    """Rotary positions: how much of a head is rotated, in which layers, and how."""

    config_key: Literal["", "partial_rotary_factor", "rotary_pct", "rotary_dim"]
    """The key of config.json that says how much of a head is rotated: a fraction, or (`rotary_dim`) a width. "": none."""
    fraction: float
    """The fraction of head_dim that is rotated unless the configuration says otherwise."""
    width: int
    """The number of elements of a head that are rotated, in families with `rotary_dim`; 0 in others."""
    products: Literal["narrow", "cast", "promoted"]
    """`cast`: q and k are converted to fp32 for the rotation; `promoted`: fp32 tables widen the products."""
    tables: int
    """Number of sets of cosines and sines (2: one for layers with a sliding window, one for the others)."""
    tables_per_layer: int
    """Number of copies of the tables that each layer makes and saves."""
    tables_of_all_positions: bool
    """Every layer has an fp32 table of all positions, as wide as what is rotated."""
    skipped_every: int
    """Every n-th layer does not rotate; 0: all rotate."""
    in_windows_only: bool
    """If there are layers with and without a window, those without do not rotate."""
    inline: bool
    """Attention's own forward splits and joins q and k, so its variables refer to the parts until it returns."""
    complex: bool
    """Pairs are rotated as complex numbers in fp32; the one table is complex too."""
    in_halves: bool
    """The halves of q and k are rotated separately and joined; the tables are half as wide."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionTraits:
    """The code of attention, whichever kernel computes it, and which kernels there are."""

    flash: bool
    """transformers has flash_attention_2 for it (`_supports_flash_attn`)."""
    flex: bool
    """transformers has flex_attention for it (`_supports_flex_attn`)."""
    shares_key_heads: bool
    """The attention kernel shares key heads; otherwise they are copied, or attention falls back to the step-by-step
    kernel."""
    expands_key_value: bool
    """A fused projection is split into copies, with every key head repeated for each of its query heads (if there are
    several)."""
    passes_positions: bool
    """Attention is told the positions of tokens, by which flash attention finds sequences without padding."""
    norms_after_projections: bool
    """q, k and v are all projected before any is normalised."""
    names_fused_projection: bool
    """A variable of attention's forward refers to the fused projection's output until it returns."""
    returns_weights: bool
    """A layer returns its attention's weights, and a variable of the model's loop refers to them until the next layer
    returns."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EagerAttentionTraits:
    """The code of attention step by step (`attn_implementation="eager"`)."""

    softcap: bool
    """It (and no other kernel) applies tanh to the scores."""
    joins_heads_first: bool
    """It lays out q, k and v head by head before any product; variables refer to them, and to the unmasked scores, until it
    returns."""
    scores_in_float32: bool
    """It converts q and k to fp32 before it multiplies them."""
    scales_in_place: bool
    """Scores are scaled where they stand."""
    adds_and_fills: bool
    """It adds an fp32 bias of positions and fills in a bool mask, which autograd saves."""
    softmax: Literal["float32", "native", "wide"]
    """`float32`: the softmax is in fp32 and then converted; `native`: in the scores' dtype; `wide`: native, and if autocast
    widens its output, only the next product converts it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskTraits:
    """Which masks the model makes and keeps."""

    always: bool
    """It builds a mask even if the kernel's own causal mask would do."""
    for_both_kinds: bool
    """It builds a mask for layers with a sliding window too, even if there are none."""
    by_position: bool
    """It passes the mask to layers as a positional argument, which a reentrant checkpoint saves like any tensor."""
    joins_alibi: bool
    """It adds ALiBi's biases to the mask, which then has numbers for every head."""
    buffer: bool
    """It has a bool buffer [max_position_embeddings, max_position_embeddings]."""
    buffer_per_layer: bool
    """Every layer has such a buffer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowTraits:
    """Which layers have a sliding window. With one kind of layer, all have it or none."""

    layers: Literal["alike", "listed", "every", "pattern", "max_window_layers", "even_max_window_layers", "unrotated"]
    """If not `alike`, each layer has its kind (`layer_types`), and the model makes a mask for each kind. Where a
    configuration lists no kinds, the layers without a window are: none (`listed`); one in `full_attention_every`
    (`every`), or in what `sliding_window_pattern` says (`pattern`); the first `max_window_layers` (of the even layers, and
    all odd ones: `even_max_window_layers`); those that rotate (`unrotated`)."""
    full_attention_every: int
    """One layer in this many has no window; 0: the family has no such pattern."""
    unused_is_none: bool
    """A network in which no layer has the window counts as one without a window."""
    always_lists: bool
    """A configuration without a window must list `layer_types` too: the class would divide by a pattern of 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTraits:
    """The forward of a layer, around attention and feed-forward."""

    norm_after_residual: bool
    """Each sub-layer's output is added to its input before the norm."""
    norms_together: bool
    """A parallel block with two norms computes both before attention."""
    keeps_outputs: bool
    """There is a separate variable for each sub-layer's output."""
    keeps_inputs: bool
    """There is a separate variable for each sub-layer's input, which is not reassigned."""
    adds_in_place: bool
    """A parallel block adds attention's output to the feed-forward's in place."""
    scales_outputs: bool
    """Each sub-layer's output is scaled before it is added."""
    inline_feed_forward: bool
    """The layer runs the feed-forward itself, which is not a module, and reassigns one variable."""
    four_hidden: bool
    """The feed-forward is 4 * hidden_size wide, whatever the configuration says."""
    drops: Literal["both", "feed_forward", "sum"]
    """Whose output the network's dropout is for: of `both` sub-layers, of the `feed_forward` alone, or of the `sum` of the
    two of a parallel block, in whose absence attention's output is dropped with attention's own probability."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearTraits:
    """The matrices of layers."""

    conv1d: bool
    """They are Conv1D, whose `addmm` returns the bias's gradient before the weight's."""
    transposes_weight: bool
    """Its Linear multiplies by `weight.T`, which is not a leaf, so autocast caches no copy of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertTraits:
    """The router of a mixture of experts, and its experts."""

    router_in_float32: bool
    """The router multiplies in fp32."""
    weights: Literal["narrow", "float32"]
    """The dtype of the chosen experts' weights; fp32 weights widen the rows that they multiply."""
    softmax_of_chosen: Literal["", "narrow", "float32"]
    """If not "": the router's softmax is over the chosen experts' logits only, and this is their dtype."""
    divides_by_sum: bool
    """The chosen experts' weights are divided by their sum."""
    clamps: bool
    """Experts clamp gate and up, which are interleaved, before they multiply them."""
    viewed_before_5: bool
    """In transformers before 5, too, all experts of a layer are one parameter, of which each expert reads a view; other
    families' experts were Linears then."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndTraits:
    """Embedding, head and loss."""

    scales_embedding: bool
    """The embedding's output is multiplied by a number."""
    embedding_scales_itself: bool
    """The scaling is inside the embedding module, not in the model's forward."""
    positions_per_sequence: bool
    """Learned positions are looked up for every sequence, not once for all."""
    scales_logits: bool
    """The logits are multiplied by a number."""
    classifier: Literal["score", "pooled", "dense"]
    """How its class for sequences ends: in a Linear over all positions, of which one is used (`score`); in the base
    network's pooler and a Linear (`pooled`); in two Linears over the first position (`dense`)."""
    loss_apart: bool
    """For a class not named `...ForCausalLM`, transformers warns that it does not know the loss, and the warning breaks the
    compiled graph (`modeling_utils.py` loss_function): the loss is a graph of its own. A reference cycle that compiling
    leaves keeps the first step's logits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NameTraits:
    """The last parts of the names of its projections, token table and head, with which users write adapter targets."""

    qkv: str
    q: str
    k: str
    v: str
    out: str
    gate: str
    up: str
    down: str
    gate_up: str
    table: tuple[str, ...]
    """Of the token table; of more than one name, some releases have one and some another, or one table has both."""
    head: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleTraits:
    """Modules: in which order they register their parameters and run, and which libraries find them."""

    norms_first: bool
    """Layers register a norm before the matrices that read it."""
    output_first: bool
    """Attention registers its output projection before the others."""
    experts_first: bool
    """A mixture of experts registers its experts before the router."""
    rotary: bool
    """There is a module that makes rotary tables."""
    dropouts: tuple[str, ...]
    """Which of `attention_dropout`, `hidden_dropout` and `embedding_dropout` are `nn.Dropout`s; the others are numbers that
    the code passes on."""
    run_after: FrozenMapping
    """Module -> the modules without weights that run after it. Most are nn.Dropout, also with probability 0; others call
    the function instead."""
    around_inner: tuple[str, ...]
    """If not empty, there is an outer module around attention and feed-forward, and these are its operations that are
    outside the inner module."""
    reads: FrozenMapping
    """Module -> a module inside it whose weight it reads, and so holds from its begin to its end."""
    final_norm: Literal["found", "found_without_adapters", "not_found"]
    """Whether accelerate finds the last norm among the children of the base model, which it looks up by the prefix of the
    model's class: peft's wrapper has a `model` of its own without a norm, which hides one whose prefix is "model"
    (accelerate 1.15 `fsdp_utils.py` `_find_final_norm`)."""
    gathered_parts: tuple[str, ...]
    """Under tensor parallelism: parts of a layer (`self_attn`, `mlp`) whose split matrices' outputs are gathered at once
    (`base_model_tp_plan`: colwise_gather_output and rowwise_split_input)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LigerTraits:
    """What Liger's kernels do with its layers, where it has kernels."""

    replaces_full_qk_norm: bool
    """Whether it replaces a norm over all heads at once (liger_kernel 0.8 `monkey_patch.py`)."""
    has_rotary: bool
    """Whether it has a kernel for the family's rotary embedding."""
    loss_budget: int
    """How many times larger than the hidden states a chunk's logits are in its fused loss."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LibraryTraits:
    """What other libraries do by the name of the family. Every family's file states these traits itself."""

    peft_targets: tuple[str, ...]
    """The projections that get an adapter if a job names none; empty: peft demands names and raises an error (peft 0.21
    `utils/constants.py` TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING)."""
    peft_adapts_experts: tuple[str, ...]
    """The names of an expert's gate, up and down projections that peft takes, as all-linear, for its stacked experts;
    empty: none (peft 0.21 `utils/transformers_weight_conversion.py` _MOE_TARGET_MODULE_MAPPING, transformers 5.17
    `conversion_mapping.py` _MODEL_TO_CONVERSION_PATTERN)."""
    liger: Literal["none", "layers", "layers_and_loss"]
    """What liger_kernel 0.8.5 patches (`transformers/monkey_patch.py`)."""
    fms_acceleration: bool
    """It has kernels (`framework_plugin_fast_kernels.py` restricted_model_archs)."""
    unsloth: bool
    """unsloth 2025.11.4 has a file for it in `models/`; it compiles other families' own code."""
    deepspeed_leaf: bool
    """ZeRO-3 treats the feed-forward as one module (DeepSpeed 0.19.8 `runtime/zero/leaf_module_config.py`
    DEFAULT_LEAF_MODULE_CLASSES)."""
    torchtitan_compiles_loss: bool
    """torchtitan's own files for its networks compile the loss alone."""


Compiled = Literal[
    "alone",
    "autocast of a whole network",
    "autocast of layers",
    "checkpointing of a whole network",
    "full checkpointing of layers",
    "selective checkpointing of layers",
    "adapters of a whole network",
    "adapters of layers",
    "layers in shards",
    "layers in shards with accelerate",
    "a network in shards with accelerate",
    "float8 of a whole network",
    "float8 of a whole network with checkpointing",
    "float8 in layers",
    "float8 in layers with checkpointing",
    "weights of layers gathered in float8",
]
"""What changes a family's compiled graphs; `alone`: nothing does."""

Difference = Literal[
    "activations offloaded from eager attention or under autocast",
    "adapters under ZeRO-3",
    "autocast",
    "autocast with adapters and checkpointing",
    "checkpointing or offloaded activations",
    "flash attention",
    "generation",
    "generation in float32",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceTraits:
    """How traces of the family's real steps compare with the ledger. Every family's file states these traits itself."""

    unmodelled: str
    """The parts of its networks that the ledger counts as in another family, or not at all: the end of a sentence; "":
    none."""
    differ: tuple[Difference, ...]
    """The settings in which the ledger differs from traces, as findings say; `models/ledger/scope/` has the sizes."""
    tensor_parallel: bool
    """Layers differ from Llama's, and its own `base_model_tp_plan` of transformers 5.17 was compared."""
    compiled: tuple[Compiled, ...]
    """The compiled graphs that were compared (`peakcast verify agreement`, the compiled cells)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One Hugging Face model family."""

    model_type: str
    alike: str
    """The family whose traits it has, as read in `source`, but for those that its own file states; "": it states all."""
    source: str
    config: ConfigRules
    norm: NormTraits
    rotary: RotaryTraits
    attention: AttentionTraits
    eager_attention: EagerAttentionTraits
    masks: MaskTraits
    windows: WindowTraits
    layer: LayerTraits
    linear: LinearTraits
    experts: ExpertTraits
    ends: EndTraits
    names: NameTraits
    modules: ModuleTraits
    liger: LigerTraits
    libraries: LibraryTraits
    traces: TraceTraits
