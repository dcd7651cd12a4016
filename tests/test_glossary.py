"""Every term of the glossary is used somewhere else, and is said once."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
GLOSSARY = ROOT / "docs" / "glossary.md"
LINES = re.findall(r"^\| (?!term|word|---)([^|]+) \| ([^|]+) \|$", GLOSSARY.read_text(encoding="utf-8"), re.MULTILINE)
TERMS = [term.strip() for terms, _ in LINES for term in terms.split(",")]


@cache
def _text() -> str:
    """All code and pages but the glossary, in small letters, dashes and line ends as spaces."""
    folders = ("peakcast", "collectors", "models", "reports", "docs", "datasets")
    pages = [path for top in folders for ending in ("py", "md") for path in (ROOT / top).rglob(f"*.{ending}")]
    text = " ".join(path.read_text(encoding="utf-8") for path in sorted({*pages, ROOT / "README.md"} - {GLOSSARY}))
    return re.sub(r"[\s_-]+", " ", text.lower())


@pytest.mark.parametrize("term", TERMS)
def test_a_term_is_used_in_code_or_docs(term: str) -> None:
    words = re.sub(r"[\s-]+", " ", term.lower())
    assert re.search(rf"\b{re.escape(words)}(s|es)?\b", _text()), f"{term!r} is used nowhere; take it out of the glossary"


def test_a_term_is_explained_once_in_one_or_two_sentences() -> None:
    assert len(TERMS) == len(set(TERMS)) > 80
    for terms, meaning in LINES:
        assert meaning.endswith((".", ".)")), terms
        assert len(re.findall(r"[.;](?:\s|$)", meaning)) <= 3, terms
