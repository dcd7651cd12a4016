"""The page of what is covered is what the table of the ledger gives."""

from pathlib import Path

import pytest

from peakcast.reports import capabilities

PAGE = Path(__file__).resolve().parents[2] / "docs" / "capabilities.md"


def test_the_page_is_what_the_table_gives():
    refresh = "python -P -m peakcast.reports.capabilities refreshes it"
    assert PAGE.read_text(encoding="utf-8") == capabilities.page(), refresh


def test_it_is_written_to_the_file_that_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(capabilities, "page", lambda: "the page\n")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="0"):
        capabilities.main(["--help"])
    assert list(tmp_path.iterdir()) == []
    assert "usage" in capsys.readouterr().out
    assert capabilities.main(["page.md"]) == 0
    assert Path("page.md").read_text(encoding="utf-8") == "the page\n"
