"""BERT trained in nine ways, as transformers' page on training with one GPU prints it, as `Measurement` rows.

Source: `transformers_page.jsonl`; the facts about it are in `datasets/README.md`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from peakcast.collectors.published.plain_rows import ImportedRow, read_plain_rows, row_job
from peakcast.measurements.records import Measurement

ASSUMPTIONS = (
    "peak_device_bytes is NVML's use of the GPU after training, in whole MiB; nothing empties PyTorch's cache before.",
    "torch 1.10 has no foreach, and transformers 4.15's default optimizer is a loop of its own.",
)
KEEPS_GRADIENTS = "torch before 2.0 keeps gradients between steps, which is not counted."


def read_transformers_page(path: Path) -> list[Measurement]:
    """Every row of `transformers_page.jsonl`, in file order. Raises: RecordError naming file and line."""
    return read_plain_rows(path, _reading)


def _reading(record: Mapping[str, Any]) -> ImportedRow:
    job = row_job(record)
    classifier = replace(job.architecture, head="sequence_classifier")
    return ImportedRow(job=job.replace(architecture=classifier), assumptions=ASSUMPTIONS, out_of_scope=(KEEPS_GRADIENTS,))
