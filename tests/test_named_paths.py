"""Files and folders of this repository that pages and docstrings name are there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CODE = ("peakcast", "collectors", "models", "reports")
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
    *(ROOT / folder / "README.md" for folder in ("collectors", "datasets", "models")),
    *sorted((ROOT / "docs").glob("*.md")),
    *sorted((ROOT / "docs" / "contributing").glob("*.md")),
]
EXAMPLE = re.compile(r"^```(?!mermaid)\w+\n.*?^```$|^New file `[^`]+`", re.MULTILINE | re.DOTALL)
"""Files that do not exist yet, and what commands write."""
TOPS = "peakcast|collectors|models|reports|tests|datasets|docs"
NAMED = re.compile(rf"(?<![\w./-])((?:{TOPS})/[\w./-]*(?:/|\.(?:py|md|toml|csv)))(?!\w)")
TO_BE_REPLACED = "datasets/my-gpu/"
OF_OTHERS = re.compile(r"models/|docs/source_en/")
"""Folders of many projects, which docstrings name as their source."""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_what_a_page_names_is_there(page: Path) -> None:
    named = set(NAMED.findall(EXAMPLE.sub("", page.read_text(encoding="utf-8"))))
    assert [path for path in sorted(named) if not (ROOT / path).exists() and not path.startswith(TO_BE_REPLACED)] == []


def test_what_a_docstring_names_is_there() -> None:
    texts = [path.read_text(encoding="utf-8") for folder in CODE for path in (ROOT / folder).rglob("*.py")]
    named = {path for text in texts for path in NAMED.findall(text) if not OF_OTHERS.match(path)}
    assert len(named) > 20
    assert [path for path in sorted(named) if not (ROOT / path).exists()] == []
