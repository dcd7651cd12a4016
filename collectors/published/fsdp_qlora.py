"""LoRA and QLoRA under FSDP1 on two GPUs, as AnswerDotAI/fsdp_qlora's page of benchmarks lists them, as `Measurement` rows.

Source: `fsdp_qlora.jsonl`; the facts about it are in `datasets/README.md`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from peakcast.collectors.published.plain_rows import ImportedRow, read_plain_rows, row_job
from peakcast.measurements.records import Measurement

ASSUMPTIONS = (
    "peak_reserved_bytes is torch.cuda.max_memory_reserved() of rank 0 in GiB with two decimals; two rows also have "
    "the allocated peak.",
    "What the page does not name is train.py's default: rank 64, bfloat16 throughout, torch.optim.AdamW, layers and "
    "trained adapters as units of FSDP, BACKWARD_PRE.",
    "The dummy data fill every sequence.",
)

OFFLOADS = "Commands of runs with parameters on the host are not given, and some of the page's have activations there too."


def read_fsdp_qlora(path: Path) -> list[Measurement]:
    """Every row of `fsdp_qlora.jsonl`, in file order. Raises: RecordError naming file and line."""
    return read_plain_rows(path, _reading)


def _reading(record: Mapping[str, Any]) -> ImportedRow:
    job = row_job(record)
    return ImportedRow(job=job, assumptions=ASSUMPTIONS, out_of_scope=(OFFLOADS,) if job.offload.parameters else ())
