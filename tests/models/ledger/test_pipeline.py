"""The orders of 1F1B and interleaved 1F1B, counted by hand, and the layers of a stage."""

from __future__ import annotations

import pytest

from peakcast.core.errors import SpecError
from peakcast.jobs.spec import Parallelism
from peakcast.models.ledger.layouts.pipeline import (
    Turn,
    pipeline_rank,
    representative_micro_batches,
    schedule,
    stage_chunks,
)


def test_one_stage_alternates():
    assert schedule(1, 1, 0, 2) == (Turn(True, 0, 0), Turn(False, 0, 0), Turn(True, 1, 0), Turn(False, 1, 0))


@pytest.mark.parametrize("stage", range(4))
def test_1f1b_holds_stages_minus_rank_micro_batches(most_in_flight, stage):
    turns = schedule(4, 1, stage, 16)
    assert most_in_flight(turns) == 4 - stage
    assert len(turns) == 2 * 16
    assert most_in_flight(schedule(4, 1, stage, 2)) == min(2, 4 - stage)


@pytest.mark.parametrize(("stage", "most"), [(0, 4 * 2 + 4 * (2 - 1) - 2 + 1), (3, 4 * (2 - 1) + 1)])
def test_interleaved_in_flight_is_korthikanti_and_narayanan(most_in_flight, stage, most):
    """2·(p − r − 1) + (v − 1)·p + 1 chunk activations."""
    assert most_in_flight(schedule(4, 2, stage, 16)) == most


def test_interleaved_order_of_two_stages_two_chunks():
    """schedules.py's own example: groups of 3 then 2 micro-batches over 2 chunks."""
    forward = [(turn.micro_batch, turn.chunk) for turn in schedule(2, 2, 0, 5, 3) if turn.forward]
    assert forward == [(0, 0), (1, 0), (2, 0), (0, 1), (1, 1), (2, 1), (3, 0), (4, 0), (3, 1), (4, 1)]


@pytest.mark.parametrize("virtual", [1, 3])
@pytest.mark.parametrize("stage", range(4))
def test_representative_micro_batches_reach_the_same_most(most_in_flight, stage, virtual):
    few = representative_micro_batches(4, virtual, stage, 256)
    assert few < 256
    assert most_in_flight(schedule(4, virtual, stage, few)) == most_in_flight(schedule(4, virtual, stage, 256))


def test_every_micro_batch_runs_forward_then_backward():
    turns = schedule(4, 3, 1, 8)
    seen: set[tuple[int, int]] = set()
    for turn in turns:
        key = (turn.micro_batch, turn.chunk)
        assert (key in seen) is not turn.forward
        seen.add(key)
    assert len(seen) == 8 * 3


def test_stage_layers():
    layout = Parallelism(pipeline_parallel_size=2, virtual_pipeline_stages=2)
    first, second = stage_chunks(8, layout, 0), stage_chunks(8, layout, 1)
    assert [list(chunk.layers) for chunk in first] == [[0, 1], [4, 5]]
    assert [(chunk.is_first, chunk.is_last) for chunk in first] == [(True, False), (False, False)]
    assert [(chunk.is_first, chunk.is_last) for chunk in second] == [(False, False), (False, True)]
    uneven = Parallelism(pipeline_parallel_size=2, pipeline_layers=(5, 3))
    assert [list(chunk.layers) for chunk in stage_chunks(8, uneven, 1)] == [[5, 6, 7]]


def test_the_stages_of_a_v_come_back():
    """Of three ranks the first has both ends of the network, the last two stages that follow each other."""
    layout = Parallelism(pipeline_parallel_size=3, virtual_pipeline_stages=2, pipeline_schedule="zero_bubble_v")
    first, _, last = (stage_chunks(6, layout, rank) for rank in range(3))
    assert [list(chunk.layers) for chunk in (*first, *last)] == [[0], [5], [2], [3]]
    assert [(chunk.is_first, chunk.is_last) for chunk in first] == [(True, False), (False, True)]
    assert [(chunk.from_here, chunk.to_here) for chunk in last] == [(False, True), (True, False)]


def test_rank_order():
    layout = Parallelism(tensor_parallel_size=2, pipeline_parallel_size=2, data_parallel_size=2)
    assert [pipeline_rank(layout, rank) for rank in range(8)] == [0, 0, 0, 0, 1, 1, 1, 1]
    assert [pipeline_rank(layout, rank, pipeline_innermost=True) for rank in range(8)] == [0, 0, 1, 1, 0, 0, 1, 1]
    with pytest.raises(SpecError, match="rank=8"):
        pipeline_rank(layout, 8)
