"""Turns an `Architecture` back into the mapping of a Hugging Face `config.json`, by the same rules of its family."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from peakcast.core.errors import SpecError
from peakcast.jobs.architecture import Architecture
from peakcast.networks.config import architecture_from_hf_config, head_keys
from peakcast.networks.families import family
from peakcast.networks.rotary import rotary_key
from peakcast.networks.rules import Choice, Key, Product, Rules
from peakcast.networks.windows import window_keys


def hf_config_of(architecture: Architecture) -> dict[str, Any]:
    """A configuration that `architecture_from_hf_config` reads as `architecture` (except its name).

    Raises: SpecError when the family cannot express the architecture.
    """
    known = family(architecture.model_type)
    if known is None:
        raise SpecError(
            f"model_type={architecture.model_type!r} is not a family of the catalog, so {architecture.name!r} cannot be "
            "built; use a known model_type.",
            parameter="model_type",
            value=architecture.model_type,
        )
    rules = known.config
    config: dict[str, Any] = {"model_type": architecture.model_type, **dict(rules.demands)}
    _fill(config, rules.rules, architecture)
    if rules.moe is not None and architecture.moe is not None:
        _fill(config, rules.moe, architecture.moe)
    if rules.mla is not None and architecture.mla is not None:
        _fill(config, rules.mla, architecture.mla)
    if architecture.mla is not None:
        config.pop("head_dim", None)  # it is the rotated part's, and follows from qk_rope_head_dim
    if rules.restore is not None:
        config |= rules.restore(architecture)
    config |= window_keys(architecture) | rotary_key(architecture) | head_keys(architecture)
    read = replace(architecture_from_hf_config(config), name=architecture.name)
    if read != architecture:
        wrong = [f for f in Architecture.__dataclass_fields__ if getattr(read, f) != getattr(architecture, f)]
        raise SpecError(
            f"a {architecture.model_type} network cannot have {wrong[0]}={getattr(architecture, wrong[0])!r} "
            f"(it has {getattr(read, wrong[0])!r}), so {architecture.name!r} cannot be built; change {wrong[0]}.",
            parameter=wrong[0],
            value=getattr(architecture, wrong[0]),
        )
    return config


def _fill(config: dict[str, Any], rules: Rules, source: object) -> None:
    for field, rule in rules.items():
        value = getattr(source, field, None)
        if isinstance(rule, Choice):
            config[rule.name] = value == rule.when_true
        elif isinstance(rule, Key) and hasattr(source, field):
            if rule.only_if:
                config[rule.only_if] = value is not None
            inside = "." in rule.name  # a nested configuration with its own defaults (MPT's refuses 0.0 for 0)
            if (value is not None or rule.nullable) and not (inside and value == rule.default):
                *outer, last = rule.name.split(".")
                inner = config
                for part in outer:
                    inner = inner.setdefault(part, {})
                inner[last] = value
    for field, rule in rules.items():  # a product's right factor has been set before
        value = getattr(source, field, None)
        if isinstance(rule, Product) and value and config.get(rule.right.name):
            config[rule.left.name] = value // config[rule.right.name]
