"""What is known of a model family stands in its file, whole, and nowhere else."""

from __future__ import annotations

import ast
import tomllib
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from peakcast.catalog import architecture, architecture_names
from peakcast.core.errors import CatalogError
from peakcast.jobs.architecture import Architecture
from peakcast.jobs.spec import TrainingJob
from peakcast.models.ledger.scope.scope import out_of_scope
from peakcast.networks.families import (
    NOT_ALIKE,
    counted_as,
    family,
    family_of,
    language_defaults,
    model_types,
    other_kinds,
    read_family,
)
from peakcast.networks.family import Family
from peakcast.networks.reverse import hf_config_of

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "peakcast" / "catalog" / "families"
GROUPS = {field.name for field in fields(Family)} - {"model_type", "alike", "source", "config"}


@cache
def stated(model_type: str) -> dict[str, Any]:
    """What a family's own file states."""
    return tomllib.loads((FOLDER / f"{model_type}.toml").read_text(encoding="utf-8"))


# -- files are whole ----------------------------------------------------------------------------------------------------


def test_every_file_is_read_and_says_where_it_was_read() -> None:
    for model_type in model_types():
        found = family(model_type)
        assert found is not None, model_type
        assert found.model_type == model_type
        assert found.alike == stated(model_type).get("as", ""), model_type
        folder = "gemma3" if model_type == "gemma3_text" else model_type
        assert f"models/{folder}/" in found.source or "remote code" in found.source, model_type


def test_llamas_file_states_every_trait() -> None:
    llama = family("llama")
    assert llama is not None
    for group in GROUPS:
        assert set(stated("llama")[group]) == {field.name for field in fields(getattr(llama, group))}, group


def test_every_other_file_says_as_which_family_it_was_read() -> None:
    for model_type in set(model_types()) - {"llama"}:
        alike = stated(model_type)["as"]
        assert alike in model_types(), model_type
        assert stated(model_type)["source"] != stated(alike)["source"] or model_type == "gemma3", model_type


def test_what_a_file_states_differs_from_the_family_that_it_is_like() -> None:
    for model_type in set(model_types()) - {"llama"}:
        alike = counted_as(stated(model_type)["as"])
        own = {group: traits for group, traits in stated(model_type).items() if group in GROUPS - set(NOT_ALIKE)}
        for group, traits in own.items():
            for trait, value in traits.items():
                assert _plain(getattr(getattr(alike, group), trait)) != value, f"{model_type}: {group}.{trait}"


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


@pytest.mark.parametrize("group", sorted(GROUPS))
def test_a_forgotten_trait_is_an_error_that_names_file_and_key(group: str) -> None:
    for trait in stated("llama")[group]:
        forgotten = stated("llama") | {group: {key: value for key, value in stated("llama")[group].items() if key != trait}}
        with pytest.raises(CatalogError, match=rf"families/new\.toml: {group}\.{trait} is required and missing"):
            read_family("new", forgotten)


@pytest.mark.parametrize("group", NOT_ALIKE)
def test_no_family_has_from_another_what_is_known_by_its_name(group: str) -> None:
    new = {"as": "llama", "source": "here"} | {own: stated("llama")[own] for own in NOT_ALIKE if own != group}
    with pytest.raises(CatalogError, match=f"{group} is required and missing"):
        read_family("new", new)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"norm": {"weight_in_fp32": True}}, "norm.weight_in_fp32 is not a known key; did you mean 'weight_in_float32'"),
        ({"norms": {}}, "norms is not a known key"),
        ({"rotary": {"products": "wide"}}, "rotary.products='wide' must be one of narrow, cast, promoted"),
        ({"rotary": {"tables": "two"}}, "rotary.tables='two' must be a whole number"),
        ({"as": "lama"}, "as='lama' must be another family; did you mean 'llama'"),
        ({"config": {"hidden_sizes": 1}}, "config.hidden_sizes is no field of Architecture; did you mean 'hidden_size'"),
        ({"config": {"hidden_size": {"keys": "n_embd"}}}, "config.hidden_size={'keys': 'n_embd'} is no rule"),
        ({"config": {"adjust": "several_keys:no_such"}}, "config.adjust='several_keys:no_such' names no function"),
        ({"config_expert": {}}, "config_expert is not a known key"),
    ],
)
def test_what_no_family_can_have_is_an_error_that_names_file_and_key(change: dict[str, Any], words: str) -> None:
    new = {"as": "llama", "source": "here", **{group: stated("llama")[group] for group in NOT_ALIKE}}
    with pytest.raises(CatalogError) as refused:
        read_family("new", new | change)
    assert str(refused.value).startswith("peakcast/catalog/families/new.toml: ")
    assert words in str(refused.value)


