"""Sizes in terms of a configuration's numbers, from hand-made sizes whose formulas are known."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
import pytest

from peakcast.models.recipes.widths import WidthSample, learned

KEYS = ("heads", "hidden", "intermediate", "key_heads")
BASE = (32, 4096, 14336, 8)


def sizes(heads: int, hidden: int, intermediate: int, key_heads: int) -> np.ndarray:
    """Of a stream, of scores, of one projection for queries, keys and values, of what is as wide as a head, and of three
    products together."""
    head_dim = hidden // heads
    return np.array(
        [
            6 * hidden,
            4096 * heads,
            2 * (heads + 2 * key_heads) * head_dim,
            head_dim * 4,
            2 * hidden * intermediate + 512 * heads + 3 * hidden,
            77,
        ],
        dtype=np.int64,
    )


def sample(*values: int) -> WidthSample:
    return WidthSample(tuple(Fraction(now, before) for now, before in zip(values, BASE, strict=True)), sizes(*values))


ALONE = [sample(64, 4096, 14336, 8), sample(32, 8192, 14336, 8), sample(32, 4096, 28672, 8), sample(32, 4096, 14336, 16)]


@pytest.mark.parametrize("values", [(16, 2048, 5632, 4), (40, 5120, 13824, 40), (128, 16384, 53248, 8)])
def test_sizes_of_other_widths_follow_from_one_changed_number_at_a_time(values: tuple[int, ...]) -> None:
    widths, unexplained = learned(KEYS, BASE, sizes(*BASE), [*ALONE, sample(16, 2048, 7168, 4)])
    assert not len(unexplained)
    assert widths.scaled(sizes(*BASE)[None], values)[0].tolist() == sizes(*values).tolist()


def test_a_size_that_is_no_sum_of_products_is_named() -> None:
    """As that of a table which is rounded up to a multiple of 10,000: 30,000 of 24,576."""
    samples = [*ALONE, sample(32, 16384, 14336, 8)]
    rounded = [WidthSample(one.factors, np.array([-(-int(one.numbers[0]) // 10000) * 10000])) for one in samples]
    _, unexplained = learned(KEYS, BASE, np.array([30000]), rounded)
    assert unexplained.tolist() == [0]


def test_widths_that_no_network_has_are_refused() -> None:
    widths, _ = learned(KEYS, BASE, sizes(*BASE), ALONE)
    with pytest.raises(ValueError, match="would not be whole"):
        widths.scaled(sizes(*BASE)[None], (48, 4097, 14336, 8))
