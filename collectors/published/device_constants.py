"""Published readings of the memory that a process holds on a GPU before it has a model: `LoggedMemory`, and its table.

Source: `device_constants_h100.jsonl`, nvidia-smi as the logs of KellerJordan/modded-nanogpt print it after NCCL's first
collective of all ranks; the facts about it are in `datasets/README.md`. A reading has no job, so it is not a `Measurement`.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from peakcast.collectors.published.source_files import read_jsonl
from peakcast.core.durable import replace_file
from peakcast.core.units import MIB

OTHERS_BYTES = 512 * MIB
"""If a GPU has more than this beyond the process's own memory, other processes have contexts there: code that lets every
rank touch GPU 0 leaves some 620 MiB each on it, while an idle driver reports 9 to 13 MiB."""
MODEL_BYTES = 1600 * MIB
"""A reading above this was taken later in the script, with tensors on the GPU: logs of 2024 and of the first half of 2025
print it after the model was built or warmed up (3.4 to 21 GiB)."""


@dataclass(frozen=True, kw_only=True)
class LoggedMemory:
    """One line of the source, in bytes."""

    case: str
    gpu: str
    num_ranks: int
    """Number of ranks of the only NCCL communicator."""
    torch: str
    cuda: str
    process_bytes: int | None
    """The process's memory in nvidia-smi's list; None if the log has no list."""
    used_bytes: int
    """Memory in use that nvidia-smi shows for the GPU (for the GPU with less, if there are two)."""
    runs: int
    """Number of logs with the same figures."""
    left_out: str
    """Why the reading is more than the context and NCCL of one process; "" if it is not."""
    source: str
    source_version: str
    path: str


def read_device_constants(path: Path) -> list[LoggedMemory]:
    """Every line of `device_constants_h100.jsonl`, in file order. Raises: RecordError naming file and line."""
    return read_jsonl(path, _reading)


def write_readings(path: Path, readings: Iterable[LoggedMemory]) -> None:
    """Write the table of `readings` to `path`. Raises: RecordError when it cannot be written."""
    text = io.StringIO()
    writer = csv.DictWriter(text, [field.name for field in fields(LoggedMemory)], lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: "" if value is None else value for name, value in asdict(row).items()} for row in readings)
    replace_file(path, text.getvalue().encode())


def _reading(record: Mapping[str, Any]) -> LoggedMemory:
    constant = record["constant"]
    own, used = constant["own_process_mib"], [constant[key] for key in ("gpu0_used_mib", "gpu1_used_mib") if constant[key]]
    process_bytes = None if own is None else own * MIB
    return LoggedMemory(
        case=record["id"],
        gpu=record["gpu"],
        num_ranks=record["num_gpus"],
        torch=record["versions"]["torch"],
        cuda=record["versions"]["cuda"],
        process_bytes=process_bytes,
        used_bytes=min(used) * MIB,
        runs=record["repeats"]["runs"],
        left_out=_left_out(process_bytes, min(used) * MIB),
        source=record["source"],
        source_version=record["commit"],
        path=record["path"],
    )


def _left_out(process_bytes: int | None, used_bytes: int) -> str:
    if used_bytes > MODEL_BYTES:
        return "taken later in the script, with tensors on the GPU"
    if process_bytes is not None and used_bytes - process_bytes > OTHERS_BYTES:
        return "another process is on the GPU: what is listed is a context without NCCL"
    return ""
