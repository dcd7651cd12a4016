"""What a command of a launch script gives to another shell: a script or a text."""

from __future__ import annotations

import re


def script_to_run(words: list[str]) -> list[str]:
    """The words of a command from the shell script on that it runs: `bash FILE ...`, `sh FILE ...`, `FILE.sh ...`; else
    empty."""
    words = words[1:] if words[0].rsplit("/", 1)[-1] in ("bash", "sh") else words
    while words and re.fullmatch(r"-[eux]+", words[0]):
        words = words[1:]
    return words if words and words[0].endswith(".sh") else []


def text_to_run(words: list[str]) -> str | None:
    """The text that a command passes to a shell: `eval ...` or `bash -c "..."`, also after `srun` and similar programs;
    else None."""
    if words[0] == "eval":
        return " ".join(words[1:])
    for index, word in enumerate(words[:-1]):
        if word in ("-c", "-lc") and index and words[index - 1].rsplit("/", 1)[-1] in ("bash", "sh"):
            return words[index + 1]
    return None
