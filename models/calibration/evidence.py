"""How much each row says, when rows of one unit of evidence (an architecture, a source) resemble each other.

A unit of n rows counts as √n rows, so each of its rows weighs 1 / √n. Counted as n, the few units with hundreds of rows
would decide alone; counted as one, a unit that was run once would say as much as one that was run in hundreds of ways.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Units = npt.NDArray[np.int64]


def number_of(names: Sequence[str]) -> Units:
    """A number for each row, equal for equal names, [rows]."""
    numbers: Units = np.unique(np.asarray(names, dtype=object).astype(str), return_inverse=True)[1]
    return numbers


def evidence_weights(units: Units, counts: Floats) -> Floats:
    """The weight of each row, [rows]. `units`: the number of its unit; `counts`: its share of its configuration (1 /
    repeats, and less for a less trusted row); the sum over a unit is its n."""
    sizes = np.bincount(units, weights=counts)
    weights: Floats = counts / np.sqrt(np.maximum(sizes, 1.0))[units]
    return weights
