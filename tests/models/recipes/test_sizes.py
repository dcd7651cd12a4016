"""Sizes as polynomials in micro-batch and sequence length."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from peakcast.models.recipes.sizes import through

POINTS = [(batch, length) for batch in (2, 3) for length in (256, 512, 768)]


def samples(*formulas: object, points: list[tuple[int, int]] = POINTS) -> dict[tuple[int, int], np.ndarray]:
    return {point: np.array([formula(*point) for formula in formulas], dtype=np.int64) for point in points}  # type: ignore[operator]


@given(st.lists(st.integers(0, 2**10), min_size=6, max_size=6), st.integers(1, 512), st.integers(1, 2**17))
def test_a_polynomial_is_found_again_and_holds_everywhere(coefficients: list[int], batch: int, length: int) -> None:
    def size(b: int, s: int) -> int:
        return sum(c * x for c, x in zip(coefficients, (1, b, s, b * s, s * s, b * s * s), strict=True))

    found = through(samples(size), POINTS)
    assert found is not None
    assert found.at(batch, length).tolist() == [size(batch, length)]


@pytest.mark.parametrize("batches", [(1,), (2, 3)])
def test_two_lengths_are_found_again(batches: tuple[int, ...]) -> None:
    """Of an encoder's states, of masks and scores of both, and of a constant."""

    def size(b: int, s: int, t: int) -> int:
        return 3 * b * s + 5 * b * t + 2 * b * s * t + 7 * t * t + b * s * s + 40 * s + 1000

    lengths = ((256, 256), (512, 256), (768, 256), (256, 512), (256, 768), (512, 512))
    points = [(batch, *pair) for batch in batches for pair in lengths]
    found = through({point: np.array([size(*point)]) for point in points}, points)
    assert found is not None
    assert found.at(batches[-1], 1001, 17).tolist() == [size(batches[-1], 1001, 17)]


def test_more_bytes_than_can_be_counted_are_an_overflow() -> None:
    found = through(samples(lambda b, s: b * s * s * 2**20), POINTS)
    assert found is not None
    with pytest.raises(OverflowError):
        found.at(512, 2**17)


def test_an_eighth_of_a_byte_an_element_is_counted() -> None:
    found = through(samples(lambda b, s: b * s * 96 // 8), POINTS)  # a dropout mask in bits
    assert found is not None
    assert found.at(5, 4096).tolist() == [5 * 4096 * 12]


def test_a_kernel_that_rounds_lengths_up_is_told_by_an_uneven_one() -> None:
    # the memory-efficient attention's statistics: [batch, heads, length rounded up to 32] in float32
    def statistics(b: int, s: int) -> int:
        return b * 8 * (-(-s // 32) * 32) * 4

    even = through(samples(statistics, lambda b, s: b * s * 2), POINTS)
    assert even is not None
    found = even.confirmed(samples(statistics, lambda b, s: b * s * 2, points=[(2, 331)]))
    assert found is not None
    assert found.multiples.tolist() == [32, 1]
    assert found.at(3, 1000).tolist() == [statistics(3, 1000), 6000]


def test_what_is_no_polynomial_is_refused() -> None:
    sizes = samples(lambda b, s: min(s, 512) * b)  # a window that begins to bite
    assert through(sizes, POINTS) is None


def test_one_sequence_needs_three_lengths() -> None:
    points = [(1, length) for length in (256, 512, 768)]
    found = through(samples(lambda b, s: s * s * 2 + 7, points=points), points)
    assert found is not None
    assert found.at(1, 2048).tolist() == [2048 * 2048 * 2 + 7]
