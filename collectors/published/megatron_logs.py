"""Logs of Megatron-LM that stand beside their arguments in public repositories, as `Measurement` rows.

Source: `megatron_logs.jsonl`; the facts about it are in `datasets/README.md`. A line is one rank of one run. A row is in
scope where GPU, layout, arguments and releases are said or follow from what the log prints.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from peakcast.collectors.published.source_files import read_jsonl
from peakcast.dialects.megatron.job import from_megatron
from peakcast.measurements.records import Measurement

ASSUMPTIONS = (
    "The values are those of the line that Megatron-LM prints once, after 20 or 100 steps (report_memory), in MiB.",
    "peak_allocated_bytes and peak_reserved_bytes are torch.cuda.max_memory_allocated() and max_memory_reserved().",
)


def read_megatron_logs(path: Path) -> list[Measurement]:
    """Every row of `megatron_logs.jsonl` as a `Measurement`, in file order. Raises: RecordError naming file and line."""
    return read_jsonl(path, _measurement)


def _measurement(record: Mapping[str, Any]) -> Measurement:
    translation = from_megatron(record["arguments"], record["num_gpus"], record["env"], record["versions"])
    note = (record["note"],) if record["note"] else ()
    unstated = (record["unstated"],) if "unstated" in record else ()
    return Measurement(
        job=translation.job,
        gpu=record["gpu"],
        provenance="published",
        source=record["source"],
        source_version=record["commit"],
        case=f"{record['id']} {record['what']} ({record['path']})",
        rank=record["rank"],
        collectives="nccl",
        environment={"env_vars": record["env"]},
        assumptions=(*note, *ASSUMPTIONS, *translation.assumptions, *translation.warnings),
        out_of_scope=" ".join((*unstated, *translation.unsupported)),
        observed=record["date"],
        **record["measured"],
    )
