"""Finds the keys of a `config.json` that no rule reads: if a shape depends on one of them, the network would be read
wrongly."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

HARMLESS = re.compile(
    # transformers' PretrainedConfig (5.17 configuration_utils.py), and how a network is made, stored or sampled from
    r"architectures|auto_map|name|_\w+|model_type|\w*dtype|transformers(\.js)?\w*|\w*_version|chunk_size_feed_forward"
    r"|\w*initializer_(range|factor)|init_(std|device|method|fn|config)|id2label|label2id|num_labels|problem_type"
    r"|output_(attentions|hidden_states|router_logits|past)|return_dict\w*|use_cache|\w*token_(id|ids|index)|is_(encoder_)?decoder"
    r"|(task_specific|generation|quantization|compression)_(params|config)|torchscript|pruned_heads|cross_attention_hidden_size"
    r"|finetuning_task|prefix|tokenizer_class|sep_token\w*|(use_)?bfloat16|summary_\w+|classifier_\w+|num_logits_to_keep|seq_length"
    r"|max_(length|new_tokens)|min_length|top_(k|p)|temperature|do_sample|(no_)?repeat\w*|length_penalty|num_(beams|return)\w*"
    r"|unsloth\w*|pretraining_tp|rope_\w+|rotary\w*|partial_rotary_factor|original_max_position_embeddings|max_seq_len\w*|n_ctx"
    r"|alibi\w*|attn_impl\w*|attn_uses_sequence_id|model_max_length|hidden_size|mamba_(d_head|hidden_act)|expand"
    r"|moe_shared_expert_overlap|mtp_layers_block_type"
    # numbers that scale a tensor, or only say how a router or a mixer counts: they change no shape
    r"|\w*(eps|epsilon|multiplier|multipliers|scaling|scale|softcapping|scalar)|norm_topk_prob|topk_\w+|n_group|num_expert_group"
    r"|\w*aux_loss\w*|\w*z_loss\w*|\w*jitter\w*|moe_loss_weight|moe_normalize_expert_weights|router_\w+|scoring_func|seq_aux"
    r"|routed_scaling_factor|time_step\w*|\w*chunk_size|mamba_ssm_cache_dtype|rescale_prenorm_residual|use_mamba\w*"
    r"|use_associative_scan|mamba_norm_before_gate|scale_\w+|relative_attention_max_distance|initializer\w*"
    r"|layer_types|\w*window\w*|max_window_layers|no_rope_\w+|attention_(types|layers)|query_pre_attn_scalar|residual_in_fp32"
    r"|reorder_and_upcast_attn|attention_softmax_in_fp32|slow_but_exact|learned_pos_emb|dense_act_fn|is_gated_act"
    r"|tie_word_embeddings|hidden_act|activation\w*|mlp_only_layers|resid_pdrop|\w*dropout\w*|\w*_pdrop|embd_pdrop|layerdrop"
    r"|num_key_value_heads|qk_head_dim|embedding_fraction|norm_type|\w*_bias|bias"
)
"""Keys that change no tensor's size, whatever their value, or that are read in more than one way."""
OF_FAMILIES = re.compile(r"num_local_experts|n_shared_experts|intermediate_size|head_dim")
"""Further names of sizes, which known families have in addition to the keys that are read."""
ONLY_AS: dict[str, tuple[Any, ...]] = {
    "add_cross_attention": (False, None),
    "clip_qkv": (None,),
    "pretraining_tp": (1, None),
    "layerdrop": (0, 0.0, None),
    "use_bidirectional_attention": (False, None),
    "apply_residual_connection_post_layernorm": (False, None),
    "qk_ln": (False, None),
    "prefix_lm": (False, None),
    "attn_type": ("multihead_attention", None),
}
"""Keys that change what a layer computes, unless they have these values; families whose rules read them model them."""
_NOT_INSIDE = re.compile(
    r"\w*rope\w*|id2label|label2id|(quantization|vision|audio|text|generation|compression)_\w+|task_\w+|auto_map"
)


class TrackedMapping(dict[str, Any]):
    """A configuration that records which of its keys were read."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__(
            {
                key: TrackedMapping(value) if isinstance(value, Mapping) and not _apart(key) else value
                for key, value in values.items()
            }
        )
        self.asked: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        """As in any mapping; the key is recorded."""
        self.asked.add(key)
        return super().get(key, default)

    def __getitem__(self, key: str) -> Any:
        self.asked.add(key)
        return super().__getitem__(key)

    def __contains__(self, key: object) -> bool:
        self.asked.add(str(key))
        return super().__contains__(key)


class Unread(NamedTuple):
    """The keys of a configuration that were not read."""

    keys: tuple[str, ...]
    """Unknown keys; those of an inner mapping with its path."""
    deviating: tuple[str, ...]
    """Known keys that were not read and do not have their usual value: "clip_qkv=8"."""


def unread(seen: TrackedMapping, *, known: bool) -> Unread:
    """The keys of a configuration that were not read and may matter; `known`: whether its family is known."""
    left = dict(_left(seen))
    patterns = (HARMLESS, OF_FAMILIES) if known else (HARMLESS,)
    keys = tuple(
        path
        for path in sorted(left)
        if _name(path) not in ONLY_AS and not any(pattern.fullmatch(_name(path)) for pattern in patterns)
    )
    deviating = (path for path, value in left.items() if _name(path) in ONLY_AS and value not in ONLY_AS[_name(path)])
    return Unread(keys, tuple(f"{path}={left[path]!r}" for path in sorted(deviating)))


def _left(seen: TrackedMapping, prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in seen.items():
        if isinstance(value, TrackedMapping):
            yield from _left(value, f"{prefix}{key}.")
        elif key not in seen.asked and value is not None:
            yield f"{prefix}{key}", value


def _name(path: str) -> str:
    return path.rpartition(".")[2]


def _apart(key: object) -> bool:
    """Whether the mapping at `key` is read separately, or is not part of the network."""
    return _NOT_INSIDE.fullmatch(str(key)) is not None
