"""What `${name...}` makes of a variable's text: cuts, replacements, other cases, parts of it. Source of the rules: the Bash
manual, "Shell Parameter Expansion"."""

from __future__ import annotations

import re
from fnmatch import fnmatchcase

MOST_CHARACTERS = 4_096
"""Length of the longest text in which patterns are looked for."""
_REPLACED = re.compile(r"/([/#%]?)((?:\\.|[^/\\])+)(?:/(.*))?", re.DOTALL)
_PART = re.compile(r":\s*(\d{1,6})(?::(\d{1,6}))?")


def changed(text: str, change: str) -> str | None:
    """`text` as `change` leaves it, the end of the expansion (`#*/`, `//,/ `, `^^`, `:0:4`); None if it is not followed."""
    if len(text) > MOST_CHARACTERS:
        return None
    if change in ("^^", ",,"):
        return text.upper() if change == "^^" else text.lower()
    if (part := _PART.fullmatch(change)) is not None:
        start = int(part[1])
        return text[start : start + int(part[2])] if part[2] else text[start:]
    if (replaced := _REPLACED.fullmatch(change)) is not None:
        return _replaced(text, *replaced.groups())
    if (cut := re.fullmatch(r"(##?|%%?)(.+)", change, re.DOTALL)) is not None:
        return _cut(text, cut[1], cut[2])
    return None


def _cut(text: str, kind: str, pattern: str) -> str:
    """`text` without the shortest (`#`, `%`) or the longest (`##`, `%%`) beginning or end that matches `pattern`."""
    lengths = range(len(text) + 1)
    for length in lengths if len(kind) == 1 else reversed(lengths):
        part = text[:length] if kind[0] == "#" else text[len(text) - length :]
        if fnmatchcase(part, _plain(pattern)):
            return text[length:] if kind[0] == "#" else text[: len(text) - length]
    return text


def _replaced(text: str, kind: str, pattern: str, other: str | None) -> str | None:
    """`text` with `other` in the place of `pattern`: at its first place, at all (`/`), at the beginning (`#`) or the end
    (`%`). None for a pattern that may match texts of several lengths."""
    plain, new = _plain(pattern), _plain(other or "")
    if re.search(r"[*?\[]", plain):
        return None
    if kind == "#":
        return new + text[len(plain) :] if text.startswith(plain) else text
    if kind == "%":
        return text[: len(text) - len(plain)] + new if text.endswith(plain) else text
    return text.replace(plain, new) if kind == "/" else text.replace(plain, new, 1)


def _plain(pattern: str) -> str:
    """`pattern` without its quotes and backslashes."""
    return re.sub(r"\\(.)|[\"']", lambda found: found[1] or "", pattern)
