"""Files of recipes: read back as they were, and refused when damaged."""

from __future__ import annotations

import gzip
import json
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peakcast.core.errors import RecordError
from peakcast.models.recipes import files
from peakcast.models.recipes.depth import Run, repeats
from peakcast.models.recipes.recipe import Recipe, recorded
from peakcast.models.recipes.sizes import through
from tests.models.recipes.walks import Library, walk


def recipe() -> Recipe:
    one = recorded(Library(12), (2, 512))
    return replace(one, walk=replace(one.walk, returned=(1,)))


def test_a_recipe_is_read_back_as_it_was(tmp_path: Path) -> None:
    one, path = recipe(), tmp_path / "one.json.gz"
    path.write_bytes(files.written([one]))
    (back,) = files.read(path)
    assert back.walk.same_program(one.walk)
    assert back.walk.parameters == one.walk.parameters
    assert back.walk.returned == one.walk.returned
    assert back.sizes.at(7, 4096).tolist() == one.sizes.at(7, 4096).tolist()
    assert (back.layers, back.batches, back.lengths, back.even) == (one.layers, one.batches, one.lengths, one.even)
    assert back.repeats is not None
    assert one.repeats is not None
    assert np.array_equal(back.repeats.moves, one.repeats.moves)
    assert files.written([back]) == files.written([one])


def test_a_second_length_is_read_back(tmp_path: Path) -> None:
    one, path = recipe(), tmp_path / "one.json.gz"
    points = [(1, *pair) for pair in ((8, 8), (16, 8), (24, 8), (8, 16), (8, 24), (16, 16))]
    sizes = through({point: one.walk.raw_bytes * point[1] * point[2] for point in points}, points)
    assert sizes is not None
    path.write_bytes(files.written([replace(one, sizes=sizes, targets=(3, 99))]))
    (back,) = files.read(path)
    assert back.targets == (3, 99)
    assert back.bytes_at(1, 512, 40).tolist() == (one.walk.raw_bytes * 512 * 40).tolist()
    content = json.loads(gzip.decompress(path.read_bytes()))
    del content["recipes"][0]["targets"]
    path.write_bytes(gzip.compress(json.dumps(content).encode()))
    with pytest.raises(RecordError, match="of other lengths than it says"):
        files.read(path)


def test_runs_of_layers_that_differ_are_read_back(tmp_path: Path) -> None:
    """A tower and a language model; and a file whose runs do not make the network is refused."""
    short = walk(9)
    sizes = through({(2, 256): short.raw_bytes}, [(2, 256)])
    assert sizes is not None
    one = Recipe(short, repeats(short, (Run(1, 1), Run(4, 2))), (5, 1), sizes, (2, 2), (256, 256))
    path = tmp_path / "one.json.gz"
    path.write_bytes(files.written([one]))
    (back,) = files.read(path)
    assert back.repeats is not None
    assert (back.repeats.runs, back.copies, back.layers) == ((Run(1, 1), Run(4, 2)), (5, 1), 16)
    content = json.loads(gzip.decompress(files.written([one])))
    content["recipes"][0]["repeats"][3] = [5, 2]
    path.write_bytes(gzip.compress(json.dumps(content).encode()))
    with pytest.raises(RecordError, match="do not make the network"):
        files.read(path)


@pytest.mark.parametrize(
    "content",
    [b"", b"no gzip", gzip.compress(b"{}"), gzip.compress(b"[" * 10_000), files.written([recipe()])[:-20]],
    ids=["empty", "no gzip", "no recipes", "too deep", "cut off"],
)
def test_what_is_no_file_of_recipes_is_refused_in_a_sentence(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "one.json.gz"
    path.write_bytes(content)
    with pytest.raises(RecordError, match="is no file of recipes"):
        files.read(path)
    with pytest.raises(RecordError, match="is no file of recipes"):
        files.read(tmp_path / "missing.json.gz")


PLAIN = json.loads(gzip.decompress(files.written([recipe()])))


def test_a_recipe_returns_tensors_that_it_has(tmp_path: Path) -> None:
    path, (plain,) = tmp_path / "one.json.gz", PLAIN["recipes"]
    damaged = {**plain, "returned": [len(plain["names"])]}
    path.write_bytes(gzip.compress(json.dumps({**PLAIN, "recipes": [damaged]}).encode()))
    with pytest.raises(RecordError, match="it returns tensors that it does not have"):
        files.read(path)


VALUES = st.one_of(st.none(), st.integers(), st.text(max_size=3), st.lists(st.integers(), max_size=3))


@settings(max_examples=200)
@given(key=st.sampled_from(sorted(PLAIN["recipes"][0])), value=VALUES)
def test_a_damaged_recipe_is_refused_or_harmless(key: str, value: object, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = tmp_path_factory.getbasetemp() / "damaged.json.gz"
    path.write_bytes(gzip.compress(json.dumps({**PLAIN, "recipes": [{**PLAIN["recipes"][0], key: value}]}).encode()))
    with suppress(RecordError):
        files.read(path)
