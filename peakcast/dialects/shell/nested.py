"""What a command of a launch script gives to another shell: a script or a text."""

from __future__ import annotations

import re

STARTERS = ("srun", "nohup", "time", "exec", "sudo", "env")
"""Programs that run the rest of their words, of which the first that is a shell script is the one to follow."""


def script_to_run(words: list[str]) -> list[str]:
    """The words of a command from the shell script on that it runs: `bash FILE ...`, `sh FILE ...`, `FILE.sh ...`, also
    after `srun` and similar programs; else empty."""
    if words[0].rsplit("/", 1)[-1] in STARTERS:
        scripts = [index for index, word in enumerate(words) if word.endswith(".sh") and not word.startswith("-")]
        return words[scripts[0] :] if scripts else []
    shells = [index for index, word in enumerate(words) if word.rsplit("/", 1)[-1] in ("bash", "sh")]
    words = words[shells[0] + 1 :] if shells else words
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
