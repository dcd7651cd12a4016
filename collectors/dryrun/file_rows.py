"""Rows in the place of a file of JSON, CSV or Parquet that does not exist, with the keys that training data usually has."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path, PurePath

from peakcast.collectors.dryrun.lengths import drawn

NUM_ROWS = 512
WHOLE = ("text", "content", "story", "document")
"""Keys whose value is a whole sequence."""
HALVES = (
    *("prompt", "completion", "instruction", "output", "question", "answer", "query", "response", "source", "target"),
    *("problem", "solution", "chosen", "rejected"),
)
"""Keys of which two together are a sequence."""
TURNS = ("messages", "conversations", "conversation")
"""Keys with the turns of a conversation. Sources of the keys: the datasets of TRL's documentation ("Dataset formats"),
Stanford Alpaca's, and ShareGPT's."""
ROLES = (("user", "human"), ("assistant", "gpt"))
"""Role of a turn -> its name in ShareGPT's form."""
OF_FORMS = {"alpaca": ("instruction", "input", "output"), "sharegpt": ("conversations",)}
"""Word in the name of a file that says its form -> the keys of that."""
LINES = (".jsonl", ".ndjson")
"""Suffixes of files that never hold anything but rows."""
TABLES = (".json", ".csv", ".tsv", ".parquet")
"""Suffixes of files that may hold rows, settings or results."""
OF_DATA = {
    *("data", "dataset", "datasets", "train", "training", "valid", "validation", "val", "eval", "test", "dev", "corpus"),
    *("instruct", "instruction", "instructions", "sft", "dpo", "chat", "alpaca", "sharegpt", "samples"),
}
"""Words in the path of such a file that say that it holds rows."""
ABOUT = {
    *("config", "configs", "settings", "args", "params", "state", "info", "meta", "metadata", "index", "results"),
    *("metrics", "log", "logs", "stats", "vocab", "tokenizer", "schema", "cache"),
}
"""Words in the name of such a file that say that it holds something else."""


def holds_rows(path: str) -> bool:
    """Whether a file of this path holds rows that are trained on, as far as its name says."""
    name = PurePath(path)
    suffix = name.suffix.lower()
    words = set(re.findall("[a-z]+", name.stem.lower()))
    folder = set(re.findall("[a-z]+", name.parent.name.lower()))
    return suffix in LINES or (suffix in TABLES and bool((words | folder) & OF_DATA) and not words & ABOUT)


def write(path: Path, name: str, shortest: int, longest: int) -> None:
    """Write `NUM_ROWS` rows, whose sequences have `shortest` to `longest` words, as a file of this `name` has them."""
    suffix = PurePath(name).suffix.lower()
    form = next((keys for word, keys in OF_FORMS.items() if word in name.lower()), None)
    rows = [_row(length) for length in drawn(shortest, longest, NUM_ROWS)]
    if form is not None:
        rows = [{key: row[key] for key in form} for row in rows]
    if suffix == ".parquet":
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        return
    with path.open("w", encoding="utf-8", newline="") as file:
        if suffix == ".json":
            json.dump(rows, file)
        elif suffix in LINES:
            file.writelines(json.dumps(row) + "\n" for row in rows)
        else:
            flat = [{name: value for name, value in row.items() if name not in TURNS} for row in rows]
            table = csv.DictWriter(file, list(flat[0]), delimiter="\t" if suffix == ".tsv" else ",")
            table.writeheader()
            table.writerows(flat)


def _row(length: int) -> dict[str, object]:
    half, turns = _words(length // 2), conversation(length)
    whole, halves = dict.fromkeys(WHOLE, _words(length)), dict.fromkeys(HALVES, half)
    return {**whole, **halves, "input": "", "label": 0, **dict.fromkeys(TURNS, turns)}


def conversation(length: int) -> list[dict[str, str]]:
    """A question and an answer of together `length` words."""
    half = _words(length // 2)
    return [{"role": role, "content": half, "from": other, "value": half} for role, other in ROLES]


def _words(count: int) -> str:
    return " ".join(["word"] * max(1, count))
