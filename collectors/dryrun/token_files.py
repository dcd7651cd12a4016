"""Makes files of tokens or text that a script reads and that do not exist, in the temporary folder, with a note for the
user.

They have the format that the script expects. If the script contains the first number of llm.c's header, a file begins with
this header of 256 numbers, as in llm.c and its descendants; else it has only tokens, as in nanoGPT, or a numpy array,
words, or rows, depending on the file's name. If the script lists a folder that does not exist, files for training,
validation and tests are made in it.
"""

from __future__ import annotations

import builtins
import contextlib
import functools
import glob
import io
import os
import pathlib
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from peakcast.collectors.dryrun import file_rows
from peakcast.collectors.dryrun.file_overlay import Overlay
from peakcast.collectors.dryrun.noted import DIRECTLY, ITS_MEANS, RunFindings, asker
from peakcast.collectors.machine.imports import when_imported

BINARY = (".bin", ".npy")
SUFFIXES = (*BINARY, ".txt")
LISTED = {".npy": (".npy", "np.load"), ".bin": (".bin", "memmap", "fromfile")}
"""Suffix of files in a folder that does not exist -> words in the text of scripts that read such files."""
SPLITS = ("train", "val", "test")
NUM_WORDS = 2**20
NUM_FILES, NUM_TOKENS = 4, 2**24
"""Number of files made for each pattern of names, and number of tokens in each file."""
BY_ITSELF = frozenset({"peakcast", "io", "codecs", "pathlib", "pandas"})
"""Packages through which a script opens its own texts and rows. Other packages look for optional files, which must stay
missing."""
HEADER_LENGTH = 256
HEADERS: dict[int, tuple[int, type[np.generic]]] = {20240520: (1, np.uint16), 20240801: (7, np.uint32)}
"""First number of a header -> (second number, dtype of tokens). Source: llm.c, dev/data/data_common.py."""
TEXT_END, DOCUMENT_LENGTH = 50256, 768
"""GPT-2's token between two documents, for which data loaders search, and its distance in tokens."""
OF_GPT2 = ("50256", "50257", "50304", "tiktoken", "gpt2")
"""Words in scripts that have GPT-2's tokens: the number of its last token, those of its vocabulary, its encoding."""
NUM_BYTES = 256
"""The tokens of other scripts are below this: every vocabulary has as many."""


