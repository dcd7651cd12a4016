"""huggingface/peft's own comparison of its methods (MetaMathQA, Llama-3.2-3B, one L40S), as `Measurement` rows.

Source: `peft_method_comparison.jsonl`; the facts about it are in `datasets/README.md`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from peakcast.collectors.published.plain_rows import ImportedRow, read_plain_rows, row_job
from peakcast.core.fields import to_mapping
from peakcast.dialects.huggingface.job import from_huggingface
from peakcast.measurements.records import Measurement

COMMON_ASSUMPTIONS = (
    "peak_reserved_bytes is the largest memory_reserved() after a step less that before the model is loaded, the 2 MiB "
    "that a first nn.Linear(1, 1) leaves cached (method_comparison/MetaMathQA utils.py, init_accelerator).",
    "Rows of a batch are assumed to be equally long: the source pads them, and says neither by how much nor which "
    "batch it was.",
)
UNPADDED = {"sdpa_repeats_key_value": False, "sdpa_copies": False}
"""Copies that older releases make for batches without padding, switched off: the job's unpadded batches only stand for the
source's padded ones. Rows of transformers 4.52.4 and 4.57.1 measured the same bytes, while unpadded batches would have
needed 5 % less from 4.54 on."""
OPTIMIZERS = {"AdamW": "adamw", "lora-fa": "adamw"}
"""The source's name -> peakcast's. LoRA-FA is AdamW over lora_B, with lora_A frozen (peft optimizers/lorafa.py)."""

STEPS = 5000
"""Steps of a whole run, which contains the longest batch."""


def read_peft_method_comparison(path: Path) -> list[Measurement]:
    """Every row of `peft_method_comparison.jsonl`, in file order. Raises: RecordError naming file and line."""
    return read_plain_rows(path, _reading)


def _reading(record: Mapping[str, Any]) -> ImportedRow:
    adapter = json.loads(record["method"]) if record["method"].startswith("{") else None
    plain = {**record, "optimizer": OPTIMIZERS[record["optimizer"]]}
    casts = "autocast_adapter_dtype True" in record["precision"]
    translation = from_huggingface(
        row_job(plain).architecture,
        {"torch_dtype": "bfloat16", "optim": "adamw_torch"},
        peft=adapter and {**adapter, "autocast_adapter_dtype": casts},
        versions=record["versions"],
    )
    reasons = list(translation.unsupported)
    if (steps := record["measured_extra"]["steps"]) != STEPS:
        reasons.append(f"{steps:,} steps of {STEPS:,}: which batches they had is not known.")
    job, finetuning = translation.job, to_mapping(translation.job.finetuning)
    if record["optimizer"] == "lora-fa":
        finetuning["method"] = "lora_fa"
    return ImportedRow(
        job=row_job(plain, finetuning=finetuning, precision=to_mapping(job.precision), framework_options=UNPADDED),
        assumptions=(*COMMON_ASSUMPTIONS, *_trained(record)),
        out_of_scope=tuple(reasons),
    )


def _trained(record: Mapping[str, Any]) -> tuple[str, ...]:
    number = record["num_trainable_params"]
    return () if number is None else (f"The source counts {number:,} parameters that train.",)
