"""How wide an answer's text is, and its long sentences in lines of that width."""

from __future__ import annotations

import textwrap

LINE_WIDTH = 100


def wrapped(text: str, width: int = LINE_WIDTH) -> str:
    """`text` in lines of at most `width` letters; words, such as flags and paths, are never broken."""
    return textwrap.fill(text, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
