"""nanotron's networks: `model.model_config` with Hugging Face's names, and its experts.

Source: nanotron 0.4 and main (2025) src/nanotron/config/models_config.py (LlamaConfig, Qwen2Config, Starcoder2Config,
MoEConfig), models/llama.py, models/qwen.py, models/starcoder2.py, nn/moe.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from peakcast.core.errors import SpecError
from peakcast.core.units import round_up
from peakcast.dialects.common.job_file import resolve_architecture
from peakcast.dialects.common.translation import Settings, note_unsupported, words
from peakcast.jobs.architecture import Architecture

PREFIX = "model.model_config."
EXPERTS = f"{PREFIX}moe_config."
FAMILIES = {"is_llama_config": "llama", "is_qwen2_config": "qwen2", "is_starcoder2_config": "starcoder2"}
SAME_NAMES = words(
    "hidden_size intermediate_size max_position_embeddings num_attention_heads num_hidden_layers num_key_value_heads "
    "vocab_size hidden_act tie_word_embeddings sliding_window"
)
OTHER_NAMES = {
    "activation_function": "hidden_act", "attn_pdrop": "attention_dropout", "embd_pdrop": "embedding_dropout",
    "num_kv_heads": "num_key_value_heads", "resid_pdrop": "residual_dropout", "sliding_window_size": "sliding_window",
}  # fmt: skip
"""nanotron's key -> Hugging Face's."""
LLAMA = {
    "hidden_size": 4096, "intermediate_size": 11008, "max_position_embeddings": 2048, "num_attention_heads": 32,
    "num_hidden_layers": 32, "vocab_size": 32000, "tie_word_embeddings": False,
}  # fmt: skip
DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": LLAMA,
    "qwen2": LLAMA,
    "starcoder2": {
        "hidden_size": 2048, "max_position_embeddings": 4096, "num_attention_heads": 16, "num_hidden_layers": 24,
        "vocab_size": 49280, "attention_dropout": 0.1, "embedding_dropout": 0.1, "residual_dropout": 0.1,
    },
}  # fmt: skip
"""Defaults of the family's config class for absent keys."""
WITHOUT_MEMORY = words(
    "bos_token_id eos_token_id pad_token_id initializer_range pretraining_tp rms_norm_eps layer_norm_epsilon use_cache "
    "rope_theta rope_interleaved interleaved_rotary z_loss_coefficient attention_softmax_in_fp32 use_rotary_embeddings "
    "scale_attention_softmax_in_fp32 scale_attn_weights use_position_embeddings _use_doc_masking _use_qkv_packed "
    "_fused_rms_norm _fused_rotary_emb"
)
WITHOUT_MEMORY_OF_EXPERTS = words(
    "router_aux_loss_coef moe_z_loss_coeff moe_router_pre_softmax router_load_balancing_type moe_router_score_function "
    "moe_router_topk_scaling_factor moe_token_drop_policy moe_router_num_groups moe_router_group_topk router_jitter_noise "
    "output_router_logits moe_router_dtype moe_impl grouped_gemm_imple use_torch_permute use_haojun_permute permute_fusion "
    "gradient_accumulation_fusion disable_parameter_transpose_cache bias_activation_fusion rotary_base "
    "rotary_scaling_factor max_position_embeddings"
)
UNSUPPORTED = {
    f"{PREFIX}z_loss_enabled": "the z-loss",
    f"{PREFIX}no_rope_layer": "leaving the rotary embedding out of some layers",
    f"{PREFIX}global_attn_layers": "attention of one head in some layers (MQA) and of all in others",
    f"{PREFIX}flex_attention_mask": "a mask of flex attention",
    f"{EXPERTS}moe_expert_capacity_factor": "a capacity of experts",
    f"{EXPERTS}moe_pad_expert_input_to_capacity": "padding of experts to their capacity",
    f"{EXPERTS}moe_router_expert_bias": "the experts' correction bias",
    f"{EXPERTS}input_jitter_eps": "noise on the router's input",
    f"{EXPERTS}num_shared_experts": "a number of shared experts",
}


