"""Which cells tell most: what the order prefers, and that it pays on rows that were really measured."""

import random

import numpy as np
import pytest

from peakcast import api, store
from peakcast.collectors.grid import expand
from peakcast.models.features import FEATURES
from peakcast.models.samples import prepare
from peakcast.models.selection import Point, covariance, expected, most_informative, point_of

N = len(FEATURES)


def at(architecture, layout, where):
    return Point(architecture, layout, tuple(float(where) for _ in range(N)))


def test_every_architecture_and_layout_is_seen_before_any_is_seen_twice():
    cells = [at("a", "dp1", 0), at("a", "dp1", 0.1), at("b", "dp1", 0.2), at("b", "dp8", 0.1), at("c", "tp2", 0.3)]
    first = [cells[i] for i in most_informative(cells)[:3]]
    assert {cell.architecture for cell in first} == {"a", "b", "c"}
    assert len({cell.layout for cell in first}) >= 2


def test_what_was_measured_already_comes_last():
    cells = [at("a", "dp1", 0), at("b", "dp1", 1), at("c", "dp1", 2)]
    assert most_informative(cells, measured=[cells[1]])[-1] == 1
    assert most_informative([]) == []


def test_the_order_is_a_permutation_and_the_covariance_is_one():
    rng = np.random.default_rng(0)
    cells = [Point(str(rng.integers(4)), str(rng.integers(3)), tuple(rng.normal(size=N))) for _ in range(30)]
    assert sorted(most_informative(cells)) == list(range(30))
    matrix = covariance(cells)
    assert np.allclose(np.diagonal(matrix), 1)
    assert np.linalg.eigvalsh(matrix).min() > -1e-9
    assert np.allclose(matrix, matrix.T)


def test_measuring_in_this_order_pays_on_published_rows():
    samples = [s for s in prepare(store.load()).samples if s.measured("peak_allocated_bytes")]
    points, values = [point_of(s) for s in samples], [s.log_ratio("peak_allocated_bytes") for s in samples]

    def error(order, count, part):
        chosen = order[:count]
        guess = expected([points[i] for i in chosen], [values[i] for i in chosen], points)
        return np.quantile(np.abs(guess - np.array(values)), part)

    orders = []
    for seed in range(20):
        order = list(range(len(points)))
        random.Random(seed).shuffle(order)
        orders.append(order)
    informative = most_informative(points)
    for count in (20, 40, 80):
        assert error(informative, count, 0.9) < 0.8 * np.mean([error(order, count, 0.9) for order in orders])
        assert error(informative, count, 0.95) < 0.9 * np.mean([error(order, count, 0.95) for order in orders])


def test_an_unknown_selection_is_named(tmp_path):
    jobs = expand({"axes": {"architecture": ["gpt2"]}})
    with pytest.raises(Exception, match=r"select='best' must be one of grid, informative"):
        api.collect(jobs, tmp_path / "x.jsonl", trace=True, select="best")


def test_a_collection_takes_the_most_telling_cell_first(tmp_path):
    # the published rows have Mistral and Llama shapes; a network of another width tells more than one more of theirs
    jobs = expand({"axes": {"architecture": ["mistral-7b", "gpt2"]}, "base": {"sequence_length": 256}})
    seen = []
    api.collect(jobs, tmp_path / "x.jsonl", trace=True, select="informative", progress=seen.append, processes=1)
    assert "gpt2" in seen[0]
