from __future__ import annotations

from dataclasses import replace

import pytest

from peakcast.core.units import GIB
from peakcast.models.evaluation.evaluation import Evaluation
from peakcast.reports.figures import by_group, cells_of, error_steps, headline
from peakcast.reports.plots import _reach


def test_the_headline_has_a_line_for_each_gpu_type_and_quantity_with_rows(evaluation: Evaluation) -> None:
    small = evaluation.tables[1].cells[0]
    mixed = replace(evaluation.tables[1], cells=(small, replace(small, measured=GIB)))
    lines = [
        (row.gpu, row.quantity, row.size, row.summary.num_rows)
        for row in headline(replace(evaluation, tables=(evaluation.tables[0], mixed)))
    ]
    assert lines == [
        ("A100-80GB", "peak_allocated_bytes", "≥ 5 GiB", 3),
        ("A100-80GB", "peak_device_bytes", "≥ 5 GiB", 1),
        ("A100-80GB", "peak_device_bytes", "< 5 GiB", 1),
        ("H100-80GB", "peak_allocated_bytes", "≥ 5 GiB", 1),
    ]
    assert [row.gpu for row in headline(evaluation, "H100-80GB")] == ["H100-80GB"]


def test_the_figures_of_three_rows_by_hand(evaluation: Evaluation) -> None:
    summary = headline(evaluation, "A100-80GB")[0].summary
    assert round(summary.errors.median, 6) == 0.01
    assert round(summary.errors.mean, 6) == round((0 + 0.01 + 0.2) / 3, 6)
    assert round(summary.errors.worst, 6) == 0.2
    assert summary.errors.under_predicted == 1 / 3
    assert summary.coverage == 2 / 3


def test_cells_come_worst_first_and_group_by_any_name(evaluation: Evaluation) -> None:
    cells = cells_of(evaluation, "A100-80GB", "peak_allocated_bytes")
    assert [cell.key[-1] for cell in cells] == ["3", "2", "1"]
    assert list(by_group(cells, "layout")) == ["single", "ddp+tp"]
    sizes = [replace(cells[0], framework="megatron", measured=gib * GIB).size for gib in (4, 5, 20)]
    assert sizes == ["megatron, below 5 GiB", "megatron, 5 to 20 GiB", "megatron, 20 GiB and more"]
    assert cells_of(evaluation, "A100-80GB", "peak_host_bytes") == ()


def test_the_steps_of_error_add_up_to_that_of_the_last_quantity(evaluation: Evaluation) -> None:
    tables = []
    for table, error in ((evaluation.tables[0], 0.5), (evaluation.tables[1], -0.1)):
        (cell,) = (cell for cell in table.cells if cell.key == f"{1:016x}")
        tables.append(replace(table, cells=(replace(cell, point=cell.measured + round(error * GIB)),)))
    steps = error_steps(replace(evaluation, tables=tuple(tables)), "A100-80GB")
    assert [(step.name, step.num_rows) for step in steps] == [("allocated", 1), ("allocated → device", 1)]
    assert [step.median_bytes / GIB for step in steps] == pytest.approx([0.5, -0.6], abs=1e-6)


def test_a_measurement_at_the_edge_of_its_bar_is_one_half_width_away(evaluation: Evaluation) -> None:
    cell = evaluation.tables[1].cells[0]
    reach = {edge: _reach(replace(cell, measured=getattr(cell, edge))) for edge in ("lower", "point", "upper")}
    assert reach == pytest.approx({"lower": 1, "point": 0, "upper": 1})
