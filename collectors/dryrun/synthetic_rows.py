"""Synthetic rows for data that cannot be downloaded: text, any other columns that the script reads, and any split."""

from __future__ import annotations

import bisect
import contextlib
import functools
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from peakcast.collectors.dryrun.file_rows import TURNS, conversation
from peakcast.collectors.dryrun.lengths import drawn

NUM_ROWS = 512
PREFERENCE = ("dpo", "reward", "kto", "orpo", "cpo")
"""Trainers of TRL that learn from two answers to a prompt."""
PROMPTS = ("grpo", "rloo", "online_dpo")
"""Trainers of TRL that generate what they learn from."""
OWN = ("text", "prompt", "chosen", "rejected")
"""Columns that all rows have."""
NUMBERS = ("label", "labels", "target", "score", "idx", "id", "index")
"""Columns with numbers, which are 0 in every row."""
ANSWERS = {"text": ["word"], "answer_start": [0]}
"""The answers to a question about a text, as SQuAD has them."""
AROUND = 1
"""Number of tokens that a trainer adds around a prompt or an answer. They count, because TRL's reward trainer drops rows
that are too long."""
MOST_COLUMNS = 16


class Rows:
    """Rows whose lengths are drawn from `shortest` to `longest`; `say` gets a sentence if they must be shorter."""

    def __init__(self, shortest: int, longest: int, say: Callable[[str], None]) -> None:
        self.shortest, self.longest = shortest, longest
        self._say = say
        self._remove: Any = None
        self._asked: list[str] = []
        """Columns of whose kind the script has asked."""
        self._prefers = False
        self._splits: list[frozenset[str]] = []
        """Names of the splits of what stands in for whole data sets."""

    def __str__(self) -> str:
        lengths = f"{self.longest:,}" if self.shortest == self.longest else f"{self.shortest:,} to {self.longest:,}"
        return f"{NUM_ROWS} rows of {lengths} words"

    def splits(self, module: Any, names: Iterable[str]) -> Any:
        """A `DatasetDict` with rows under `names`, and under every other name that it is asked for (`train_sft`)."""
        rows, kind = self.made(module), module.DatasetDict
        self._splits.append(frozenset(names))
        kind.__missing__ = lambda found, name: self._split(found, name)
        return kind(dict.fromkeys(names, rows))

    def _split(self, found: Any, name: str) -> Any:
        """The rows of a split that `found`, or what the script has made of it, does not have: those of another one."""
        if frozenset(found) not in self._splits:
            raise KeyError(name)
        return next(iter(found.values()))

    def made(self, module: Any) -> Any:
        """A `Dataset` of `datasets`, whose functions add columns when they are asked for them."""
        if self._remove is None:
            self._change(module.Dataset)
            self._give_features(module)
        self._prefers = _is_loaded(PREFERENCE)
        columns = ("prompt", "chosen", "rejected") if self._prefers else ("prompt",) if _is_loaded(PROMPTS) else ("text",)
        return module.Dataset.from_dict({name: self._values(name, NUM_ROWS) for name in columns})

    @functools.lru_cache(MOST_COLUMNS)  # noqa: B019
    def values(self, column: str) -> list[Any]:
        """The values of `column` in all rows."""
        return self._values(column, NUM_ROWS)

    def _values(self, column: str, count: int) -> list[Any]:
        if column in NUMBERS:
            return [0] * count
        lengths = drawn(self.shortest, self.longest, count)
        if self._prefers:  # a prompt and an answer, with the tokens that a trainer puts around them, are one sequence
            lengths = [max(1, length // 2 - AROUND) for length in lengths]
        if column in TURNS:
            return [conversation(length) for length in lengths]
        return [ANSWERS] * count if column == "answers" else [" ".join(["word"] * length) for length in lengths]

    def _with(self, rows: Any, columns: Iterable[str]) -> Any:
        """`rows` with `columns` added; if one was missing, columns that the script never asked for are removed."""
        asked = list(columns)
        missing = [column for column in asked if column not in rows.column_names]
        unasked = [column for column in OWN if column in rows.column_names and column not in asked]
        for column in missing:
            rows = rows.add_column(column, self._values(column, len(rows)))
        return self._remove(rows, unasked) if missing and unasked else rows

    def _give_features(self, module: Any) -> None:
        """Make rows answer of which kind any column is: labels are of two classes, others are text. The column is added
        when rows are mapped."""
        kind, asked = module.Dataset, self._asked
        features: property = kind.features

        class Known(module.Features):  # type: ignore[misc,name-defined]
            def __missing__(self, name: str) -> Any:
                asked.append(name)
                return module.ClassLabel(names=["0", "1"]) if name in NUMBERS else module.Value("string")

        kind.features = property(lambda rows: Known(features.fget(rows) or {}))  # type: ignore[misc]

    def _change(self, kind: Any) -> None:
        """Make functions that map rows, name a column or read one of a row find it."""
        apply, keep, read, self._remove = kind.map, kind.filter, kind.__getitem__, kind.remove_columns
        shuffle = kind.shuffle

        def read_row(rows: Any, key: Any) -> Any:
            found = read(rows, key)
            return _Row(found, self, key) if isinstance(found, dict) and isinstance(key, int) else found

        def mapped(rows: Any, *arguments: Any, **keywords: Any) -> Any:
            rows = self._with(rows, (*_names(keywords.get("remove_columns")), *self._asked))
            for _ in range(MOST_COLUMNS):
                try:
                    return apply(rows, *arguments, **keywords)
                except KeyError as error:
                    column = error.args[0] if error.args else None
                    if not isinstance(column, str) or column in rows.column_names:
                        raise
                    rows = self._with(rows, [column, *_names(keywords.get("remove_columns"))])
            return apply(rows, *arguments, **keywords)

        def asking(function: Callable[..., Any]) -> Callable[..., Any]:
            def asked(rows: Any, *arguments: Any, **keywords: Any) -> Any:
                columns = next(iter((*arguments, *keywords.values())), None)
                return function(self._with(rows, _names(columns)), *arguments, **keywords)

            return asked

        def filtered(rows: Any, function: Any = None, *arguments: Any, **keywords: Any) -> Any:
            left = keep(rows, function, *arguments, **keywords)
            if len(left) or not len(rows) or (most := _longest_kept(rows[0], function)) is None:
                return left
            self._say(f"rows that stood in were cut to {most:,}, the longest that a filter of the script lets pass.")
            return keep(apply(rows, lambda row: _cut(row, most)), function, *arguments, **keywords)

        def shuffled(rows: Any, *arguments: Any, buffer_size: int = 0, **keywords: Any) -> Any:
            return shuffle(rows, *arguments, **keywords)  # a stream of rows has a buffer

        kind.map, kind.filter, kind.__getitem__, kind.shuffle = mapped, filtered, read_row, shuffled
        kind.set_epoch = lambda *_: None  # as a stream of rows has it
        for name in ("rename_column", "rename_columns", "remove_columns", "select_columns"):
            setattr(kind, name, asking(getattr(kind, name)))


class _Row(dict[str, Any]):
    """A row, the `number`th, with every column that is read of it."""

    def __init__(self, found: Mapping[str, Any], rows: Rows, number: int) -> None:
        super().__init__(found)
        self._rows, self._number = rows, number

    def __missing__(self, column: str) -> Any:
        return self._rows.values(column)[self._number]


def _cut(row: Mapping[str, Any], length: int) -> dict[str, Any]:
    """`row` with texts and lists of at most `length`."""
    return {name: value[:length] if isinstance(value, (str, list)) else value for name, value in row.items()}


def _longest_kept(row: Mapping[str, Any], function: Any) -> int | None:
    """The length to which `row` must be cut so that a filter's `function` keeps it; None if none will do."""

    def keeps(length: int) -> bool:
        return bool(function(_cut(row, length)))

    with contextlib.suppress(Exception):  # it wants whole batches, or numbers of rows
        lengths = range(1, max(len(value) for value in row.values() if isinstance(value, (str, list))))
        return bisect.bisect_left(lengths, True, key=lambda length: not keeps(length)) or None
    return None


def _is_loaded(trainers: Iterable[str]) -> bool:
    return any(f"trl.trainer.{name}_trainer" in sys.modules for name in trainers)


def _names(columns: Any) -> list[str]:
    """The names in an argument that may be one column, several, or a mapping to new names."""
    return [columns] if isinstance(columns, str) else list(columns or ())
