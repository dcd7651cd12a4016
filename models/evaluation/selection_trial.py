"""Whether the informative order of measuring helps, tried on existing rows: `python -P -m
peakcast.models.evaluation.selection_trial`.

It compares the error of the expected values for all rows, given the first of them, in the informative order and in random
orders. How much there is to gain depends on the rows: little where the ledger is right already.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from peakcast.models.evaluation.selection import Array, Point, expected, most_informative

COUNTS = (10, 20, 40, 80)
NUM_ORDERS = 20
QUANTITY = "peak_allocated_bytes"
PARTS = (0.5, 0.95)


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """Quantiles (`PARTS`) of the absolute error after `count` cells; for random orders, their mean."""

    count: int
    informative: tuple[float, ...]
    random: tuple[float, ...]


def errors(order: Sequence[int], points: Sequence[Point], values: Sequence[float]) -> Array:
    """|expected − true| of every point, once the values of the points in `order` are known."""
    guess = expected([points[i] for i in order], [values[i] for i in order], points)
    off: Array = np.abs(guess - np.asarray(values))
    return off


def random_orders(number: int, num_orders: int = NUM_ORDERS) -> list[list[int]]:
    """Random orders of `number` items, the same ones each time."""
    orders = []
    for seed in range(num_orders):
        order = list(range(number))
        random.Random(seed).shuffle(order)
        orders.append(order)
    return orders


def trials(points: Sequence[Point], values: Sequence[float], counts: Sequence[int] = COUNTS) -> list[Trial]:
    """One trial for each of `counts` that is smaller than the number of points."""
    informative, orders = most_informative(points), random_orders(len(points))

    def quantiles(order: Sequence[int]) -> Array:
        """Quantiles of the error when the cells of `order` are known."""
        found: Array = np.quantile(errors(order, points, values), PARTS)
        return found

    return [
        Trial(
            count=count,
            informative=tuple(quantiles(informative[:count]).tolist()),
            random=tuple(np.mean([quantiles(order[:count]) for order in orders], axis=0).tolist()),
        )
        for count in counts
        if count < len(points)
    ]


def table(found: Sequence[Trial], num_rows: int) -> str:
    """The trials as lines of text."""
    lines = [f"{num_rows} rows, allocated", "cells measured  informative: median    p95  random order: median    p95"]
    for each in found:
        (median, p95), (by_chance, by_chance_p95) = each.informative, each.random
        lines.append(f"{each.count:14}  {median:19.2%} {p95:6.1%}  {by_chance:20.2%} {by_chance_p95:6.1%}")
    return "\n".join(lines)


def main() -> int:
    """Prints the trials of the rows in `datasets/`."""
    from peakcast.measurements import store
    from peakcast.models.calibration.samples import prepare
    from peakcast.models.evaluation.selection import point_of

    samples = [sample for sample in prepare(store.load()).samples if sample.measured(QUANTITY)]
    points, values = [point_of(sample) for sample in samples], [sample.log_ratio(QUANTITY) for sample in samples]
    print(table(trials(points, values), len(samples)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