def nanotron_architecture(settings: Settings, tensor: int) -> Architecture:
    """The network of `model.model_config`, with its vocabulary padded as in nanotron. Raises: SpecError."""
    chosen = [name for key, name in FAMILIES.items() if settings.switch(PREFIX + key)]
    if not chosen:
        raise SpecError(
            f"model.model_config must be of a known family ({', '.join(FAMILIES)}: true); give the network by --model.",
            parameter="model.model_config",
        )
    family = chosen[0]
    given = {name: settings.raw(PREFIX + name) for name in sorted(SAME_NAMES)}
    given |= {name: settings.raw(PREFIX + key) for key, name in OTHER_NAMES.items() if settings.given(PREFIX + key)}
    config = DEFAULTS[family] | {name: value for name, value in given.items() if value is not None}
    if family == "starcoder2":
        has_one_key_head = settings.switch(PREFIX + "multi_query") or not settings.switch(PREFIX + "grouped_query")
        key_heads = {"num_key_value_heads": 1} if has_one_key_head else {}
        config = {"intermediate_size": 4 * config["hidden_size"]} | config | key_heads
    else:
        config.setdefault("num_key_value_heads", config["num_attention_heads"])
    config["vocab_size"] = _padded(settings, config["vocab_size"], tensor)
    sliding = {"use_sliding_window": True, "max_window_layers": 0} if config.get("sliding_window") else {}
    routed = any(key.startswith(EXPERTS) for key in settings.left())
    config |= _experts(settings, config) if routed else {}
    name = f"nanotron-{config['num_hidden_layers']}-layers-{config['hidden_size']}"
    described = resolve_architecture({"name": name, "model_type": "qwen2_moe" if routed else family, **sliding, **config})
    settings.notes.assumptions.append(
        "nanotron's layers are treated as Hugging Face's: its fused RMSNorm and rotary embedding keep less than those."
    )
    note_unsupported(settings, UNSUPPORTED)
    _note_ignored(settings)
    if family == "starcoder2":
        return described
    biased = settings.switch(f"{PREFIX}attention_bias")  # only of query, key and value
    described = replace(described, attention_bias=biased, attention_output_bias=False)
    return _with_routed_layers(settings, described) if routed else described


def _padded(settings: Settings, size: object, tensor: int) -> object:
    multiple = settings.size("model.make_vocab_size_divisible_by", 1) * tensor
    if not isinstance(size, int) or size <= 0 or size % multiple == 0:
        return size
    padded = round_up(size, multiple)
    settings.notes.assumptions.append(f"vocab_size {size:,} is padded to {padded:,}, as nanotron does.")
    return padded


def _experts(settings: Settings, config: Mapping[str, Any]) -> dict[str, Any]:
    """`moe_config` as the keys of Qwen2-MoE, which nanotron's layer imitates."""
    width = settings.size(f"{PREFIX}intermediate_size", config["intermediate_size"])
    shared = settings.switch(f"{EXPERTS}enable_shared_expert")
    for key, counts in (("moe_hidden_size", True), ("shared_expert_hidden_size", shared)):
        if settings.raw(EXPERTS + key, config["hidden_size"]) != config["hidden_size"] and counts:
            rule = f"must be hidden_size={config['hidden_size']}: experts of another width are not modelled"
            raise settings.refuse(EXPERTS + key, rule)
    if not settings.given(f"{EXPERTS}moe_intermediate_size"):
        settings.notes.assumptions.append(
            f"{EXPERTS}moe_intermediate_size is not given; intermediate_size={width} is assumed, as nanotron did at first."
        )
    shared_width = settings.size(f"{EXPERTS}shared_expert_intermediate_size", width)
    settings.notes.assumptions.append(
        "nanotron's experts (two grouped products, gate and up in one) are treated as those of Hugging Face's Qwen2-MoE."
    )
    settings.one_of(f"{EXPERTS}token_dispatcher_type", "alltoall", ("alltoall", "allgather"))
    return {
        "num_experts": settings.size(f"{EXPERTS}num_experts", 8, assume=True),
        "num_experts_per_tok": settings.size(f"{EXPERTS}top_k", 2, assume=True),
        "moe_intermediate_size": settings.size(f"{EXPERTS}moe_intermediate_size", width),
        "shared_expert_intermediate_size": shared_width if shared else 0,
    }


def _with_routed_layers(settings: Settings, architecture: Architecture) -> Architecture:
    """`architecture` with the routed layers of `moe_config.layers`, which has their indices; [-1] means all. Raises:
    SpecError for a pattern that an `Architecture` cannot express."""
    key = f"{EXPERTS}layers"
    layers, count = settings.raw(key, [-1]), architecture.num_hidden_layers
    wanted = set(range(count)) if layers == [-1] else set(layers) if isinstance(layers, list) else None
    if architecture.moe is None or wanted is None:
        raise settings.refuse(key, "must be a list of layers")
    moe = replace(architecture.moe, shared_expert_gate=bool(architecture.moe.shared_expert_intermediate_size))
    for dense in range(count):
        for frequency in range(1, count - dense + 1):
            pattern = replace(moe, first_k_dense_replace=dense, moe_layer_freq=frequency)
            found = replace(architecture, moe=pattern)
            if {layer for layer in range(count) if found.is_moe_layer(layer)} == wanted:
                return found
    raise settings.refuse(key, "is not a dense start followed by every n-th layer: other patterns are not modelled")


def _note_ignored(settings: Settings) -> None:
    known = {PREFIX + name for name in WITHOUT_MEMORY} | {EXPERTS + name for name in WITHOUT_MEMORY_OF_EXPERTS}
    for key in settings.left():
        if key in known or key.startswith(f"{PREFIX}rope_scaling."):
            settings.raw(key)
            settings.notes.ignored.append(key)
