"""What nearly the same requests reserve: nothing else where they are nested, GiB more where one tensor decides."""

from __future__ import annotations

import pytest

from peakcast.core.units import MIB
from peakcast.jobs.allocator_settings import Allocator
from peakcast.jobs.spec import Precision
from peakcast.models.allocator.nearby_orders import MOST_LATER, NUM_ORDERS, nearby_orders
from peakcast.models.allocator.replay import replay_run
from peakcast.models.calibration.calibration import UNCALIBRATED
from peakcast.models.prediction.predict import known_of, predict
from peakcast.models.recipes.baseline_choice import SeenRun, baseline_from
from peakcast.timelines.timeline import Category, Entry, Phase, Timeline

LENGTH = 40
PHASES = [Phase.FORWARD] * LENGTH


def steps_of(*entries):
    return [Timeline.from_entries([Entry(name, Category.OTHER, size, *life) for name, size, *life in entries], PHASES)]


NESTED = steps_of(("weight", 100 * MIB, 0, 99), ("outer", 200 * MIB, 1, 30), ("inner", 40 * MIB, 9, 20))
# the state goes where `passing` was, or, while that is still there, into the room of `first`, of which `last` needs all
CHANCE = steps_of(
    ("first", 400 * MIB, 0, 10),
    ("kept", 20 * MIB, 1, 99),
    ("passing", 20 * MIB, 2, 15),
    ("above", 20 * MIB, 3, 99),
    ("state", 20 * MIB, 15, 99),
    ("last", 400 * MIB, 25, 30),
)
EXPANDABLE = Allocator(expandable_segments=True)


def reserved(orders):
    return [replay_run(order, EXPANDABLE).peak_reserved_bytes for order in orders]


def test_tensors_go_a_little_later_and_never_beyond_their_step():
    orders = [order[0] for order in nearby_orders(CHANCE)]
    seen = CHANCE[0]
    assert len(orders) == NUM_ORDERS
    later = [order.dies - seen.dies for order in orders]
    assert {int(each.min()) for each in later} == {0}
    assert max(int(each.max()) for each in later) == MOST_LATER
    assert all((order.dies[seen.dies >= LENGTH] >= LENGTH).all() for order in orders)
    assert [order.dies.tolist() for order in orders] == [order[0].dies.tolist() for order in nearby_orders(CHANCE)]


def test_nested_requests_reserve_the_same_in_any_order_nearby():
    assert set(reserved(nearby_orders(NESTED))) == set(reserved([NESTED]))


def test_where_one_tensor_decides_the_bar_covers_both_ends_and_the_answer_says_so(fakes):
    ends = min(reserved(nearby_orders(CHANCE))), max(reserved(nearby_orders(CHANCE)))
    assert ends == (460 * MIB, 860 * MIB)
    job, device = fakes.job(allocator=EXPANDABLE), fakes.devices["H100-80GB"]

    def answer(steps, compiled=True):
        trace = {"first": steps[0], "steady": steps[0]}
        with baseline_from("trace", lambda *_: trace, SeenRun(steps[0], compiled)):
            return predict(job, device, 0, UNCALIBRATED, ledger=lambda job, *, step, **_: trace[step])

    by_chance, nested, as_seen = answer(CHANCE), answer(NESTED), answer(CHANCE, compiled=False)
    bar = by_chance.peak_reserved_bytes
    all_of_them = reserved([CHANCE, *nearby_orders(CHANCE)])
    assert bar.point == sum(all_of_them) // len(all_of_them)  # each as likely
    assert bar.lower <= ends[0] < ends[1] <= bar.upper <= by_chance.peak_device_bytes.upper
    (said,) = [said for said in by_chance.assumptions if "exact order of requests" in said]
    assert "0.45 GiB to 0.84 GiB" in said
    assert not any("exact order of requests" in said for said in (*nested.assumptions, *as_seen.assumptions))
    assert [as_seen.peak_reserved_bytes.point] == reserved([CHANCE])
    assert nested.peak_reserved_bytes.point == pytest.approx(340 * MIB)


def test_a_setting_that_the_ledger_ignores_changes_nothing_where_the_run_was_seen(fakes):
    job, trace = fakes.job(framework="torch", precision=Precision(gradients="float32")), {}
    assert [finding.parameter for finding in known_of(job)] == ["precision.gradients"]
    with baseline_from("trace", lambda *_: trace, SeenRun(NESTED[0], compiled=False)):
        assert known_of(job) == ()
