"""One run after the other of torchtune's README, each with one more way to save memory, as `Measurement` rows.

Source: `torchtune_readme.jsonl`; the facts about it are in `datasets/README.md`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from peakcast.collectors.published.configured_rows import read_configured_rows
from peakcast.measurements.records import Measurement

ASSUMPTIONS = (
    "The source prints the peak of the allocator's active bytes, in GiB with one decimal. They are read as allocated "
    "bytes where one stream runs: a block is active and not allocated only while another stream may still use it.",
    "torch.optim.AdamW is fused, as in torchtune's configurations of that month: foreach's temporary copy of the states "
    "alone would need more than what is printed.",
    "Packed samples are attended by flex_attention under their mask, which is assumed to need what sdpa does.",
)
UNPACKED = "Samples are as long as the data has them, and the source does not say how long the longest is."


def read_torchtune_readme(path: Path) -> list[Measurement]:
    """Every row of `torchtune_readme.jsonl`, in file order. Raises: RecordError naming file and line."""
    return read_configured_rows(path, ASSUMPTIONS, _out_of_scope)


def _out_of_scope(record: Mapping[str, Any]) -> tuple[str, ...]:
    return () if record["config"]["dataset"]["packed"] else (UNPACKED,)
