"""How the sizes of a recorded network follow from the numbers of its configuration.

A size is a product of powers of them (`hidden_size * vocab_size`), or a sum of a few such products, as for one projection
to queries, keys and values. Walks of networks in which one number at a time is changed show the powers; walks in which many
are changed decide.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

import numpy as np

from peakcast.models.recipes.walk import Ints

POWERS = (0, 1, 2, -1, -2)
"""Powers of one number in one size, the usual ones first: `head_dim` is `hidden_size / num_attention_heads` in most
families."""
Factors = tuple[int, ...]
"""The power of each number."""
Sum = tuple[tuple[Fraction, Factors], ...]
"""(share, product): the share that each product has of a size in the recorded network."""


@dataclass(frozen=True)
class WidthSample:
    """A walk of a network in which numbers were multiplied. `factors`: by how much, in the order of `Widths.keys`;
    `numbers`: the sizes then."""

    factors: tuple[Fraction, ...]
    numbers: Ints


@dataclass(frozen=True)
class Widths:
    """How each of a recipe's numbers (bytes, or sides of weights) follows from the values of `keys`."""

    keys: tuple[str, ...]
    base: tuple[int, ...]
    """The values in the recorded network."""
    products: tuple[Factors, ...]
    parts: Ints
    """[4, num_parts]: index of the number, index of the product, numerator and denominator of its share."""

    def scaled(self, columns: Ints, values: Sequence[int]) -> Ints:
        """`columns` [num_rows, num_numbers] of the recorded network, for a network with these `values`. Raises: ValueError
        if they would not be whole numbers: there is no such network."""
        factors = [Fraction(1)] * len(self.products)
        for index, product in enumerate(self.products):
            for now, before, power in zip(values, self.base, product, strict=True):
                factors[index] *= Fraction(now, before) ** power
        number = self.parts[0]
        times = [factors[product] * Fraction(top, bottom) for product, top, bottom in self.parts[1:].T.tolist()]
        found = np.zeros(columns.shape, dtype=object)
        bottoms = np.array([one.denominator for one in times], dtype=object)
        shared = columns[:, number].astype(object) * [one.numerator for one in times]  # Python ints, which cannot overflow
        for row in range(len(columns)):  # parts of a sum may be fractions, although the sum is whole
            whole = (shared[row] % bottoms == 0).all()
            pairs = zip(shared[row], bottoms, strict=True)
            np.add.at(
                found[row], number, np.array([top // bottom if whole else Fraction(top, bottom) for top, bottom in pairs])
            )
        if any(isinstance(one, Fraction) and one.denominator != 1 for one in found.ravel()):
            raise ValueError("its sizes would not be whole")
        return found.astype(np.int64)


def learned(keys: Sequence[str], base: Sequence[int], numbers: Ints, samples: Sequence[WidthSample]) -> tuple[Widths, Ints]:
    """Formulas for how each of `numbers`, sizes in the recorded network, depends on the configuration's `keys`, learned
    from `samples`; and the indices of the numbers that no formula explains, which are treated as constant."""
    factors = [sample.factors for sample in samples]
    found: dict[tuple[Fraction, ...], Sum | None] = {}
    products: dict[Factors, int] = {}
    parts, unexplained = [], []
    for index, ratios in enumerate(_ratios(numbers, samples)):
        if ratios not in found:
            found[ratios] = next(_sums(factors, ratios), None)
        terms = found[ratios]
        if terms is None:
            unexplained.append(index)
            terms = ((Fraction(1), (0,) * len(keys)),)
        for share, product in terms:
            parts.append((index, products.setdefault(product, len(products)), share.numerator, share.denominator))
    columns = np.array(parts, dtype=np.int64).reshape(-1, 4).T
    return Widths(tuple(keys), tuple(base), tuple(products), columns), np.array(unexplained, dtype=np.int64)


def _ratios(numbers: Ints, samples: Sequence[WidthSample]) -> Iterator[tuple[Fraction, ...]]:
    """For each number, by what each sample multiplies it."""
    changed = zip(*(sample.numbers.tolist() for sample in samples), strict=True)
    for number, row in zip(numbers.tolist(), changed, strict=True):
        yield tuple(Fraction(one, number) if number else Fraction(one == 0) for one in row)


def _sums(factors: Sequence[tuple[Fraction, ...]], ratios: Sequence[Fraction]) -> Iterator[Sum]:
    """Sums that have these `ratios` when numbers are multiplied by `factors`, the simplest first."""
    lone = {
        which[0]: (one[which[0]], ratio)
        for one, ratio in zip(factors, ratios, strict=True)
        if len(which := [key for key, factor in enumerate(one) if factor != 1]) == 1
    }
    num_keys = len(factors[0]) if factors else 0
    for shares in _shares(lone):
        options = []
        for key in range(num_keys):
            factor, ratio = lone.get(key, (Fraction(1), Fraction(1)))
            options.append(_powers(shares, factor, ratio) if key in lone else [(0,) * len(shares)])
        if not all(options) or np.prod([len(one) for one in options], dtype=float) > MOST_CANDIDATES:
            continue
        for chosen in itertools.product(*options):
            terms = tuple((share, tuple(powers[i] for powers in chosen)) for i, share in enumerate(shares))
            if all(_value(terms, one) == ratio for one, ratio in zip(factors, ratios, strict=True)):
                yield terms


MOST_CANDIDATES = 4096
"""Most combinations of powers that are tried for a sum."""


def _value(terms: Sum, factors: Sequence[Fraction]) -> Fraction:
    """The factor of a sum when the numbers are multiplied by `factors`."""
    total = Fraction(0)
    for share, product in terms:
        for factor, power in zip(factors, product, strict=True):
            if power and factor != 1:
                share *= factor**power
        total += share
    return total


def _powers(shares: Sequence[Fraction], factor: Fraction, ratio: Fraction) -> list[Factors]:
    """The powers that a number may have in products whose sum is multiplied by `ratio` when the number is multiplied by
    `factor`, the smallest first."""

    def total(powers: Factors) -> Fraction:
        return sum((share * factor**power for share, power in zip(shares, powers, strict=True)), Fraction(0))

    chosen = [powers for powers in itertools.product(POWERS, repeat=len(shares)) if total(powers) == ratio]
    return sorted(chosen, key=lambda powers: sum(map(abs, powers)))


def _shares(lone: Mapping[int, tuple[Fraction, Fraction]]) -> Iterator[tuple[Fraction, ...]]:
    """Shares that products may have: one product, then two, then three. A number that occurs in some of the products
    changes the sum by their share."""
    yield (Fraction(1),)
    whole = Fraction(1)
    of_one: set[Fraction] = set()
    for factor, ratio in lone.values():
        for one, other in itertools.permutations(POWERS[:4], 2):
            share = (ratio - factor**other) / (factor**one - factor**other)
            if 0 < share < whole:
                of_one.add(share)
    simple = sorted(of_one, key=lambda share: share.denominator)
    yield from ((share, whole - share) for share in simple)
    steps = {(ratio - 1) / (factor - 1) for factor, ratio in lone.values()}
    linear = sorted({share for share in steps | {whole - step for step in steps} if 0 < share < whole})
    linear = sorted({*linear, *(b - a for a, b in itertools.combinations(linear, 2))})
    for first, second in itertools.combinations_with_replacement(linear, 2):
        if first + second < whole:
            yield first, second, whole - first - second
