"""The pages: self-contained, the same bytes for the same rows, honest about who measured."""

from __future__ import annotations

import csv
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from peakcast.models.evaluation.evaluation import Evaluation
from peakcast.reports.plots import coverage_by_layout
from peakcast.reports.render import slug, write_index, write_report
from tests.reports.conftest import cell


@pytest.fixture(scope="module")
def written(evaluation: Evaluation, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Path]]:
    """The files of the index and of each GPU type's report: drawing one takes seconds."""
    folder = tmp_path_factory.mktemp("reports")
    reports = {gpu: write_report(evaluation, gpu, folder) for gpu in ("A100-80GB", "H100-80GB")}
    return {"index": write_index(evaluation, folder), **reports}


def test_equal_rows_give_equal_bytes(evaluation: Evaluation, written: dict[str, list[Path]], tmp_path: Path) -> None:
    first, second = written["A100-80GB"], write_report(evaluation, "A100-80GB", tmp_path)
    assert [path.name for path in first] == ["report.html", "report.md", "rows.csv"]
    assert [path.read_bytes() for path in first] == [path.read_bytes() for path in second]


class _Links(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.loaded: list[str] = []
        self.open: list[str] = []

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        values = dict(attributes)
        self.loaded += [str(v) for k, v in values.items() if k in ("src", "srcset", "data", "poster", "action") and v]
        self.loaded += [str(values["href"])] if tag == "link" else []
        self.loaded += [v for k, v in values.items() if tag in ("use", "image") and k.endswith("href") and v]
        self.open.append(tag)


def test_a_page_loads_nothing_from_outside(written: dict[str, list[Path]]) -> None:
    for path in [written["A100-80GB"][0], *written["index"]]:
        page = path.read_text()
        links = _Links()
        links.feed(page)
        assert [link for link in links.loaded if not link.startswith("#")] == []
        assert "script" not in links.open
        assert not re.search(r"@import|url\((?!#)", page)


def test_names_from_tables_are_shown_and_never_run(written: dict[str, list[Path]]) -> None:
    html, markdown, _ = (path.read_text() for path in written["A100-80GB"])
    assert "&lt;script&gt;" in html
    assert "&lt;b&gt;T5" in html
    assert "a \\| b" in markdown


def test_who_measured_is_said_for_every_source(written: dict[str, list[Path]]) -> None:
    for path in written["A100-80GB"][:2]:
        assert "3 rows published by others, not measured by us: someone/else" in path.read_text()
    for path in written["H100-80GB"][:2]:
        assert "1 row measured by this project" in path.read_text()


def test_rows_that_are_far_off_are_named_and_the_others_are_not(written: dict[str, list[Path]]) -> None:
    markdown = written["A100-80GB"][1].read_text()
    assert "off by more than 2 %: 1 of 3" in markdown
    assert "−20.0 %" in markdown
    assert "case 2" not in markdown.partition("off by more than 2 %: ")[2]


def test_the_csv_has_every_row_of_the_gpu_type_under_every_split(written: dict[str, list[Path]]) -> None:
    with written["A100-80GB"][2].open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [(row["held_out"], row["quantity"]) for row in rows].count(("architecture", "peak_allocated_bytes")) == 3
    assert {row["held_out"] for row in rows} == {"architecture", "layout"}
    assert all(row["case"][:1] not in "=+-@" for row in rows)
    worst = next(row for row in rows if row["key"].endswith("3"))
    assert float(worst["error"]) == -0.2


def test_the_index_links_every_report(written: dict[str, list[Path]]) -> None:
    (index,) = written["index"]
    for gpu in ("A100-80GB", "H100-80GB"):
        assert f'href="{slug(gpu)}/report.html"' in index.read_text()
        assert (index.parent / slug(gpu) / "report.html").is_file()


def test_what_an_axis_means_is_not_cut_off_at_the_edge_of_its_picture() -> None:
    figure = coverage_by_layout([cell(1, 20.0, 20.2, layout="fsdp1 8, tensor parallel 4"), cell(2, 9.0, 9.1)])
    figure.draw_without_rendering()
    box = figure.axes[0].xaxis.label.get_window_extent()
    assert figure.bbox.x0 <= box.x0 <= box.x1 <= figure.bbox.x1
