"""huggingface/optimum-benchmark's runs of Llama-2 on an A100 (prefill and generation), as `Measurement` rows.

Source: `optimum_benchmark.jsonl`; the facts about it are in `datasets/README.md`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from peakcast.catalog import gpu
from peakcast.collectors.published.plain_rows import ImportedRow, read_plain_rows, row_job
from peakcast.measurements.records import Measurement

COMMON_ASSUMPTIONS = (
    "Numbers are whole MB of 10^6 bytes, rounded down: up to 1 MB less than the run had.",
    "peak_device_bytes is NVML's use at the end of the call less the driver's reserve, which the call that was asked "
    "(nvmlDeviceGetMemoryInfo, version 1) counts as used and nvidia-smi does not: 881 MiB here, NVML's total less CUDA's.",
)
POSITIONS = 4096
"""max_position_embeddings of Llama-2; transformers of 2023 keeps rotary tables of that length in every layer."""
FIRST_LLAMA_POSITIONS = 2048
"""The same of the first Llama, of which TheBloke's checkpoints are."""
OUTPUTS_STAY = "6a25a6db"
"""Commit of the runs that did not empty the cache after loading and kept the last forward's outputs: their reserved memory
is 9.6 GB above allocated. Runs of 9a0db86b, in the same month, have the reserved memory of later ones to the MB."""


def read_optimum_benchmark(path: Path) -> list[Measurement]:
    """Every row of `optimum_benchmark.jsonl`, in file order. Raises: RecordError naming file and line."""
    return read_plain_rows(path, _reading)


def _reading(record: Mapping[str, Any]) -> ImportedRow:
    prompt, new = record["sequence_length"], record["new_tokens"] or 1
    changes = {
        "task": "inference",
        "inference": {"prompt_length": prompt, "new_tokens": new, "cache": "dynamic"},
        "precision": {"parameters": "float16", "compute": "float16"},
    }
    facts, reasons, positions = [], [], POSITIONS
    if "GPTQ" in record["method"]:
        changes["finetuning"] = {"quantization": "gptq"}
        changes["framework_options"] = {"gptq_kernel": "exllamav2" if "exllamav2" in record["method"] else "exllama"}
        positions = FIRST_LLAMA_POSITIONS if "/TheBloke/LLaMa-" in record["path"] else POSITIONS
        facts.append("Groups of 128 and a bias in every Linear, which AutoGPTQ makes whatever the checkpoint has.")
    stays = record["commit"].startswith(OUTPUTS_STAY)
    if stays and not record["new_tokens"]:
        reasons.append("What the forward before this one returned, a cache and logits, was still held: no job says that.")
    return ImportedRow(
        job=row_job({**record, "model": {**record["model"], "max_position_embeddings": positions}}, **changes),
        assumptions=(*COMMON_ASSUMPTIONS, *facts),
        out_of_scope=tuple(reasons),
        unread=("peak_reserved_bytes", "peak_device_bytes") if stays else (),
        also_counted={"peak_device_bytes": _driver_reserve_bytes(record["gpu"])},
    )


def _driver_reserve_bytes(name: str) -> int:
    """Bytes that version 1 of NVML's call counts as used without any process: NVML's total minus CUDA's."""
    device = gpu(name)
    return device.nvml_memory_bytes - device.cuda_memory_bytes
