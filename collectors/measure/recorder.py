"""Runs a job on the GPU phase by phase, keeps the readings at the phases' edges, and makes a row of them."""

from __future__ import annotations

import contextlib
import datetime
import itertools
import time
from typing import TYPE_CHECKING, Any

from peakcast import __version__
from peakcast.collectors.machine import probes
from peakcast.collectors.machine.versions import with_versions
from peakcast.collectors.measure.growth import Growth
from peakcast.collectors.processes import gang
from peakcast.collectors.stacks.steps.stepping import name_gradients, name_states, run_steps
from peakcast.core.errors import CollectorError
from peakcast.jobs.lengths import lengths_change
from peakcast.jobs.lengths import steps as lengths_of_steps
from peakcast.jobs.spec import TrainingJob
from peakcast.measurements.records import Collectives, Measurement
from peakcast.timelines.files import pack
from peakcast.timelines.timeline import Category, Phase

if TYPE_CHECKING:
    from peakcast.collectors.tracing.recorded_run import Recording

GENERATION = ("prefill", "decode")
"""Parts of a generation's forward, by the number of the forward call; calls after the second belong to the second part."""
PART_OF_A_GPU = "measured on a MIG instance, which has less of everything than the GPU it is named after"


def collectives(job: TrainingJob) -> Collectives:
    """The backend that moves data between ranks: none for one rank, "fake" if one rank stands for many."""
    if job.parallelism.world_size == 1:
        return "none"
    if not gang.launched():
        return "fake"
    import torch.distributed as dist

    backend: Collectives = "nccl" if dist.get_backend() == "nccl" else "gloo"
    return backend


