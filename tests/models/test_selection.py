"""Which cells tell most: what the order prefers, and that it pays where the truth is known."""

from pathlib import Path

import numpy as np
import pytest

from peakcast import api
from peakcast.collectors.measure import runner
from peakcast.collectors.measure.grid import expand
from peakcast.collectors.measure.settings import CollectSettings
from peakcast.models.calibration.features import FEATURES
from peakcast.models.evaluation.selection import NOISE, Point, covariance, most_informative
from peakcast.models.evaluation.selection_trial import COUNTS, errors, random_orders, table, trials
from peakcast.reports.readme import commands

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


def world(seed):
    """120 cells of 20 architectures, a few of which have most (Zipf), in 4 layouts, and errors that jobs share as the
    covariance has it. What is true does not depend on anybody's rows."""
    rng = np.random.default_rng(seed)
    weights = 1 / np.arange(1, 21)
    architectures = rng.choice(20, size=120, p=weights / weights.sum())
    layouts = rng.choice(4, size=120, p=[0.7, 0.15, 0.1, 0.05])
    centres = rng.normal(size=(20, N))
    points = [
        Point(str(a), str(layout), tuple(centres[a] + 0.3 * rng.normal(size=N)))
        for a, layout in zip(architectures, layouts, strict=True)
    ]
    return points, rng.multivariate_normal(np.zeros(120), covariance(points) + NOISE * np.eye(120))


def cells_needed(order, points, values, target=0.4):
    """How many of `order` must be measured before all are known to `target` (their own spread is 1)."""
    for count in range(4, len(order), 4):
        if np.sqrt(np.mean(errors(order[:count], points, values) ** 2)) <= target:
            return count
    return len(order)


def test_the_same_error_takes_a_quarter_fewer_cells_than_in_random_order():
    """Random order finds the rare architectures late (coupon collector); the informative one sees each at once. So it never
    needs more than the mean of random orders, and over ten worlds at most three quarters."""
    needed = []
    for seed in range(10):
        points, values = world(seed)
        informative = cells_needed(most_informative(points), points, values)
        by_chance = [cells_needed(order, points, values) for order in random_orders(len(points), 3)]
        needed.append((informative, np.mean(by_chance)))
    assert all(informative <= by_chance for informative, by_chance in needed), needed
    assert sum(informative for informative, _ in needed) <= 0.75 * sum(by_chance for _, by_chance in needed), needed


def test_a_trial_says_what_each_order_came_to():
    points, values = world(0)
    found = trials(points, list(values), counts=(20, 60, 500))
    assert [each.count for each in found] == [20, 60]
    assert all(each.informative[0] <= each.informative[1] for each in found)
    assert found[1].informative < found[0].informative
    lines = table(found, len(points)).splitlines()
    assert (lines[0], len(lines)) == ("120 rows, allocated", 4)


def test_the_readmes_table_is_this_commands():
    """Its figures follow the rows: python -P -m peakcast.reports.readme collectors/README.md writes them."""
    readme = Path(__file__).resolve().parents[2] / "collectors" / "README.md"
    ((command, shown),) = commands(readme.read_text(encoding="utf-8"))
    assert command == "python -P -m peakcast.models.evaluation.selection_trial"
    assert [int(line.split()[0]) for line in shown.splitlines()[2:]] == list(COUNTS)


def test_an_unknown_selection_is_named(tmp_path):
    jobs = expand({"axes": {"architecture": ["gpt2"]}})
    with pytest.raises(Exception, match=r"select='best' must be one of grid, informative"):
        api.collect(jobs, tmp_path / "x.jsonl", CollectSettings(trace=True), select="best")


@pytest.mark.whole  # what it is made of has tests of its own, above and in test_campaign.py
def test_a_collection_takes_the_most_telling_cell_first(tmp_path, few_rows, monkeypatch):
    monkeypatch.setenv("PEAKCAST_DATASETS", str(few_rows))
    # the published rows have Mistral and Llama shapes; a network of another width tells more than one more of theirs
    jobs = expand({"axes": {"architecture": ["mistral-7b", "gpt2"]}, "base": {"sequence_length": 256}})
    taken = []

    def collect(jobs, *arguments, **options):
        taken.extend(jobs)
        return runner.CollectionSummary()

    monkeypatch.setattr(runner, "collect", collect)
    api.collect(jobs, tmp_path / "x.jsonl", CollectSettings(trace=True), select="informative")
    assert [job.architecture.name for job in taken] == ["gpt2", "mistral-7b"]
