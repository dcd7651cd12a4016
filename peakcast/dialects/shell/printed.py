"""What commands print that only change a text or take a path apart; they are calculated, not run."""

from __future__ import annotations

import posixpath
import re
from collections.abc import Callable, Sequence

from peakcast.dialects.shell.values import calculated

_FOLDER = re.compile(r"cd\s+(?:-P\s+|--\s+)?(.+?)\s*(?:[12&]?>\s*\S+\s*)*(?:&&|;)\s*pwd(?:\s+-\w)?", re.DOTALL)
_FIELDS = re.compile(r"\{\s*print\s+(NF|\$\d{1,2})\s*;?\s*\}")
"""The program of `awk` that prints the number of fields, or one of them."""


def folder_of(text: str) -> str | None:
    """FOLDER as written in `cd FOLDER && pwd`, which prints it; None for another text."""
    found = _FOLDER.fullmatch(text.strip())
    return found[1] if found else None


def _parent(path: str) -> str:
    """What `dirname` prints, with `..` for the folder above one that is only known as `.`"""
    return posixpath.join(path, "..") if posixpath.basename(path) in (".", "..") else posixpath.dirname(path) or "."


OF_A_PATH: dict[str, Callable[[str], str]] = {
    "dirname": _parent, "basename": posixpath.basename, "realpath": posixpath.normpath, "readlink": posixpath.normpath,
}  # fmt: skip
"""What commands print of the one path that they are given. Paths stay relative, and links are not followed."""


def prints(name: str) -> bool:
    """Whether the command `name` prints what is known here."""
    return name in ("echo", "expr", "printf") or name in OF_A_PATH


def printed(commands: Sequence[Sequence[str]]) -> str | None:
    """What a pipeline of `commands`, each with its words, prints, without the end of the last line; None if that is not
    known here."""
    text = _said(commands[0][0], commands[0][1:]) if commands and commands[0] else None
    for words in commands[1:]:
        text = None if text is None or not words else _changed(words[0], words[1:], text)
    return text


def _said(name: str, given: Sequence[str]) -> str | None:
    """What a command prints that reads nothing."""
    paths = [word for word in given if not word.startswith("-")]
    if name in OF_A_PATH:
        return OF_A_PATH[name](paths[0]) if len(paths) == 1 else None
    if name == "expr":
        value = calculated(" ".join(given))
        return None if value is None else str(value)
    if name == "printf" and given and len(given) - 1 == len(re.findall(r"%[sd]", given[0])) == given[0].count("%"):
        words = iter(given[1:])
        return re.sub(r"%[sd]", lambda _: next(words), given[0]).removesuffix("\\n")
    return " ".join(given) if name == "echo" else None


def _changed(name: str, given: Sequence[str], text: str) -> str | None:
    """What a command prints that reads `text`."""
    if name == "tr" and len(given) == 2 and all(len(_plain(word)) == 1 for word in given):
        return text.replace(_plain(given[0]), _plain(given[1]))
    if name == "wc" and list(given) in (["-l"], ["-w"]):
        return str(len(text.split("\n") if given[0] == "-l" else text.split()))
    return _field(given, text) if name == "awk" else None


def _plain(word: str) -> str:
    """A character as `tr` understands it."""
    return {"\\n": "\n", "\\t": "\t"}.get(word, word)


def _field(given: Sequence[str], text: str) -> str | None:
    """What `awk -F, '{print NF}'` prints of one line."""
    *options, program = given or [""]
    separator = "".join(options).removeprefix("-F")
    found = _FIELDS.fullmatch(program)
    if found is None or "\n" in text or (options and not options[0].startswith("-F")):
        return None
    fields = text.split(separator or None)
    if found[1] == "NF":
        return str(len(fields))
    return dict(enumerate([text, *fields])).get(int(found[1][1:]), "")
