"""How a family's configuration is read: the rules in its file, `catalog/families/<model_type>.toml`, as values.

Each field of `Architecture` has a rule: a plain value is fixed by the family; `{ key = "n_embd" }` reads a key of
config.json, `{ flag = ... }` turns a flag into the field's value, `{ product = [...] }` multiplies two keys. "null" stands
for null, which TOML does not have. Defaults are those of the family's configuration class.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from importlib import import_module
from types import MappingProxyType
from typing import Any, Final

from peakcast.core.errors import SpecError, near_misses
from peakcast.jobs.architecture import Architecture, MixtureOfExperts, MultiLatentAttention

REQUIRED: Final = "<required>"
"""Default of a key for which no default would be right: the configuration must have it."""


@dataclass(frozen=True, slots=True)
class Key:
    """The value of a key; `.` in `name` leads into a nested mapping."""

    name: str
    default: Any = REQUIRED
    nullable: bool = False
    """Whether an explicit null means null; otherwise it means the default, as in the config classes."""
    only_if: str | None = None
    """A flag that must be true; otherwise the field is null (Qwen2's `use_sliding_window`)."""


@dataclass(frozen=True, slots=True)
class Choice:
    """A field's value chosen by a flag of the configuration."""

    name: str
    default: bool
    when_true: Any
    when_false: Any


@dataclass(frozen=True, slots=True)
class Product:
    """The product of two keys (0 if one is null), for DeepSeek's shared experts."""

    left: Key
    right: Key


TomlTable = dict[str, Any]
Rules = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ConfigRules:
    """The rules of one family: a rule per field, values that the configuration must not have, and functions that use
    several keys."""

    rules: Rules
    moe: Rules | None = None
    mla: Rules | None = None
    demands: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))
    """Key -> the only value that is modelled, which is also assumed if the key is absent."""
    adjust: Callable[[Mapping[str, Any], TomlTable], None] | None = None
    restore: Callable[[Architecture], TomlTable] | None = None
    """Computes the keys of the configuration that `adjust` reads, from the architecture."""


GROUPS = ("config", "config_experts", "config_latent_attention", "config_demands")
"""The groups of a family's file that are rules."""


def config_rules(groups: Mapping[str, Mapping[str, Any]]) -> ConfigRules:
    """The rules that these groups of a family's file are. Raises: SpecError naming the key."""
    rules = dict(groups.get("config", {}))
    adjust, restore = _function(rules, "adjust"), _function(rules, "restore")
    moe, mla = groups.get("config_experts"), groups.get("config_latent_attention")
    return ConfigRules(
        _rules("config", rules, None if adjust else Architecture),
        None if moe is None else _rules("config_experts", moe, MixtureOfExperts),
        None if mla is None else _rules("config_latent_attention", mla, MultiLatentAttention),
        {key: _plain(value) for key, value in groups.get("config_demands", {}).items()},
        adjust,
        restore,
    )


def _rules(group: str, stated: Mapping[str, Any], of: Any) -> Rules:
    """The rules of a group, for the fields of the class `of`. None: `adjust` makes fields of some that are none."""
    known = [f.name for f in fields(of)] if of else list(stated)
    for name in stated:
        if name not in known:
            raise SpecError(f"{group}.{name} is no field of {of.__name__}{near_misses(name, known) or '.'}", parameter=name)
    return {name: _rule(f"{group}.{name}", value) for name, value in stated.items()}


def _rule(where: str, stated: Any) -> Any:
    """The rule that a value of the file is."""
    if not isinstance(stated, dict):
        return _plain(stated)
    rest = {name: _plain(value) for name, value in stated.items() if name not in ("key", "flag", "product")}
    try:
        if "key" in stated:
            return Key(stated["key"], **rest)
        if "flag" in stated:
            return Choice(stated["flag"], **rest)
        left, right = (_rule(where, key) for key in stated["product"])
        return Product(left, right, **rest)
    except (KeyError, TypeError, ValueError):
        way_out = "write { key = ... }, { flag = ... } or { product = [...] } with the fields of peakcast/networks/rules.py"
        raise SpecError(f"{where}={stated!r} is no rule; {way_out}.", parameter=where, value=stated) from None


def _plain(value: Any) -> Any:
    return None if value == "null" else value


def _function(rules: TomlTable, name: str) -> Any:
    """The function that `rules` name, as "module:function" of this folder; None if they name none."""
    named = rules.pop(name, None)
    if named is None:
        return None
    module, _, function = str(named).partition(":")
    if module not in ("several_keys", "state_space"):
        raise SpecError(f"config.{name}={named!r} must be 'several_keys:...' or 'state_space:...'.", parameter=name)
    found = getattr(import_module(f"peakcast.networks.{module}"), function, None)
    if found is None:
        raise SpecError(f"config.{name}={named!r} names no function of peakcast/networks/{module}.py.", parameter=name)
    return found
