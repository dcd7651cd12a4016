"""Losses that go in chunks of tokens: a recipe of four chunks holds for every number of them."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from peakcast.core.errors import RecordError
from peakcast.models.recipes import files
from peakcast.models.recipes.chunked import ChunkRule, Loop, lengthened, loops_of, shortened
from peakcast.models.recipes.recipe import recorded_in_chunks
from peakcast.models.recipes.walk import Walk
from peakcast.timelines.timeline import Phase
from tests.models.recipes.walks import ACTIVATION, TEMPORARY, Library, mapping

BY_LENGTH, BY_ROWS = ChunkRule(128, by_length=True), ChunkRule(128, by_length=False)
LOOPS = (Loop(False, 1, 2), Loop(True, 0, 2))


def rows_of(rule: ChunkRule, batch: int, length: int) -> list[int]:
    """The rows of each chunk, as LitGPT cuts them: finetune/lora.py and full.py, utils.py `chunked_cross_entropy`."""
    if rule.by_length:
        parts = [min(128, length - start) for start in range(0, length, 128)]
        return [batch * part for part in (*parts[:-1], parts[-1] - 1)]
    rows = batch * (length - 1)
    return [min(128, rows - start) for start in range(0, rows, 128)]


def chunked(layers: int, batch: int, length: int, rule: ChunkRule = BY_LENGTH, odd_chunk: int | None = None) -> Walk:
    """A network of which each chunk makes a log-softmax for its backward and a loss that stays until the forward ends, and
    in backward two gradients: one until the next chunk begins, one until all are joined. What a step before left of each
    chunk is found and goes when the head begins."""
    made, rows = mapping(layers, batch, length), rows_of(rule, batch, length)
    number, places = len(rows), made["num_places"]
    head, backward, entries = made["stretches"][places - 1], made["stretches"][places], made["entries"]
    for entry in entries:  # what runs in backward already comes after the chunks
        for column in (4, 6, 8):
            if entry[column] == places:
                entry[column + 1] += 2 * number
    more: list[list[Any]] = []
    for chunk, row in enumerate(rows):
        head[0] += ["log_softmax", "odd" if chunk == odd_chunk else "nll"]
        back = 2 * (number - 1 - chunk)
        softmax = ["softmax", ACTIVATION, row * 40, places - 1]
        more += [
            [*softmax, places - 1, 1 + 2 * chunk, places, back + 2, -1, 0, 0],
            ["wide", ACTIVATION, row * 20, places - 1, places - 1, 1 + 2 * chunk, -1, 0, -1, 0, 0],
            ["loss", TEMPORARY, row * 4, places - 1, places - 1, 2 + 2 * chunk, places - 1, 1 + 2 * number, -1, 0, 0],
            ["nll.grad", TEMPORARY, row * 40, places - 1, places, back, places, back + 2, -1, 0, 0],
            ["softmax.grad", TEMPORARY, row * 40, places - 1, places, back + 1, places, 2 * number, -1, 0, 0],
        ]
    head[1] += [int(Phase.LOSS)] * 2 * number
    backward[0][:0] = ["nll_backward", "softmax_backward"] * number
    backward[1][:0] = [int(Phase.BACKWARD)] * 2 * number
    found = [["wide", ACTIVATION, row * 20, 0, -1, 1, places - 1, 1, -1, 0, 0] for row in rows]
    made["entries"] = [*found, *entries, *more]
    made["visits"][places - 1] = [
        visit
        for chunk in range(number)
        for visit in (["forward", True, "loss", 1 + 2 * chunk, []], ["forward", False, "loss", 3 + 2 * chunk, []])
    ]
    return Walk.read(made)


def tensors(walk: Walk) -> Counter[tuple[object, ...]]:
    """Every tensor: its name, bytes, category and life."""
    return Counter(zip(walk.names, walk.raw_bytes.tolist(), *walk.lives.tolist(), strict=True))


@pytest.mark.parametrize("number", [4, 5, 9])
def test_copies_of_the_second_chunk_make_the_walk_of_many(number: int) -> None:
    many, few = chunked(2, 2, 128 * number), chunked(2, 2, 512)
    short = shortened(many, LOOPS, number)
    assert short is not None
    assert short.labels == few.labels
    assert short.visits == few.visits
    made = lengthened(short, LOOPS, number)
    assert made is not None
    assert tensors(made[0]) == tensors(many)
    assert (made[0].labels, made[0].phases, made[0].visits) == (many.labels, many.phases, many.visits)


def test_loops_are_found_where_operations_repeat_as_often_as_there_are_chunks() -> None:
    assert loops_of(chunked(2, 1, 1024), 8) == LOOPS
    assert loops_of(chunked(2, 1, 1024), 9) == ()


def test_chunks_that_differ_are_no_copies() -> None:
    assert shortened(chunked(2, 1, 1024, odd_chunk=3), LOOPS, 8) is None


class InChunks(Library):
    """A library whose loss goes in chunks."""

    rule = BY_LENGTH
    odd_chunk: int | None = None

    def __call__(self, layers: int | None, batch: int, length: int, steps: int = 2) -> Walk:
        self.asked.append((layers, batch, length))
        return chunked(layers or self.layers, batch, length, self.rule, self.odd_chunk)


@pytest.mark.parametrize("rule", [BY_LENGTH, BY_ROWS])
@pytest.mark.parametrize("batch", [1, 2])
def test_one_recipe_holds_for_every_number_of_chunks(rule: ChunkRule, batch: int) -> None:
    library = InChunks(8)
    library.rule = rule
    recipe = recorded_in_chunks(library, (batch, 512), None, rule)
    assert recipe.chunking is not None
    assert recipe.layers == 8
    assert recipe.lengths == (401, 8192)
    for length in (512, 700, 1041, 4000):
        more = 1 if batch == 1 else 5
        assert recipe.covers(more, length)
        one, walk = recipe.at(more, length), chunked(recipe.walk.num_layers, more, length, rule)
        assert one.walk.labels == walk.labels
        sizes = one.bytes_at(more, length).tolist()
        found = Counter(zip(one.walk.names, sizes, *one.walk.lives.tolist(), strict=True))
        assert found == tensors(walk)


def test_where_the_last_chunk_is_empty_or_there_are_too_few_is_not_covered() -> None:
    recipe = recorded_in_chunks(InChunks(8), (1, 512), None, BY_LENGTH)
    assert not recipe.covers(1, 513)  # LitGPT leaves the last token out, the only one of the fifth chunk
    assert recipe.covers(1, 514)
    assert not recipe.covers(1, 384)
    assert not recorded_in_chunks(InChunks(8), (1, 300), None, BY_LENGTH).covers(1, 301)


def test_a_loss_whose_chunks_differ_is_recorded_at_its_length_alone() -> None:
    library = InChunks(8)
    library.odd_chunk = 2
    recipe = recorded_in_chunks(library, (1, 1024), None, BY_LENGTH)
    assert recipe.chunking is None
    assert recipe.covers(1, 1024)
    assert not recipe.covers(1, 1023)


def test_chunks_are_read_back_and_damaged_ones_refused(tmp_path: Path) -> None:
    recipe, path = recorded_in_chunks(InChunks(8), (1, 512), None, BY_LENGTH), tmp_path / "one.json.gz"
    path.write_bytes(files.written([recipe]))
    (back,) = files.read(path)
    assert back.chunking == recipe.chunking
    assert back.at(1, 900).bytes_at(1, 900).tolist() == recipe.at(1, 900).bytes_at(1, 900).tolist()
    content = json.loads(gzip.decompress(path.read_bytes()))
    for damaged in ([0, True, []], [128, True, [[True, 0, 0]]], [128, True, [[False, 0, 2]]]):
        content["recipes"][0]["chunking"] = damaged
        path.write_bytes(gzip.compress(json.dumps(content).encode()))
        with pytest.raises(RecordError, match="its chunks"):
            files.read(path)
