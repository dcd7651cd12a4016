"""Replaces models of sentencepiece that a script loads and this machine lacks, with a note for the user: by a vocabulary of
as many pieces, which makes one token of each byte."""

from __future__ import annotations

import functools
import importlib.abc
import importlib.machinery
import os
import re
import sys
import types
from collections.abc import Iterable, Sequence
from typing import Any

from peakcast.collectors.dryrun.noted import DIRECTLY, RunFindings, asker
from peakcast.collectors.machine.imports import when_imported

PACKAGE = "sentencepiece"
NUM_PIECES = 32_000
"""Pieces of a model whose file's name has no number: those of Llama's (tokenizer.model)."""
UNKNOWN, BEGIN, END = range(3)
CONTROL = ("<unk>", "<s>", "</s>")
"""Pieces 0 to 2, as sentencepiece trains by default (TrainerSpec: unk_id, bos_id, eos_id); those of bytes follow them."""
NUM_BYTES = 256


def install(notes: RunFindings) -> None:
    """Change sentencepiece when the script imports it; where it is not installed, the script finds a stub of it. Each model
    that is replaced is reported to `notes`."""
    replacement = type("SentencePieceProcessor", (Pieces,), {"notes": notes})
    sys.meta_path.append(_StubFinder(replacement))
    when_imported(PACKAGE, functools.partial(_replace_missing, replacement=replacement))


class _StubFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds a stub of sentencepiece for the script's own code, after all other finders have failed."""

    def __init__(self, processor: type) -> None:
        self._processor = processor

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> Any:
        if fullname != PACKAGE or asker(DIRECTLY) is None:
            return None
        return importlib.machinery.ModuleSpec(fullname, self)

    def create_module(self, spec: Any) -> types.ModuleType:
        module = types.ModuleType(spec.name)
        module.SentencePieceProcessor = self._processor  # type: ignore[attr-defined]
        return module

    def exec_module(self, module: types.ModuleType) -> None:
        """Does nothing: `create_module` has filled the stub."""


def _replace_missing(module: Any, replacement: type) -> None:
    """Let the installed package load the models that are here, and `replacement` stand in for others."""
    real = module.SentencePieceProcessor
    if real is replacement:
        return

    class Processor(real):  # type: ignore[misc,valid-type]
        def __new__(cls, model_file: Any = None, *arguments: Any, **keywords: Any) -> Any:
            if model_file is not None and not os.path.exists(model_file):
                return replacement(model_file)
            return super().__new__(cls)

    module.SentencePieceProcessor = Processor


class Pieces:
    """A processor of sentencepiece: control pieces, a piece for each byte, and others as which nothing is encoded."""

    notes: RunFindings

    def __init__(self, model_file: Any = None, **_: Any) -> None:
        self._num_pieces = NUM_PIECES
        if model_file is not None:
            self.load(model_file)

    def load(self, model_file: Any) -> bool:
        """Stand in for a model: the largest number in its file's name is that of its pieces."""
        name = os.path.basename(os.fspath(model_file))
        numbers = [int(found) for found in re.findall(r"\d+", name) if int(found) > NUM_BYTES]
        self._num_pieces = max(numbers, default=NUM_PIECES)
        self.notes.add(
            "script_part_skipped",
            "command",
            f"sentencepiece's {name} is not here: a model of {self._num_pieces:,} pieces stood in, which makes a token of "
            "each byte.",
        )
        return True

    def __getattr__(self, name: str) -> Any:
        """Other names of the same methods: EncodeAsIds, encode_as_ids, GetPieceSize."""
        plain = re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()
        plain = {"encode_as_ids": "encode", "decode_ids": "decode"}.get(plain, plain)
        plain = {"get_piece_size": "vocab_size", "piece_size": "vocab_size"}.get(plain, plain)
        if plain == name:
            raise AttributeError(name)
        return getattr(self, plain)

    def __len__(self) -> int:
        return self._num_pieces

    def vocab_size(self) -> int:
        """The number of pieces."""
        return self._num_pieces

    def encode(self, text: Any, out_type: type = int, add_bos: bool = False, add_eos: bool = False, **_: Any) -> Any:
        """The ids of a text's bytes (if `out_type` is str, the pieces); a list of such for several texts."""
        if not isinstance(text, (str, bytes)):
            return [self.encode(one, out_type, add_bos, add_eos) for one in text]
        data = text if isinstance(text, bytes) else text.encode()
        ids = [BEGIN] * add_bos + [len(CONTROL) + byte for byte in data] + [END] * add_eos
        return ids if out_type is int else [self.id_to_piece(number) for number in ids]

    def decode(self, ids: Iterable[int], **_: Any) -> str:
        """The text of the bytes among `ids`."""
        return bytes(number - len(CONTROL) for number in ids if self.is_byte(number)).decode(errors="replace")

    def id_to_piece(self, number: int) -> str:
        """The text of a piece."""
        if number < len(CONTROL):
            return CONTROL[number]
        return f"<0x{number - len(CONTROL):02X}>" if self.is_byte(number) else f"▁{number}"

    def piece_to_id(self, piece: str) -> int:
        """The id of a control piece; for others that of the unknown piece."""
        return CONTROL.index(piece) if piece in CONTROL else UNKNOWN

    def is_byte(self, number: int) -> bool:
        """Whether a piece is one of the bytes."""
        return len(CONTROL) <= number < len(CONTROL) + NUM_BYTES

    def is_control(self, number: int) -> bool:
        """Whether a piece begins or ends a text."""
        return number in (BEGIN, END)

    def is_unknown(self, number: int) -> bool:
        """Whether a piece is that for what is unknown."""
        return number == UNKNOWN

    def is_unused(self, number: int) -> bool:
        """False: every piece is used."""
        return False

    def unk_id(self) -> int:
        """The id of the unknown piece."""
        return UNKNOWN

    def bos_id(self) -> int:
        """The id of the piece that begins a text."""
        return BEGIN

    def eos_id(self) -> int:
        """The id of the piece that ends a text."""
        return END

    def pad_id(self) -> int:
        """-1: models have no piece for padding by default."""
        return -1