class Recorder:
    """Runs a job on the GPU phase by phase and keeps the readings."""

    def __init__(self, job: TrainingJob, gpu: str, environment: dict[str, Any], rank: int = 0) -> None:
        self.job = job
        self.gpu = gpu
        self.rank = gang.rank(rank)
        self.environment = environment
        self.readings: dict[str, Any] = {}
        """Readings that differ from run to run, separate from the facts about how it was measured."""
        self.spoiled: list[str] = []
        self.idle: int | None = None
        self.context: int | None = None
        """Bytes that the CUDA context added."""
        self.growth: Growth | None = None
        self.nvml_peak: int | None = None
        self.nvml_end: int | None = None
        self.pageable_before: int | None = None
        """`probes.pageable_bytes` after the CUDA context is made: the interpreter, its libraries and the driver."""
        self.pageable_peak: int | None = None
        self.managed = 0
        self.is_mig = False
        self.outcome = "ok"
        self.steps: list[dict[str, dict[str, int]]] = []
        self.built: dict[str, int] = {}
        self.steady_allocated: int | None = None
        self.recording: Recording | None = None
        self._phase = ""
        self._training: Any = None

    def begin_history(self) -> None:
        """Also record the allocator's actions. The row says so, because recording runs between operators."""
        from peakcast.collectors.tracing.recorded_run import Recording

        self.recording = Recording()
        self.environment["history"] = True

    def run(self, steps: int) -> None:
        """Build the job and run `steps` training steps; allocator peaks are reset at the edge of every phase."""
        with self.recording or contextlib.nullcontext():
            self._run(steps)

    def _run(self, steps: int) -> None:
        import torch

        from peakcast.collectors.stacks import build, build_inference, layouts

        started = time.monotonic()
        self.readings["host_resident_before_bytes"] = probes.host_peak_bytes()
        layouts.start_group(self.job, self.rank)
        self._mark("process group")
        generates = self.job.task == "inference"
        training: Any = (build_inference if generates else build)(self.job, f"cuda:{gang.local_rank()}")
        stepping = time.monotonic()
        torch.cuda.synchronize()
        self.built = probes.allocator_peaks()
        self._mark("build")
        self.readings["build_seconds"] = round(time.monotonic() - started, 2)
        self.environment.update(training.facts())
        self._training = training
        recording = self.recording
        if recording is not None:
            recording.name(training.model.named_parameters(), Category.PARAMETERS)
        with recording.watching(training.model) if recording is not None else contextlib.nullcontext():
            if generates:
                for _ in range(steps):
                    self.step_begins()
                    self._generate(training)
                    self.step_ends()
            else:
                run_steps(training, steps, self)
        self._mark("later steps")
        self.readings["wall_seconds"] = round(time.monotonic() - started, 3)
        self.readings["step_seconds"] = round(time.monotonic() - stepping, 3)
        if self.job.attention == "sdpa" and "attention_backend" not in self.environment:  # nothing fused to be seen
            self.environment["attention_backend"] = probes.attention_backend(self.job)
        if not generates:
            self.managed = probes.managed_bytes(training.optimizer)
            if probes.has_skipped(getattr(training, "scaler", None)):
                self.spoiled.append("gradients overflowed: the loss scaler skipped a step.")
        if not generates and not any(training.optimizer.state.values()) and self.job.optimizer.name != "sgd":
            self.spoiled.append("the optimizer has no states: its step was skipped.")

    def timelines(self) -> bytes | None:
        """The recorded history as a file's bytes; None if there is none, or if it is too large to keep."""
        if self.recording is None or self.outcome != "ok":
            return None
        try:
            return pack(self.recording.content())
        except CollectorError as error:  # the row is kept without it
            self.readings["history"] = error.message
            return None

    # -- what a run of steps tells (`stepping.Follower`)

    def step_begins(self) -> None:
        """Begin new readings for the step."""
        self.steps.append({})
        if self.recording is not None:
            self.recording.step()

    def begin(self, phase: Phase) -> None:
        """A phase begins."""
        self._begin(phase)

    def loss_made(self, loss: Any) -> None:
        """In the first step, read from the loss's graph which attention kernel ran."""
        if len(self.steps) == 1 and (kernel := probes.attention_in_graph(loss)):
            self.environment["attention_backend"] = kernel

    def gradients_made(self) -> None:
        """Name the gradients in the history."""
        if self.recording is not None:
            name_gradients(self._training, self.recording.name)

    def states_made(self) -> None:
        """Name the optimizer states in the history."""
        if self.recording is not None:
            name_states(self._training, self.recording.name)

    def step_ends(self) -> None:
        """Read what stays allocated between steps."""
        import torch

        self._begin(None)
        self.steady_allocated = int(torch.cuda.memory_allocated())

    def _generate(self, inference: Any) -> None:
        """Run prefill and decoding: one phase, the forward, with two parts in the readings."""

        def on_forward(index: int) -> None:
            if index < len(GENERATION):
                self._begin(Phase.FORWARD, GENERATION[index])

        inference.generate(on_forward)

    def _begin(self, phase: Phase | None, part: str = "") -> None:
        """Close the current phase (or part of it) and begin the next."""
        import torch

        if self._phase:
            torch.cuda.synchronize()
            self._keep(probes.allocator_peaks())
            if len(self.steps) == 1:
                self._mark(self._phase)
        self._phase = part or (phase.name.lower() if phase is not None else "")
        if self.recording is not None and phase is not None:
            self.recording.phase = phase
        torch.cuda.reset_peak_memory_stats()

    def _mark(self, step: str) -> None:
        """Attribute what was added outside the allocator to `step`."""
        if self.growth is not None:
            self.growth.mark(step)

    def _keep(self, peaks: dict[str, int]) -> None:
        """Keep `peaks` of the current phase; the largest over its micro-batches."""
        before = self.steps[-1].get(self._phase, {})
        self.steps[-1][self._phase] = {name: max(size, before.get(name, 0)) for name, size in peaks.items()}

    def out_of_memory(self, error: BaseException) -> None:
        """Keep what was reached as lower bounds."""
        import torch

        self.outcome = "out_of_memory"
        if self._phase:
            self._keep(probes.allocator_peaks())
        message = (str(error).splitlines() or [""])[0][:300]
        self.readings["out_of_memory"] = {
            "phase": self._phase or "init",
            "message": message,
            "requested_bytes": probes.requested_bytes(message),
            "reserved_bytes": int(torch.cuda.memory_reserved()),
        }
        with contextlib.suppress(RuntimeError):  # a context that ran out of memory outside the allocator may not answer
            free, total = torch.cuda.mem_get_info()
            self.readings["out_of_memory"] |= {"free_bytes": int(free), "total_bytes": int(total)}

    def _host(self) -> int | None:
        """Host memory of the job, in bytes: pinned, managed, and pageable beyond what the process had before."""
        pinned = probes.pinned_peak_bytes()
        if pinned is None or self.pageable_peak is None or self.pageable_before is None:
            return None
        grown = max(self.pageable_peak - self.pageable_before, 0)
        return grown + self.managed + (0 if probes.registers_pinned() else pinned)

    def _settled(self) -> list[dict[str, dict[str, int]]]:
        """The steps whose phases make the row: the last one; if lengths change, all from the second on."""
        return self.steps[1:] or self.steps if lengths_change(self.job) else self.steps[-1:]

    def _lengths(self) -> dict[str, Any]:
        """If lengths change: the longest sequence and the number of tokens of each micro-batch of each step."""
        if not lengths_change(self.job):
            return {}
        ran = itertools.islice(lengths_of_steps(self.job, self.rank), len(self.steps))
        return {"lengths": [[[part.sequence_length, part.num_tokens] for part in step] for step in ran]}

    def _phase_peaks(self) -> dict[str, int]:
        """The most that was allocated in each phase once memory had settled."""
        peaks: dict[str, int] = {}
        for part, peak in itertools.chain.from_iterable(step.items() for step in self._settled()):
            phase = "forward" if part in GENERATION else part
            peaks[phase] = max(peak["allocated"], peaks.get(phase, 0))
        return peaks

    def _complete_readings(self, num_ooms: int) -> None:
        """Add what NVML, the allocator and the host say at the end of the run."""
        if self.idle is not None:
            self.readings |= {"nvml_idle_bytes": self.idle, "nvml_peak_bytes": self.nvml_peak}
            self.readings["nvml_end_bytes"] = self.nvml_end
        self.readings |= self.growth.readings() if self.growth is not None else {}
        self.readings |= {"num_ooms": num_ooms, "steps": self.steps, "built": self.built, **self._lengths()}
        self.readings |= {
            "host_resident_bytes": probes.host_peak_bytes(),
            "host_pinned_bytes": probes.pinned_peak_bytes(),
            "host_pageable_before_bytes": self.pageable_before,
            "host_pageable_bytes": self.pageable_peak,
            "host_managed_bytes": self.managed,
        }

    def row(self) -> Measurement:
        """The readings as a row."""
        counts = probes.allocator_counts()
        if counts["num_alloc_retries"] and self.outcome == "ok":
            self.spoiled.append(f"the allocator gave memory back and retried {counts['num_alloc_retries']} times.")
        peaks = [self.built, *(phase for step in self.steps for phase in step.values())]
        peaks = [peak for peak in peaks if peak]
        first = [phase["allocated"] for phase in self.steps[0].values()] if self.steps else []
        used = None if self.nvml_peak is None or self.idle is None else self.nvml_peak - self.idle
        self._complete_readings(counts["num_ooms"])
        return Measurement(
            job=with_versions(self.job),
            gpu=self.gpu,
            provenance="measured",
            rank=self.rank,
            collectives=collectives(self.job),
            source="peakcast",
            source_version=__version__,
            outcome="ok" if self.outcome == "ok" else "out_of_memory",
            peak_allocated_bytes=max((peak["allocated"] for peak in peaks), default=None),
            peak_reserved_bytes=max((peak["reserved"] for peak in peaks), default=None),
            peak_requested_bytes=max((peak["requested"] for peak in peaks), default=None),
            peak_active_bytes=max((peak["active"] for peak in peaks), default=None),
            peak_device_bytes=used,
            peak_host_bytes=self._host(),
            first_step_peak_allocated_bytes=max(first, default=None),
            steady_allocated_bytes=self.steady_allocated if self.outcome == "ok" else None,
            context_bytes=self.context,
            num_alloc_retries=counts["num_alloc_retries"],
            phase_peaks=self._phase_peaks(),
            environment={**self.environment, "readings": self.readings},
            out_of_scope=PART_OF_A_GPU if self.is_mig else "",
            spoiled=tuple(self.spoiled),
            observed=datetime.date.today().isoformat(),
        )
