"""The page that says how many published rows count and why the others do not: `datasets/published/README.md`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence

from peakcast.measurements.records import Measurement

HEADER = """# Published rows: what counts

Written by `peakcast import-published`. Nothing is dropped: a row counts in an accuracy figure when it is finished, in scope
and unspoiled (`out_of_scope` and `spoiled` may both hold). What the rows are is said in the [dataset card](../README.md).

"""


def counts_page(rows_of: Mapping[str, Sequence[Measurement]]) -> str:
    """The page, as Markdown, for the rows of each source file."""
    lines = [
        "| table | GPU types | rows | **count** | out of scope | spoiled | ran out of memory | never ran |",
        "|---|---|---:|---:|---:|---:|---:|---:|",
        *(_line(name, rows) for name, rows in rows_of.items()),
        "",
        "| table | why a row does not count | rows |",
        "|---|---|---:|",
    ]
    for name, rows in rows_of.items():
        lines += [f"| {name} | {reason} | {number} |" for reason, number in _reasons(rows)]
    return HEADER + "\n".join(lines) + "\n"


def _line(name: str, rows: Sequence[Measurement]) -> str:
    numbers = (
        len(rows),
        sum(row.counts for row in rows),
        sum(bool(row.out_of_scope) for row in rows),
        sum(bool(row.spoiled) for row in rows),
        sum(row.outcome == "out_of_memory" for row in rows),
        sum(row.outcome == "failed" for row in rows),
    )
    return f"| {name} | {', '.join(sorted({row.gpu for row in rows}))} | {' | '.join(map(str, numbers))} |"


def _reasons(rows: Iterable[Measurement]) -> list[tuple[str, int]]:
    """(reason, number of rows), most rows first. A reason is its first sentence without the parts that differ from row to
    row."""
    found: Counter[str] = Counter()
    for row in rows:
        found.update({f"out of scope: {_kind(row.out_of_scope)}"} if row.out_of_scope else ())
        found.update(f"spoiled: {_kind(reason)}" for reason in row.spoiled)
    return sorted(found.items(), key=lambda item: (-item[1], item[0]))


def _kind(reason: str) -> str:
    first = re.split(r"[:;(]|\. |\.$", reason)[0]
    return re.sub(r"[-+−]?\d+(\.\d+)?%\s?", "", first).replace("|", "\\|").strip()
