"""What device memory is made of, by hand."""

from __future__ import annotations

from dataclasses import replace

from peakcast.core.units import GIB
from peakcast.models.evaluation.evaluation import Evaluation
from peakcast.reports.device_tables import COLUMNS, device_tables


def test_what_is_counted_and_what_is_left_over_add_up_to_what_was_measured(evaluation: Evaluation) -> None:
    parts = {"baseline_allocated": 6 * GIB, "baseline_reserved": 8 * GIB, "context": GIB // 2, "baseline": 9 * GIB}
    (cell,) = (replace(cell, **parts, measured=12 * GIB) for cell in evaluation.tables[1].cells)
    table = replace(evaluation.tables[1], cells=(cell, replace(cell, layout="fsdp1"), replace(cell, layout="fsdp1")))
    ((_, columns, lines),) = device_tables(replace(evaluation, tables=(table,)), "A100-80GB")
    assert columns == COLUMNS
    assert [line[:3] for line in lines] == [["someone/else", "fsdp1", "2"], ["someone/else", "single", "1"]]
    assert lines[1][3:] == ["6.00", "2.00", "0.50", "0.50", "12.00", "3.00", "3.00 to 3.00"]
    assert not list(device_tables(evaluation, "H100-80GB"))