class TokenFiles:
    """Makes the files that a script's own code opens; rows have `lengths` (the shortest, the longest)."""

    def __init__(self, overlay: Overlay, notes: RunFindings, lengths: Sequence[int]) -> None:
        self._overlay = overlay
        self._notes = notes
        self._lengths = lengths

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
        when_imported("pandas", functools.partial(self._in_tables, names=("read_parquet", "read_json")))
        when_imported("pyarrow.parquet", functools.partial(self._in_tables, names=("read_table",)))

    def _in_tables(self, module: Any, names: Sequence[str]) -> None:
        """Make functions of `module` that open a table without Python's `open` find what is made here."""

        def reading(read: Callable[..., Any]) -> Callable[..., Any]:
            @functools.wraps(read)
            def reads(*arguments: Any, **keywords: Any) -> Any:
                path, *others = arguments or (None,)
                if not isinstance(path, (str, os.PathLike)):
                    return read(*arguments, **keywords)
                if not os.path.exists(path):
                    self._make_if_asked(path)
                return read(self._overlay.read(path), *others, **keywords)

            return reads

        for name in names:
            setattr(module, name, reading(getattr(module, name)))

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
        """The files that a pattern has found; if it is a pattern for token files and has found none, files that are made
        now."""
        name = os.fsdecode(pattern)
        if not found and asker() is not None and "*" in name and _kind(name.replace("*", "0")):
            found = [name.replace("*", f"{number:06d}") for number in range(NUM_FILES)]
            for one in found:
                self._make_if_asked(one)
        return iter(found)

    def _make_folder_if_asked(self, folder: Any) -> None:
        """Make files in a folder that the script lists and that does not exist, if their format is known."""
        whose = asker(DIRECTLY)
        if whose is None or not isinstance(folder, (str, os.PathLike)) or os.path.exists(folder):
            return
        text = _text(whose)
        suffix = next((suffix for suffix, words in LISTED.items() if any(word in text for word in words)), None)
        for split in SPLITS if suffix is not None else ():
            self._make_if_asked(os.path.join(folder, f"{split}_{0:06d}{suffix}"))

    def stand_in(self, path: Any) -> bool:
        """Make the file at `path`, for which the script itself has looked. Returns whether it is of a kind that is made, or
        a model of sentencepiece, for which something stands in where it is loaded."""
        return os.fsdecode(path).endswith(".model") or self._make_if_asked(path)

    def _make_if_asked(self, path: Any) -> bool:
        """Make `path` if the script reads it as a token file. Returns whether the file was made."""
        kind = _kind(os.fsdecode(path)) if isinstance(path, (str, os.PathLike)) else ""
        whose = asker(ITS_MEANS if kind in BINARY else BY_ITSELF) if kind else None
        if whose is None:
            return False
        name = os.fspath(path)
        place = self._overlay.write(name, keeps=False)
        if kind not in SUFFIXES:
            file_rows.write(Path(place), os.path.basename(name), *self._lengths)
        else:
            _write(Path(place), kind, _text(whose))
        like = re.sub(r"\d+", "*", os.path.basename(name))
        sentence = f"{like} is not here: files of {self._size(kind)} stood in for it and its like."
        self._notes.add("script_part_skipped", "command", sentence)
        return True

    def _size(self, kind: str) -> str:
        if kind not in SUFFIXES:
            lengths = " to ".join(f"{length:,}" for length in dict.fromkeys(self._lengths))
            return f"{file_rows.NUM_ROWS} rows of {lengths} words (--length), with the usual keys,"
        return f"{NUM_WORDS:,} words" if kind == ".txt" else f"{NUM_TOKENS:,} tokens"


_iglob, _path_glob = glob.iglob, pathlib.Path.glob


def _kind(name: str) -> str:
    """The suffix of a file of tokens, text or rows, before the number of a part ("train.npy.0"); "" for other files."""
    if file_rows.holds_rows(name):
        return os.path.splitext(name)[1].lower()
    found = re.search(r"(\.\w+?)(\.\d+)?$", name)
    return found[1] if found is not None and found[1] in SUFFIXES else ""


def _text(file: str) -> str:
    """The text of the script's `file`; "" for code that is in no file."""
    with contextlib.suppress(OSError):
        return Path(file).read_text(encoding="utf-8", errors="replace")
    return ""


def words() -> str:
    """A text of `NUM_WORDS` words, with each printable letter."""
    alphabet = "".join(map(chr, range(33, 127)))  # scripts that read letters count the different ones
    return f"{alphabet}\n" + "word text " * (NUM_WORDS // 2)


def _write(path: Path, kind: str, script: str) -> None:
    if kind == ".txt":
        path.write_text(words(), encoding="utf-8")
        return
    tokens = np.arange(NUM_TOKENS, dtype=np.uint32) % DOCUMENT_LENGTH
    if any(word in script for word in OF_GPT2):
        tokens[tokens == 0] = TEXT_END
    else:
        tokens %= NUM_BYTES
    if kind == ".npy":
        with path.open("wb") as file:
            np.save(file, tokens.astype(np.uint16))
        return
    first = next((number for number in HEADERS if str(number) in script), None)
    version, dtype = HEADERS[first] if first is not None else (0, np.uint16)
    with path.open("wb") as file:
        if first is not None:
            header = np.zeros(HEADER_LENGTH, dtype=np.int32)
            header[:3] = first, version, NUM_TOKENS
            file.write(header.tobytes())
        file.write(tokens.astype(dtype).tobytes())
