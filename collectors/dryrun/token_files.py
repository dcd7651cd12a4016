"""Files of tokens or text that a script reads and that are not there: some are made in the temporary folder, which is said.

Their form is the one that the script expects: after the header of 256 numbers that llm.c and its descendants begin with,
where the script names its first one; else tokens alone, as nanoGPT has them, or a numpy array, or words, as the name
says. In a folder that the script lists and that is not there are files for training, validation and tests.
"""

from __future__ import annotations

import builtins
import contextlib
import glob
import io
import os
import pathlib
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from peakcast.collectors.dryrun.files import Overlay
from peakcast.collectors.dryrun.noted import DIRECTLY, ITS_MEANS, Notes, asker

SUFFIXES = (".bin", ".npy", ".txt")
LISTED = {".npy": (".npy", "np.load"), ".bin": (".bin", "memmap", "fromfile")}
"""Suffixes of files in a folder that is not there, and what scripts say that read such."""
SPLITS = ("train", "val", "test")
NUM_WORDS = 2**20
NUM_FILES, NUM_TOKENS = 4, 2**24
"""Of each pattern of names; and tokens of each file."""
BY_ITSELF = frozenset({"peakcast", "io", "codecs", "pathlib"})
"""Packages by which a script opens a text of its own; others read files of packages that are rightly not there."""
HEADER_LENGTH = 256
HEADERS: dict[int, tuple[int, type[np.generic]]] = {20240520: (1, np.uint16), 20240801: (7, np.uint32)}
"""First number of a header -> (second number, dtype of tokens). Source: llm.c, dev/data/data_common.py."""
TEXT_END, DOCUMENT_LENGTH = 50256, 768
"""GPT-2's token between two documents, for which data loaders search, and its distance in tokens."""


class TokenFiles:
    """Makes the files that a script's own code opens."""

    def __init__(self, overlay: Overlay, notes: Notes) -> None:
        self._overlay = overlay
        self._notes = notes

    def install(self) -> None:
        """Install it in this process."""
        import torch

        builtins.open = io.open = self._opening(builtins.open)  # type: ignore[assignment]
        glob.iglob = lambda pattern, **more: self._globbed(list(_iglob(pattern, **more)), pattern)  # type: ignore[assignment]
        pathlib.Path.glob = lambda path, pattern, **more: (  # type: ignore[method-assign,assignment]
            Path(found) for found in self._globbed(list(_path_glob(path, pattern, **more)), os.path.join(path, pattern))
        )
        listed = os.listdir

        def list_folder(path: Any = ".") -> list[Any]:
            self._make_folder_if_asked(path)
            return listed(path)

        os.listdir = list_folder
        from_file = torch.from_file

        def read(filename: Any, *arguments: Any, **keywords: Any) -> torch.Tensor:
            if not os.path.exists(filename):
                self._make_if_asked(filename)
            return from_file(os.fspath(self._overlay.read(filename)), *arguments, **keywords)

        torch.from_file = read

    def _opening(self, open_file: Callable[..., Any]) -> Callable[..., Any]:
        def opened(file: Any, mode: str = "r", *arguments: Any, **keywords: Any) -> Any:
            try:
                return open_file(file, mode, *arguments, **keywords)
            except FileNotFoundError:
                if any(letter in mode for letter in "wax+") or not self._make_if_asked(file):
                    raise
                return open_file(file, mode, *arguments, **keywords)

        return opened

    def _globbed(self, found: list[Any], pattern: Any) -> Iterator[Any]:
        """The files that a pattern has found; if it is for token files and finds none, files that are made now."""
        name = os.fsdecode(pattern)
        if not found and asker() is not None and name.endswith(SUFFIXES) and "*" in name:
            found = [name.replace("*", f"{number:06d}") for number in range(NUM_FILES)]
            for one in found:
                self._make_if_asked(one)
        return iter(found)

    def _make_folder_if_asked(self, folder: Any) -> None:
        """A folder that the script lists and that is not there has files from now on, where it is known of which form."""
        whose = asker(DIRECTLY)
        if whose is None or not isinstance(folder, (str, os.PathLike)) or os.path.exists(folder):
            return
        text = _text(whose)
        suffix = next((suffix for suffix, words in LISTED.items() if any(word in text for word in words)), None)
        for split in SPLITS if suffix is not None else ():
            self._make_if_asked(os.path.join(folder, f"{split}_{0:06d}{suffix}"))

    def _make_if_asked(self, path: Any) -> bool:
        """Whether `path` is a token file of the script's, which is there from now on."""
        whose = asker(BY_ITSELF if str(path).endswith(".txt") else ITS_MEANS)
        if whose is None or not isinstance(path, (str, os.PathLike)) or not os.fspath(path).endswith(SUFFIXES):
            return False
        name = os.fspath(path)
        place = self._overlay.write(name, keeps=False)
        _write(Path(place), _text(whose))
        like = re.sub(r"\d+", "*", os.path.basename(name))
        size = f"{NUM_WORDS:,} words" if name.endswith(".txt") else f"{NUM_TOKENS:,} tokens"
        sentence = f"{like} is not here: files of {size} stood in for it and its like."
        self._notes.add("script_part_skipped", "command", sentence)
        return True


_iglob, _path_glob = glob.iglob, pathlib.Path.glob


def _text(file: str) -> str:
    """The script's; "" of code that is in no file."""
    with contextlib.suppress(OSError):
        return Path(file).read_text(encoding="utf-8", errors="replace")
    return ""


def _write(path: Path, script: str) -> None:
    if path.suffix == ".txt":
        alphabet = "".join(map(chr, range(33, 127)))  # scripts that read letters count how many kinds there are
        path.write_text(f"{alphabet}\n" + "word text " * (NUM_WORDS // 2), encoding="utf-8")
        return
    tokens = np.arange(NUM_TOKENS, dtype=np.uint32) % DOCUMENT_LENGTH
    tokens[tokens == 0] = TEXT_END
    if path.suffix == ".npy":
        np.save(path, tokens.astype(np.uint16))
        return
    first = next((number for number in HEADERS if str(number) in script), None)
    version, kind = HEADERS[first] if first is not None else (0, np.uint16)
    with path.open("wb") as file:
        if first is not None:
            header = np.zeros(HEADER_LENGTH, dtype=np.int32)
            header[:3] = first, version, NUM_TOKENS
            file.write(header.tobytes())
        file.write(tokens.astype(kind).tobytes())
