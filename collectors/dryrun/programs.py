"""Replaces `nvidia-smi`, which scripts start to ask about the GPUs, by a program in a folder at the beginning of PATH."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from peakcast.catalog import Device

PROGRAM = """#!{python} -SE
import sys
query = next((word.partition("=")[2] for word in sys.argv if word.startswith("--query-gpu=")), "")
known = {known}
for index in range({count}):
    if query:
        print(", ".join(str(index) if name == "index" else known.get(name, "0") for name in query.split(",")))
    else:
        print("GPU {{}}: {{}} (UUID: {{}})".format(index, known["name"], known["uuid"]))
"""


def install(folder: Path, device: Device, name: str, num_gpus: int) -> None:
    """Make `nvidia-smi`, started by this process or its children, report `num_gpus` GPUs of type `device`."""
    mebibytes = f"{device.cuda_memory_bytes // 2**20} MiB"
    known = {
        "name": name,
        "gpu_name": name,
        "uuid": "GPU-00000000-0000-0000-0000-000000000000",
        "memory.total": mebibytes,
        "memory.free": mebibytes,
        "memory.used": "0 MiB",
        "driver_version": "570.00",
        "compute_cap": ".".join(map(str, device.compute_capability)),
        "count": str(num_gpus),
    }
    path = folder / "bin" / "nvidia-smi"
    path.parent.mkdir(exist_ok=True)
    path.write_text(PROGRAM.format(python=sys.executable, known=known, count=num_gpus), encoding="utf-8")
    path.chmod(0o755)
    os.environ["PATH"] = os.pathsep.join((str(path.parent), os.environ.get("PATH", os.defpath)))
