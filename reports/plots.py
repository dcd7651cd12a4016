"""The plots of a report, drawn without global state of matplotlib; the same cells give the same bytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib
import matplotlib.ticker
import numpy as np
from matplotlib.figure import Figure

from peakcast.core.drawing import INK, MUTED, STYLE, inline_svg
from peakcast.core.units import GIB
from peakcast.models.evaluation.evaluation import Evaluation
from peakcast.models.evaluation.metrics import Scored
from peakcast.reports.figures import by_group
from peakcast.reports.tables import QUANTITY_NAMES

MAX_POINTS = 2000
"""If there are more points, they are thinned evenly, so that a page of vector graphics stays small."""
SHOWN_ERROR = 0.10
"""Larger errors are drawn at the edge of the histogram."""
ACCENT, SECOND, GOOD = "#1d6fb8", "#d9822b", "#e3efe3"
_STYLE = {**STYLE, "axes.titlesize": 11, "axes.titleweight": "bold", "axes.titlelocation": "left"}
_SIZE = (5.2, 3.6)

Plot = Callable[[Sequence[Scored]], Figure]


def predicted_against_measured(cells: Sequence[Scored]) -> Figure:
    """Points with their 90 % bars over measured bytes, on logarithmic axes, and the line of equality."""
    figure, axes = _figure("Predicted against measured")
    shown = _thinned(cells)
    measured = np.array([cell.measured for cell in shown]) / GIB
    point = np.array([cell.point for cell in shown]) / GIB
    low, high = measured.min() / 1.5, measured.max() * 1.5
    bars = np.array([[max(c.point - c.lower, 0), c.upper - c.point] for c in shown]).T / GIB
    bars = np.minimum(bars, np.array([point * 0.999, np.full_like(point, high * 1e3)]))
    axes.plot([low, high], [low, high], color=MUTED, linewidth=1, zorder=1)
    axes.errorbar(point, measured, xerr=bars, fmt="none", ecolor=ACCENT, alpha=0.18, linewidth=1, zorder=2)
    axes.scatter(point, measured, s=14, color=ACCENT, alpha=0.7, linewidths=0, zorder=3)
    axes.set(xscale="log", yscale="log", xlim=(low, high), ylim=(low, high))
    axes.set(xlabel="predicted, with its 90 % bar, GiB", ylabel="measured, GiB")
    for axis in (axes.xaxis, axes.yaxis):
        _label_sizes(axis, low, high)
    return figure


def error_histogram(cells: Sequence[Scored]) -> Figure:
    """Number of configurations by error: baseline + residual, and the baseline alone behind it."""
    figure, axes = _figure("Errors")
    largest = max(abs(value) for cell in cells for value in (cell.error, cell.baseline_error))
    edge = min(SHOWN_ERROR, max(largest * 1.05, 0.01))
    bins = np.linspace(-edge, edge, 41)
    weights = [cell.weight for cell in cells]
    for name, values, style in (
        ("baseline alone", [cell.baseline_error for cell in cells], {"color": SECOND, "alpha": 0.45}),
        ("baseline + residual", [cell.error for cell in cells], {"color": ACCENT, "alpha": 0.75}),
    ):
        axes.hist(np.clip(values, -edge, edge), bins=bins, weights=weights, label=name, **style)
    axes.axvline(0, color=INK, linewidth=0.8)
    axes.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(5))
    axes.xaxis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda value, _: f"{value * 100:g} %"))
    beyond = sum(abs(cell.error) > edge for cell in cells)
    outside = f" ({beyond} {'row' if beyond == 1 else 'rows'} beyond the edge)" if beyond else ""
    axes.set(xlabel=f"predicted / measured − 1{outside}")
    axes.set(ylabel="configurations")
    _legend(axes)
    return figure


def coverage_by_layout(cells: Sequence[Scored]) -> Figure:
    """Share of measurements inside the 90 % bars, layout by layout."""
    groups = by_group(cells, "layout")
    names = list(groups)[:14][::-1]
    figure, axes = _figure("Coverage of the 90 % bars by layout", height=max(2.2, 0.3 * len(names) + 1.2))
    axes.axvspan(0.88, 0.92, color=GOOD, zorder=0)
    axes.axvline(0.9, color=MUTED, linewidth=1, zorder=3)
    axes.barh(names, [groups[name].coverage for name in names], color=ACCENT, height=0.55, zorder=2)
    for row, name in enumerate(names):
        label = f"{groups[name].num_configurations:.0f}"
        axes.text(groups[name].coverage + 0.015, row, label, va="center", ha="left", fontsize=9, color=INK)
    axes.set(xlim=(0, 1.12), xlabel="share covered (number of configurations)")
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1.0])
    axes.xaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1.0, decimals=0))
    return figure


def error_against_size(cells: Sequence[Scored]) -> Figure:
    """Absolute error over measured bytes, on logarithmic axes."""
    figure, axes = _figure("Error against size")
    shown = _thinned(cells)
    measured = np.array([cell.measured for cell in shown]) / GIB
    for name, values, color in (
        ("baseline alone", [abs(cell.baseline_error) for cell in shown], SECOND),
        ("baseline + residual", [abs(cell.error) for cell in shown], ACCENT),
    ):
        axes.scatter(measured, np.maximum(values, 1e-5), s=12, color=color, alpha=0.6, linewidths=0, label=name)
    axes.axhline(0.01, color=MUTED, linewidth=1, linestyle="--")
    axes.set(xscale="log", yscale="log", xlabel="measured, GiB", ylabel="absolute error")
    _label_sizes(axes.xaxis, float(measured.min()), float(measured.max()))
    axes.yaxis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda value, _: f"{value * 100:g} %"))
    _legend(axes)
    return figure


def _label_sizes(axis: Any, low: float, high: float) -> None:
    """Label a logarithmic axis of GiB from `low` to `high` at even steps where it spans less than a decade: there may be no
    power of ten to label."""
    if high < 10 * low:
        axis.set_major_locator(matplotlib.ticker.MaxNLocator(4))
        axis.set_minor_locator(matplotlib.ticker.NullLocator())
    axis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(matplotlib.ticker.NullFormatter())


def error_by_layout(cells: Sequence[Scored]) -> Figure:
    """Every error by layout; layouts with most configurations are at the top."""
    names = list(by_group(cells, "layout"))[:14][::-1]
    figure, axes = _figure("Error by layout", height=max(2.2, 0.3 * len(names) + 1.2))
    for row, name in enumerate(names):
        errors = np.clip([cell.error for cell in cells if cell.layout == name], -SHOWN_ERROR, SHOWN_ERROR)
        spread = np.linspace(-0.22, 0.22, len(errors)) if len(errors) > 1 else [0.0]
        axes.scatter(np.sort(errors), row + np.asarray(spread), s=10, color=ACCENT, alpha=0.6, linewidths=0, zorder=2)
    axes.axvline(0, color=INK, linewidth=0.8)
    axes.set_yticks(range(len(names)), names)
    axes.xaxis.set_major_locator(matplotlib.ticker.MaxNLocator(5))
    axes.xaxis.set_major_formatter(matplotlib.ticker.FuncFormatter(lambda value, _: f"{value * 100:g} %"))
    axes.set(xlabel="predicted / measured − 1", ylim=(-0.6, len(names) - 0.4))
    return figure


def calibration_curve(cells: Sequence[Scored]) -> Figure:
    """Share of measurements within a fraction (or a multiple) of their 90 % bar; at one bar it should be 90 %."""
    figure, axes = _figure("Calibration of the bars")
    reach = np.array([_reach(cell) for cell in cells])
    weights = np.array([cell.weight for cell in cells])
    multiples = np.linspace(0, 2, 201)
    covered = [float(weights[reach <= multiple].sum() / weights.sum()) for multiple in multiples]
    axes.plot(multiples, covered, color=ACCENT, linewidth=1.8, label="measured", zorder=3)
    # for errors of a normal distribution the bar would be 1.645 standard deviations
    normal = [math.erf(1.6449 * multiple / math.sqrt(2)) for multiple in multiples]
    axes.plot(multiples, normal, color=MUTED, linewidth=1, linestyle="--", label="normal errors", zorder=2)
    axes.scatter([1], [0.9], s=30, color=SECOND, zorder=4)
    axes.set(xlim=(0, 2), ylim=(0, 1.02), xlabel="distance from the prediction, in half-widths of the bar")
    axes.set(ylabel="share of configurations")
    axes.yaxis.set_major_formatter(matplotlib.ticker.PercentFormatter(1.0, decimals=0))
    _legend(axes)
    return figure


def _reach(cell: Scored) -> float:
    """Distance of the measurement from the prediction in half-widths of its bar, on the logarithmic scale of the bars."""
    distance = math.log(cell.measured / cell.point)
    edge = math.log(cell.upper / cell.point) if distance > 0 else math.log(cell.point / cell.lower)
    return abs(distance) / edge if edge > 0 else (math.inf if distance else 0.0)


PLOTS: dict[str, tuple[Plot, str]] = {
    "predicted": (predicted_against_measured, "Each dot is a row; on the line the prediction is right."),
    "errors": (error_histogram, "Left of zero too little was predicted, the costly side."),
    "coverage": (coverage_by_layout, "Nominal is 90 %; the band is our target, 88 to 92 %."),
    "calibration": (calibration_curve, "Through the dot the bars hold what they promise; above it they are too wide."),
    "size": (error_against_size, "The dashed line is an error of 1 %."),
    "layouts": (error_by_layout, "Each dot is a row; layouts with most configurations on top."),
}
"""Name → the function that draws it, and what to read from it."""


def figures(evaluation: Evaluation) -> dict[str, Figure]:
    """Every plot of every quantity over all GPU types, by file name; for experiment tracking."""
    with matplotlib.rc_context(_STYLE):
        return {
            f"{QUANTITY_NAMES[table.quantity]}-{name}.png": draw(table.cells)
            for table in evaluation.tables
            if table.held_out == "architecture"
            for name, (draw, _) in PLOTS.items()
        }


def svg(draw: Plot, cells: Sequence[Scored], salt: str) -> str:
    """The plot as an `<svg>` element to put into a page. `salt` keeps its ids apart from those of other plots."""
    return inline_svg(lambda: draw(cells), {**_STYLE, "svg.hashsalt": salt})


def _figure(title: str, height: float = _SIZE[1]) -> tuple[Figure, Any]:
    figure = Figure(figsize=(_SIZE[0], height), layout="constrained")
    axes = figure.add_subplot()
    axes.set_title(title)
    axes.grid(color="#e4e7eb", linewidth=0.6)
    axes.set_axisbelow(True)
    return figure, axes


def _legend(axes: Any) -> None:
    """A legend below the axes, where it hides neither a point nor the title."""
    axes.figure.legend(frameon=False, fontsize=9, ncols=2, loc="outside lower center")


def _thinned(cells: Sequence[Scored]) -> list[Scored]:
    step = -(-len(cells) // MAX_POINTS)
    return list(cells[:: max(step, 1)])
