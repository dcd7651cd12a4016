"""What a cell does, in a process of its own: makes a `Measurement` of a question.

The question: `{"job": {...}, "gpu": "H100-80GB" | null, "trace": false, "steps": 3}`. With a GPU it measures; with `trace`
it traces on fake tensors. Out of memory is an outcome. Only the standard library, torch, pynvml and the stack under test
are imported beside peakcast's own light modules.
"""

from __future__ import annotations

import contextlib
import datetime
import os
import time
from collections.abc import Mapping
from typing import Any, Literal

from peakcast import __version__
from peakcast.collectors import probes
from peakcast.errors import NO_GPU, CollectorError
from peakcast.fields import FrozenMapping
from peakcast.records import Measurement
from peakcast.spec import TrainingJob
from peakcast.timeline import Phase

LIBRARIES = (
    "torch",
    "torch._subclasses.fake_tensor",
    "transformers",
    "transformers.models.auto.modeling_auto",
    "transformers.modeling_utils",
    "peft",
    "pynvml",
)
"""What cells import, for a parent to have ready. One that is missing is left to the cell, which says what to install."""
MIN_STEPS = 3
"""The first step has no optimizer states; two steady ones show that it has settled."""
NVML_QUANTUM_BYTES = 64 * 2**20
"""Use before our context that is larger than this is another process (an idle driver reports some MiB)."""


def run(question: Mapping[str, Any]) -> Measurement:
    """The row of one question."""
    from peakcast.dialects.job_file import job_from_mapping

    job = job_from_mapping(question["job"])
    if question.get("trace"):
        return traced(job, str(question["gpu"]), int(question.get("rank", 0)))
    return measured(job, question.get("gpu"), max(int(question.get("steps", MIN_STEPS)), MIN_STEPS))


def traced(job: TrainingJob, gpu: str, rank: int = 0) -> Measurement:
    """The row of a trace of `rank`: what the framework allocates, no kernels, no context."""
    from peakcast.collectors.tracing.trace import trace_here

    started = time.monotonic()
    timelines = trace_here(job, rank)
    first, steady = timelines["first"], timelines["steady"]
    return Measurement(
        job=with_versions(job),
        gpu=gpu,
        provenance="traced",
        rank=rank,
        collectives=collectives(job),
        source="peakcast",
        source_version=__version__,
        peak_allocated_bytes=max(first.peak().num_bytes, steady.peak().num_bytes),
        first_step_peak_allocated_bytes=first.peak().num_bytes,
        steady_allocated_bytes=int(steady.totals[-1]),
        phase_peaks={phase.name.lower(): size for phase, size in steady.phase_peaks().items()},
        environment={
            "versions": probes.versions(),
            "readings": {"wall_seconds": round(time.monotonic() - started, 1)},
        },
        observed=datetime.date.today().isoformat(),
    )


def collectives(job: TrainingJob) -> Literal["none", "fake"]:
    """One GPU stands for one rank of many: its collectives move nothing."""
    return "fake" if job.parallelism.world_size > 1 else "none"


def with_versions(job: TrainingJob) -> TrainingJob:
    """`job` with the versions that really ran, which decide whose conventions hold."""
    found = probes.versions()
    deciding: tuple[str, ...] = ("torch", "transformers", "accelerate", "peft")
    if job.framework == "megatron":
        deciding = ("torch", "megatron_core", "transformer_engine")
    return job.replace(versions=FrozenMapping({k: found[k] for k in deciding if k in found}))


def measured(job: TrainingJob, gpu: str | None, steps: int) -> Measurement:
    """The row of a real run on this machine's first GPU. Raises: CollectorError without one."""
    import torch

    variable = "PYTORCH_CUDA_ALLOC_CONF"  # read before the newer PYTORCH_ALLOC_CONF
    settings = os.environ.get(variable, "")
    if job.allocator.expandable_segments or "expandable_segments" in settings:
        settings = probes.allocator_setting(job.allocator.expandable_segments, settings)
    if not torch.cuda.is_available():
        raise CollectorError(f"{NO_GPU}; trace instead (--trace), or run on a machine with a GPU.")
    if settings:  # the variable itself was read when the parent imported torch
        torch.cuda.memory._set_allocator_settings(settings)
        os.environ[variable] = settings
    nvml = probes.Nvml()
    idle = nvml.used_bytes()
    torch.cuda.init()
    torch.empty(1, device="cuda")
    context = nvml.used_bytes()
    if context is not None:
        context -= torch.cuda.memory_reserved()  # the small segment behind that one element
    environment = {**probes.cuda_environment(), "versions": probes.versions(), "driver": nvml.driver()}
    record = Recorder(job, gpu or gpu_name(environment["gpu_name"]), environment)
    record.idle, record.context = idle, context
    if idle is not None and idle > NVML_QUANTUM_BYTES * 16:
        record.spoiled.append(f"{idle} bytes of the GPU were in use before the run: another process?")
    with nvml.sampling() as seen:
        try:
            record.run(steps)
        except RuntimeError as error:  # PyTorch's out-of-memory error is one, and so are those of cuBLAS and CUDA
            if not probes.is_out_of_memory(error):
                raise
            record.out_of_memory(error)
        record.nvml_peak = seen["peak"]
    if (nvml.num_processes() or 1) > 1:
        record.spoiled.append("another process used the GPU during the run.")
    return record.row()


def gpu_name(reported: str) -> str:
    """The catalog's name of the GPU that CUDA reports. Raises: CollectorError naming the way out."""
    from peakcast import catalog
    from peakcast.errors import CatalogError

    try:
        return catalog.gpu(reported).name
    except CatalogError as error:
        raise CollectorError(
            f"the GPU {reported!r} is not in the catalog; name its type with --gpu, or add it to catalog/gpus.toml.",
            parameter="gpu",
            value=reported,
        ) from error


