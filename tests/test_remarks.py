from __future__ import annotations

from dataclasses import replace

import pytest

from peakcast.answers.prediction import Interval, Limit, Prediction
from peakcast.answers.remarks import (
    NUM_SHOWN,
    assumptions_shown,
    notable,
    preventing,
    verdict_reason,
    verdict_words,
    warnings_shown,
)
from peakcast.core.findings import FAILS, KINDS, LESS, MORE, UNKNOWN, Finding, found, ordered
from peakcast.core.units import GIB

UNKEYED = Finding("setting_unknown", "odd", "either", "odd is not known here.")
UNSEEN = Finding("kind_not_measured", "parallelism", "either", "no measured run has layout=tp.")


def bar(lower: float, upper: float) -> Interval:
    point = int((lower + upper) / 2 * GIB)
    return Interval(baseline=point, point=point, lower=int(lower * GIB), upper=int(upper * GIB), upper_95=int(upper * GIB))


def prediction(fits: str, lower: float, upper: float, *findings: Finding, limit: Limit | None = None) -> Prediction:
    return Prediction(
        gpu="H100-80GB",
        rank=0,
        peak_allocated_bytes=bar(lower, upper),
        peak_reserved_bytes=bar(lower, upper),
        peak_device_bytes=bar(lower, upper),
        peak_host_bytes=bar(lower, upper),
        capacity_bytes=80 * GIB,
        fits=fits,  # type: ignore[arg-type]
        limit=limit or Limit("peak_device_bytes", 80 * GIB),
        peak_phase="backward",
        found=findings,
    )


def test_at_least_is_said_only_where_nothing_may_lower_it() -> None:
    sure, unknown = prediction("no", 90, 100), found("it is not modelled.", "it", effect=UNKNOWN)
    assert verdict_reason(sure) == "expect 95.00 GiB, at least 90.00 (95 % sure), where there are 80.00 GiB"
    assert "at least" not in verdict_reason(replace(sure, found=(unknown,)))
    assert "at least" in verdict_reason(replace(sure, found=(found("it needs more.", "it", effect=MORE),)))
    less = prediction("uncertain", 90, 100, found("it saves memory.", "it", effect=LESS))
    assert verdict_reason(less) == "expect 95.00 GiB where there are 80.00 GiB, but less for something that is not counted"
    more = prediction("uncertain", 10, 20, found("it needs more.", "it", effect=MORE))
    assert verdict_reason(more) == "expect 15.00 of 80.00 GiB, and more for something that is not counted"


def test_the_sentence_says_what_is_expected_and_how_sure_that_is() -> None:
    assert verdict_reason(prediction("yes", 40, 50)) == "expect 45.00 of 80.00 GiB, at most 50.00 (95 % sure)"
    unsure = verdict_reason(prediction("uncertain", 70, 90))
    assert unsure == "expect 80.00 of 80.00 GiB, but 70.00 to 90.00 GiB are possible"
    meant = Finding("setting_reinterpreted", "", "more", "it may be another job as well.")
    assert verdict_reason(prediction("uncertain", 40, 50, meant)).endswith("unless a warning below holds")


def test_a_run_that_a_library_refuses_is_said_to_fail() -> None:
    refused = found("it cannot be.", "it", effect=FAILS)
    asked = prediction("uncertain", 40, 50, refused)
    assert preventing(asked) is refused
    assert verdict_words(asked) == "would fail"
    assert verdict_reason(asked) == "if it ran, expect 45.00 of 80.00 GiB"
    assert verdict_words(prediction("no", 90, 95, refused)) == "does not fit"


def test_findings_that_bars_have_already_are_left_to_the_details() -> None:
    assert notable([UNSEEN, UNKEYED]) == (UNKEYED,)


def test_the_reason_names_what_is_short() -> None:
    host = Limit("peak_host_bytes", 64 * GIB)
    assert verdict_reason(prediction("no", 90, 100, limit=host)).startswith("expect 95.00 GiB of host memory, at least")
    usual = replace(host, known=False)
    assert "a usual node has 64.00 GiB a GPU" in verdict_reason(prediction("uncertain", 90, 100, limit=usual))


def test_what_may_move_the_answer_most_comes_first_and_once() -> None:
    unsupported = Finding("setting_not_modelled", "fp8", "either", "fp8 is not modelled.")
    lower = found("kernels save memory.", "kernels", effect=LESS)
    assert ordered([UNKEYED, UNSEEN, unsupported, lower, lower]) == (lower, unsupported, UNSEEN, UNKEYED)


def test_findings_of_a_kind_are_one_sentence_unless_all_are_asked_for() -> None:
    both = [UNKEYED, replace(UNKEYED, parameter="other", sentence="other is not known here.")]
    assert warnings_shown(both) == ["Warning: odd and other are not known here; they are left out, and may matter."]
    assert warnings_shown(both[:1]) == ["Warning: odd is not known here."]
    assert warnings_shown(both, whole=True) == ["Warning: odd is not known here.", "Warning: other is not known here."]


def test_the_rest_is_counted() -> None:
    said = [f"number {number}." for number in range(9)]
    lines = assumptions_shown(said)
    assert lines[:NUM_SHOWN] == [f"Assumed: {sentence}" for sentence in said[:NUM_SHOWN]]
    assert lines[NUM_SHOWN:] == ["4 more assumptions; --details prints them."]
    assert len(assumptions_shown(said, whole=True)) == 9
    many = [found(sentence, "it") for sentence in said]
    assert warnings_shown(many)[NUM_SHOWN:] == ["4 more warnings; --details prints them."]


@pytest.mark.parametrize("code", KINDS)
def test_every_kind_says_what_it_means(code: str) -> None:
    kind = KINDS[code]
    assert kind.meaning
    assert not kind.uncounted or kind.severity
    assert kind.together.count("{}") == bool(kind.together)
