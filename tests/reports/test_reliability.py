"""The figures of the attacks, from what pytest writes."""

from __future__ import annotations

import pytest

from peakcast.core.errors import RecordError
from peakcast.reports.reliability import END, Attacked, attacked, refresh, table

CASE = """<testcase name="{name}" time="{seconds}"><properties><property name="attacks" value="100" />
<property name="kind" value="{kind}" /></properties>{outcome}</testcase>"""


def report(tmp_path, *cases):
    path = tmp_path / "attacks.xml"
    path.write_text(f'<testsuites><testsuite name="pytest">{"".join(cases)}</testsuite></testsuites>')
    return path


def test_attacks_are_counted_by_kind_and_faults_by_test(tmp_path):
    good = CASE.format(name="a", seconds=1.25, kind="jobs", outcome="")
    bad = CASE.format(name="b", seconds=2.5, kind="jobs", outcome="<failure />")
    other = CASE.format(name="c", seconds=1, kind="scripts", outcome="")
    plain = '<testcase name="d" time="9" />'
    found = attacked(report(tmp_path, good, bad, other, plain))
    assert found == {"jobs": Attacked(200, 1, 3.75), "scripts": Attacked(100, 0, 1.0)}
    assert table(found, "today").splitlines()[0] == "300 attacks, 1 of which ended badly (today)."
    assert "| scripts | 100 | 0 | 1 |" in table(found, "today")


def test_a_report_without_attacks_and_a_page_without_a_place_for_them_are_refused(tmp_path):
    with pytest.raises(RecordError, match="holds no attacks"):
        attacked(report(tmp_path))
    page = tmp_path / "page.md"
    page.write_text(f"{END}\n")
    with pytest.raises(RecordError, match="has no lines"):
        refresh(page)
