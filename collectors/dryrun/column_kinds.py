"""What the columns of synthetic rows hold, by their names: text, numbers, words with tags, translations, images."""

from __future__ import annotations

import functools
import io
import re
from collections.abc import Callable, Sequence
from typing import Any

from peakcast.collectors.dryrun.file_rows import TURNS, conversation
from peakcast.core.errors import SpecError

NUMBERS = ("label", "labels", "target", "score", "idx", "id", "index", "fine_label", "coarse_label")
"""Columns with numbers, which are 0 in every row."""
ANSWERS = {"text": ["word"], "answer_start": [len("word ")]}
"""The answers to a question about a text, as SQuAD has them, with a word before them, as scripts look for one."""
WORDS = ("tokens", "words")
"""Columns with a text that is split into words, as datasets of token classification have it."""
TAGS = re.compile(r"\w+_tags|tags")
"""Columns with a number for each word: ner_tags, pos_tags, chunk_tags."""
INDICES = ("input_ids", "attention_mask")
"""Columns of a text that has been tokenized; 1 is a token of every tokenizer."""
QUESTIONS = ("question", "context", "answers")
"""Columns with a question about a text and the answers to it, as SQuAD has them."""
MOST_IN_A_QUESTION = 32
"""Words of a question: a text is cut to what is left of the longest sequence beside it."""
AUDIO = ("audio", "speech")
TRANSLATION = "translation"
"""The column with a text in several languages, as WMT's datasets have it."""
LANGUAGE = re.compile(r"[a-z]{2,3}([-_][A-Za-z]{2,4})?")
IMAGES = ("image", "img", "pixel_values")
IMAGE_SIDE = 256
"""Pixels of an image's sides; what prepares images for a network resizes them."""


def is_listed(name: str) -> bool:
    """Whether scripts ask for a column of this name only if they train on data of that kind: words, tags, translations,
    questions."""
    return name in (*WORDS, *QUESTIONS, TRANSLATION) or TAGS.fullmatch(name) is not None


def values(name: str, lengths: Sequence[int], languages: Sequence[str] = ()) -> list[Any]:
    """The values of column `name` in rows of `lengths` words; `languages`: those of a translation. Raises: SpecError for
    audio."""
    if name in AUDIO:
        raise SpecError(
            f"no rows stand in for audio, which the column {name!r} has: put some 64 recordings as long as those that it "
            "trains on where the script looks for its data; only their lengths count.",
            parameter=name,
        )
    if name in NUMBERS:
        return [0] * len(lengths)
    if name == "answers":
        return [ANSWERS] * len(lengths)
    if name in IMAGES:
        return [{"bytes": _image(), "path": None}] * len(lengths)
    return [_value(name, length, languages) for length in lengths]


def _value(name: str, length: int, languages: Sequence[str]) -> Any:
    if name in TURNS:
        return conversation(length)
    if name in WORDS:
        return ["word"] * length
    if name in INDICES:
        return [1] * length
    if TAGS.fullmatch(name):
        return [0] * length
    text = " ".join(["word"] * (min(length, MOST_IN_A_QUESTION) if name == "question" else length))
    return dict.fromkeys(languages, text) if name == TRANSLATION else text


def kind(module: Any, name: str) -> Any:
    """The kind of column `name`, in the words of `module`, which is `datasets`. Labels and tags are of two classes."""
    if name in NUMBERS:
        return module.ClassLabel(names=["0", "1"])
    if TAGS.fullmatch(name):
        return module.Sequence(module.ClassLabel(names=["0", "1"]))
    if name in WORDS:
        return module.Sequence(module.Value("string"))
    if name in AUDIO:
        return module.Audio()
    return module.Image() if name in IMAGES else module.Value("string")


OF_CLASSES = ("names", "num_classes", "int2str", "str2int")
"""What only a column of classes has, `datasets.ClassLabel`."""


def column_of_classes(module: Any, asked: set[str]) -> Callable[[str], Any]:
    """A function that gives the kind of a column as `kind` does, but turns a text into classes, whatever its name, once a
    script reads of it what only those have; its name is then put into `asked`."""

    class TextOrClass(module.Value):  # type: ignore[misc,name-defined]
        def __getattr__(self, name: str) -> Any:
            if name not in OF_CLASSES:
                raise AttributeError(name, name=name, obj=self)
            asked.add(self.__dict__["column"])
            return getattr(module.ClassLabel(names=["0", "1"]), name)

    def found(column: str) -> Any:
        known = kind(module, column)
        if type(known) is not module.Value:
            return known
        either = TextOrClass(known.dtype)
        either.__dict__["column"] = column
        return either

    return found


@functools.cache
def _image() -> bytes:
    from PIL import Image

    file = io.BytesIO()
    Image.new("RGB", (IMAGE_SIDE, IMAGE_SIDE)).save(file, "PNG")
    return file.getvalue()
