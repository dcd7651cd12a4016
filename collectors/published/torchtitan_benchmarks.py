"""What pytorch/torchtitan's benchmark pages and two of its pull requests say of memory, as `Measurement` rows.

Source: `torchtitan_benchmarks.jsonl`; the facts about it are in `datasets/README.md`. A row names a commit or a pull
request, whose conventions are given by the release that has most of them, as in `torchtitan_log.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from peakcast.collectors.published.plain_rows import ImportedRow, read_plain_rows, row_job
from peakcast.measurements.records import Measurement

ASSUMPTIONS = (
    "peak_reserved_bytes is what torchtitan logs as `memory:`, max_memory_reserved() of the fullest rank in GiB.",
    "The H100 are cards of 95 GiB, which the catalog has no type for: whether a run fits is not asked of a row.",
)
RELEASES = {
    "9dec370ad": ("0.0.2", "a commit of 2024-12-26: as before 0.1.0"),
    "pull request 808": ("0.0.2", "January 2025: as before 0.1.0, whose loss was not compiled"),
    "e7c0cae93": ("0.1.0", "a commit of 2025-06-13, the month of 0.1.0"),
    "pull request 1690": ("0.1.0", "September 2025, between 0.1.0 and 0.2.0: a dense network as 0.1.0 trains it"),
}
"""The source's own version -> the release whose conventions are assumed, and why."""
LARGER_CARD = 79 * 2**30
"""Bytes that an H100-80GB has for a process, about."""
BEYOND = (
    "The run reserved more than the catalog's H100-80GB has; its card has 95 GiB, so that the allocator gave nothing back."
)


def read_torchtitan_benchmarks(path: Path) -> list[Measurement]:
    """Every row of `torchtitan_benchmarks.jsonl`, in file order. Raises: RecordError naming file and line."""
    return read_plain_rows(path, _reading)


def _reading(record: Mapping[str, Any]) -> ImportedRow:
    release, why = RELEASES[record["versions"]["torchtitan"]]
    torch = record["versions"]["torch"].partition("+")[0]
    options = {"fsdp_float8_all_gather": True} if record.get("float8_all_gather") else {}
    job = row_job(
        {**record, "framework": "torch", "model": {}},
        architecture=record["model"]["name"],
        versions={"torchtitan": release, "torch": torch},
        framework_options=options,
    )
    return ImportedRow(
        job=job,
        assumptions=(*ASSUMPTIONS, f"torchtitan {release} is assumed: {why}."),
        out_of_scope=(BEYOND,) if record["measured"]["peak_reserved_bytes"] > LARGER_CARD else (),
    )