# -- families that are known, and those that are not ---------------------------------------------------------------------


def test_every_network_of_the_catalog_is_of_a_family_with_a_file_or_has_recipes() -> None:
    """A network that the ledger does not describe is not taken for Llama: recipes answer it."""
    unknown = {name for name in architecture_names() if family(architecture(name).model_type) is None}
    assert {architecture(name).kind for name in unknown} <= {"undescribed", "multimodal"}
    assert all(architecture(name).configuration for name in unknown)


def test_a_family_without_a_file_is_unknown_and_counted_as_one_like_llama() -> None:
    assert family("no_such") is None
    assert family("../families/llama") is None
    taken, llama = counted_as("no_such"), counted_as("llama")
    assert all(getattr(taken, group) == getattr(llama, group) for group in GROUPS - set(NOT_ALIKE))
    assert (taken.libraries.peft_targets, taken.libraries.liger, taken.traces.compiled) == ((), "none", ())


def test_the_answer_says_that_a_family_is_unknown() -> None:
    said = "model_type='no_such' is not known to the ledger, and is counted as a Llama, whose keys it has"
    assert said in out_of_scope(TrainingJob(architecture=_named("no_such")))
    assert out_of_scope(TrainingJob(architecture=_named("llama"))) == ""


def _named(model_type: str) -> Architecture:
    known = architecture("llama-3.2-1b")
    return Architecture(**{f.name: getattr(known, f.name) for f in fields(known)} | {"model_type": model_type})


def test_no_family_that_rules_cannot_describe_has_a_file() -> None:
    assert not set(other_kinds()) & set(model_types())


def test_a_family_has_the_traits_of_the_one_that_it_is_like() -> None:
    gemma, gemma2 = counted_as("gemma"), counted_as("gemma2")
    assert gemma2.norm == gemma.norm != counted_as("llama").norm
    assert (gemma.eager_attention.softcap, gemma2.eager_attention.softcap) == (False, True)
    assert counted_as("gptj").modules.run_after != counted_as("codegen").modules.run_after  # a value is never mixed
    assert family_of(architecture("gemma-2-2b")) is gemma2


def test_a_family_is_a_value() -> None:
    for model_type in model_types():
        known = counted_as(model_type)
        assert all(is_dataclass(getattr(known, group)) for group in GROUPS), model_type
        assert read_family(model_type, stated(model_type)) == known


def test_a_configuration_of_a_family_is_read_back() -> None:
    for name in ("gpt-j-6b", "falcon-40b", "exaone-4.0-32b", "t5-small"):
        assert hf_config_of(architecture(name))["model_type"] == architecture(name).model_type


# -- and nowhere else -----------------------------------------------------------------------------------------------------

NAMES = {*model_types(), *other_kinds()} - {"mamba"}
"""(`mamba` is also a kind of layer.)"""
DIALECTS = ROOT / "peakcast" / "dialects"
CODE = [path for top in ("models", "peakcast") for path in (ROOT / top).rglob("*.py") if DIALECTS not in path.parents]


def named(path: Path) -> Iterator[str]:
    """The families that a module's code names; docstrings are sentences."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in NAMES:
            yield node.value


def test_no_module_names_a_family_but_the_one_that_unknown_families_are_taken_for() -> None:
    """Dialects do, which translate what other projects call their networks."""
    found = {path.relative_to(ROOT).as_posix(): set(named(path)) for path in CODE}
    assert {path: names for path, names in found.items() if names} == {"peakcast/networks/families.py": {"llama"}}


def test_sizes_that_language_models_leave_to_their_class_are_those_of_transformers() -> None:
    config = pytest.importorskip("transformers").AutoConfig
    for model_type in model_types():
        defaults = language_defaults(model_type)
        found = config.for_model(model_type) if defaults else None
        assert defaults == {name: getattr(found, name) for name in defaults}, model_type
