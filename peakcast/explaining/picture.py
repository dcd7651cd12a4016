"""The stacked timeline as a picture file: bytes by category over the operations of the step, phases shaded, the peak
marked."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from peakcast.answers.labels import phase_title
from peakcast.core.drawing import INK, STYLE
from peakcast.core.errors import SpecError
from peakcast.core.extras import need
from peakcast.core.units import GIB
from peakcast.explaining.stack import BANDS, sampled, stacked
from peakcast.timelines.timeline import Phase, Timeline

ENDINGS = (".png", ".svg")
COLUMNS = 1200
"""Number of sampled instants, which is the picture's width in pixels."""
NARROW = 0.15
"""If a phase takes less than this fraction of the width, its name is written in two lines."""
WIDE, TALL = (10.0, 5.2), (4.8, 5.8)
"""Width and height in inches of the picture, and of the one for a phone, whose legend is below."""
LETTER = 0.115
"""Inches that a letter of a phase's name takes, with its spacing."""
DIM, RED = "#5b6570", "#b3261e"
SHADES = {
    Phase.INIT: "#ffffff",
    Phase.FORWARD: "#ffffff",
    Phase.LOSS: "#fbe3d6",
    Phase.BACKWARD: "#eef2f6",
    Phase.GRADIENT_CLIPPING: "#e6e0ef",
    Phase.OPTIMIZER_STEP: "#dfe9dc",
}


def check_picture_path(path: Path) -> None:
    """Refuse a file that is neither PNG nor SVG, and any where there is no matplotlib.

    Raises: SpecError or MissingPackageError.
    """
    if path.suffix.lower() not in ENDINGS:
        raise SpecError(f"picture={path} must end in .png or .svg.", parameter="picture", value=str(path))
    need("a picture", "matplotlib")


def write_picture(timeline: Timeline, path: Path, title: str, capacity_bytes: int | None = None) -> None:
    """Draw `timeline` to `path` (.png or .svg); `capacity_bytes` adds a line for the GPU's capacity."""
    import matplotlib

    check_picture_path(path)
    with matplotlib.rc_context(STYLE):
        figure = draw(timeline, title, capacity_bytes)
        metadata = {"Date": None} if path.suffix.lower() == ".svg" else {"Software": None}
        figure.savefig(path, dpi=150, metadata=metadata)


def draw(timeline: Timeline, title: str, capacity_bytes: int | None = None, size: tuple[float, float] = WIDE) -> Any:
    """The picture as a matplotlib figure, of the `size` WIDE or TALL."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    axes = figure.add_subplot()
    instants = sampled(timeline, COLUMNS)
    heights = stacked(timeline)[:, instants] / GIB
    totals = heights.sum(axis=0)
    top = float(totals.max())
    where = int(np.median(np.flatnonzero(instants == instants[np.argmax(totals)])))
    limit = top * 1.22
    if capacity_bytes is not None and capacity_bytes / GIB < 1.6 * top:
        limit = max(limit, capacity_bytes / GIB * 1.08)
        _draw_capacity(axes, capacity_bytes / GIB)
    _draw_bands(axes, heights)
    _shade(axes, timeline, instants, COLUMNS / size[0])
    _mark_peak(axes, where, top, limit, f"peak {timeline.peak().num_bytes / GIB:,.2f} GiB")
    axes.set(xlim=(0, COLUMNS), ylim=(0, limit), ylabel="GiB", xticks=[])
    between = "; " if size == WIDE else ";\n"
    axes.set_xlabel(f"operations of one step, in order{between}short phases are drawn wider")
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold", pad=28)
    handles, labels = axes.get_legend_handles_labels()
    style = {"frameon": False, "fontsize": 9, "handlelength": 1.2}
    if size == WIDE:
        axes.legend(handles[::-1], labels[::-1], loc="center left", bbox_to_anchor=(1.01, 0.5), **style)
    else:
        figure.legend(handles[::-1], labels[::-1], loc="outside lower left", ncols=2, **style)
    return figure


def _draw_capacity(axes: Any, capacity_gib: float) -> None:
    """A line at the GPU's capacity."""
    axes.axhline(capacity_gib, color=RED, linewidth=1, linestyle="--", zorder=4)
    label = f"the GPU's {capacity_gib:.1f} GiB"
    axes.text(10, capacity_gib, label, va="bottom", ha="left", color=RED, fontsize=9, zorder=5)


