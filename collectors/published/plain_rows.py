"""The row format that several published sources share: one run a line, with its job if a job file can express it.

A row has `id source commit path gpu num_gpus framework versions model method batch sequence_length accumulation precision
optimizer checkpointing attention compile layout allocator measured grade note rank` and usually `job`; one of
`configured_rows.py` has `config` in place of what describes the run. Bytes are whole numbers. Grade A: every input is
known; B: something was assumed, which `note` says. `outcome` is given where the run ran out of memory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peakcast.collectors.published.source_files import read_jsonl
from peakcast.dialects.common.job_file import job_from_mapping
from peakcast.jobs.parallelism import Parallelism
from peakcast.jobs.spec import TrainingJob
from peakcast.measurements.records import Measurement

SHAPES = {
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "kv_heads": "num_key_value_heads",
    "ffn": "intermediate_size",
    "vocab": "vocab_size",
    "tie": "tie_word_embeddings",
}
"""A row's names for sizes of its network -> config.json's; any other name is config.json's own."""
KEPT_AS_FOUND = (
    "framework", "versions", "method", "precision", "optimizer", "checkpointing", "attention", "layout", "allocator",
    "accumulation", "config", "grade", "note",
)  # fmt: skip
"""Fields of a row that are kept in `environment`, so that nothing is lost that a job cannot express."""


@dataclass(frozen=True, kw_only=True)
class ImportedRow:
    """How a source's own module reads one row."""

    job: TrainingJob
    assumptions: tuple[str, ...] = ()
    """Assumptions in addition to the row's own note."""
    out_of_scope: tuple[str, ...] = ()
    """Why the job differs from the run, or the ledger does not cover it; one sentence each."""
    spoiled: tuple[str, ...] = ()
    unread: tuple[str, ...] = ()
    """Names in `measured` that are not the job's peak; they are kept in `environment["unread"]`."""
    also_counted: Mapping[str, int] = field(default_factory=dict)
    """Name in `measured` → bytes that the source includes in addition to the quantity. They are subtracted, and the
    source's number is kept in `environment["as_read"]`."""


def read_plain_rows(path: Path, reading: Callable[[Mapping[str, Any]], ImportedRow]) -> list[Measurement]:
    """Every row of `path` as a `Measurement`, in file order. Raises: RecordError naming file and line."""
    return read_jsonl(path, lambda record: measurement(record, reading(record)))


def measurement(record: Mapping[str, Any], reading: ImportedRow) -> Measurement:
    """`record` as a `Measurement` of the job that `reading` has."""
    as_read = record["measured"]
    measured = {name: value for name, value in as_read.items() if name not in reading.unread}
    unread = {name: as_read[name] for name in reading.unread if name in as_read}
    more = {name: size for name, size in reading.also_counted.items() if measured.get(name)}
    measured |= {name: measured[name] - size for name, size in more.items()}
    return Measurement(
        job=reading.job,
        gpu=record["gpu"],
        provenance="published",
        source=record["source"],
        source_version=record["commit"],
        case=f"{record['id']} {record['path']}",
        rank=record.get("rank") or 0,
        collectives="nccl" if record["num_gpus"] > 1 else "none",
        environment={
            **{name: record[name] for name in KEPT_AS_FOUND if record.get(name) is not None},
            **({"unread": unread} if unread else {}),
            **({"as_read": {name: as_read[name] for name in more}} if more else {}),
        },
        assumptions=(*_note(record), *reading.assumptions),
        out_of_scope=" ".join(reading.out_of_scope),
        spoiled=reading.spoiled,
        observed=record.get("date") or "",
        outcome=record.get("outcome", "ok"),
        **measured,
    )


def row_job(record: Mapping[str, Any], **changes: Any) -> TrainingJob:
    """The row's own job with `changes`, or, if the row has none, the nearest job that its other fields describe.

    `changes` are keys of a job file.
    Raises: SpecError, as a job file does.
    """
    return job_from_mapping({**(record.get("job") or _described(record)), **changes})


def _described(record: Mapping[str, Any]) -> dict[str, Any]:
    """The mapping of a job file for training, from the row's fields other than `job`. Stage 2 means FSDP here: weights stay
    gathered between forward and backward."""
    precision, optimizer = record["precision"], str(record["optimizer"] or "adamw").lower().split()
    layout = record["layout"] or {"data_parallel_size": record["num_gpus"]}
    segments = record["allocator"] or {}
    mapping = {
        "architecture": {SHAPES.get(word, word): value for word, value in record["model"].items()},
        "framework": "torch" if record["framework"].startswith("torch") else "huggingface",
        "versions": {name: release.partition("+")[0] for name, release in (record["versions"] or {}).items()},
        "micro_batch_size": record["batch"],
        "sequence_length": record["sequence_length"],
        "gradient_accumulation_steps": record["accumulation"],
        "precision": precision if isinstance(precision, Mapping) else None,
        "optimizer": {"name": optimizer[0], **({"implementation": optimizer[1]} if len(optimizer) > 1 else {})},
        "activation_checkpointing": {"mode": (record["checkpointing"] or "none").partition(",")[0]},
        "attention": (record["attention"] or "sdpa").partition(" ")[0],
        "compile": record["compile"],
        "parallelism": {
            name: layout[name] for name in Parallelism.__dataclass_fields__ if name in layout and name != "zero_stage"
        },
        "framework_options": {"fsdp_reshard_after_forward": False} if layout.get("zero_stage") == 2 else {},
        "allocator": {name: segments[name] for name in ("expandable_segments",) if name in segments},
    }
    return {name: value for name, value in mapping.items() if value is not None}


def _note(record: Mapping[str, Any]) -> tuple[str, ...]:
    note = str(record.get("note") or "").strip().rstrip(".")
    return (f"Grade {record['grade']} of the source's reading: {note}.",) if note else ()
