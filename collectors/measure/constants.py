"""`peakcast collect constants`: reads, in separate processes, what this machine's GPU holds outside PyTorch's allocator.

One process reads the CUDA context and what each library takes when it is first used (`first_uses.py`). If there are several
GPUs, torchrun starts one process for each, and they read NCCL's communicators (`communicators.py`).
"""

from __future__ import annotations

import datetime
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peakcast.catalog.constants import Constants
from peakcast.collectors.measure.worker import gpu_name
from peakcast.core.errors import NO_GPU, CollectorError
from peakcast.core.fields import FrozenMapping

FIRST_USES, COMMUNICATORS = "peakcast.collectors.measure.first_uses", "peakcast.collectors.measure.communicators"
INSTALL = "torch is not installed here; install it with its CUDA build: pip install 'peakcast[collect]'."
OWN = "peakcast: "
"""How the programs' own sentences begin on standard error."""

Probe = Callable[[str, int, float], Mapping[str, Any]]
"""`probe(module, num_ranks, timeout_seconds)`: runs a program of this package on so many ranks, returns what it found."""


@dataclass(frozen=True, slots=True)
class MeasuredConstants:
    """The constants that were read, and sentences about what could not be read or is unusual."""

    constants: Constants
    remarks: tuple[str, ...]


def read_constants(gpu: str | None, timeout_seconds: float, probe: Probe | None = None) -> MeasuredConstants:
    """Read the GPU of this machine, which is of type `gpu` (None: the type that CUDA reports). `timeout_seconds` limits
    each program.

    Raises: CollectorError, in a sentence, without a GPU, torch or NVML, or for a GPU that the catalog does not have.
    """
    probe = probe or run_probe
    alone = probe(FIRST_USES, 1, timeout_seconds)
    if alone.get("context_bytes") is None:
        why = " ".join(alone.get("nvml") or ()) or "NVML gives no reading."
        raise CollectorError(f"device memory cannot be read on this machine: {why}", parameter="constants")
    steps = {step["step"]: step for step in alone["steps"]}
    taken = {name: max(0, step["outside_bytes"]) for name, step in steps.items() if step.get("outside_bytes") is not None}
    remarks = list(alone.get("nvml", ()))
    remarks += [f"{name} was not read: {step['reason']}" for name, step in steps.items() if "reason" in step]
    communicators: dict[str, int] = {}
    if alone.get("num_gpus", 1) > 1:
        try:
            together = probe(COMMUNICATORS, alone["num_gpus"], timeout_seconds)
            sizes = together["communicators"].items()
            communicators = {ranks: max(0, size) for ranks, size in sizes if size is not None}
            taken |= {"nccl": max(0, together["nccl"])} if together["nccl"] is not None else {}
        except CollectorError as error:
            remarks.append(f"NCCL's communicators were not read: {error.message}")
    else:
        remarks.append("NCCL's communicators were not read, since only one GPU is here; they are estimated.")
    versions = {"torch": alone["versions"].get("torch"), "cuda": alone.get("cuda"), "driver": alone.get("driver")}
    found = Constants(
        gpu=gpu or gpu_name(alone["gpu_name"]),
        context_bytes=max(0, alone["context_bytes"]),
        first_uses_bytes=FrozenMapping(taken),
        communicator_bytes=FrozenMapping(communicators),
        versions=FrozenMapping({name: str(version) for name, version in versions.items() if version}),
        observed=datetime.date.today().isoformat(),
    )
    return MeasuredConstants(found, tuple(remarks))


def run_probe(module: str, num_ranks: int, timeout_seconds: float) -> Mapping[str, Any]:
    """The JSON that the program `module` writes. It runs in one process, or by torchrun in `num_ranks`. Raises:
    CollectorError."""
    with tempfile.TemporaryDirectory(prefix="peakcast-constants-") as folder:
        file = Path(folder) / "found.json"
        torchrun = ["torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}", "--max-restarts=0", "-m"]
        command = [sys.executable, "-P", "-m", *(torchrun if num_ranks > 1 else ()), module, str(file)]
        _run(command, module, timeout_seconds)
        try:
            found: Mapping[str, Any] = json.loads(file.read_bytes())
        except (OSError, ValueError) as error:
            raise CollectorError(f"{module} left no reading: {error}.", parameter="constants") from error
    return found


def _run(command: Sequence[str], module: str, timeout_seconds: float) -> None:
    environment = {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", **os.environ, "PYTHONSAFEPATH": "1"}  # NVML's order
    try:
        ended = subprocess.run(
            command, env=environment, capture_output=True, text=True, errors="replace", timeout=timeout_seconds, check=False
        )
    except subprocess.TimeoutExpired:
        raise CollectorError(
            f"{module} gave no answer within timeout_seconds={timeout_seconds:g}; give it more.",
            parameter="timeout_seconds",
            value=timeout_seconds,
        ) from None
    if ended.returncode == 0:
        return
    said = ended.stderr
    if NO_GPU in said:
        raise CollectorError(
            f"{NO_GPU}; `peakcast collect constants` reads a real one, so run it on a machine with a GPU.",
            parameter="constants",
        )
    if "No module named 'torch'" in said:
        raise CollectorError(INSTALL, parameter="constants")
    raise CollectorError(f"{module} ended with exit code {ended.returncode}: {_cause(said)[:300]}", parameter="constants")


def _cause(said: str) -> str:
    """Why a program ended, of what it `said`: its own sentence, of several ranks' the first, because the others fail by it;
    otherwise the last line with words, which torchrun's are not (a rule of ====)."""
    lines = [line.strip() for line in said.splitlines() if any(map(str.isalpha, line))]
    own = (line.removeprefix(OWN) for line in lines if line.startswith(OWN))
    return next(own, lines[-1] if lines else "it said nothing")