def _draw_bands(axes: Any, heights: npt.NDArray[np.float64]) -> None:
    """A band for each kind of tensor, one on top of the other. `heights`: GiB. [num_bands, COLUMNS]"""
    edges, base = np.arange(COLUMNS + 1), np.zeros(COLUMNS)
    for band, height in zip(BANDS, heights, strict=True):
        if height.max() * GIB >= 1:
            upper = base + height
            axes.fill_between(
                edges, np.append(base, base[-1]), np.append(upper, upper[-1]), step="post", color=band.colour,
                linewidth=0, label=band.name, zorder=2,
            )  # fmt: skip
            base = upper


def _mark_peak(axes: Any, where: int, top: float, limit: float, text: str) -> None:
    """An arrow with `text` to the peak, `top` GiB in column `where`; `limit`: the GiB at the upper edge."""
    axes.annotate(
        text,
        xy=(where, top),
        xytext=(min(max(where, 0.09 * COLUMNS), 0.9 * COLUMNS), top + 0.07 * limit),
        ha="center", va="bottom", fontsize=10, fontweight="bold", color=INK, zorder=6,
        arrowprops={"arrowstyle": "->", "color": INK},
        bbox={"facecolor": "white", "alpha": 0.8, "edgecolor": "none", "pad": 1.5},
    )  # fmt: skip


def _shade(axes: Any, timeline: Timeline, instants: Any, columns_per_inch: float) -> None:
    """Draw the background of each phase, and its name above its widest part."""
    phases = timeline.phases[instants]
    edges = [0, *(np.flatnonzero(np.diff(phases)) + 1).tolist(), len(phases)]
    widest: dict[Phase, tuple[int, int]] = {}
    for start, stop in itertools.pairwise(edges):
        phase = Phase(int(phases[start]))
        axes.axvspan(start, stop, color=SHADES[phase], linewidth=0, zorder=0)
        if phase not in widest or stop - start > widest[phase][1] - widest[phase][0]:
            widest[phase] = (start, stop)
    stretches = sorted((start, stop, phase) for phase, (start, stop) in widest.items())
    names = [phase_title(phase.name.lower()) for *_, phase in stretches]
    widths = [stop - start for start, stop, _ in stretches]
    names = [n.replace(" ", "\n") if width < NARROW * COLUMNS else n for n, width in zip(names, widths, strict=True)]
    rooms = [LETTER * columns_per_inch * max(map(len, name.split("\n"))) for name in names]
    places = _apart([(start + stop) / 2 for start, stop, _ in stretches], rooms)
    for name, place in zip(names, places, strict=True):
        axes.text(
            place, 1.01, name, transform=axes.get_xaxis_transform(), ha="center",
            va="bottom", fontsize=8, color=DIM, linespacing=1.0,
        )  # fmt: skip


def _apart(centres: list[float], widths: list[float]) -> list[float]:
    """`centres`, in order, moved as little as needed so that items of these `widths` do not overlap: to the right, and back
    from the right edge."""
    places = list(centres)
    for i in range(1, len(places)):
        places[i] = max(places[i], places[i - 1] + (widths[i - 1] + widths[i]) / 2)
    if places:
        places[-1] = min(places[-1], max(centres[-1], COLUMNS - widths[-1] / 2))
    for i in reversed(range(len(places) - 1)):
        places[i] = min(places[i], places[i + 1] - (widths[i] + widths[i + 1]) / 2)
    return places
