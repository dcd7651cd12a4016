"""A recording compared with a prediction as a picture: bands for what was recorded, and a line for the prediction."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from peakcast.answers.labels import phase_title
from peakcast.core.drawing import INK, STYLE
from peakcast.core.units import GIB
from peakcast.explaining.picture import DIM, RED, SHADES, check_picture_path
from peakcast.explaining.recording_comparison import UNKNOWN_PHASE, RecordingComparison, shares
from peakcast.explaining.stack import sampled, spans
from peakcast.timelines.timeline import Phase, Timeline

COLUMNS = 500
BANDS = (("as predicted", "#5b8db8"), ("nobody predicted", "#f2b134"), ("no tensor (kernels, libraries)", "#d9572b"))


def write_comparison(found: RecordingComparison, path: Path, title: str) -> None:
    """Draw the comparison to `path` (.png or .svg). Raises: SpecError for another ending."""
    import matplotlib

    check_picture_path(path)
    with matplotlib.rc_context(STYLE):
        metadata = {"Date": None} if path.suffix.lower() == ".svg" else {"Software": None}
        draw(found, title).savefig(path, dpi=150, metadata=metadata)


def draw(found: RecordingComparison, title: str) -> Any:
    """The picture as a matplotlib figure."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 5.2), layout="constrained")
    axes = figure.add_subplot()
    instants = sampled(found.recorded, COLUMNS)
    edges = np.arange(COLUMNS + 1)
    base = np.zeros(COLUMNS)
    for (name, colour), height in zip(BANDS, shares(found, instants) / GIB, strict=True):
        upper = base + height
        axes.fill_between(
            edges, np.append(base, base[-1]), np.append(upper, upper[-1]), step="post", color=colour, linewidth=0,
            label=name, zorder=2,
        )  # fmt: skip
        base = upper
    line = _predicted(found.recorded, found.predicted, instants) / GIB
    if not np.isnan(line).all():
        axes.step(edges, np.append(line, line[-1]), where="post", color=INK, linewidth=1.2, label="predicted", zorder=4)
    top = max(float(base.max()), float(np.nan_to_num(line).max()))
    _shade(axes, found.recorded, instants, top)
    where = int(np.argmax(base))
    axes.annotate(
        f"recorded peak {found.peak.recorded_bytes / GIB:,.2f} GiB",
        xy=(where, float(base.max())),
        xytext=(min(max(where, 0.14 * COLUMNS), 0.86 * COLUMNS), top * 1.1),
        ha="center", fontsize=10, fontweight="bold", color=INK, zorder=6,
        arrowprops={"arrowstyle": "->", "color": RED},
    )  # fmt: skip
    axes.set(xlim=(0, COLUMNS), ylim=(0, top * 1.22), ylabel="GiB", xticks=[])
    axes.set_xlabel("allocations that were recorded, in order; short phases are drawn wider")
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold", pad=12)
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], loc="center left", bbox_to_anchor=(1.01, 0.5), frameon=False, fontsize=9)
    return figure


def _predicted(recorded: Timeline, predicted: Timeline, instants: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """The prediction's total at each instant of the recording. As the two have no common clock, the prediction's course of
    a phase is stretched over every part of the recording in that phase. NaN if the prediction does not have a phase."""
    line = np.full(len(recorded.phases), np.nan)
    for phase, start, stop in spans(recorded):
        course = predicted.totals[predicted.phases == phase]
        if len(course):
            line[start:stop] = course[np.arange(stop - start) * len(course) // (stop - start)]
    return line[instants]


def _shade(axes: Any, recorded: Timeline, instants: npt.NDArray[np.int64], top: float) -> None:
    """Draw the background of each phase, and its name once, in its widest part."""
    phases = recorded.phases[instants]
    edges = [0, *(np.flatnonzero(np.diff(phases)) + 1).tolist(), len(phases)]
    widest: dict[Phase, tuple[int, int]] = {}
    for start, stop in itertools.pairwise(edges):
        phase = Phase(int(phases[start]))
        axes.axvspan(start, stop, color=SHADES[phase], linewidth=0, zorder=0)
        if stop - start > widest.get(phase, (0, 0))[1] - widest.get(phase, (0, 0))[0]:
            widest[phase] = (start, stop)
    for phase, (start, stop) in widest.items():
        name = UNKNOWN_PHASE if phase is Phase.INIT else phase_title(phase.name.lower())
        if stop - start > 0.02 * COLUMNS:
            middle = min((start + stop) / 2, (1 - 0.0042 * len(name)) * COLUMNS)  # the last one ends within the picture
            axes.text(middle, top * 1.2, name, ha="center", va="top", fontsize=8, color=DIM)
