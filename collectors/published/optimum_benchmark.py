"""huggingface/optimum-benchmark's runs of Llama-2 on an A100 (prefill and generation), as `Measurement` rows.

Source: `optimum_benchmark.jsonl`; the facts about it are in `datasets/README.md`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from peakcast.collectors.published.plain_rows import Reading, job_of, read_plain_rows
from peakcast.records import Measurement

COMMON_ASSUMPTIONS = (
    "Numbers are whole MB of 10^6 bytes, rounded down: up to 1 MB less than the run had.",
    "peak_device_bytes is NVML's use at the end of the call, with the context and without anything subtracted.",
)
POSITIONS = 4096
"""max_position_embeddings of Llama-2, whose rotary tables transformers of 2023 keeps in every layer."""


def read_optimum_benchmark(path: Path) -> list[Measurement]:
    """Every row of `optimum_benchmark.jsonl`, in file order. Raises: RecordError naming file and line."""
    return read_plain_rows(path, _reading)


def _reading(record: Mapping[str, Any]) -> Reading:
    prompt, new = record["sequence_length"], record["new_tokens"] or 1
    changes = {
        "task": "inference",
        "inference": {"prompt_length": prompt, "new_tokens": new, "cache": "dynamic"},
        "precision": {"parameters": "float16", "compute": "float16"},
    }
    reasons = []
    if "GPTQ" in record["method"]:
        changes["finetuning"] = {"quantization": "gptq"}
        reasons.append("Generation with quantised weights is not modelled: they are counted whole.")
    return Reading(
        job=job_of({**record, "model": {**record["model"], "max_position_embeddings": POSITIONS}}, **changes),
        assumptions=COMMON_ASSUMPTIONS,
        out_of_scope=tuple(reasons),
        unread=("peak_reserved_bytes", "peak_device_bytes") if "no empty_cache before the call" in record["note"] else (),
    )
