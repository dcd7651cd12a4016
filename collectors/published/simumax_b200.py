"""SimuMax's measurements of Megatron-LM on eight B200, as `Measurement` rows.

Source: `simumax_b200.jsonl`, whose lines are questions of `peakcast predict --batch` with what was `measured`; the facts
about it are in `datasets/README.md`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from peakcast.collectors.published.source_files import read_jsonl
from peakcast.dialects.megatron.job import from_megatron
from peakcast.measurements.records import Measurement

ASSUMPTIONS = (
    "Each value is the largest of the eight ranks; ranks of equal shapes differ by up to 2.6 % in reserved memory.",
    "peak_allocated_bytes and peak_reserved_bytes are torch.cuda.max_memory_allocated() and max_memory_reserved().",
)


def read_simumax_b200(path: Path) -> list[Measurement]:
    """Every row of `simumax_b200.jsonl` as a `Measurement`, in file order. Raises: RecordError naming file and line."""
    return read_jsonl(path, _measurement)


def _measurement(record: Mapping[str, Any]) -> Measurement:
    run, measured = record["megatron"], record["measured"]
    if record["rank"] != "worst":
        raise ValueError(f"rank={record['rank']!r} must be worst")
    translation = from_megatron(run["arguments"], run["num_gpus"], run["env"], run["versions"])
    return Measurement(
        job=translation.job,
        gpu=record["gpu"],
        provenance="published",
        source=record["source"],
        source_version="v1.2",
        case=record["id"],
        rank=None,
        collectives="nccl",
        peak_allocated_bytes=int(measured["peak_allocated_bytes"]),
        peak_reserved_bytes=int(measured["peak_reserved_bytes"]),
        environment={"env_vars": run["env"], "grade": record["grade"], "note": record["note"]},
        assumptions=(*ASSUMPTIONS, *translation.assumptions, *translation.warnings),
        out_of_scope=" ".join(translation.unsupported),
    )