class Recorder:
    """Runs a job on the GPU phase by phase and keeps what was read."""

    def __init__(self, job: TrainingJob, gpu: str, environment: dict[str, Any]) -> None:
        self.job = job
        self.gpu = gpu
        self.environment = environment
        self.readings: dict[str, Any] = {}
        """What differs from run to run: kept apart from the facts that say how it was measured."""
        self.spoiled: list[str] = []
        self.idle: int | None = None
        self.context: int | None = None
        self.nvml_peak: int | None = None
        self.outcome = "ok"
        self.steps: list[dict[str, dict[str, int]]] = []
        self.built: dict[str, int] = {}
        self.steady_allocated: int | None = None
        self._phase = ""

    def run(self, steps: int) -> None:
        """Build, then `steps` training steps; allocator peaks are reset at every phase edge."""
        import torch

        from peakcast.collectors.frameworks import build, layouts

        started = time.monotonic()
        layouts.start_group(self.job)
        training = build(self.job, "cuda:0")
        torch.cuda.synchronize()
        self.built = probes.allocator_peaks()
        self.readings["build_seconds"] = round(time.monotonic() - started, 2)
        self.environment.update(training.facts())
        for _ in range(steps):
            self.steps.append({})
            self._step(training)
        self.readings["wall_seconds"] = round(time.monotonic() - started, 2)
        if self.job.attention == "sdpa" and "attention_backend" not in self.environment:  # nothing fused to be seen
            dtype = getattr(torch, self.job.precision.compute)
            self.environment["attention_backend"] = probes.attention_backend(training.model, dtype)
        if not any(training.optimizer.state.values()) and self.job.optimizer.name != "sgd":
            self.spoiled.append("the optimizer has no states: its step was skipped.")

    def _step(self, training: Any) -> None:
        import torch

        if hasattr(training, "forward_backward"):  # the library has a schedule of its own
            training.forward_backward(self._begin)
        else:
            self._micro_batches(training)
        self._begin(Phase.GRADIENT_CLIPPING)
        training.clip()
        self._begin(Phase.OPTIMIZER_STEP)
        training.step()
        training.zero_grad()
        self._begin(None)
        self.steady_allocated = int(torch.cuda.memory_allocated())

    def _micro_batches(self, training: Any) -> None:
        for _ in range(self.job.gradient_accumulation_steps):
            self._begin(Phase.FORWARD)
            loss = training.forward(lambda: self._begin(Phase.LOSS))
            if len(self.steps) == 1 and (kernel := probes.attention_in_graph(loss)):
                self.environment["attention_backend"] = kernel
            self._begin(Phase.BACKWARD)
            training.backward(loss)
            del loss

    def _begin(self, phase: Phase | None) -> None:
        """Close the phase at hand and begin the next."""
        import torch

        if self._phase:
            torch.cuda.synchronize()
            self._keep(probes.allocator_peaks())
        self._phase = phase.name.lower() if phase is not None else ""
        torch.cuda.reset_peak_memory_stats()

    def _keep(self, peaks: dict[str, int]) -> None:
        """The peaks of the phase at hand, over all its micro-batches."""
        before = self.steps[-1].get(self._phase, {})
        self.steps[-1][self._phase] = {name: max(size, before.get(name, 0)) for name, size in peaks.items()}

    def out_of_memory(self, error: BaseException) -> None:
        """Keep what was reached: lower bounds."""
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
        with contextlib.suppress(RuntimeError):  # a context that ran out outside the allocator may answer no more
            free, total = torch.cuda.mem_get_info()
            self.readings["out_of_memory"] |= {"free_bytes": int(free), "total_bytes": int(total)}

    def row(self) -> Measurement:
        """What was read, as a row."""
        counts = probes.allocator_counts()
        if counts["num_alloc_retries"] and self.outcome == "ok":
            self.spoiled.append(f"the allocator gave memory back and retried {counts['num_alloc_retries']} times.")
        peaks = [self.built, *(phase for step in self.steps for phase in step.values())]
        peaks = [peak for peak in peaks if peak]
        first = [phase["allocated"] for phase in self.steps[0].values()] if self.steps else []
        last = self.steps[-1] if self.steps else {}
        used = None if self.nvml_peak is None or self.idle is None else self.nvml_peak - self.idle
        self.readings |= {"num_ooms": counts["num_ooms"], "steps": self.steps, "built": self.built}
        self.readings["host_resident_bytes"] = probes.host_peak_bytes()
        return Measurement(
            job=with_versions(self.job),
            gpu=self.gpu,
            provenance="measured",
            collectives=collectives(self.job),
            source="peakcast",
            source_version=__version__,
            outcome="ok" if self.outcome == "ok" else "out_of_memory",
            peak_allocated_bytes=max((peak["allocated"] for peak in peaks), default=None),
            peak_reserved_bytes=max((peak["reserved"] for peak in peaks), default=None),
            peak_requested_bytes=max((peak["requested"] for peak in peaks), default=None),
            peak_active_bytes=max((peak["active"] for peak in peaks), default=None),
            peak_device_bytes=used,
            peak_host_bytes=None,
            first_step_peak_allocated_bytes=max(first, default=None),
            steady_allocated_bytes=self.steady_allocated if self.outcome == "ok" else None,
            context_bytes=None if self.context is None or self.idle is None else self.context - self.idle,
            num_alloc_retries=counts["num_alloc_retries"],
            phase_peaks={phase: peak["allocated"] for phase, peak in last.items()},
            environment={**self.environment, "readings": self.readings},
            spoiled=tuple(self.spoiled),
            observed=datetime.date.today().isoformat(),
        )

