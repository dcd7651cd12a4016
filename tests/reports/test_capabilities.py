"""The page of what is covered is what the table of the ledger gives."""

from pathlib import Path

from peakcast.reports import capabilities

PAGE = Path(__file__).resolve().parents[2] / "docs" / "capabilities.md"


def test_the_page_is_what_the_table_gives():
    refresh = "python -P -m peakcast.reports.capabilities refreshes it"
    assert PAGE.read_text(encoding="utf-8") == capabilities.page(), refresh
