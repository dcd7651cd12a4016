"""What a collection shows while it runs and at its end: time left, and measured against predicted as a table and a
picture."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from peakcast.answers.prediction import QUANTITIES
from peakcast.core.drawing import STYLE
from peakcast.core.durable import replace_file
from peakcast.core.errors import PeakcastError
from peakcast.core.units import GIB
from peakcast.jobs.spec import job_in_words
from peakcast.measurements.records import Measurement

NARROW = 30
"""If an axis ends at less than this many times its beginning, it gets marks between powers of ten."""
REDRAW_SECONDS = 10.0
"""Least time between two drawings of a picture, which takes a third of a second to draw."""
MUTED = "#5b6570"
COLOURS = dict(zip(QUANTITIES, ("#1f6feb", "#d97706", "#7c3aed", "#0f766e"), strict=True))


def telling_time(progress: Callable[[str], None]) -> Callable[[str, int, int], None]:
    """Turns a runner's progress into one line: number of the cell, number of cells, time elapsed, and time left at the
    present pace."""
    began: list[tuple[float, int]] = []

    def tell(cell: str, done: int, total: int) -> None:
        now = time.monotonic()
        if not began:
            began.append((now, done))
        (start, first), gone = began[0], now - began[0][0]
        left = f", about {_minutes(gone / (done - first) * (total - done))} left" if done > first else ""
        progress(f"{done + 1} of {total}, {_minutes(now - start)} gone{left}: {cell}")

    return tell


def _minutes(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 90 else f"{seconds / 60:.0f} min"


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedQuantity:
    """One quantity of one row: bytes measured (or traced) and predicted."""

    cell: str
    quantity: str
    measured_bytes: int
    predicted_bytes: int

    @property
    def error(self) -> float:
        """Predicted / measured − 1."""
        return self.predicted_bytes / self.measured_bytes - 1


class Collected:
    """The rows of a collection and their predictions; `picture` (.png or .svg) is drawn again as rows come.

    Predictions are computed in a thread of their own, so that the GPU's next cell does not wait for them.
    """

    def __init__(self, picture: Path | None = None) -> None:
        from peakcast.explaining.picture import check_picture_path

        if picture is not None:
            check_picture_path(picture)
        self.picture = picture
        self._thread = ThreadPoolExecutor(1)
        self._under_way: list[Future[None]] = []
        self.compared: list[ComparedQuantity] = []
        self.kind = "measured"
        self._drawn = 0.0

    def add(self, row: Measurement) -> None:
        """Add a row. If it failed or no prediction can be made for it, there is nothing to compare."""
        if row.outcome == "ok":
            self._under_way.append(self._thread.submit(self._compare, row))

    def finish(self) -> None:
        """Wait for the comparisons, and draw them all."""
        for future in self._under_way:
            future.result()
        self._thread.shutdown()
        self.draw()

    def _compare(self, row: Measurement) -> None:
        cell, self.kind = job_in_words(row.job), row.provenance
        for quantity, predicted in predicted_bytes(row).items():
            measured = getattr(row, quantity)
            if measured and predicted:  # host memory is predicted only with offloading
                self.compared.append(
                    ComparedQuantity(cell=cell, quantity=quantity, measured_bytes=measured, predicted_bytes=predicted)
                )
        if time.monotonic() - self._drawn > REDRAW_SECONDS:
            self.draw()
            self._drawn = time.monotonic()

    def table(self) -> list[dict[str, Any]]:
        """A mapping for each quantity: number of cells, errors (absolute, relative to the measured), and the cell with the
        largest."""
        lines = []
        for quantity in QUANTITIES:
            found = [each for each in self.compared if each.quantity == quantity]
            if found:
                errors = np.abs([each.error for each in found])
                worst = found[int(errors.argmax())]
                lines.append(
                    {
                        "quantity": quantity.removeprefix("peak_").removesuffix("_bytes"),
                        "cells": len(found),
                        "median_error": float(np.median(errors)),
                        "p95_error": float(np.quantile(errors, 0.95)),
                        "worst_error": worst.error,
                        "worst_cell": worst.cell,
                    }
                )
        return lines

    def draw(self) -> None:
        """Write the picture: measured bytes on the horizontal axis; above, predicted bytes, and below, the error of each
        cell."""
        if self.picture is None or not self.compared:
            return
        import io

        import matplotlib
        from matplotlib.figure import Figure
        from matplotlib.ticker import LogLocator, NullFormatter, PercentFormatter, StrMethodFormatter

        buffer = io.BytesIO()
        with matplotlib.rc_context(STYLE):
            figure = Figure(figsize=(7, 7.5), layout="constrained")
            both, errors = figure.subplots(2, 1, sharex=True, height_ratios=(5, 2))
            for line in self.table():
                quantity = f"peak_{line['quantity']}_bytes"
                points = [each for each in self.compared if each.quantity == quantity]
                look: dict[str, Any] = {"s": 22, "alpha": 0.75, "color": COLOURS[quantity], "linewidths": 0}
                across = [point.measured_bytes / GIB for point in points]
                label = f"{line['quantity']}: {line['cells']} cells, median error {line['median_error']:.2%}"
                both.scatter(across, [point.predicted_bytes / GIB for point in points], label=label, **look)
                errors.scatter(across, [point.error for point in points], **look)
            sizes = [size / GIB for p in self.compared for size in (p.measured_bytes, p.predicted_bytes)]
            ends = [min(sizes) / 1.2, max(sizes) * 1.2]
            both.plot(ends, ends, color=MUTED, linewidth=0.8, zorder=0)
            both.set(xscale="log", yscale="log", xlim=ends, ylim=ends, ylabel="predicted, GiB")
            both.legend(loc="upper left", frameon=False)
            limit = 1.2 * max(0.01, *(abs(each.error) for each in self.compared))
            errors.axhline(0, color=MUTED, linewidth=0.8, zorder=0)
            errors.set(xlabel=f"{self.kind}, GiB", ylabel="error", ylim=(-limit, limit))
            errors.yaxis.set_major_formatter(PercentFormatter(1))
            for axis in (both.xaxis, both.yaxis):
                axis.set_major_formatter(StrMethodFormatter("{x:g}"))
                axis.set_minor_formatter(NullFormatter())
                if ends[1] < NARROW * ends[0]:  # a narrow range contains at most one power of ten
                    axis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5, 7)))
            figure.savefig(buffer, format=self.picture.suffix[1:].lower(), dpi=130)
        replace_file(self.picture, buffer.getvalue())


def predicted_bytes(row: Measurement) -> dict[str, int]:
    """The predicted point of each quantity for the row's job; for a trace, which has no kernels, only the analytical
    peak."""
    from peakcast import catalog

    try:
        if row.provenance == "traced":
            from peakcast.models.baseline.ledger import ledger
            from peakcast.models.ledger.scope.scope import out_of_scope

            if out_of_scope(row.job):
                return {}
            peaks = [ledger(row.job, rank=row.rank, step=step).peak().num_bytes for step in ("first", "steady")]
            return {"peak_allocated_bytes": max(peaks)}
        from peakcast.models.prediction.predict import predict

        prediction = predict(row.job, catalog.gpu(row.gpu), row.rank)
    except (PeakcastError, NotImplementedError):
        return {}
    return {quantity: getattr(prediction, quantity).point for quantity in QUANTITIES}
