"""LoRA and QLoRA under FSDP1 on two GPUs, as AnswerDotAI/fsdp_qlora's page of benchmarks lists them, as `Measurement` rows.

Source: `fsdp_qlora.jsonl`; the facts about it are in `datasets/README.md`.
"""

from __future__ import annotations

from pathlib import Path

from peakcast.collectors.published.plain_rows import ImportedRow, read_plain_rows, row_job
from peakcast.measurements.records import Measurement

ASSUMPTIONS = (
    "peak_reserved_bytes is torch.cuda.max_memory_reserved() of rank 0 in GiB with two decimals; two rows also have "
    "the allocated peak.",
    "What the page does not name is train.py's default: rank 64, bfloat16 throughout, torch.optim.AdamW, layers and "
    "trained adapters as units of FSDP, BACKWARD_PRE, rank 0's weights sent to the others, whose own are on meta. Its "
    "loop checkpoints inside the units and holds the logits until the step is done.",
    "The dummy data fill every sequence.",
)


def read_fsdp_qlora(path: Path) -> list[Measurement]:
    """Every row of `fsdp_qlora.jsonl`, in file order. Raises: RecordError naming file and line."""
    return read_plain_rows(path, lambda record: ImportedRow(job=row_job(record), assumptions=ASSUMPTIONS))
