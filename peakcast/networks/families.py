"""Reads what is known of each Hugging Face model family from `catalog/families/<model_type>.toml`, when it is first needed.

A file says `as = "<another family>"` and states what differs; Llama's states everything. Every file states the groups of
`NOT_ALIKE` in full, because no family shares them with another: they are about its name or its own traces.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from importlib.resources import files
from typing import Any

from peakcast.core.errors import CatalogError, SpecError, near_misses
from peakcast.core.fields import build
from peakcast.jobs.architecture import Architecture
from peakcast.networks.family import Family, LibraryTraits, TraceTraits
from peakcast.networks.rules import GROUPS, config_rules

NOT_ALIKE = ("libraries", "traces")
_KNOWN_TO_NONE = LibraryTraits(
    peft_targets=(),
    peft_adapts_experts=(),
    liger="none",
    fms_acceleration=False,
    unsloth=False,
    deepspeed_leaf=False,
    torchtitan_compiles_loss=False,
)
_UNTRACED = TraceTraits(unmodelled="", differ=(), tensor_parallel=False, compiled=())
_CATALOG = files("peakcast").joinpath("catalog")
_FOLDER = _CATALOG.joinpath("families")


def family(model_type: str) -> Family | None:
    """The family called `model_type`; None if it has no file. Raises: CatalogError naming the file and the key that is
    unknown, missing or of a wrong type."""
    return _family(model_type) if model_type in _known() else None


def family_of(architecture: Architecture) -> Family:
    """The family as which the ledger counts a network: its own, or, if it is unknown, one whose code is like Llama's, which
    no library knows and no trace has confirmed. A finding says so (`models/ledger/scope/networks.py`)."""
    return counted_as(architecture.model_type)


@cache
def counted_as(model_type: str) -> Family:
    """`family_of` by the name of a family."""
    if known := family(model_type):
        return known
    return replace(_family("llama"), model_type=model_type, alike="llama", libraries=_KNOWN_TO_NONE, traces=_UNTRACED)


@cache
def model_types() -> tuple[str, ...]:
    """The names of all families, sorted."""
    return tuple(sorted(file.name.removesuffix(".toml") for file in _FOLDER.iterdir() if file.name.endswith(".toml")))


def families_where(holds: Callable[[Family], bool]) -> tuple[str, ...]:
    """The names of the families of which `holds` is true, sorted, for messages: it reads every file."""
    return tuple(model_type for model_type in model_types() if holds(_family(model_type)))


@cache
def other_kinds() -> Mapping[str, str]:
    """Known families that no rules can describe -> what kind of network they are."""
    return tomllib.loads(_CATALOG.joinpath("undescribed.toml").read_text(encoding="utf-8"))


def language_defaults(model_type: object) -> Mapping[str, int]:
    """Sizes that a language model inside another network's configuration has where that does not say them."""
    return _language_defaults().get(model_type, {}) if isinstance(model_type, str) else {}


@cache
def _language_defaults() -> Mapping[str, Mapping[str, int]]:
    return tomllib.loads(_CATALOG.joinpath("language_defaults.toml").read_text(encoding="utf-8"))


# -- files --------------------------------------------------------------------------------------------------------------


@cache
def _known() -> frozenset[str]:
    return frozenset(model_types())


@cache
def _family(model_type: str) -> Family:
    return read_family(model_type, _stated(model_type))


def read_family(model_type: str, stated: Mapping[str, Any]) -> Family:
    """The family of a file's content. Raises: CatalogError naming the file and the key that is unknown, missing or of a
    wrong type."""
    try:
        whole = _complete(model_type, stated)
        rules = {group: whole.pop(group) for group in GROUPS if group in whole}
        about = {"model_type": model_type, "alike": whole.pop("as", ""), "config": config_rules(rules)}
        return build(Family, about | whole)
    except SpecError as error:
        raise CatalogError(f"{_name(model_type)}: {error.message}", parameter=error.parameter, value=error.value) from None


def _complete(model_type: str, stated: Mapping[str, Any]) -> dict[str, Any]:
    """What a file states, group by group over what it has from another family's file."""
    alike = stated.get("as")
    if alike is None:
        return dict(stated)
    if alike not in _known() or alike == model_type:
        rule = f"must be another family{near_misses(str(alike), model_types()) or '.'}"
        raise SpecError(f"as={alike!r} {rule}", parameter="as", value=alike)
    _family(alike)  # must be right by itself, so that an error names the file that it is in
    base = _complete(alike, _stated(alike))
    for own in (*NOT_ALIKE, "source"):
        del base[own]
    return base | {
        group: base.get(group, {}) | traits if isinstance(traits, dict) else traits for group, traits in stated.items()
    }


@cache
def _stated(model_type: str) -> Mapping[str, Any]:
    """What a family's own file states."""
    try:
        return tomllib.loads(_FOLDER.joinpath(f"{model_type}.toml").read_text(encoding="utf-8"))
    except tomllib.TOMLDecodeError as error:
        raise CatalogError(f"{_name(model_type)}: {error}.") from None


def _name(model_type: str) -> str:
    return f"peakcast/catalog/families/{model_type}.toml"
