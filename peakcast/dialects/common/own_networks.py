"""Networks that a training library implements itself, and the arguments from which it builds them.

An `Architecture` says how transformers' code of a network is written. LitGPT and torchtune have code of their own for
networks of the same shapes; its tensors are not described here but recorded from the library as installed. This module only
has the arguments from which a job's library builds the network.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from functools import cache, lru_cache
from importlib import resources
from typing import Any

from peakcast.core.fields import FrozenMapping
from peakcast.jobs.architecture import Architecture
from peakcast.jobs.spec import TrainingJob, canonical_json
from peakcast.networks.families import family, family_of
from peakcast.networks.rotary import rotated_width

SIZES = (
    *("name", "model_type", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
    *("intermediate_size", "vocab_size", "max_position_embeddings", "moe"),
)
"""Fields that are copied from the description of transformers' network: sizes that are shown to the user, and the number of
experts."""
LITGPT, TORCHTUNE, TRANSFORMERS = "litgpt", "torchtune", "transformers"
BUILDER = "builder"
"""The key of a configuration that names torchtune's function; its other keys are that function's arguments."""


def library_of(job: TrainingJob) -> str:
    """The package that implements the networks that `job` trains. Jobs of lightning-thunder's benchmark count as
    transformers': it runs LitGPT's networks in another loop."""
    if job.framework != "torch" or "lightning_thunder" in job.versions:
        return TRANSFORMERS
    return next((library for library in (LITGPT, TORCHTUNE) if library in job.versions), TRANSFORMERS)


def own_network(job: TrainingJob) -> Architecture | None:
    """The network of `job` with the configuration from which its library builds it; None if the library uses transformers',
    or if peakcast cannot describe the network to it."""
    library = library_of(job)
    if library == TRANSFORMERS:
        return None
    return _own(job.architecture, library)


@lru_cache(maxsize=1024)
def _own(architecture: Architecture, library: str) -> Architecture | None:
    if architecture.configuration:
        return architecture  # made by this function before
    if architecture.kind != "decoder" or family(architecture.model_type) is None:
        return None
    arguments = (litgpt_config if library == LITGPT else torchtune_arguments)(architecture)
    if arguments is None:
        return None
    return Architecture(
        **{name: getattr(architecture, name) for name in SIZES}, configuration=canonical_json(arguments), kind="undescribed"
    )


def of_any_release(job: TrainingJob) -> TrainingJob:
    """`job` without the releases that it names, but with the library whose own networks it trains."""
    library = library_of(job)
    return job.replace(versions=FrozenMapping({} if library == TRANSFORMERS else {library: "main"}))


def as_trained_by_library(job: TrainingJob) -> TrainingJob:
    """`job` with its library's own network, if it has one."""
    own = own_network(job)
    if own is None:
        return job
    return job.replace(architecture=own, versions=FrozenMapping({library_of(job): "main"}))


def _is_unlike_litgpt(architecture: Architecture) -> bool:
    """Whether the network has a part that LitGPT's cannot have."""
    known = family_of(architecture)
    gelu = architecture.hidden_act.startswith("gelu")
    unlike = (
        architecture.mla is not None or architecture.ssm is not None or bool(architecture.layer_types),
        architecture.position_embedding != "rope" or architecture.embedding_norm or architecture.attention_sinks,
        architecture.normalization not in ("rmsnorm", "layernorm"),
        architecture.qk_norm not in ("none", "head", "full"),
        architecture.attention_output_bias != architecture.mlp_bias and architecture.moe is None,
        known.layer.scales_outputs or known.ends.scales_logits,
        not gelu and not (architecture.gated_mlp and architecture.hidden_act == "silu"),
    )
    return any(unlike)


