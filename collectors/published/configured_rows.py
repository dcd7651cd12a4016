"""Rows whose run is stated by a configuration of the stack that ran it, read by that stack's dialect.

Such a row has `config` (the configuration, with what its source says about the run), `model` where the dialect does not
know the network by name, `spoiled` where its number contradicts the run, and the fields of `plain_rows.py` that do not
describe the run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from peakcast.collectors.published.plain_rows import ImportedRow, read_plain_rows
from peakcast.dialects.common.asked_versions import asked_versions
from peakcast.dialects.common.pasted import Pasted
from peakcast.dialects.recognise import ReadOptions, translated
from peakcast.measurements.records import Measurement


def read_configured_rows(
    path: Path, assumptions: tuple[str, ...], out_of_scope: Callable[[Mapping[str, Any]], tuple[str, ...]] = lambda row: ()
) -> list[Measurement]:
    """Every row of `path`, in file order. `assumptions`: those of every row, beside the dialect's. `out_of_scope`: why a
    row is, beside what the dialect reports as not modelled. Raises: RecordError naming file and line."""

    def reading(record: Mapping[str, Any]) -> ImportedRow:
        pasted = Pasted(
            values=record["config"], where="config", num_gpus=record["num_gpus"], model=record.get("model"),
        )
        read = translated(pasted, ReadOptions(versions=asked_versions(record["versions"]), dialect=record.get("dialect")))
        return ImportedRow(
            job=read.job,
            assumptions=(*assumptions, *read.assumptions, *read.warnings),
            out_of_scope=(*read.unsupported, *out_of_scope(record)),
            spoiled=tuple(record.get("spoiled", ())),
        )

    return read_plain_rows(path, reading)
