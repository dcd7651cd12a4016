"""A replayed recording as text, with its comparison to a prediction: a line for each phase, then the sizes that differ."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence

from peakcast.answers.labels import phase_title
from peakcast.core.units import GIB, MIB, format_gib
from peakcast.doors.replaying import NotReplayed, Replayed
from peakcast.explaining.recording_comparison import UNKNOWN_PHASE, Moment, RecordingComparison, SizeRow
from peakcast.models.allocator.history_replay import HistoryReplay
from peakcast.printing.wrapping import LINE_WIDTH
from peakcast.timelines.timeline import Phase

NUM_ROWS = 10
NAMES_WIDTH = 70
COLUMNS = ("recorded", "predicted", "nearest", "agreed", "missing", "surplus", "no tensor", "unsplit")


def replayed_text(found: Replayed) -> str:
    """Whether the simulation agrees with the recording, for each GPU, and the comparison."""
    lines = [line for name, each in zip(found.names, found.gpus, strict=True) for line in _replay(name, each)]
    parts = ["\n".join(lines)]
    parts += [comparison_text(found.beside)] if found.beside is not None else []
    parts += [f"Written: {found.written}"] if found.written else []
    return "\n\n".join(parts)


def one_of_many_text(found: Replayed | NotReplayed) -> str:
    """One file among several: its path, and what the replay says or why there is none."""
    text = f"not replayed: {found.error.message}" if isinstance(found, NotReplayed) else replayed_text(found)
    return f"{found.file}\n{textwrap.indent(text, '  ')}"


def _replay(name: str, each: HistoryReplay) -> Iterator[str]:
    yield f"{name}: the simulation {'agrees' if each.agrees else 'DISAGREES'}"
    yield f"  {each.same_place:,} of {each.allocations:,} allocations land at the recorded address"
    recorded, simulated = each.recorded_peak_reserved_bytes, each.peak_reserved_bytes
    difference = "the same" if recorded == simulated else f"{simulated - recorded:+,} bytes"
    yield f"  peak reserved {format_gib(recorded)} recorded, {format_gib(simulated)} simulated: {difference}"
    yield f"  peak allocated {format_gib(each.peak_allocated_bytes)}"
    if each.reserved_differs:
        yield f"  after {each.reserved_differs:,} of {each.num_events:,} events the sum of segments differs"
    if each.first_difference is not None and not each.agrees:
        yield f"  the first difference is at event {each.first_difference:,}"


def comparison_text(found: RecordingComparison) -> str:
    """The whole comparison."""
    lines = [f"Beside {found.predicted_by}, each phase at its fullest, GiB:", f"  {'':<16}" + _headings()]
    lines += [f"  {_phase(moment):<16}" + _numbers(moment) for moment in found.phases]
    note = (
        "nearest: the predicted moment that has most in common, and is compared; agreed: tensors as predicted, by size; "
        "missing: predicted, not recorded; surplus: tensors that nobody predicted; no tensor: taken by kernels and "
        "libraries; unsplit: rests of blocks."
    )
    lines += textwrap.wrap(note, LINE_WIDTH - 4, initial_indent="  ", subsequent_indent="  ", break_on_hyphens=False)
    return "\n".join([*lines, "", *_sizes(found.peak)])


def _headings() -> str:
    return "".join(f"{name:>10}" for name in COLUMNS)


def _numbers(m: Moment) -> str:
    sizes = (
        m.recorded_bytes, m.predicted_peak_bytes, m.predicted_bytes, m.as_predicted_bytes, m.missing_bytes,
        m.unpredicted_bytes, m.hidden_bytes, m.slack_bytes,
    )  # fmt: skip
    return "".join(f"{size / GIB:>10.3f}" for size in sizes)


def _phase(moment: Moment) -> str:
    phase = Phase[moment.phase.upper()]
    return UNKNOWN_PHASE if phase is Phase.INIT else phase_title(moment.phase)


def _sizes(moment: Moment) -> Iterator[str]:
    more = [row for row in moment.sizes if row.recorded > row.predicted]
    fewer = [row for row in moment.sizes if row.recorded < row.predicted]
    equal = [row for row in moment.sizes if row.recorded == row.predicted]
    yield (
        f"At the recorded peak of {format_gib(moment.recorded_bytes)} ({_phase(moment)}, after {moment.recorded_instant:,} "
        "allocations):"
    )
    yield from _rows("recorded and not predicted", more)
    yield from _rows("predicted and not recorded", fewer)
    yield from _rows("as predicted, as many of each size", equal)


def _rows(title: str, rows: Sequence[SizeRow]) -> Iterator[str]:
    if not rows:
        yield f"  nothing is {title}"
        return
    yield f"  {title}:"
    for row in rows[:NUM_ROWS]:
        names = row.recorded_as if row.recorded > row.predicted else row.predicted_as or row.recorded_as
        hidden = " (no tensor)" if row.hidden and row.hidden == row.recorded else ""
        counts = f"{row.recorded:>7,} recorded {row.predicted:>7,} predicted  {_size(row.size_bytes):>14}  "
        yield "    " + counts + textwrap.shorten(", ".join(names), NAMES_WIDTH, placeholder=" ...") + hidden
    rest = rows[NUM_ROWS:]
    if rest:
        size = sum(abs(row.difference_bytes) or row.recorded * row.size_bytes for row in rest)
        yield f"    and {len(rest)} more sizes, {size / GIB:.3f} GiB together"


def _size(num_bytes: int) -> str:
    return f"{num_bytes / MIB:,.2f} MiB" if num_bytes >= MIB // 10 else f"{num_bytes:,} B"
