"""Words of an answer that the command line, the web page and `explain` share: the reason for the verdict, and its
findings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from peakcast.answers.labels import OF_LIMIT, VERDICTS, WOULD_FAIL
from peakcast.answers.prediction import Interval, Prediction
from peakcast.core.findings import KINDS, Finding, guessed, ordered
from peakcast.core.units import GIB, format_gib

NUM_SHOWN = 5
"""Number of findings, and of assumptions, that are printed unless all are asked for."""
SURE = "95 % sure"
"""How certain the one-sided bounds of an interval are."""


def verdict_words(p: Prediction) -> str:
    """The verdict in a few words. If a library refuses to run the job, it would fail, whatever memory there is."""
    return WOULD_FAIL if preventing(p) else VERDICTS[p.fits]


def verdict_reason(p: Prediction) -> str:
    """How much is expected, with which certainty, and how much is available: the end of the sentence that the verdict
    begins."""
    bar: Interval = getattr(p, p.limit.quantity)
    what = OF_LIMIT[p.limit.quantity]
    there, expected = format_gib(p.limit.num_bytes), format_gib(bar.point)
    expect = f"expect {bar.point / GIB:,.2f} of {there}{what}"
    if not p.limit.known:
        return f"expect {expected}{what} a rank, where a usual node has {there} a GPU"
    if preventing(p):
        return f"if it ran, {expect}"
    if guessed(p.findings):
        return f"{expect} if it needs as much as a Llama of its sizes, which is a guess"
    if p.fits == "uncertain" and bar.upper_95 < p.limit.num_bytes:
        counted = all(finding.direction == "less" or not finding.uncounted for finding in p.findings)
        return f"{expect}, {'unless a warning below holds' if counted else 'and more for something that is not counted'}"
    if p.fits == "uncertain" and bar.lower > p.limit.num_bytes and _may_be_lower(p):
        return f"expect {expected}{what} where there are {there}, but less for something that is not counted"
    if p.fits == "yes":
        return f"{expect}, at most {bar.upper_95 / GIB:,.2f} ({SURE})"
    if p.fits == "no" and not _may_be_lower(p):
        return f"expect {expected}{what}, at least {bar.lower / GIB:,.2f} ({SURE}), where there are {there}"
    return f"{expect}, but {bar.lower / GIB:,.2f} to {format_gib(bar.upper_95)} are possible"


def preventing(p: Prediction) -> Finding | None:
    """The finding that the run would fail, which then decides the answer instead of memory; None without it."""
    if p.fits == "no":
        return None
    return next((finding for finding in p.findings if KINDS[finding.code].prevents), None)


def compared_text(name: str, size: int, bar: Interval) -> str:
    """A measured peak beside its prediction, on one line; `name` is that of the quantity ("allocated")."""
    inside = "inside" if bar.lower <= size <= bar.upper else "OUTSIDE"
    error = f"{(bar.point / size - 1) * 100:+.1f} %" if size else "nothing was allocated"
    return f"{name} peak {format_gib(size)} measured, {bar_text(bar)} predicted: {error}, {inside} the bar"


def bar_text(bar: Interval) -> str:
    """The predicted size and its 90 % bar."""
    return f"{format_gib(bar.point)} ({format_gib(bar.lower)} to {format_gib(bar.upper)})"


def _may_be_lower(p: Prediction) -> bool:
    """Whether something that is not counted may make the real peak lower than all numbers here."""
    return any(finding.uncounted and finding.direction != "more" for finding in p.findings)


def notable(findings: Iterable[Finding]) -> tuple[Finding, ...]:
    """The `findings` that an answer shows at once, those that may change it most first; the others are `Kind.routine`."""
    return tuple(finding for finding in ordered(findings) if not KINDS[finding.code].routine)


def warnings_shown(findings: Iterable[Finding], *, whole: bool = False, most: int = NUM_SHOWN) -> list[str]:
    """The `findings` as `Warning: ...` lines: at most `most`, then how many are left. `whole`: all of them, one by one."""
    found = ordered(findings)
    return _shown("Warning", [f.sentence for f in found] if whole else _together(found), "warning", whole, most)


def warning_sentences(findings: Iterable[Finding]) -> list[str]:
    """The `NUM_SHOWN` sentences of `findings` that may change the answer most; findings of one kind share a sentence
    (`Kind.together`)."""
    return _together(ordered(findings))[:NUM_SHOWN]


def assumptions_shown(assumptions: Sequence[str], *, whole: bool = False) -> list[str]:
    """The `assumptions` as lines, shortened like those of `warnings_shown`."""
    return _shown("Assumed", assumptions, "assumption", whole)


def _shown(title: str, sentences: Sequence[str], noun: str, whole: bool, most: int = NUM_SHOWN) -> list[str]:
    shown = sentences if whole or len(sentences) <= most + 1 else sentences[:most]
    left = len(sentences) - len(shown)
    rest = [f"{left} more {noun}s; --details prints them."] if left else []
    return [f"{title}: {sentence}" for sentence in shown] + rest


def _together(findings: Sequence[Finding]) -> list[str]:
    """The sentences of `findings`; those with the same `Kind.together` become one sentence at the place of the first."""
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
