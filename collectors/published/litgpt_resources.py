"""LoRA, adapters and generation by lit-gpt of October 2023, as its page of resources lists them, as `Measurement` rows.

Source: `litgpt_resources.jsonl`; the facts about it are in `datasets/README.md`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from peakcast.collectors.published.configured_rows import configured_reading
from peakcast.collectors.published.plain_rows import ImportedRow, read_plain_rows, row_job
from peakcast.measurements.records import Measurement

ASSUMPTIONS = (
    "peak_allocated_bytes is torch.cuda.max_memory_allocated(), never reset, in GB of 10^9 bytes with two decimals "
    "(finetune/lora.py, generate/base.py).",
    "What the page does not name is the scripts' default: LoRA of rank 8 on queries and values.",
    "The first micro-batch has the longest sample, to which its others are padded; later ones are assumed to be as long, "
    "so that accumulated gradients are counted beside it.",
)
QUANTIZED = (
    "bitsandbytes before 0.43.2 keeps the inputs of 4-bit matrices until the next forward has ended; how long the samples "
    "are that follow the longest is not said"
)
"""Counted as long as the longest, such runs are 9 to 13 % above the printed peaks; without what is kept, 0 to 3 % below."""
GENERATED = (ASSUMPTIONS[0], "generate/base.py's defaults: a prompt of 4 words, taken as 6 tokens, and 50 new tokens.")


def read_litgpt_resources(path: Path) -> list[Measurement]:
    """Every row of `litgpt_resources.jsonl`, in file order. Raises: RecordError naming file and line."""
    return read_plain_rows(path, _reading)


def _reading(record: Mapping[str, Any]) -> ImportedRow:
    if "job" in record:
        return ImportedRow(job=row_job(record), assumptions=GENERATED)
    return configured_reading(record, ASSUMPTIONS, (QUANTIZED,) if record["config"]["quantize"] else ())
