"""The words of an answer that the command line, the web page and `explain` share: the verdict's reason, its findings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from peakcast.findings import KINDS, Finding, ordered
from peakcast.prediction import Interval, Prediction
from peakcast.units import format_gib

NUM_SHOWN = 5
"""Findings, and assumptions, that are printed unless all are asked for."""
OF = {"peak_device_bytes": "", "peak_reserved_bytes": " for PyTorch's allocator", "peak_host_bytes": " of host memory"}
"""What a limit is of, after its size."""


def verdict_reason(p: Prediction) -> str:
    """Why the verdict is what it is, as the end of a sentence."""
    bar: Interval = getattr(p, p.limit.quantity)
    there, what = format_gib(p.limit.num_bytes), OF[p.limit.quantity]
    at_most, span = format_gib(bar.upper_95), f"between {format_gib(bar.lower)} and {format_gib(bar.upper_95)}"
    if p.fits == "yes":
        return f"{at_most} of {there}{what} at most, with 95 % confidence"
    if not p.limit.known:
        return f"about {format_gib(bar.point)}{what} a rank are needed, and a usual node has {there} a GPU"
    if p.fits == "no" and not _may_be_lower(p):
        return f"at least {format_gib(bar.lower)}{what} would be needed, and {there} are there"
    if p.fits == "uncertain" and any(KINDS[finding.code].prevents for finding in p.findings):
        return f"what is counted needs {span} of {there}{what}, and the run would fail"
    if p.fits == "uncertain" and bar.upper_95 < p.limit.num_bytes:
        return f"what is counted needs {at_most} of {there}{what} at most, and something that needs more is not counted"
    if p.fits == "uncertain" and bar.lower > p.limit.num_bytes and _may_be_lower(p):
        return f"what is counted needs {span} of {there}{what}, and something that needs less is not counted"
    return f"{span}{what} are needed, and {there} are there"


def compared_text(name: str, size: int, bar: Interval) -> str:
    """A measured peak beside its prediction, on one line; `name` is that of the quantity ("allocated")."""
    inside = "inside" if bar.lower <= size <= bar.upper else "OUTSIDE"
    error = f"{(bar.point / size - 1) * 100:+.1f} %" if size else "nothing was allocated"
    return f"{name} peak {format_gib(size)} measured, {bar_text(bar)} predicted: {error}, {inside} the bar"


def bar_text(bar: Interval) -> str:
    """The predicted size and its 90 % bar."""
    return f"{format_gib(bar.point)} ({format_gib(bar.lower)} to {format_gib(bar.upper)})"


def _may_be_lower(p: Prediction) -> bool:
    """Whether something uncounted may make the real peak lower than any number here."""
    return any(finding.uncounted and finding.direction != "more" for finding in p.findings)


def warnings_shown(findings: Iterable[Finding], *, whole: bool = False) -> list[str]:
    """What `findings` say, as `Warning: ...` lines, at most `NUM_SHOWN` of them and then how many are left. `whole`: all of
    them, each by itself."""
    found = ordered(findings)
    return _shown("Warning", [f.sentence for f in found] if whole else _together(found), "warning", whole)


def warning_sentences(findings: Iterable[Finding]) -> list[str]:
    """The `NUM_SHOWN` sentences of `findings` that may move the answer most; those of a kind as one (`Kind.together`)."""
    return _together(ordered(findings))[:NUM_SHOWN]


def assumptions_shown(assumptions: Sequence[str], *, whole: bool = False) -> list[str]:
    """The `assumptions` as lines, shortened as `warnings_shown` are."""
    return _shown("Assumed", assumptions, "assumption", whole)


def _shown(title: str, sentences: Sequence[str], noun: str, whole: bool) -> list[str]:
    shown = sentences if whole or len(sentences) <= NUM_SHOWN + 1 else sentences[:NUM_SHOWN]
    left = len(sentences) - len(shown)
    return [f"{title}: {sentence}" for sentence in shown] + (
        [f"{left} more {noun}s; --all-findings prints them."] if left else []
    )


def _together(findings: Sequence[Finding]) -> list[str]:
    """The sentences of `findings`, those of the same `Kind.together` as one where the first of them would be."""
    parameters: dict[str, list[str]] = {}
    for finding in findings:
        if together := KINDS[finding.code].together:
            parameters.setdefault(together, []).append(finding.parameter)
    said: dict[str, None] = {}
    for finding in findings:
        together = KINDS[finding.code].together
        named = list(dict.fromkeys(parameters.get(together, ())))
        said[together.format(listed(named)) if len(named) > 1 else finding.sentence] = None
    return list(said)


def listed(words: Sequence[str]) -> str:
    """`words` as a list in a sentence: "a, b and c"."""
    return words[-1] if len(words) == 1 else f"{', '.join(words[:-1])} and {words[-1]}"
