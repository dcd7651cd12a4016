"""An `Explanation` as text: sections that each answer one question, at most 100 columns wide."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

from peakcast.answers.advised import Advice
from peakcast.answers.explanation import (
    LAYER_COLUMNS,
    Change,
    Collective,
    Comparison,
    Explanation,
    Group,
    ModuleRow,
    ParameterRow,
)
from peakcast.answers.labels import category_name, phase_name, phase_title
from peakcast.answers.remarks import assumptions_shown, warnings_shown
from peakcast.core.units import GIB, MIB, format_gib
from peakcast.explaining.text_picture import text_picture
from peakcast.printing.what_to_try import flags_text, lowered, steps_text, value_text
from peakcast.printing.wrapping import LINE_WIDTH, wrapped

NUM_TENSORS = 12
NUM_RANKS_SHOWN = 8
INSIDE = LINE_WIDTH - 6
"""The width of text inside a section, which is indented."""


def explanation_text(explanation: Explanation, *, layers: bool = False, whole: bool = False) -> str:
    """Sections: why the peak, the timeline, the per-layer table, communication, advice, comparison. `layers` shows every
    layer and every parameter's shape; `whole` every warning and assumption."""
    e = explanation
    where = f" on {e.gpu}" if e.gpu else ""
    title = f"{e.architecture}{where}, rank {e.rank}: one steady step, by the {e.source}"
    why = (wrapped(line, INSIDE) for line in e.peak.sentences)
    sections = [title, _section("Why this is the peak", why), text_picture(e.timeline)]
    sections.append(_modules("Layer by layer, GiB", e.modules, layers))
    if e.unsharded_modules:
        sections.append(_modules("Before sharding: the same on one rank, GiB", e.unsharded_modules, layers))
    if layers and e.parameters:
        sections.append(_parameters(e.parameters))
    if e.groups:
        sections.append(_groups(e.groups, e.rank))
    if e.communication:
        sections.append(_communication(e.communication, e.communication_notes))
    if e.together:
        sections.append(steps_text(e.together))
    if e.advice:
        sections.append(advice_text(e.advice))
    if e.comparison is not None:
        sections.append(comparison_text(e.comparison))
    said = [*warnings_shown(e.findings, whole=whole), *assumptions_shown(e.assumptions, whole=whole)]
    notes = [wrapped(line, INSIDE) for line in said]
    sections += ["\n".join(notes)] if notes else []
    sections += ["\n".join(f"Written: {path}" for path in e.written)] if e.written else []
    return "\n\n".join(sections)


def _section(title: str, lines: Iterable[str]) -> str:
    return "\n".join([f"{title}:", *lines])


# -- layers and parameters ----------------------------------------------------------------------------------------------


def _modules(title: str, rows: Sequence[ModuleRow], every: bool) -> str:
    """One line per module, or per sequence of equal layers; the totals are the largest sum of each column in the step."""
    names = [*LAYER_COLUMNS, "at peak"]
    lines = [f"  {'':<20}{'parameters':>16}" + "".join(f"{_heading(name):>10}" for name in names)]
    for name, count, row in _runs(rows, every):
        title_ = f"{name} (each)" if count > 1 else name
        lines.append(f"  {title_:<20}{row.num_parameters:>16,}" + _cells(row, 1))
    total = {name: sum(getattr(row, name) for row in rows) for name in ("num_parameters", *LAYER_COLUMNS, "at_peak")}
    sums = "".join(f"{total[name] / GIB:>10.3f}" for name in (*LAYER_COLUMNS, "at_peak"))
    lines.append(f"  {'sum over all':<20}{total['num_parameters']:>16,}{sums}")
    lines.append("  Each column shows its own maximum over the step; the last shows what is alive at the peak.")
    return _section(title, lines)


def _heading(column: str) -> str:
    return {"activations": "activat.", "optimizer": "optim."}.get(column, column)


def _cells(row: ModuleRow, count: int) -> str:
    return "".join(f"{getattr(row, name) * count / GIB:>10.3f}" for name in (*LAYER_COLUMNS, "at_peak"))


def _runs(rows: Sequence[ModuleRow], every: bool) -> list[tuple[str, int, ModuleRow]]:
    """(name, number of layers, row of one of them) for each sequence of neighbouring layers with the same numbers."""
    if every:
        return [(_module_name(row.module), 1, row) for row in rows]
    runs = []
    for _, group in itertools.groupby(rows, key=lambda row: _alike(row.module, _cells(row, 1))):
        alike = list(group)
        name = _module_name(alike[0].module)
        if len(alike) > 1:
            name = f"layers.{alike[0].module[7:]}–{alike[-1].module[7:]}"
        runs.append((name, len(alike), alike[0]))
    return runs


def _alike(module: str, numbers: Any) -> Any:
    """A key that is equal for neighbouring layers with the same numbers."""
    return numbers if module.startswith("layers.") else module


def _module_name(module: str) -> str:
    return {"": "no module", "model": "buffer padding"}.get(module, module)


