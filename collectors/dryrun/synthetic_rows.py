"""Synthetic rows for data that cannot be downloaded: text, any other columns that the script reads, and any split."""

from __future__ import annotations

import bisect
import contextlib
import functools
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from peakcast.collectors.dryrun import row_choices
from peakcast.collectors.dryrun.checks import expected_to_contain
from peakcast.collectors.dryrun.column_kinds import (
    IMAGES,
    LANGUAGE,
    TRANSLATION,
    column_of_classes,
    is_listed,
    kind,
    values,
)
from peakcast.collectors.dryrun.lengths import drawn

NUM_ROWS = 512
PREFERENCE = ("dpo", "reward", "kto", "orpo", "cpo")
"""Trainers of TRL that learn from two answers to a prompt."""
PROMPTS = ("grpo", "rloo", "online_dpo", "distillation")
"""Trainers of TRL that generate what they learn from."""
OWN = ("text", "prompt", "chosen", "rejected")
"""Columns that all rows have."""
AROUND = 1
"""Number of tokens that a trainer adds around a prompt or an answer. They count, because TRL's reward trainer drops rows
that are too long."""
PROMPT = 1
"""Words of a prompt before an answer. Losses leave prompts out, so that a row costs most if nearly all of it is answer."""
MOST_COLUMNS = 16
MADE_UP = "rows of peakcast"
"""Description of data sets that are made up, which everything that is made of them keeps; the script's own stay as they
are."""