def litgpt_config(architecture: Architecture) -> dict[str, Any] | None:
    """The fields of LitGPT's `Config` (litgpt 0.5.13 config.py) for a network of this shape; None if LitGPT cannot build
    it. When it finetunes, LitGPT never ties the tables."""
    known = family_of(architecture)
    gelu = architecture.hidden_act.startswith("gelu")
    if _is_unlike_litgpt(architecture):
        return None
    moe = architecture.moe
    feed_forward = "LLaMAMoE" if moe else "GptNeoxMLP" if not architecture.gated_mlp else "GemmaMLP" if gelu else "LLaMAMLP"
    config: dict[str, Any] = {
        "block_size": architecture.max_position_embeddings or 4096,
        "n_layer": architecture.num_hidden_layers,
        "n_embd": architecture.hidden_size,
        "padded_vocab_size": architecture.vocab_size,
        "n_head": architecture.num_attention_heads,
        "head_size": architecture.head_dim,
        "n_query_groups": architecture.num_key_value_heads,
        "intermediate_size": architecture.intermediate_size,
        "norm_class_name": "RMSNorm" if architecture.normalization == "rmsnorm" else "LayerNorm",
        "parallel_residual": architecture.parallel_block,
        "shared_attention_norm": architecture.parallel_block and architecture.norms_per_parallel_block == 1,
        "bias": architecture.mlp_bias,
        "lm_head_bias": architecture.lm_head_bias,
        "mlp_class_name": feed_forward,
        "gelu_approximate": "none" if architecture.hidden_act == "gelu" or not gelu else "tanh",
        "rotary_percentage": rotated_width(architecture) / architecture.head_dim,
        "scale_embeddings": known.ends.scales_embedding,
    }
    if moe is not None:
        config |= {"n_expert": moe.num_experts, "n_expert_per_token": moe.num_experts_per_tok}
        config["intermediate_size"] = moe.moe_intermediate_size
    return config | _of_later_releases(architecture)


def _of_later_releases(architecture: Architecture) -> dict[str, Any]:
    """The fields that were added to LitGPT's `Config` since 0.4.2, if the network needs them."""
    placement = architecture.norm_placement
    fields: dict[str, Any] = {
        "attn_bias": architecture.attention_bias and not architecture.mlp_bias,
        "norm_qk": architecture.qk_norm != "none",
        "norm_qk_type": "olmo2" if architecture.qk_norm == "full" else None,
        "post_attention_norm": placement != "pre",
        "post_mlp_norm": placement != "pre",
        "sliding_window_size": architecture.sliding_window,
    }
    found = {name: value for name, value in fields.items() if value}
    return found | ({"norm_1": False, "norm_2": False} if placement == "post" else {})


@cache
def torchtune_families() -> Mapping[str, Mapping[str, Any]]:
    """Family -> what the catalog says of torchtune's function for its networks (`catalog/torchtune.toml`)."""
    text = resources.files("peakcast").joinpath("catalog", "torchtune.toml").read_text(encoding="utf-8")
    found: dict[str, Mapping[str, Any]] = tomllib.loads(text)["families"]
    return found


def torchtune_arguments(architecture: Architecture) -> dict[str, Any] | None:
    """The arguments of torchtune's function for a network of this shape; None if it has none."""
    known = torchtune_families().get(architecture.model_type)
    if known is None:
        return None
    tied, told_width = architecture.tie_word_embeddings, bool(known.get("told_head_dim"))
    if not told_width and architecture.query_size != architecture.hidden_size:
        return None
    return {
        BUILDER: known.get("tied", known["builder"]) if tied else known["builder"],
        "vocab_size": architecture.vocab_size,
        "num_layers": architecture.num_hidden_layers,
        "num_heads": architecture.num_attention_heads,
        "num_kv_heads": architecture.num_key_value_heads,
        **({"head_dim": architecture.head_dim} if told_width else {}),
        "embed_dim": architecture.hidden_size,
        "intermediate_dim": architecture.intermediate_size,
        "max_seq_len": architecture.max_position_embeddings or 4096,
        "tie_word_embeddings": tied,
    }
