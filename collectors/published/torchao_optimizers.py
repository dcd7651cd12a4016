"""Full finetuning with torchao's optimizers, as its page of them lists it, as `Measurement` rows.

Source: `torchao_optimizers.jsonl`; the facts about it are in `datasets/README.md`.
"""

from __future__ import annotations

from pathlib import Path

from peakcast.collectors.published.configured_rows import read_configured_rows
from peakcast.measurements.records import Measurement

ASSUMPTIONS = ("peak_allocated_bytes is printed in GB with one decimal; GiB are assumed, which torchtune logs.",)
UNPACKED = "Samples are as long as the data has them, and the source does not say how long the longest of a batch is."


def read_torchao_optimizers(path: Path) -> list[Measurement]:
    """Every row of `torchao_optimizers.jsonl`, in file order. Raises: RecordError naming file and line."""
    return read_configured_rows(path, ASSUMPTIONS, lambda record: (UNPACKED,))
