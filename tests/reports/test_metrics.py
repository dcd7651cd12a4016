from __future__ import annotations

from peakcast.models.evaluation import Evaluation
from peakcast.reports.metrics import TARGETS, by_group, cells_of, headline


def test_the_headline_has_a_line_for_each_gpu_type_and_quantity_with_rows(evaluation: Evaluation) -> None:
    lines = [(row.gpu, row.quantity, row.summary.num_rows) for row in headline(evaluation)]
    assert lines == [
        ("A100-80GB", "peak_allocated_bytes", 3),
        ("A100-80GB", "peak_device_bytes", 1),
        ("H100-80GB", "peak_allocated_bytes", 1),
    ]
    assert [row.gpu for row in headline(evaluation, "H100-80GB")] == ["H100-80GB"]


def test_the_figures_of_three_rows_by_hand(evaluation: Evaluation) -> None:
    summary = headline(evaluation, "A100-80GB")[0].summary
    assert round(summary.errors.median, 6) == 0.01
    assert round(summary.errors.mean, 6) == round((0 + 0.01 + 0.2) / 3, 6)
    assert round(summary.errors.worst, 6) == 0.2
    assert summary.errors.under_predicted == 1 / 3
    assert summary.coverage == 2 / 3


def test_a_target_names_what_it_misses(evaluation: Evaluation) -> None:
    row = headline(evaluation, "A100-80GB")[0]
    assert row.target.missed(row.summary) == ("median", "p95", "half-width", "coverage")
    assert str(TARGETS["peak_allocated_bytes"]) == "median ≤ 0.2 %, p95 ≤ 1 %, half-width ≤ 1 %, coverage 88–92 %"
    assert str(TARGETS["peak_reserved_bytes"]) == "p95 ≤ 2.5 %, coverage 88–92 %"


def test_cells_come_worst_first_and_group_by_any_name(evaluation: Evaluation) -> None:
    cells = cells_of(evaluation, "A100-80GB", "peak_allocated_bytes")
    assert [cell.key[-1] for cell in cells] == ["3", "2", "1"]
    assert list(by_group(cells, "layout")) == ["single", "ddp+tp"]
    assert cells_of(evaluation, "A100-80GB", "peak_host_bytes") == ()
