"""Observes a user's training script from inside its process: the same readings as of a cell, without phases."""

from __future__ import annotations

import contextlib
import datetime
import sys
from pathlib import Path
from typing import Any

from peakcast import __version__
from peakcast.collectors.machine import probes
from peakcast.collectors.machine.nvml import Nvml
from peakcast.collectors.stacks.steps.sampling import SampledMemory, sampling
from peakcast.core.fields import FrozenMapping
from peakcast.jobs.spec import TrainingJob
from peakcast.measurements.records import Measurement

SOURCE = "local"
"""`source` of rows made here: they are of a user's own run, not measured by this project."""

MOST_EVENTS = 1_000_000
"""Number of the allocator's latest actions that a history keeps: some hundred steps of a large network."""


class Observation:
    """Peaks of this process on its first GPU between `start` and `finish`. Without a GPU nothing is read."""

    def __init__(self, snapshot: Path | None = None) -> None:
        """`snapshot`: where PyTorch's own history of the run is written when it finishes."""
        self._snapshot = snapshot
        self._stack = contextlib.ExitStack()
        self._nvml = Nvml()
        self._seen = SampledMemory()
        self._retries = 0
        self.peaks: dict[str, int] = {}

    @staticmethod
    def gpu_name() -> str | None:
        """The GPU's name as CUDA reports it; None without one. CUDA is asked only if the script has loaded torch
        already."""
        torch = sys.modules.get("torch")
        return str(torch.cuda.get_device_name()) if torch is not None and torch.cuda.is_available() else None

    def start(self) -> None:
        """Begin: peaks are counted from here on."""
        if self.gpu_name() is None:
            return
        import torch

        self._nvml.check(probes.cuda_uuid())
        if self._snapshot is not None:
            torch.cuda.memory._record_memory_history(max_entries=MOST_EVENTS)
        torch.cuda.reset_peak_memory_stats()
        self._retries = probes.allocator_counts()["num_alloc_retries"]
        self._seen = self._stack.enter_context(sampling(self._nvml))

    def finish(self) -> None:
        """Read the peaks; a second call reads nothing new."""
        self._stack.close()
        if self.gpu_name() is not None and not self.peaks:
            self.peaks = probes.allocator_peaks()
            if self._snapshot is not None:
                import torch

                torch.cuda.memory._dump_snapshot(str(self._snapshot))
                torch.cuda.memory._record_memory_history(enabled=None)

    def row(self, job: TrainingJob, gpu: str, num_steps: int | None = None) -> Measurement:
        """What was observed, as a row of provenance `measured`."""
        retries = probes.allocator_counts()["num_alloc_retries"] - self._retries
        spoiled = [f"the allocator gave memory back and retried {retries} times."] if retries else []
        if self._seen.others:
            spoiled.append("another process used the GPU during the run.")
        if num_steps is not None and num_steps < 2:  # in the first, optimizer states do not exist beside gradients
            spoiled.append("fewer than two steps were run.")
        found = probes.versions()
        versions = FrozenMapping({k: found[k] for k in ("torch", "transformers", "peft") if k in found})
        return Measurement(
            job=job.replace(versions=versions),
            gpu=gpu,
            provenance="measured",
            source=SOURCE,
            source_version=__version__,
            peak_allocated_bytes=self.peaks.get("allocated"),
            peak_reserved_bytes=self.peaks.get("reserved"),
            peak_active_bytes=self.peaks.get("active"),
            peak_requested_bytes=self.peaks.get("requested"),
            peak_device_bytes=self._seen.peak,
            num_alloc_retries=retries,
            environment={**probes.cuda_environment(), "versions": found, "driver": self._nvml.driver()},
            spoiled=tuple(spoiled),
            observed=datetime.date.today().isoformat(),
        )


def shape_of_call(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, int] | None:
    """[batch, sequence] of the token ids with which a model is called; None without token ids."""
    ids = kwargs.get("input_ids", args[0] if args else None)
    shape: tuple[int, ...] = tuple(getattr(ids, "shape", ()))
    return (int(shape[0]), int(shape[1])) if len(shape) == 2 else None