class Rows:
    """Rows whose lengths are drawn from `shortest` to `longest`; `say` gets a sentence if they must be shorter."""

    def __init__(self, shortest: int, longest: int, say: Callable[[str], None]) -> None:
        self.shortest, self.longest = shortest, longest
        self._say = say
        self._remove: Any = None
        self._asked: list[str] = []
        """Columns of whose kind the script has asked."""
        self._classes: set[str] = set()
        """Columns of whose classes the script has asked, which hold numbers."""
        self._prefers = False
        self._languages: list[str] = []
        """Languages of the translations that the script has asked for."""
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
        self._say(f"which splits the data has is not known: rows like those of the others stood in for {name!r}.")
        return next(iter(found.values()))

    def made(self, module: Any) -> Any:
        """A `Dataset` of `datasets`, whose functions add columns when they are asked for them."""
        if self._remove is None:
            self._change(module.Dataset)
            self._give_features(module)
            row_choices.install(module.Dataset, _is_made_up)
        self._prefers = _is_loaded(PREFERENCE)
        columns = ("prompt", "chosen", "rejected") if self._prefers else ("prompt",) if _is_loaded(PROMPTS) else ("text",)
        made_up = module.DatasetInfo(description=MADE_UP)
        return module.Dataset.from_dict({name: self._values(name, NUM_ROWS) for name in columns}, info=made_up)

    @functools.lru_cache(MOST_COLUMNS)  # noqa: B019
    def values(self, column: str) -> list[Any]:
        """The values of `column` in all rows."""
        return self._values(column, NUM_ROWS)

    def _values(self, column: str, count: int) -> list[Any]:
        if column in self._classes:
            return [0] * count
        lengths = drawn(self.shortest, self.longest, count)
        if self._prefers:  # a prompt and an answer, with the tokens that a trainer puts around them, are one sequence
            prompt = column == "prompt"
            lengths = [PROMPT if prompt else max(1, length - PROMPT - 2 * AROUND) for length in lengths]
        return values(column, lengths, self._languages or ("en",))

    def _with(self, rows: Any, columns: Iterable[str]) -> Any:
        """`rows`, if they are made up, with `columns` added; if one was missing, columns that the script never asked for
        are removed."""
        if not _is_made_up(rows):
            return rows
        asked, there = list(columns), list(rows.column_names)
        missing = [column for column in dict.fromkeys(asked) if column not in there]
        unasked = [column for column in OWN if column in there and column not in asked]
        for column in missing:
            rows = rows.add_column(column, self._values(column, len(rows)))
            if column in IMAGES:
                rows = rows.cast_column(column, self._kind(column))
        return self._remove(rows, unasked) if missing and unasked else rows

    def _with_absent(self, rows: Any, column: Any) -> Any:
        """`rows` with the `column` that a function which maps them has not found; None if that is not what it lacks."""
        if not isinstance(column, str) or not _is_made_up(rows):
            return None
        if TRANSLATION in list(rows.column_names) and LANGUAGE.fullmatch(column) and column not in self._languages:
            self._languages.append(column)
            return self._with(self._remove(rows, TRANSLATION), [TRANSLATION])
        return None if column in list(rows.column_names) else self._with(rows, [column])

    def _give_features(self, module: Any) -> None:
        """Make rows answer of which kind any column is, and that they have words, tags and translations. The column is
        added when rows are mapped."""
        rows_kind, asked = module.Dataset, self._asked
        text_or_class = column_of_classes(module, self._classes)
        features: property = rows_kind.features
        columns: property = rows_kind.column_names
        self._kind = functools.partial(kind, module)

        class Known(module.Features):  # type: ignore[misc,name-defined]
            def __missing__(self, name: str) -> Any:
                asked.append(name)
                return text_or_class(name)

        class AskedColumns(_Columns):
            def __contains__(self, name: object) -> bool:
                if not isinstance(name, str) or super().__contains__(name):
                    return super().__contains__(name)
                if is_listed(name) or expected_to_contain(sys._getframe(1)):
                    asked.append(name)
                    self.append(name)
                return super().__contains__(name)

            def __getitem__(self, index: Any) -> Any:
                """A script that takes the second column of data has one."""
                for number in range(len(self), min(index + 1, MOST_COLUMNS) if isinstance(index, int) else 0):
                    asked.append(f"text_{number}")
                    self.append(f"text_{number}")
                return super().__getitem__(index)

        def known(rows: Any) -> Any:
            found = features.fget(rows)  # type: ignore[misc]
            return Known(found or {}) if _is_made_up(rows) else found

        def named(rows: Any) -> list[str]:
            found = columns.fget(rows)  # type: ignore[misc]
            return AskedColumns(found) if _is_made_up(rows) else found

        rows_kind.features, rows_kind.column_names = property(known), property(named)

    def _asking(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function` of rows and names of columns, which finds these columns where rows are made up."""

        def asked(rows: Any, *arguments: Any, **keywords: Any) -> Any:
            columns = next(iter((*arguments, *keywords.values())), None)
            return function(self._with(rows, _names(columns)), *arguments, **keywords)

        return asked

    def _change(self, kind: Any) -> None:
        """Make functions that map rows, name a column or read one of a row find it, where rows are made up."""
        self._change_reading(kind)
        apply, keep, self._remove = kind.map, kind.filter, kind.remove_columns
        shuffle = kind.shuffle

        def mapped(rows: Any, *arguments: Any, **keywords: Any) -> Any:
            removed = keywords.get("remove_columns")
            rows = self._with(rows, (*_names(removed), *self._asked))
            for _ in range(MOST_COLUMNS):
                if isinstance(removed, _Columns):  # all that there are, those just found too
                    keywords["remove_columns"] = _Columns(rows.column_names)
                try:
                    return apply(rows, *arguments, **keywords)
                except KeyError as error:
                    found = self._with_absent(rows, error.args[0] if error.args else None)
                    if found is None:
                        raise
                    rows = self._with(found, _names(removed))
            return apply(rows, *arguments, **keywords)

        def filtered(rows: Any, function: Any = None, *arguments: Any, **keywords: Any) -> Any:
            left = keep(rows, function, *arguments, **keywords)
            if len(left) or not (len(rows) and _is_made_up(rows)) or (most := _longest_kept(rows[0], function)) is None:
                return left
            self._say(f"rows that stood in were cut to {most:,}, the longest that a filter of the script lets pass.")
            return keep(apply(rows, lambda row: _cut(row, most)), function, *arguments, **keywords)

        def shuffled(rows: Any, *arguments: Any, buffer_size: int = 0, **keywords: Any) -> Any:
            return shuffle(rows, *arguments, **keywords)  # a stream of rows has a buffer

        kind.map, kind.filter, kind.shuffle = mapped, filtered, shuffled
        kind.set_epoch = lambda *_: None  # as a stream of rows has it
        for name in ("rename_column", "rename_columns", "remove_columns", "select_columns"):
            setattr(kind, name, self._asking(getattr(kind, name)))

    def _change_reading(self, kind: Any) -> None:
        """Make every way to read rows give rows in which any column is found."""
        read, read_several, iterate = kind.__getitem__, kind.__getitems__, kind.__iter__

        def read_rows(rows: Any, key: Any) -> Any:
            if not _is_made_up(rows):
                return read(rows, key)
            if isinstance(key, str):
                return read(self._with(rows, [key]), key)
            found = read(rows, key)
            return _Row(found, self, key) if isinstance(found, dict) and isinstance(key, int) else found

        def read_batch(rows: Any, keys: list[int]) -> list[Any]:
            return [rows[int(key)] for key in keys] if _is_made_up(rows) else read_several(rows, keys)

        def read_each(rows: Any) -> Any:
            if not _is_made_up(rows):
                return iterate(rows)
            each = enumerate(iterate(rows))
            return (_Row(row, self, number) if isinstance(row, dict) else row for number, row in each)

        kind.__getitem__, kind.__getitems__, kind.__iter__ = read_rows, read_batch, read_each


class _Columns(list[str]):
    """The names of all columns of made-up rows, as far as they are known."""


class _Row(dict[str, Any]):
    """A row, the `number`th of `rows`, with every column that is read of it. A copy that a library makes of it, as of any
    mapping, has the columns that were there."""

    def __init__(self, found: Any = (), rows: Rows | None = None, number: int = 0) -> None:
        super().__init__(found)
        self._rows, self._number = rows, number % NUM_ROWS

    def __missing__(self, column: str) -> Any:
        if self._rows is None:
            raise KeyError(column)
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


def _is_made_up(rows: Any) -> bool:
    return MADE_UP in (rows.info.description or "")


def _is_loaded(trainers: Iterable[str]) -> bool:
    return any(f"trl.trainer.{name}_trainer" in sys.modules for name in trainers)


def _names(columns: Any) -> list[str]:
    """The names in an argument that may be one column, several, or a mapping to new names."""
    return [columns] if isinstance(columns, str) else list(columns or ())
