"""What the fast lane leaves out is there, and what it takes in runs side by side."""

from __future__ import annotations

from pathlib import Path

import pytest

TESTS = Path(__file__).parent


def test_every_file_left_out_of_the_fast_lane_exists_and_is_named_once() -> None:
    lines = (TESTS / "not_fast.txt").read_text(encoding="utf-8").splitlines()
    names = [line for line in lines if not line.startswith("#")]
    assert names == sorted(set(names))
    assert [name for name in names if not (TESTS / name).is_file()] == []


def test_what_computes_alone_is_marked_fast(request: pytest.FixtureRequest) -> None:
    assert request.node.get_closest_marker("fast") is not None


@pytest.mark.slow
def test_what_is_slow_is_not(request: pytest.FixtureRequest) -> None:
    assert request.node.get_closest_marker("fast") is None
