"""How large an error to expect: what rows teach of it, and what stands where they are silent."""

from __future__ import annotations

import numpy as np
import pytest

from peakcast.answers.prediction import QUANTITIES
from peakcast.core.errors import CalibrationError
from peakcast.models.calibration.spread import LEAST, LEAST_SHARE, PRIORS, TERMS, Spread, terms_of

QUANTITY = "peak_allocated_bytes"


def terms(**given: float) -> dict[str, float]:
    return {**dict.fromkeys(TERMS, 0.0), "always": 1.0, **given}


def learned(rows: list[dict[str, float]], errors: list[float]) -> Spread:
    return Spread(QUANTITY).fit(rows, errors, [1.0] * len(rows))


def test_every_quantity_has_a_prior_for_every_term() -> None:
    assert set(PRIORS) == set(QUANTITIES)
    assert all(set(prior) == set(TERMS) for prior in PRIORS.values())


def test_what_rows_show_is_learned_and_what_they_do_not_stays_the_prior() -> None:
    """Half the rows are mixtures of experts, whose errors are five times as large; none is compiled."""
    random = np.random.default_rng(3)
    rows = [terms(routed=float(index % 2)) for index in range(400)]
    errors = [0.004 * (5 if row["routed"] else 1) * random.exponential() for row in rows]
    spread = learned(rows, errors)
    assert spread.predict(terms()) == pytest.approx(0.004, rel=0.15)
    assert spread.predict(terms(routed=1.0)) == pytest.approx(0.02, rel=0.15)
    assert spread.coefficients_["compiled"] == pytest.approx(PRIORS[QUANTITY]["compiled"])


def test_the_sign_of_an_error_does_not_matter() -> None:
    rows, errors = [terms()] * 50, [0.01 * (-1) ** index for index in range(50)]
    assert learned(rows, errors).coefficients_ == learned(rows, [abs(error) for error in errors]).coefficients_


def test_rows_without_errors_leave_a_share_of_the_prior() -> None:
    """A dozen rows that were right do not prove that the next compiled job is."""
    spread = learned([terms(compiled=1.0, outside=4.0)] * 12, [0.0] * 12)
    for name in ("compiled", "outside"):
        assert spread.coefficients_[name] >= LEAST_SHARE * PRIORS[QUANTITY][name]
    assert learned([terms()] * 1000, [0.0] * 1000).predict(terms()) >= LEAST


def test_what_a_new_kind_costs_is_learned_from_rows_of_one() -> None:
    """Rows that were mended leave a share of the prior; where no row is of a new kind, all of it stays."""
    prior = PRIORS[QUANTITY]["kind"]
    assert learned([terms()] * 500, [0.0] * 500).coefficients_["kind"] == pytest.approx(prior)
    assert learned([terms(kind=1.0)] * 500, [0.0] * 500).coefficients_["kind"] == LEAST_SHARE * prior
    random = np.random.default_rng(3)
    rows = [terms(kind=float(index % 2)) for index in range(400)]
    errors = [0.004 * (5 if row["kind"] else 1) * random.exponential() for row in rows]
    assert learned(rows, errors).predict(terms(kind=1.0)) == pytest.approx(0.02, rel=0.15)


def test_a_job_further_outside_is_expected_to_be_no_better() -> None:
    random = np.random.default_rng(5)
    rows = [terms(outside=float(index % 5), fixed=random.uniform(0, 1)) for index in range(200)]
    spread = learned(rows, [0.01 * random.exponential() for _ in rows])
    expected = [spread.predict(terms(outside=float(step), fixed=0.5)) for step in range(9)]
    assert expected == sorted(expected)


def test_a_spread_survives_json_and_a_damaged_one_is_refused() -> None:
    spread = learned([terms()] * 10, [0.003] * 10)
    assert Spread.from_mapping(spread.to_mapping(), QUANTITY).coefficients_ == spread.coefficients_
    for damage in ({"always": -1.0}, {"always": float("nan")}, {"always": "x"}, {"never": 0.0}):
        with pytest.raises(CalibrationError):
            Spread.from_mapping({**spread.to_mapping(), **damage}, QUANTITY)


def test_only_what_holds_a_cache_is_charged_with_it() -> None:
    row = {
        "gib_over_start": 0.05,
        "log2_reserved_over_allocated": 1.0,
        "log2_num_experts": 3.0,
        "generates": 0.0,
        "compile": 1.0,
        "sharded": 1.0,
        "beyond_replay": 1.0,
        "changing_lengths": 1.0,
        "allocator_slack": 0.01,
        "num_parallel_axes": 0.0,
    }
    allocated, reserved = (terms_of(row, f"peak_{name}_bytes", 2.0) for name in ("allocated", "reserved"))
    assert (allocated["cached"], reserved["cached"]) == (0.0, pytest.approx(np.log(2.0)))
    assert [(allocated[name], reserved[name]) for name in ("beyond", "lengths")] == [(0.0, 1.0)] * 2
    assert [reserved[name] for name in ("fixed", "routed", "compiled", "sharded", "outside")] == [0.05, 1, 1, 1, 2.0]


@pytest.mark.parametrize(
    ("axes", "quantity", "slack"), [(2, "allocated", 0.01), (0, "allocated", 0.0), (2, "reserved", 0.0)]
)
def test_rests_of_blocks_are_uncertain_on_several_gpus(axes: int, quantity: str, slack: float) -> None:
    """They are part of allocated memory; reserved memory has the whole blocks, and one GPU's order of requests is known."""
    row = {
        **dict.fromkeys(("gib_over_start", "log2_reserved_over_allocated", "log2_num_experts"), 0.0),
        **dict.fromkeys(("generates", "compile", "sharded", "beyond_replay", "changing_lengths"), 0.0),
        "allocator_slack": float(np.expm1(0.01)),
        "num_parallel_axes": float(axes),
    }
    assert terms_of(row, f"peak_{quantity}_bytes", 0.0)["slack"] == pytest.approx(slack)
