"""An `Evaluation` of a few rows that can be checked by hand."""

from __future__ import annotations

from typing import Any

import pytest

from peakcast.answers.prediction import QUANTITIES
from peakcast.core.units import GIB
from peakcast.models.evaluation.evaluation import Evaluation, Table
from peakcast.models.evaluation.metrics import Floor, Scored, summarise


def cell(number: int, measured: float, point: float, **changes: Any) -> Scored:
    """A row of `measured` GiB predicted as `point` GiB, with a bar of ± 10 %."""
    facts: dict[str, Any] = {
        "key": f"{number:016x}",
        "case": f"case {number}",
        "source": "someone/else",
        "gpu": "A100-80GB",
        "architecture": "llama/2048x16/32",
        "layout": "single",
        "framework": "huggingface",
        "kind": "full",
        "quantity": "peak_allocated_bytes",
        "weight": 1.0,
        "known": "",
        "baseline": round(point * 0.99 * GIB),
    }
    size = round(point * GIB)
    bars = {"lower": round(size * 0.9), "upper": round(size * 1.1), "upper_95": round(size * 1.1)}
    return Scored(**{**facts, **bars, "measured": round(measured * GIB), "point": size, **changes})


def table(cells: list[Scored], held_out: str = "architecture") -> Table:
    """The table of `cells`."""

    return Table(
        quantity=cells[0].quantity,
        held_out=held_out,
        overall=summarise(cells),
        cells=tuple(sorted(cells, key=lambda c: (-abs(c.error), c.key))),
    )


@pytest.fixture(scope="session")
def evaluation() -> Evaluation:
    """Three rows on one GPU type (errors 0, +1 % and −20 %) and one, measured by us, on another."""
    cells = [
        cell(1, 10, 10),
        cell(2, 20, 20.2, layout="ddp+tp", architecture="gpt2/768x12/12"),
        cell(3, 40, 32, case='<script>alert("x")</script> | =cmd()', known="a | b"),
        cell(4, 5, 5, gpu="H100-80GB", source="peakcast"),
    ]
    device = [cell(1, 12, 12, quantity="peak_device_bytes")]
    return Evaluation(
        num_rows=4,
        num_configurations=4,
        left_out={"out of scope: <b>T5</b>": 2},
        versions={"torch": ("2.4.1",)},
        rows_digest="ab" * 32,
        tables=(table(cells), table(device), table(cells, "layout")),
        floors={q: Floor(num_configurations=0, median=0.0, p95=0.0, worst=0.0) for q in QUANTITIES},
    )
