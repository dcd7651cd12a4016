"""Finetuning runs of LitGPT's own configurations, as its table of them lists, as `Measurement` rows.

Source: `litgpt_finetune.jsonl`; the facts about it are in `datasets/README.md`.
"""

from __future__ import annotations

from pathlib import Path

from peakcast.collectors.published.configured_rows import read_configured_rows
from peakcast.measurements.records import Measurement

ASSUMPTIONS = (
    "peak_allocated_bytes is torch.cuda.max_memory_allocated(), never reset, in GB of 10^9 bytes with two decimals (litgpt "
    "finetune/lora.py and full.py print it as `Memory used`).",
    "The longest sample of alpaca_2k_test is longer than train.max_seq_length, and cut to it.",
)


def read_litgpt_finetune(path: Path) -> list[Measurement]:
    """Every row of `litgpt_finetune.jsonl`, in file order. Raises: RecordError naming file and line."""
    return read_configured_rows(path, ASSUMPTIONS)
