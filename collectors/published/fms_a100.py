"""foundation-model-stack/fms-acceleration's A100 benchmark, as `Measurement` rows.

Source: `scripts/benchmarks/refs/a100_80gb.csv` of that project at commit 876e2ed (Apache-2.0); the facts about it are in
`datasets/README.md`.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping
from pathlib import Path

from peakcast.collectors.published.fms_cases import case_of
from peakcast.core.errors import RecordError
from peakcast.core.units import MIB
from peakcast.measurements.records import DEVICE_MEAN, Measurement

SOURCE = "foundation-model-stack/fms-acceleration scripts/benchmarks/refs/a100_80gb.csv"
COMMIT = "876e2ed"
VERSIONS = {
    "torch": "2.4.1",
    "transformers": "4.48.1",
    "accelerate": "1.0.1",
    "peft": "0.13.2",
    "trl": "0.13.0",
    "bitsandbytes": "0.43.3",
    "flash_attn": "2.7.3",
}
TOTAL_PEAK = (
    "peak_allocated_bytes is the source's mem_peak_torch_mem_alloc_in_bytes, read as the total peak: full bf16 fine-tuning "
    "of Mistral-7B gives 10.00 bytes per parameter (2 weights, 2 gradients, 4 states, 2 foreach temporary)."
)
COLUMNS = (
    "model_name_or_path", "num_gpus", "per_device_train_batch_size", "peft_method", "r", "lora_alpha", "lora_dropout",
    "target_modules", "torch_dtype", "bf16", "fp16", "framework_config", "mem_torch_mem_alloc_in_bytes",
    "mem_peak_torch_mem_alloc_in_bytes", "mem_nvidia_mem_reserved",
)  # fmt: skip


def read_fms_a100(path: Path) -> list[Measurement]:
    """Every row of `fms_a100.csv` as a `Measurement`, in file order. Raises: RecordError naming file and line."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            reader = csv.DictReader(file)
            if tuple(reader.fieldnames or ()) != COLUMNS:
                raise RecordError(f"{path}, line 1: the columns are not {', '.join(COLUMNS)}; restore the source file.")
            rows = []
            for record in reader:
                try:
                    rows.append(_measurement(record))
                except (ValueError, KeyError, TypeError) as error:
                    raise RecordError(f"{path}, line {reader.line_num}: {error!r}; restore the source file.") from error
    except (OSError, UnicodeDecodeError) as error:
        raise RecordError(f"{path} cannot be read: {error}; give the folder of the source files.") from error
    return rows


def _measurement(record: Mapping[str, str]) -> Measurement:
    case = case_of(record, VERSIONS)
    peak = _whole(record, "mem_peak_torch_mem_alloc_in_bytes")
    steady, device = _whole(record, "mem_torch_mem_alloc_in_bytes"), _whole(record, "mem_nvidia_mem_reserved")
    return Measurement(
        job=case.job,
        gpu="A100-80GB",
        provenance="published",
        source=SOURCE,
        source_version=COMMIT,
        case=case.name,
        collectives="nccl" if int(record["num_gpus"]) > 1 else "none",
        outcome="ok" if peak is not None else "out_of_memory",
        peak_allocated_bytes=case.allocated(peak),
        peak_device_bytes=None if device is None else device * MIB,
        steady_allocated_bytes=case.allocated(steady),
        environment={
            **VERSIONS,
            "framework_config": record["framework_config"],
            "model_name_or_path": record["model_name_or_path"],
            "idle_subtracted": True,
            **({DEVICE_MEAN: True} if int(record["num_gpus"]) > 1 else {}),
            **case.as_read(peak_allocated_bytes=peak, steady_allocated_bytes=steady),
        },
        assumptions=(TOTAL_PEAK, *case.assumptions),
        out_of_scope=case.out_of_scope,
    )


def _whole(record: Mapping[str, str], column: str) -> int | None:
    return int(record[column]) if record[column] else None
