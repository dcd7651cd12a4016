"""Every decision has a page, a date and a line in the index."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "decisions"
INDEX = (FOLDER / "README.md").read_text(encoding="utf-8")
PAGES = sorted(path for path in FOLDER.glob("*.md") if path.name != "README.md")


def _anchor(heading: str) -> str:
    """What GitHub makes of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_a_page_is_dated_and_listed_once_with_its_title_and_dates(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    title = text.partition("\n")[0].removeprefix("# ")
    dates = re.findall(r"^\*(\d{4}-\d\d-\d\d)\*$", text, re.MULTILINE)
    assert dates
    first, last = min(dates), max(dates)
    assert re.fullmatch(rf"{first[:7]}-[a-z0-9-]+\.md", path.name)
    shown = first if first == last else f"{first} to {last[-2:]}"
    assert len(re.findall(re.escape(f"| [{title}]({path.name}) | {shown} | "), INDEX)) == 1


def test_every_listed_page_exists() -> None:
    assert sorted(re.findall(r"\]\((2\S+\.md)\)", INDEX)) == [path.name for path in PAGES]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_links_lead_to_files_and_headings(path: Path) -> None:
    for target in re.findall(r"\]\(([^):]+)\)", path.read_text(encoding="utf-8")):
        file, _, anchor = target.partition("#")
        found = path.parent / file if file else path
        assert found.exists(), target
        headings = re.findall(r"^#+ (.*)$", found.read_text(encoding="utf-8"), re.MULTILINE) if anchor else []
        assert not anchor or anchor in {_anchor(heading) for heading in headings}, target


def test_pages_that_code_cites_exist() -> None:
    root = FOLDER.parents[1]
    code = [path for top in ("peakcast", "collectors", "models", "reports") for path in (root / top).rglob("*.py")]
    cited = {name for path in code for name in re.findall(r"docs/decisions/([\w-]+\.md)", path.read_text(encoding="utf-8"))}
    assert cited
    assert cited - {path.name for path in PAGES} == set()
