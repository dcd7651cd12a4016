"""One recipe stands for networks of other widths and depths, as far as walks confirm it, and for no others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from peakcast.core.errors import CollectorError, RecordError
from peakcast.dialects.common.job_file import job_from_mapping
from peakcast.jobs.spec import TrainingJob
from peakcast.models.ledger.recorded.parameters import recorded_parameters
from peakcast.models.recipes import shipped
from peakcast.models.recipes.generalising import network_kind
from peakcast.models.recipes.kinds import NetworkKind, with_values
from peakcast.models.recipes.recipe import Recipe, recorded
from peakcast.models.recipes.walk import Walk, WalkedParameter
from peakcast.networks.undescribed import for_tracing
from tests.models.recipes.walks import Library

CONFIG = {
    "model_type": "unheard_of",
    "num_hidden_layers": 8,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "sliding_window": 65536,
    "max_position_embeddings": 4096,
    "vocab_size": 4096,
    "logit_scaling": 2.0,
    "hidden_act": "silu",
}


class Wide(Library):
    """A library whose blocks keep the stream with keys and values, and takes another path for other activations."""

    def __call__(
        self, layers: int | None, batch: int, length: int, steps: int = 2, changes: Mapping[str, Any] | None = None
    ) -> Walk:
        config = CONFIG | {name.removeprefix("network."): value for name, value in (changes or {}).items()}
        hidden, heads, groups = (config[name] for name in ("hidden_size", "num_attention_heads", "num_key_value_heads"))
        if heads % groups or hidden % heads:
            raise CollectorError("no such network")
        made = super().__call__(layers, batch, length, steps)
        kept = batch * length * 2 * (hidden + 2 * groups * (hidden // heads))
        sizes = [kept if name == "kept" else size for name, size in zip(made.names, made.raw_bytes.tolist(), strict=True)]
        parameters = tuple(one._replace(shape=(hidden, heads)) if one.name == "w" else one for one in made.parameters)
        made = replace(made, raw_bytes=np.array(sizes, dtype=np.int64), parameters=parameters)
        if config["hidden_act"] != "silu":
            made = replace(made, names=("another", *made.names[1:]))
        return made


def job(**changes: Any) -> TrainingJob:
    with for_tracing():
        return job_from_mapping({"architecture": {**CONFIG, **changes}, "micro_batch_size": 2, "sequence_length": 512})


@pytest.fixture(scope="module")
def known() -> tuple[NetworkKind, Recipe]:
    library = Wide(8)
    recipe = recorded(library, (2, 512))
    kind = network_kind(library, recipe, job(), {})
    assert kind is not None
    return kind, recipe


def test_what_a_walk_shows_to_change_nothing_is_free_and_thresholds_are_not(known: tuple[NetworkKind, Recipe]) -> None:
    kind = known[0]
    assert set(kind.widths.keys) == {
        f"network.{name}" for name in ("hidden_size", "num_attention_heads", "num_key_value_heads")
    }
    assert set(kind.idle) == {f"network.{name}" for name in ("max_position_embeddings", "vocab_size", "logit_scaling")}
    assert kind.values(job(sliding_window=4096)) is None


def test_heads_that_attention_pads_are_of_another_kind(known: tuple[NetworkKind, Recipe]) -> None:
    """Flash attention pads heads to multiples of 8, with copies that no walk of whole ones has."""
    kind = known[0]
    heads = {"num_attention_heads": 16, "num_key_value_heads": 4}
    assert kind.values(job(hidden_size=768, **heads)) is not None  # 48 each
    assert kind.values(job(hidden_size=672, **heads)) is None  # 42


def test_layers_told_by_their_numbers_repeat_as_the_recorded_ones(known: tuple[NetworkKind, Recipe]) -> None:
    """As of LFM2, whose configurations list the layers with attention: more layers with the same list are others."""
    kind = known[0]
    numbers = [layer for layer in range(8) if layer % 2]
    listed = replace(kind, layers=8, prefix=2, unit=2, conditions={**kind.conditions, "network.full_attn_idxs": numbers})
    assert listed.values(job(full_attn_idxs=numbers)) is not None
    assert listed.values(job(full_attn_idxs=numbers, num_hidden_layers=16)) is None


class Positioned(Wide):
    """A library whose network has a table of positions, and takes no longer sequences."""

    def __call__(
        self, layers: int | None, batch: int, length: int, steps: int = 2, changes: Mapping[str, Any] | None = None
    ) -> Walk:
        positions = (changes or {}).get("network.max_position_embeddings", 768)
        if length > positions:
            raise CollectorError("too long")
        made = super().__call__(layers, batch, length, steps, changes)
        table = WalkedParameter("embedding", "positions", (positions, 64), 2, True)
        return replace(made, parameters=(*made.parameters, table))


def test_narrower_networks_have_as_many_positions_as_the_recorded_one() -> None:
    library, asked = Positioned(8), job(max_position_embeddings=768)
    recipe = recorded(library, (2, 512), 768)
    kind = network_kind(library, recipe, asked, {})
    assert kind is not None
    assert "network.max_position_embeddings" in kind.widths.keys
    assert kind.values(job(max_position_embeddings=768, hidden_size=256, num_attention_heads=4)) is not None
    assert kind.values(job(max_position_embeddings=512, hidden_size=256, num_attention_heads=4)) is None


def test_another_width_and_depth_has_the_sizes_of_its_own_walk(known: tuple[NetworkKind, Recipe]) -> None:
    kind, recipe = known
    other = {"hidden_size": 1280, "num_attention_heads": 20, "num_key_value_heads": 4}
    values = kind.values(job(**other, num_hidden_layers=30, vocab_size=50257))
    assert values is not None
    found = with_values(recipe, kind.widths, values, 30)
    walked = Wide(8)(4, 5, 999, 2, {f"network.{name}": value for name, value in other.items()})
    assert found.layers == 30
    assert found.sizes.at(5, 999).tolist() == walked.raw_bytes.tolist()
    assert found.walk.parameters == walked.parameters


@pytest.mark.parametrize(
    "other",
    [
        {"hidden_act": "gelu"},
        {"hidden_size": 2**20},  # wider than was walked
        {"num_hidden_layers": 2},  # fewer than were recorded
        {"num_attention_heads": 1, "num_key_value_heads": 1},
        {"logit_scale": 0.5},  # unheard of
        {"logit_scaling": 0.0},  # as a dropout that is off: what changes nothing while it is there
        {"logit_scaling": None},
        {"hidden_size": 513},
    ],
)
def test_networks_that_no_walk_confirms_are_left_alone(known: tuple[NetworkKind, Recipe], other: dict[str, Any]) -> None:
    assert known[0].values(job(**other)) is None


def test_what_no_code_reads_may_be_anything(known: tuple[NetworkKind, Recipe]) -> None:
    """Published configurations keep keys of the programs that made them, and how to generate."""
    kind = replace(known[0], read=frozenset(CONFIG))
    assert kind.values(job(logit_scale=0.5, num_beams=4, task_specific_params={"a": {"b": 1}})) is not None
    assert kind.values(job(hidden_act="gelu", num_beams=4)) is None


def test_a_switch_that_is_off_is_as_good_as_absent(known: tuple[NetworkKind, Recipe]) -> None:
    assert known[0].values(job(gradient_checkpointing=False)) is not None
    assert known[0].values(job(gradient_checkpointing=True)) is None


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"precision": {"parameters": "float32", "compute": "bfloat16"}}, "of precision.parameters=bfloat16"),
        ({"architecture": {**CONFIG, "hidden_act": "gelu"}}, "of hidden_act=silu"),
        ({"architecture": {**CONFIG, "logit_scale": 0.5}}, "without logit_scale"),
        ({"architecture": {**CONFIG, "hidden_size": 2**20}}, "of networks of other sizes"),
        ({"micro_batch_size": 1}, "of micro-batches of 2 to 65536 sequences of 17 to 65536 tokens"),
        ({"architecture": {**CONFIG, "model_type": "never_shipped"}}, ""),
    ],
)
def test_a_refusal_says_what_the_nearest_shipped_recipe_is_of(
    known: tuple[NetworkKind, Recipe],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    changes: dict[str, Any],
    expected: str,
) -> None:
    (tmp_path / shipped.file_name("unheard_of")).write_bytes(shipped.written([known]))
    monkeypatch.setattr(shipped, "_stacks", lambda _: (tmp_path,))
    with for_tracing():
        asked = job_from_mapping({"architecture": CONFIG, "micro_batch_size": 2, "sequence_length": 512, **changes})
    assert shipped.nearest_shipped(asked) == expected


def bart(encoder: int, decoder: int) -> TrainingJob:
    network = {"model_type": "bart", "encoder_layers": encoder, "decoder_layers": decoder}
    network |= {"d_model": 1024, "vocab_size": 50264}
    network |= dict.fromkeys(("encoder_ffn_dim", "decoder_ffn_dim"), 4096)
    network |= dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 16)
    asked = {"micro_batch_size": 2, "sequence_length": 512, "activation_checkpointing": {"mode": "full"}}
    return job_from_mapping({"architecture": network, **asked})


def test_both_stacks_of_a_shipped_encoder_decoder_grow_by_themselves() -> None:
    """DistilBART's twelve layers over six: those of BART, of which two layers of each stack were recorded as one that
    repeats."""
    width, inner = 1024, 4096

    def numel(encoder: int, decoder: int) -> int:
        recipe = shipped.shipped_recipe(bart(encoder, decoder))
        assert recipe is not None
        assert recipe.layers == encoder + decoder
        return sum(tensor.numel for tensor in recorded_parameters(bart(encoder, decoder), recipe))

    attention, norm = 4 * (width * width + width), 2 * width
    feed_forward = 2 * width * inner + inner + width
    assert numel(12, 6) - numel(11, 6) == attention + feed_forward + 2 * norm
    assert numel(12, 7) - numel(12, 6) == 2 * attention + feed_forward + 3 * norm
    assert numel(12, 12) - numel(12, 6) == 6 * (numel(12, 7) - numel(12, 6))


def test_a_stack_with_fewer_layers_than_were_recorded_has_no_recipe() -> None:
    assert shipped.shipped_recipe(bart(12, 4)) is None


def test_another_regime_is_another_kind(known: tuple[NetworkKind, Recipe]) -> None:
    asked = job_from_mapping({"architecture": "gpt2", "activation_checkpointing": {"mode": "full"}})
    assert known[0].values(job().replace(activation_checkpointing=asked.activation_checkpointing)) is None


def test_a_file_of_kinds_is_read_as_it_was_written(known: tuple[NetworkKind, Recipe], tmp_path: Path) -> None:
    path = tmp_path / shipped.file_name("unheard_of")
    path.write_bytes(shipped.written([known, known]))
    (kind, recipe), _ = shipped.all_of(path)
    assert kind.values(job(hidden_size=1024)) == [1024, 8, 8]
    assert recipe.sizes.at(3, 700).tolist() == known[1].sizes.at(3, 700).tolist()
    assert len(path.read_bytes()) < 1.2 * len(shipped.written([known])) + 500  # equal recipes are in it once


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "damaged.json.gz"
    path.write_bytes(b"\x1f\x8b nothing")
    with pytest.raises(RecordError, match=r"damaged\.json\.gz is no file of recipes: .*delete it"):
        shipped.all_of(path)
