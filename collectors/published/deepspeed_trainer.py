"""Qwen1.5-0.5B and Llama-3-8B under transformers' Trainer and DeepSpeed, by batch and by length, as `Measurement` rows.

Source: `deepspeed_trainer.jsonl`; the facts about it are in `datasets/README.md`. Printed are peaks of active and reserved
bytes. Active bytes are the allocated ones where nothing waits for another stream: under stage 2 without `overlap_comm`, not
under stage 3, whose rows have no allocated peak.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from peakcast.collectors.published.plain_rows import ImportedRow, read_plain_rows, row_job
from peakcast.measurements.records import Measurement

PADDED = "Texts are padded to the length, so that attention is given a mask."
LOADED_FIRST = "The program loads the network before it makes its training arguments, so that zero.Init does not make it."


def read_deepspeed_trainer(path: Path) -> list[Measurement]:
    """Every row of `deepspeed_trainer.jsonl`, in file order. Raises: RecordError naming file and line."""
    return read_plain_rows(path, _reading)


def _reading(record: Mapping[str, Any]) -> ImportedRow:
    job = row_job(record)
    partitions = job.parallelism.zero_stage == 3
    return ImportedRow(job=job, assumptions=(PADDED, LOADED_FIRST) if partitions else (PADDED,))
