"""What Axolotl's pages say that its example configurations use, as `Measurement` rows.

Source: `axolotl_examples.jsonl`; the facts about it are in `datasets/README.md`.
"""

from __future__ import annotations

from pathlib import Path

from peakcast.collectors.published.configured_rows import read_configured_rows
from peakcast.measurements.records import Measurement

ASSUMPTIONS = (
    "peak_reserved_bytes is what axolotl logs as device_mem_reserved(gib), torch.cuda.max_memory_reserved() since the last "
    "log; the page of gpt-oss says so, and the others are assumed to mean the same.",
)
ROUNDED = "The page says what a run takes about, and not by which releases."


def read_axolotl_examples(path: Path) -> list[Measurement]:
    """Every row of `axolotl_examples.jsonl`, in file order. Raises: RecordError naming file and line."""
    return read_configured_rows(path, ASSUMPTIONS, lambda record: (ROUNDED,))
