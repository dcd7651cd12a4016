"""Reads the mapping of a Hugging Face `config.json` into an `Architecture`, by the rules of its family."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any

from peakcast.core.errors import SpecError
from peakcast.core.fields import flat
from peakcast.jobs.architecture import MOST_ELEMENTS, MOST_LAYERS, Architecture, MixtureOfExperts, MultiLatentAttention
from peakcast.networks.families import counted_as, family, language_defaults, other_kinds
from peakcast.networks.rotary import read_rotary
from peakcast.networks.rules import REQUIRED, Choice, ConfigRules, Key, Product, Rules, TomlTable
from peakcast.networks.undescribed import given_labels, is_traced, kept_configuration, undescribed
from peakcast.networks.unread import TrackedMapping, Unread, unread
from peakcast.networks.windows import read_windows

LLAMA_KEYS = (
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "intermediate_size",
    "vocab_size",
    "rms_norm_eps",
    "hidden_act",
)
"""Keys by which an unknown `model_type` is recognised as similar to Llama."""

FOREIGN_KEYS = re.compile(
    r"(\w+\.)*(moe_\w+|\w*num_(local_|routed_|shared_)?experts\w*|n_(routed_|shared_)?experts|(kv|q)_lora_rank|vision_config"
    r"|audio_config|num_decoder_layers|\w*state_size|(mamba|ssm)_\w+|\w*d_state|linear_num_\w+|attn_layer_period|conv_L_cache"
    r"|ffn_config|attn_config)(\.\w+)*"
)
"""Keys, at any depth, of shapes that Llama does not have; with one of them, an unknown `model_type` is not similar to
Llama."""

_OTHER_NAMES = {
    "hidden_size": ("hidden_size", "n_embd", "d_model"),
    "num_hidden_layers": ("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    "num_attention_heads": ("num_attention_heads", "n_head", "n_heads", "num_heads"),
    "max_position_embeddings": ("max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"),
}
"""Names that transformers' `attribute_map`s treat as equal; the family's own name is tried first."""

_CLASSIFIER = re.compile(r".*For(SequenceClassification|TokenClassification|QuestionAnswering)")
_HEADS = {
    "sequence_classifier": "ForSequenceClassification",
    "token_classifier": "ForTokenClassification",
}
"""What the names of classes with such a head end in."""
_FLAGS = {"tie_word_embeddings", "attention_bias", "attention_output_bias", "mlp_bias", "lm_head_bias", "parallel_block"}
_PROBABILITIES = {"attention_dropout", "hidden_dropout", "embedding_dropout"}
_TEXTS = {"hidden_act"}
_MAY_BE_ZERO = {
    "max_position_embeddings",
    "num_nextn_predict_layers",
    "type_vocab_size",
    "first_k_dense_replace",
    "shared_expert_intermediate_size",
    "product",
}


def architecture_from_hf_config(config: Mapping[str, Any], name: str | None = None) -> Architecture:
    """The `Architecture` that the mapping of a Hugging Face `config.json` describes.

    `name` (or the mapping's own "name") appears in messages and reports. For a multimodal configuration, its `text_config`
    is read; the architecture is marked `kind="multimodal"` and contains the whole configuration, so that recipes can be
    recorded.
    Raises: SpecError naming the key, its value, the rule and the way out.
    """
    return read_hf_config(config, name)[0]


def left_out_of(config: Mapping[str, Any]) -> Unread:
    """The keys of a `config.json`'s mapping that no `Architecture` has and that may matter. Raises: SpecError."""
    return read_hf_config(config)[1]


def is_unknown(config: Mapping[str, Any]) -> bool:
    """Whether a `config.json` belongs to no known family."""
    return isinstance(config.get("model_type"), str) and family(config["model_type"]) is None


def read_hf_config(config: Mapping[str, Any], name: str | None = None) -> tuple[Architecture, Unread]:
    """The `Architecture` of a configuration, and the keys that it leaves out. Raises: SpecError."""
    _check_describes_network(config)
    config = _with_defaults(config)
    language, multimodal = _language_part(config)
    seen = TrackedMapping(language)
    model_type = seen.get("model_type")
    known = not isinstance(model_type, str) or family(model_type) is not None  # other types are refused below
    if not known and (is_traced() or not _is_like_llama(model_type, language)):
        return undescribed(config, name), Unread((), ())
    reads = _rules_of(model_type)
    called = name or config.get("name") or config.get("_name_or_path") or model_type
    values = _read(reads.rules, seen)
    _check_demands(reads, seen)
    if reads.moe is not None:
        values["moe"] = _read(reads.moe, seen)
    if reads.adjust is not None:
        reads.adjust(seen, values)
    if "refusal" in values:
        key, value, rule = values["refusal"]
        raise _refuse(key, value, f"must be {rule}", "other patterns are not modelled; trace it instead")
    _complete(values, seen)
    read_windows(seen, values)
    read_rotary(seen, values)
    if values.get("moe") is not None:
        values["moe"] = _experts(values["moe"])
    if reads.mla is not None:
        values |= _latent_attention(_read(reads.mla, seen), values)
    values |= _head(seen)
    if multimodal:
        values["kind"] = "multimodal"
    if multimodal or not known:  # recipes are recorded from it
        values["configuration"] = kept_configuration(config)
    return Architecture(name=str(called), model_type=str(model_type), **values), unread(seen, known=known)


def _check_describes_network(config: object) -> None:
    """Refuse what is no configuration of a network."""
    if not isinstance(config, Mapping):
        raise SpecError(
            f"the configuration must be a mapping of keys to values (a parsed config.json), not {type(config).__name__}.",
            value=config,
        )
    if "peft_type" in config and "model_type" not in config:
        raise SpecError(
            f"architecture is an adapter of peft (adapter_config.json), which is no network; give its base model, "
            f"{config.get('base_model_name_or_path')!r} (base_model_name_or_path), and the adapter as finetuning.",
            parameter="architecture",
        )


def _with_defaults(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """`config`, whose `text_config` says the sizes that it leaves to its class."""
    text = config.get("text_config")
    if not isinstance(text, Mapping) or not (defaults := language_defaults(text.get("model_type"))):
        return config
    return {**config, "text_config": {**defaults, **text}}


def _language_part(config: Mapping[str, Any]) -> tuple[Mapping[str, Any], bool]:
    """The keys of the language model, and whether the network has other parts."""
    text = config.get("text_config")
    multimodal = any(isinstance(config.get(key), Mapping) for key in ("vision_config", "audio_config"))
    if not isinstance(text, Mapping):
        return config, multimodal
    shared = {key: config[key] for key in ("model_type", "tie_word_embeddings") if config.get(key) is not None}
    return {**shared, **text}, multimodal


def _rules_of(model_type: object) -> ConfigRules:
    """The rules for reading a configuration: its family's, or Llama's."""
    if model_type is None:
        raise SpecError(
            'model_type is required and missing; a config.json names its family there, for example "model_type": "llama".',
            parameter="model_type",
        )
    if not isinstance(model_type, str):
        raise _refuse("model_type", model_type, "must be a text", "for example 'llama'")
    return counted_as(model_type).config


def _is_like_llama(model_type: str, config: Mapping[str, Any]) -> bool:
    """Whether the keys of a network of an unknown family are enough to treat it like Llama."""
    foreign = any(value and FOREIGN_KEYS.fullmatch(key) for key, value in flat(config).items())
    return model_type not in other_kinds() and not foreign and all(config.get(key) is not None for key in LLAMA_KEYS)


def _check_demands(reads: ConfigRules, config: Mapping[str, Any]) -> None:
    for key, allowed in reads.demands.items():
        value = config.get(key, allowed)
        if value is not None and value != allowed:
            raise _refuse(key, value, f"must be {allowed!r}".lower(), "the variant is not modelled; trace it instead")
    projected = config.get("word_embed_proj_dim")
    if projected is not None and projected != config.get("hidden_size"):
        raise _refuse(
            "word_embed_proj_dim", projected, "must equal hidden_size", "projected embeddings are not modelled; trace it"
        )


# -- rules to values --------------------------------------------------------------------------------------------------


def _read(rules: Rules, config: Mapping[str, Any]) -> TomlTable:
    """The value of every field that `rules` names."""
    return {field: _value(field, rule, config) for field, rule in rules.items()}


def _value(field: str, rule: Any, config: Mapping[str, Any]) -> Any:
    if isinstance(rule, Key):
        if rule.only_if is not None and not _flag(rule.only_if, config.get(rule.only_if), False):
            return None
        key, value = _lookup(field, rule, config)
        return None if value is None else _checked(field, key, value)
    if isinstance(rule, Choice):
        return rule.when_true if _flag(rule.name, config.get(rule.name), rule.default) else rule.when_false
    if isinstance(rule, Product):
        left, right = (_value("product", key, config) for key in (rule.left, rule.right))
        return (left or 0) * (right or 0)
    return rule


def _lookup(field: str, rule: Key, config: Mapping[str, Any]) -> tuple[str, Any]:
    """(the key that was found, its value), or (the family's key, its default)."""
    for key in (rule.name, *_OTHER_NAMES.get(field, ())):
        found, value = _descend(config, key)
        if found and (value is not None or rule.nullable):
            return key, value
    if rule.default is REQUIRED:
        raise SpecError(
            f"{rule.name} is required and missing from the configuration of model_type={config.get('model_type')!r}; "
            "copy it from the network's config.json.",
            parameter=rule.name,
        )
    return rule.name, rule.default


def _descend(config: Mapping[str, Any], path: str) -> tuple[bool, Any]:
    value: Any = config
    for part in path.split("."):
        if not isinstance(value, Mapping) or part not in value:
            return False, None
        value = value[part]
    return True, value


def _checked(field: str, key: str, value: Any) -> Any:
    if field in _FLAGS:
        return _flag(key, value, False)
    if field in _TEXTS:
        if isinstance(value, str):
            return value
        raise _refuse(key, value, "must be a text", "for example 'silu'")
    if field in _PROBABILITIES:
        return _probability(key, value)
    if field == "final_logit_softcapping":
        return _number(key, value)
    return _whole_number(field, key, value)


def _head(config: Mapping[str, Any]) -> TomlTable:
    """The head of the class that `architectures` names, if it is a classifier's: a span's begin and end are two classes of
    each token."""
    named = config.get("architectures")
    name = str(named[0]) if isinstance(named, (list, tuple)) and named else ""
    found = _CLASSIFIER.fullmatch(name)
    if found is None:
        return {}
    head = "sequence_classifier" if found[1] == "SequenceClassification" else "token_classifier"
    return {"head": head, "num_labels": _whole_number("num_labels", "num_labels", given_labels(config))}


def head_keys(architecture: Architecture) -> TomlTable:
    """The keys that `_head` reads as the head of `architecture`."""
    if architecture.head == "language_model":
        return {}
    return {"architectures": [_HEADS[architecture.head]], "num_labels": architecture.num_labels}


def _flag(key: str, value: Any, default: bool) -> bool:
    if value is None:
        return default
    if isinstance(value, bool):
        return value
    raise _refuse(key, value, "must be true or false", "write it without quotes")


def _number(key: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise _refuse(key, value, "must be a finite number", "write it without quotes")
    return float(value)


def _probability(key: str, value: Any) -> float:
    number = _number(key, value)
    if not 0 <= number < 1:
        raise _refuse(key, value, "must be at least 0 and below 1", "use 0.0 for no dropout")
    return number


def _whole_number(field: str, key: str, value: Any) -> int:
    least = 0 if field in _MAY_BE_ZERO else 1
    most = MOST_LAYERS if field == "num_hidden_layers" else MOST_ELEMENTS
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value % 1:
        raise _refuse(key, value, "must be a whole number", f"write it without quotes, at least {least}")
    if not least <= value <= most:
        raise _refuse(key, value, f"must be from {least} to {most:,}", "correct it")
    return int(value)


# -- fields that follow from others -------------------------------------------------------------------------------------


def _complete(values: TomlTable, config: Mapping[str, Any]) -> None:
    """Fill in values that the configuration leaves to defaults: head width, key-value heads, a feed-forward of
    4·hidden_size."""
    hidden, heads = values["hidden_size"], values["num_attention_heads"]
    if values["num_key_value_heads"] is None:
        values["num_key_value_heads"] = heads
    if values["intermediate_size"] is None:
        values["intermediate_size"] = 4 * hidden
    if values["head_dim"] is None:
        if hidden % heads:
            raise SpecError(
                f"num_attention_heads={heads} does not divide hidden_size={hidden} and the configuration of "
                f"model_type={config.get('model_type')!r} gives no head_dim; use a divisor of {hidden}"
                f"{' or give head_dim' if _reads_head_dim(config) else ''}.",
                parameter="num_attention_heads",
                value=heads,
            )
        values["head_dim"] = hidden // heads
    for unset in [key for key, value in values.items() if value is None and key not in ("moe", "sliding_window")]:
        if unset != "final_logit_softcapping":
            del values[unset]


def _reads_head_dim(config: Mapping[str, Any]) -> bool:
    return isinstance(counted_as(str(config.get("model_type"))).config.rules.get("head_dim"), Key)


def _experts(values: TomlTable) -> MixtureOfExperts | None:
    """The routed feed-forward; None if the configuration has no experts (dense DeepSeek)."""
    if values["num_experts"] is None:
        return None
    if values["num_experts_per_tok"] is None:
        raise SpecError(
            "num_experts_per_tok is required and missing; copy it from the network's config.json.",
            parameter="num_experts_per_tok",
        )
    return MixtureOfExperts(**values)


def _latent_attention(mla: TomlTable, values: TomlTable) -> TomlTable:
    """MLA's fields: a query head is as wide as its two parts together, and every query head has its own key and value."""
    return {
        "mla": MultiLatentAttention(**mla),
        "head_dim": mla["qk_nope_head_dim"] + mla["qk_rope_head_dim"],
        "num_key_value_heads": values["num_attention_heads"],
    }


def _refuse(key: str, value: object, rule: str, way_out: str) -> SpecError:
    return SpecError(f"{key}={value!r} {rule}; {way_out}.", parameter=key, value=value)