def _parameters(rows: Sequence[ParameterRow]) -> str:
    """Each parameter's shape in the whole model and, if it differs, on this rank; equal layers share a line."""
    by_module: dict[str, list[tuple[Any, ...]]] = {}
    for row in rows:
        by_module.setdefault(row.module, []).append((row.name, row.shape, row.rank_shape, row.shards))
    lines = []
    for _, group in itertools.groupby(by_module.items(), key=lambda item: _alike(*item)):
        alike = list(group)
        first, last = alike[0][0], alike[-1][0]
        lines.append(f"  {first if first == last else f'layers.{first[7:]}–{last[7:]} (each)'}")
        for name, shape, rank_shape, shards in alike[0][1]:
            cut = f" → {list(rank_shape)}" if rank_shape != shape else ""
            lines.append(f"    {name:<44} {list(shape)}{cut}{f' ÷ {shards} ranks' if shards > 1 else ''}")
    return _section("Parameters (whole model → this rank)", lines)


# -- communication ------------------------------------------------------------------------------------------------------


def _groups(groups: Sequence[Group], rank: int) -> str:
    lines = []
    for group in groups:
        shown = ", ".join(map(str, group.members[:NUM_RANKS_SHOWN])) + (", …" if group.size > NUM_RANKS_SHOWN else "")
        count = f"{len(group.firsts):,} group" + ("" if len(group.firsts) == 1 else "s")
        lines.append(f"  {group.axis:<24} {group.size:>4,} ranks, {count}; this one: {shown}")
    return _section(f"Who rank {rank} talks to", lines)


def _communication(rows: Sequence[Collective], notes: Sequence[str]) -> str:
    head = f"  {'':<46}{'message':>11}{'calls':>13}{'sent per GPU, GiB':>22}{'cluster':>9}"
    under = f"  {'':<46}{'MiB':>11}{'micro/step':>13}{'micro':>11}{'step':>11}{'GiB':>9}"
    lines = [head, under]
    for axis, group in itertools.groupby(rows, key=lambda row: row.axis):
        for row in (listed := list(group)):
            if row is listed[0]:
                lines.append(f"  {axis}, {row.group_size} ranks")
            calls = f"{row.calls_per_micro_batch or '–'}/{row.calls_per_iteration or '–'}"
            micro = f"{row.sent_per_micro_batch_bytes / GIB:.3f}" if row.calls_per_micro_batch else "–"
            lines.append(
                f"    {row.function:<44}{row.message_bytes / MIB:>11.2f}{calls:>13}{micro:>11}"
                f"{row.sent_per_iteration_bytes / GIB:>11.3f}{row.sent_in_cluster_bytes / GIB:>9.1f}"
            )
            elsewhere = "" if row.calls_per_iteration else "; by other pipeline stages alone"
            lines.append(f"      {row.what}; {row.where}{elsewhere}")
    total = sum(row.sent_per_iteration_bytes for row in rows)
    cluster = sum(row.sent_in_cluster_bytes for row in rows)
    lines.append(f"  {'everything':<46}{'':>35}{total / GIB:>11.3f}{cluster / GIB:>9.1f}")
    return _section("Communication of one step", [*lines, *(f"  {wrapped(note, INSIDE)}" for note in notes)])


# -- advice and comparison ----------------------------------------------------------------------------------------------


def advice_text(advice: Sequence[Advice]) -> str:
    """Two lines per piece of advice: what it saves by itself, what it costs, and its flags."""
    sections = []
    for same, title in (
        (True, "What would lower it by itself, by GiB saved"),
        (False, "What would lower it by itself, but changes results"),
    ):
        lines = []
        for item in advice:
            if item.same_training is same:
                lines.append(f"  {lowered(item)}: {item.sentence}")
                lines.append(textwrap.indent(wrapped(f"{flags_text(item.changes)}; price: {item.price}", INSIDE), " " * 6))
        sections += [_section(title, lines)] if lines else []
    return "\n\n".join(sections)


def comparison_text(comparison: Comparison) -> str:
    """The differences between the first job and the second, by field, phase, category and tensor."""
    c = comparison
    fields = [f"  {path}: {value_text(before)} → {value_text(after)}" for path, (before, after) in c.fields.items()]
    before, after = c.peak_bytes
    phases = (phase_name(c.peak_phase[0]), phase_name(c.peak_phase[1]))
    moved = f"in {phases[0]}" if phases[0] == phases[1] else f"from {phases[0]} to {phases[1]}"
    lines = fields or ["  the jobs are equal"]
    lines.append(f"  peak {format_gib(before)} → {format_gib(after)} ({(after - before) / GIB:+.2f}), {moved}")
    lines += _changes("phase by phase", c.phases, lambda change: phase_title(change.name))
    lines += _changes("at the peak, by kind", c.categories, lambda change: category_name(change.name))
    tensors = c.tensors[:NUM_TENSORS]
    lines += _changes("at the peak, by tensor", tensors, lambda change: f"{change.name} ({category_name(change.category)})")
    return _section("Compared, this job first", lines)


def _changes(title: str, changes: Sequence[Change], name: Any) -> list[str]:
    lines = [f"  {title:<56}{'this':>12}{'other':>12}{'change':>12}"]
    for change in changes:
        shown = name(change)
        shown = shown if len(shown) <= 52 else "…" + shown[-51:]
        lines.append(
            f"    {shown:<54}{change.before / GIB:>12.3f}{change.after / GIB:>12.3f}{change.difference / GIB:>+12.3f}"
        )
    return lines
