"""Replaces programs that scripts and their shells start by others, in a folder at the beginning of PATH: `nvidia-smi`,
which they ask about the GPUs, and the Python programs of this environment, of which those that train are followed."""

from __future__ import annotations

import functools
import json
import os
import shlex
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from peakcast.catalog import Device
from peakcast.collectors.dryrun.command import LAUNCHERS
from peakcast.collectors.dryrun.tools import console_module

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
QUESTION = "PEAKCAST_DRYRUN_QUESTION"
"""Variable that tells stand-ins the file with the question of the script that has started them, or their shell."""
STAND_IN = """#!/bin/sh
exec {python} -P -m peakcast.collectors.dryrun.started "${{{variable}:-{question}}}" "${{0##*/}}" "$@"
"""
"""A program that knows by its name which one it stands in for."""


def install_python(question: Mapping[str, Any]) -> None:
    """Make shells that the script of `question` starts find Python and the launchers, which may be in an environment that
    is not on PATH, and follow what trains, as if the script had started it."""
    folder = Path(question["folder"])
    asked, first = folder / f"question-of-{os.getpid()}.json", folder / "bin" / "python"
    asked.write_text(json.dumps(dict(question)), encoding="utf-8")
    os.environ[QUESTION] = str(asked)
    if first.exists():  # made by the script that started this one
        return
    first.parent.mkdir(exist_ok=True)
    program = STAND_IN.format(python=shlex.quote(sys.executable), variable=QUESTION, question=asked)
    first.write_text(program, encoding="utf-8")
    first.chmod(0o755)
    for name in {"python3", f"python3.{sys.version_info.minor}", *LAUNCHERS, *console_scripts()}:
        (first.parent / name).symlink_to(first)


@functools.cache
def console_scripts() -> tuple[str, ...]:
    """The names of the console scripts beside this Python."""
    return tuple(path.name for path in Path(sys.executable).parent.iterdir() if console_module(str(path)))


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
