"""LoRA and full finetuning on samples of all lengths, as ms-swift's page of benchmarks lists them, as `Measurement` rows.

Source: `swift_benchmark.jsonl`; the facts about it are in `datasets/README.md`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from peakcast.collectors.published.plain_rows import ImportedRow, read_plain_rows, row_job
from peakcast.measurements.records import Measurement

ASSUMPTIONS = (
    "peak_reserved_bytes is torch.cuda.max_memory_reserved() of the whole run in GiB with two decimals "
    "(get_max_cuda_memory).",
    "The samples of cls-fudan-news-zh, of 91 to 19,548 tokens, are assumed to be drawn uniformly from 91 to max_length.",
    "Releases that the page does not name are those of January 2024.",
)
OWN_CODE = ("qwen", "baichuan")
ORDER = "In which order the samples' lengths came is not known, and what the allocator keeps depends on it."


def read_swift_benchmark(path: Path) -> list[Measurement]:
    """Every row of `swift_benchmark.jsonl`, in file order. Raises: RecordError naming file and line."""
    return read_plain_rows(path, _reading)


def _reading(record: Mapping[str, Any]) -> ImportedRow:
    name = record["job"]["architecture"]["name"]
    own = f"The network's code comes with its weights; {name} is counted as the nearest of transformers' networks."
    return ImportedRow(
        job=row_job(record),
        assumptions=ASSUMPTIONS,
        out_of_scope=(ORDER, *((own,) if name.startswith(OWN_CODE) else ())),
    )
