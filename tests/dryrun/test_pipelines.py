"""Ranks of a pipeline, alone: what the stage before sends is what that stage's own rank says."""

from __future__ import annotations

from pathlib import Path

import pytest

from peakcast.doors.dryrunning import dryrun

SCRIPT = str(Path(__file__).parent / "scripts" / "pipeline.py")


def parameters_of(rank, chunks=1, ranks=3):
    """Numbers in the stages of a rank."""
    stages = range(rank, chunks * ranks, ranks)
    return sum(256 * (one + 1) * 1024 + 1024 + 1024 * 256 * (one + 2) + 256 * (one + 2) for one in stages)


RANKS = [
    (0, 1, []),
    pytest.param(2, 1, [0, 1], marks=pytest.mark.whole),
    pytest.param(1, 2, [0, 2, 3], marks=pytest.mark.whole),
]


@pytest.mark.parametrize(("rank", "chunks", "asked"), RANKS)
def test_each_rank_of_a_pipeline_has_the_shapes_that_the_one_before_it_sends(rank, chunks, asked):
    lines = []
    words = ["torchrun", "--nproc-per-node", "3", SCRIPT, str(chunks)]
    found = dryrun(words, "H100-80GB", rank, output=lines.append)
    held = found.answer.composition
    assert held["parameters"] == pytest.approx(4 * parameters_of(rank, chunks), rel=0.01)
    assert held["optimizer_states"] == pytest.approx(8 * parameters_of(rank, chunks), rel=0.01)
    said = "".join(lines)
    assert [one for one in range(6) if f"stage {one} of the pipeline says" in said] == asked
