"""A recipe is recorded from a few walks, and says where it holds."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from peakcast.core.errors import CollectorError
from peakcast.models.recipes.recipe import LARGEST_BATCH, recorded
from peakcast.models.recipes.walk import Walk, WalkedParameter
from tests.models.recipes.walks import Library, mapping, walk


def test_a_deep_network_is_walked_whole_once() -> None:
    library = Library(40)
    recipe = recorded(library, (4, 1000))
    assert (recipe.layers, recipe.walk.num_layers) == (40, 4)
    assert [layers for layers, _, _ in library.asked].count(None) == 1
    assert recipe.covers(4, 1000)
    assert recipe.covers(64, 32768)
    assert not recipe.covers(1, 1000)  # of one sequence the library may make fewer copies


def test_sizes_follow_batch_and_length() -> None:
    recipe = recorded(Library(12), (2, 512))
    expected = dict(zip(walk(4).names, walk(4, 6, 2048).raw_bytes.tolist(), strict=True))
    assert dict(zip(recipe.walk.names, recipe.sizes.at(6, 2048).tolist(), strict=True)) == expected


def test_a_recipe_ends_where_the_library_does_something_else() -> None:
    short, long = recorded(Library(8, window=4096), (2, 512)), recorded(Library(8, window=4096), (2, 8192))
    assert short.lengths == (17, 768)  # what was walked: nobody knows where between there and far it changes
    assert short.batches == (2, LARGEST_BATCH)  # more sequences of that length were walked
    assert not short.covers(2, 8192)
    assert long.covers(2, 8192)
    assert not long.covers(2, 4096)


def test_an_uneven_length_is_told_apart_from_a_far_one() -> None:
    class Rounding(Library):
        """Rounds the length of what a block keeps up to 32, and no longer keeps as much from 4,096 on."""

        def __call__(self, layers: int | None, batch: int, length: int, steps: int = 2) -> Walk:
            made = super().__call__(layers, batch, length, steps)
            kept = np.array([name == "kept" for name in made.names])
            rows = -(-length // 32) * 32 if length < 4096 else length // 2
            return replace(made, raw_bytes=np.where(kept, batch * rows * 4, made.raw_bytes))

    recipe = recorded(Rounding(8), (2, 512))
    assert recipe.lengths == (17, 768)  # the far walk has other sizes
    assert recipe.covers(2, 333)
    sizes = dict(zip(recipe.walk.names, recipe.sizes.at(2, 333).tolist(), strict=True))
    assert sizes["kept"] == 2 * 352 * 4


def test_a_table_of_positions_bounds_the_lengths() -> None:
    library = Library(8)
    recipe = recorded(library, (2, 512), most=1024)
    assert recipe.lengths == (17, 1024)
    assert max(length for _, _, length in library.asked) <= 1024


def test_a_length_that_the_library_refuses_is_not_covered() -> None:
    recipe = recorded(Library(8, refuses_from=20_000), (2, 512))
    assert recipe.lengths == (17, 768)
    with pytest.raises(CollectorError, match="too long"):
        recorded(Library(8, refuses_from=20_000), (2, 32768))


def test_a_network_of_few_positions_is_recorded_at_fractions_of_the_asked_length() -> None:
    """BERT's 512, which its configuration names in a way that peakcast does not know."""
    recipe = recorded(Library(8, refuses_from=513), (2, 512))
    assert recipe.lengths == (17, 512)
    assert recipe.covers(64, 131)


def test_weights_that_are_neither_in_blocks_nor_a_table_are_odd_ends() -> None:
    recipe = recorded(Library(8), (2, 512))
    assert not recipe.odd_ends
    assert recipe.tied
    head, between = (WalkedParameter(*of, 2, True) for of in (("head", "dense", (4, 4)), ("between.4", "norm", (8, 4))))
    own = WalkedParameter("head", "lm_head", (10, 4), 2, True)  # as the embedding's table is
    for more, odd in ((head, True), (between, True), (own, False)):
        walk = replace(recipe.walk, parameters=(*recipe.walk.parameters, more))
        assert replace(recipe, walk=walk).odd_ends is odd


def first_step(layers: int, batch: int, length: int) -> Walk:
    """A walk of a step that finds nothing of an earlier one."""
    made = mapping(layers, batch, length)
    made["entries"] = [one for one in made["entries"] if one[4:6] != [-1, 1]]
    return Walk.read(made)


def test_what_a_step_leaves_is_what_the_next_one_finds() -> None:
    """So a first step at another batch and length tells the sizes of a later one."""
    again = first_step(4, 2, 256).same_tensors_in(walk(4, 2, 256))
    assert again is not None
    assert first_step(4, 3, 512).raw_bytes[again].tolist() == walk(4, 3, 512).raw_bytes.tolist()
    assert first_step(4, 2, 256).same_tensors_in(walk(5, 2, 256)) is None
    nothing_left = replace(walk(4), raw_bytes=walk(4).raw_bytes + (walk(4).lives[2] == 1))
    assert first_step(4, 2, 256).same_tensors_in(nothing_left) is None


class Thinning(Library):
    """A library that can skip layers of a network whose first eight layers are a tower, which keeps its depth."""

    def __call__(self, layers, batch, length, steps=2, changes=(), skipped=()):
        deep = self.layers if layers is None else 8 + layers
        made = walk if steps > 1 else first_step
        self.asked.append((layers, batch, length))
        kinds = () if skipped else (0,) * 8 + (1,) * (deep - 8)
        return replace(made(deep - len(skipped), batch, length), kinds=kinds)


def test_a_tower_and_a_language_model_are_both_thinned() -> None:
    library = Thinning(40)
    recipe = recorded(library, (4, 1000))
    assert (recipe.layers, recipe.walk.num_layers) == (40, 3 + 3)
    assert recipe.copies == (8 - 3, 32 - 3)
    deep = recipe.deep()
    sizes = recipe.sizes.at(4, 1000)[deep.entries]
    assert sorted(zip(deep.lives[2].tolist(), sizes.tolist(), strict=True)) == sorted(
        zip(walk(40, 4, 1000).lives[2].tolist(), walk(40, 4, 1000).raw_bytes.tolist(), strict=True)
    )


class EncoderDecoder(Library):
    """What its last layer keeps follows from targets, which are as long as what it reads if nobody says how long."""

    def __call__(self, layers, batch, length, steps=2, changes=None, skipped=()):
        targets = (changes or {}).get("decoder_sequence_length", length)
        made = super().__call__(layers, batch, length, steps)
        kept = np.array([name == "kept" for name in made.names])
        return replace(made, raw_bytes=np.where(kept, batch * length * targets, made.raw_bytes), has_targets=True)


@pytest.mark.parametrize("asked", [(2, 512), (2, 512, 96), (1, 2000, 40)])
def test_one_recipe_holds_for_every_length_of_targets(asked: tuple[int, ...]) -> None:
    recipe = recorded(EncoderDecoder(8), asked)
    assert recipe.covers(*asked)
    assert recipe.covers(asked[0], 1001, 17)
    assert recipe.covers(asked[0], 333)
    kept = recipe.walk.names.index("kept")
    assert recipe.bytes_at(asked[0], 1001, 17)[kept] == asked[0] * 1001 * 17
    assert recipe.bytes_at(asked[0], 333)[kept] == asked[0] * 333 * 333


def test_a_recipe_of_one_length_does_not_hold_for_targets_of_another() -> None:
    recipe = recorded(Library(8), (2, 512))
    assert recipe.covers(2, 512, 512)
    assert not recipe.covers(2, 512, 96)
