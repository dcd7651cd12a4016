"""huggingface/peft's own comparison of its methods (MetaMathQA, Llama-3.2-3B, one L40S), as `Measurement` rows.

Source: `peft_method_comparison.jsonl`; the facts about it are in `datasets/README.md`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from peakcast.collectors.published.plain_rows import Reading, job_of, read_plain_rows
from peakcast.dialects.huggingface import from_huggingface
from peakcast.fields import to_mapping
from peakcast.records import Measurement

COMMON_ASSUMPTIONS = (
    "peak_reserved_bytes is the largest memory_reserved() after a step less that before the model is loaded, the 2 MiB "
    "that a first nn.Linear(1, 1) leaves cached (method_comparison/MetaMathQA utils.py, init_accelerator).",
    "Rows of a batch are taken as equally long: the source pads them, and says neither by how much nor which batch it was.",
)
OPTIMIZERS = {"AdamW": "adamw", "lora-fa": "adamw"}
"""The source's words. LoRA-FA is AdamW over lora_B, with lora_A frozen (peft optimizers/lorafa.py)."""


def read_peft_method_comparison(path: Path) -> list[Measurement]:
    """Every row of `peft_method_comparison.jsonl`, in file order. Raises: RecordError naming file and line."""
    return read_plain_rows(path, _reading)


def _reading(record: Mapping[str, Any]) -> Reading:
    adapter = json.loads(record["method"]) if record["method"].startswith("{") else None
    plain = {**record, "optimizer": OPTIMIZERS[record["optimizer"]]}
    casts = "autocast_adapter_dtype True" in record["precision"]
    translation = from_huggingface(
        job_of(plain).architecture,
        {"torch_dtype": "bfloat16", "optim": "adamw_torch"},
        peft=adapter and {**adapter, "autocast_adapter_dtype": casts},
        versions=record["versions"],
    )
    reasons = list(translation.unsupported)
    if record["optimizer"] == "lora-fa":
        reasons.append("LoRA-FA, which freezes lora_A, is not modelled: LoRA is taken in its place.")
    job = translation.job
    return Reading(
        job=job_of(plain, finetuning=to_mapping(job.finetuning), precision=to_mapping(job.precision)),
        assumptions=(*COMMON_ASSUMPTIONS, *_trained(record)),
        out_of_scope=tuple(reasons),
    )


def _trained(record: Mapping[str, Any]) -> tuple[str, ...]:
    number = record["num_trainable_params"]
    return () if number is None else (f"The source counts {number:,} parameters that train.",)
