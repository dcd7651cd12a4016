"""The stacked timeline in characters: one column per sampled instant, one band of characters per kind of memory."""

from __future__ import annotations

import numpy as np

from peakcast.core.units import GIB
from peakcast.explaining.stack import BANDS, sampled, stacked
from peakcast.timelines.timeline import Phase, Timeline

WIDTH = 80
HEIGHT = 16
MARGIN = 9
"""Columns that the scale takes."""
LETTERS = {
    Phase.INIT: "i",
    Phase.FORWARD: "F",
    Phase.LOSS: "L",
    Phase.BACKWARD: "B",
    Phase.GRADIENT_CLIPPING: "C",
    Phase.OPTIMIZER_STEP: "O",
}
PHASE_WORDS = {
    Phase.FORWARD: "F forward",
    Phase.LOSS: "L loss",
    Phase.BACKWARD: "B backward",
    Phase.GRADIENT_CLIPPING: "C clipping",
    Phase.OPTIMIZER_STEP: "O optimizer step",
}


def text_picture(timeline: Timeline, *, width: int = WIDTH, height: int = HEIGHT) -> str:
    """The picture, at most `width` characters wide: GiB on the vertical axis, operations on the horizontal one, and the
    phase of each column below it."""
    instants = sampled(timeline, width - MARGIN - 1)
    tops = np.cumsum(stacked(timeline)[:, instants], axis=0)
    peak = int(tops[-1].max())
    unit = max(peak, 1) / height
    digits = 1 if peak >= GIB else 3  # a step of a small module peaks at hundredths of a GiB
    lines = []
    for row in range(height, 0, -1):
        middle = (row - 0.5) * unit
        cells = [_cell(tops[:, column], middle) for column in range(len(instants))]
        scale = f"{row * unit / GIB:>{MARGIN - 2}.{digits}f} ┤" if row % 4 == 0 else f"{'│':>{MARGIN}}"
        lines.append(scale + "".join(cells).rstrip())
    lines.append(f"{'0 └':>{MARGIN}}" + "─" * len(instants))
    phases = [Phase(int(timeline.phases[instant])) for instant in instants]
    lines.append(" " * MARGIN + "".join(LETTERS[phase] for phase in phases))
    where = int(np.argmax(tops[-1]))
    lines.append(" " * (MARGIN + where) + "^ peak" if where < len(instants) - 6 else " " * (MARGIN + where - 5) + "peak ^")
    present = [band for row, band in enumerate(BANDS) if np.diff(tops, axis=0, prepend=0)[row].max() >= unit / 2]
    lines += _filled([f"{band.character} {band.name}" for band in present], "GiB:", width)
    lines += _filled([words for phase, words in PHASE_WORDS.items() if phase in phases], "Phases:", width)
    return "\n".join(lines)


def _cell(tops: np.ndarray, middle: float) -> str:  # type: ignore[type-arg]
    """The character of the band that contains `middle`; a blank above the highest band."""
    band = int(np.searchsorted(tops, middle, side="left"))
    return BANDS[band].character if band < len(BANDS) else " "


def _filled(words: list[str], title: str, width: int) -> list[str]:
    lines, line = [], title
    for word in words:
        if len(line) + 2 + len(word) > width:
            lines.append(line)
            line = " " * len(title)
        line += "  " + word
    return [*lines, line]
