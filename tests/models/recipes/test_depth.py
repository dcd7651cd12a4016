"""A short network stands for a deep one, tensor by tensor."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from peakcast.models.recipes.depth import Run, Short, Thinned, deep_names, deepened, repeats, short_depth, thinned
from peakcast.models.recipes.walk import Walk
from tests.models.recipes.walks import walk


def tensors(found: Walk) -> list[tuple[int, ...]]:
    columns = np.vstack([found.lives, found.raw_bytes, found.categories])
    return sorted(map(tuple, columns.T.tolist()))


def test_four_layers_stand_for_a_network_whose_layers_are_alike() -> None:
    # one that takes what the embedding hands on, two that repeat, and the last
    assert short_depth(walk(9)) == Short(4, (Run(1, 1),))


@pytest.mark.parametrize("layers", [4, 5, 6, 11])
def test_a_deepened_walk_is_the_deep_networks_own(layers: int) -> None:
    short = walk(4)
    how = repeats(short, (Run(1, 1),))
    assert how is not None
    deep = deepened(short, how, (layers - 4,))
    own = np.vstack([deep.lives, short.raw_bytes[deep.entries], short.categories[deep.entries]])
    assert sorted(map(tuple, own.T.tolist())) == tensors(walk(layers))
    assert deep.num_places == 2 * layers + 1
    assert [int(one) for one in deep.sources[:3]] == [0, 1, 2]


def test_a_last_layer_of_its_own_is_the_last_of_a_short_network_too() -> None:
    """With it begins, in backward, what layers before it add to: the gradient of an encoder's output."""
    deep = walk(9)
    labels = list(deep.labels)
    labels[deep.num_places] = labels[deep.num_places + 1] = ("begins", "another")
    assert short_depth(replace(deep, labels=tuple(labels))) == Short(4, (Run(1, 1),))


def test_layers_that_are_told_otherwise_do_not_repeat() -> None:
    """Where every second layer has a window that no length of the walks reaches."""
    assert short_depth(walk(12), ["window", "all"] * 6) == Short(6, (Run(1, 2),))
    assert short_depth(walk(12), range(12)) is None


def test_an_encoder_and_a_decoder_grow_together() -> None:
    """Two stacks of layers that are alike are one of twice as many."""
    assert short_depth(replace(walk(18), stacks=2)) == Short(8, (Run(1, 1), Run(5, 1)))
    short = replace(walk(8), stacks=2)
    deep = deepened(short, repeats(short, (Run(1, 1), Run(5, 1))), (2, 2))
    own = np.vstack([deep.lives, short.raw_bytes[deep.entries], short.categories[deep.entries]])
    assert sorted(map(tuple, own.T.tolist())) == tensors(walk(12))
    assert deep_names(short, deep) == {**deep_names(short, deep), "layers.3": "layers.5", "between.8": "between.12"}


def test_what_lives_until_the_last_layer_still_does() -> None:
    short = walk(4)
    deep = deepened(short, repeats(short, (Run(1, 1),)), (3,))
    rotary = [index for index, entry in enumerate(deep.entries) if short.names[entry] == "rotary"]
    assert [int(deep.lives[3, index]) for index in rotary] == [2 * 7 - 1]


def test_a_network_with_a_layer_unlike_the_others_needs_it() -> None:
    found = short_depth(walk(9, odd_layer=2))
    assert found is not None
    assert found.layers > 4  # and the layers before it
    assert short_depth(walk(5, odd_layer=2)) is None


def test_units_that_are_unlike_are_not_copied() -> None:
    assert repeats(walk(4, odd_layer=2), (Run(1, 1),)) is None


def test_stacks_grow_apart() -> None:
    """A tower of 3 more layers and a language model of 5 more, each with a unit of its own."""
    short = walk(9)
    deep = deepened(short, repeats(short, (Run(1, 1), Run(4, 2))), (3, 2))
    own = np.vstack([deep.lives, short.raw_bytes[deep.entries], short.categories[deep.entries]])
    assert sorted(map(tuple, own.T.tolist())) == tensors(walk(9 + 3 + 2 * 2))


def test_runs_of_alike_layers_are_thinned_wherever_they_are() -> None:
    """A tower of 8 layers, and a language model in which every fourth layer is of another kind."""
    kinds = (0,) * 8 + (1, 1, 1, 2) * 4
    found = thinned(replace(walk(24), kinds=kinds))
    left = [kind for layer, kind in enumerate(kinds) if layer not in found.skipped]
    assert len(left) == 3 + 8 + 3  # the first and the last layer have other neighbours, and repeat none
    for run, more in reversed(list(zip(found.runs, found.copies, strict=True))):
        left[run.prefix : run.prefix] = left[run.prefix : run.prefix + run.unit] * more
    assert tuple(left) == kinds


def test_layers_that_are_all_unlike_stay() -> None:
    assert thinned(replace(walk(6), kinds=tuple(range(6)))) == Thinned((), (), ())
