"""The work of a cell, in a process of its own: it makes a `Measurement` of a question.

The question: `{"job": {...}, "gpu": "H100-80GB" | null, "trace": false, "steps": 3, "history": false, "ranks": "auto"}`.
With a GPU the job is measured; with `trace` it is traced on fake tensors; with `history` the run's timelines are returned
too, packed; `ranks` says whether a job of many ranks runs with all of them. Out of memory is a valid outcome. Besides
peakcast's own light modules, only the standard library, torch, pynvml and the stack under test are imported.
"""

from __future__ import annotations

import datetime
import os
import time
from collections.abc import Mapping
from typing import Any

from peakcast import __version__, catalog
from peakcast.collectors.machine import probes
from peakcast.collectors.machine.nvml import Nvml
from peakcast.collectors.machine.versions import with_versions
from peakcast.collectors.measure.growth import Growth
from peakcast.collectors.measure.recorder import Recorder, collectives
from peakcast.collectors.processes import gang
from peakcast.collectors.processes.engines import WORK
from peakcast.collectors.stacks.steps.sampling import sampling
from peakcast.core.errors import CollectorError
from peakcast.jobs import conventions
from peakcast.jobs.lengths import CHANGING_STEPS, lengths_change
from peakcast.jobs.spec import TrainingJob
from peakcast.measurements.records import Measurement
from peakcast.timelines.files import pack, timeline_to_mapping
from peakcast.timelines.timeline import Timeline

LIBRARIES = (
    "torch",
    "torch._subclasses.fake_tensor",
    "transformers",
    "transformers.models.auto.modeling_auto",
    "transformers.modeling_utils",
    "transformers.models.llama.modeling_llama",
    "transformers.trainer",
    "peft",
    "pynvml",
    "peakcast.collectors.stacks.huggingface",
    "peakcast.collectors.tracing.trace",
    "peakcast.collectors.tracing.tracer",
    "peakcast.collectors.tracing.deepspeed_fakes",
    "peakcast.collectors.tracing.dtensors",
    "peakcast.collectors.tracing.fake_cuda",
    "peakcast.collectors.tracing.kernel_packages",
    "peakcast.collectors.tracing.megatron_fakes",
    "peakcast.collectors.tracing.patches",
)
"""Modules that cells import, so that a parent can import them first. A missing one is left to the cell, which says what to
install."""


def read_ahead() -> None:
    """Read the catalog's tables now, so that cells, which are forked from this process, need not."""
    catalog.read_ahead()
    conventions.read_ahead()


MIN_STEPS = 3
"""The first step begins without optimizer states; two steady steps show that memory has settled."""


def run(question: Mapping[str, Any]) -> list[tuple[Measurement, bytes | None]]:
    """The row of one question (one for each real rank), with its timelines as a file's bytes if they are asked for."""
    from peakcast.dialects.common.job_file import job_from_mapping

    job = job_from_mapping(question["job"])
    history, ranks = bool(question.get("history")), job.parallelism.world_size
    if ranks > 1 and not gang.launched() and has_ranks(question, ranks):
        return gang.run(question, ranks, WORK)
    if question.get("trace"):
        return [traced(job, str(question["gpu"]), int(question.get("rank", 0)), history=history)]
    steps = max(int(question.get("steps", MIN_STEPS)), CHANGING_STEPS if lengths_change(job) else MIN_STEPS)
    return [measured(job, question.get("gpu"), steps, int(question.get("rank", 0)), history=history)]


def has_ranks(question: Mapping[str, Any], ranks: int) -> bool:
    """Whether all ranks of a job are to run. Raises: CollectorError if they must and there are too few GPUs."""
    asked = question.get("ranks", "auto")
    if question.get("trace"):
        return bool(asked == "real")
    import torch

    num_gpus = torch.cuda.device_count()  # asks NVML; ranks need a process that has not touched CUDA
    if asked == "real" and num_gpus < ranks:
        raise CollectorError(
            f"ranks='real' needs a GPU for each of {ranks} ranks and {num_gpus} are here; use 'auto', where one stands for "
            "the others.",
            parameter="ranks",
            value="real",
        )
    return bool(asked != "one" and num_gpus >= ranks)


def traced(job: TrainingJob, gpu: str, rank: int = 0, *, history: bool = False) -> tuple[Measurement, bytes | None]:
    """The row of a trace of `rank`: what the framework allocates, without kernels and context."""
    from peakcast.collectors.tracing.trace import trace_here, trace_on_cpu

    started = time.monotonic()
    timelines = trace_on_cpu(job) if gang.launched() else trace_here(job, rank)
    first, steady = timelines["first"], timelines["steady"]
    packed = timelines_packed(timelines) if history else None
    row = Measurement(
        job=with_versions(job),
        gpu=gpu,
        provenance="traced",
        rank=gang.rank(rank),
        collectives=collectives(job),
        source="peakcast",
        source_version=__version__,
        peak_allocated_bytes=max(first.peak().num_bytes, steady.peak().num_bytes),
        first_step_peak_allocated_bytes=first.peak().num_bytes,
        steady_allocated_bytes=int(steady.totals[-1]),
        phase_peaks={phase.name.lower(): size for phase, size in steady.phase_peaks().items()},
        environment={
            "versions": probes.versions(),
            "readings": {"wall_seconds": round(time.monotonic() - started, 3)},
        },
        observed=datetime.date.today().isoformat(),
    )
    return row, packed


def timelines_packed(timelines: Mapping[str, Timeline]) -> bytes | None:
    """A trace's timelines as a file's bytes; a trace has no hidden allocations."""
    return pack({**{step: timeline_to_mapping(timeline) for step, timeline in timelines.items()}, "hidden": []})


def _run(record: Recorder, steps: int) -> None:
    """Run the job; if it needs more memory than there is, that is recorded."""
    try:
        record.run(steps)
    except RuntimeError as error:  # a base of PyTorch's out-of-memory error, and of those of cuBLAS and CUDA
        if not probes.is_out_of_memory(error):
            raise
        record.out_of_memory(error)


def measured(
    job: TrainingJob, gpu: str | None, steps: int, rank: int = 0, *, history: bool = False
) -> tuple[Measurement, bytes | None]:
    """The row of a real run on this machine's first GPU, as `rank` of the job if it stands for all ranks. Raises:
    CollectorError without a GPU."""
    import torch

    probes.require_gpu()
    variable = probes.ALLOCATOR_VARIABLES[0]
    if settings := probes.allocator_settings(job.allocator, os.environ.get(variable, "")):
        torch.cuda.memory._set_allocator_settings(settings)  # the variable was read when the parent imported torch
        os.environ[variable] = settings
    os.environ.setdefault("CUDA_DEVICE_ORDER", "PCI_BUS_ID")  # NVML's order; CUDA's own has the fastest GPU first
    torch.cuda.set_device(gang.local_rank())
    nvml = Nvml(gang.local_rank())
    idle, busy = nvml.settled_bytes(), nvml.is_in_use()
    growth = Growth(nvml.used_bytes, torch.cuda.memory_reserved, idle)
    probes.open_context()
    nvml.check(probes.cuda_uuid())
    context = growth.mark("context")
    environment = {**probes.cuda_environment(), "versions": probes.versions(), "driver": nvml.driver()}
    record = Recorder(job, gpu or gpu_name(environment["gpu_name"]), environment, rank)
    record.idle, record.context, record.is_mig, record.growth = idle, context, nvml.is_mig, growth
    if history:
        record.begin_history()
    if busy:
        record.spoiled.append(f"{idle} bytes of the GPU were in use before the run: another process?")
    record.pageable_before = probes.pageable_bytes()
    with sampling(nvml) as seen:
        _run(record, steps)
    record.nvml_peak, record.nvml_end, record.pageable_peak = seen.peak, nvml.used_bytes(), seen.pageable_peak
    if seen.others:
        record.spoiled.append("another process used the GPU during the run.")
    if remarks := nvml.remarks(seen.processes):
        environment["nvml"] = remarks
    packed = record.timelines()
    return record.row(), packed


def gpu_name(reported: str) -> str:
    """The catalog's name of the GPU that CUDA reports. Raises: CollectorError naming the way out."""
    from peakcast import catalog
    from peakcast.core.errors import CatalogError

    try:
        return catalog.gpu(reported).name
    except CatalogError as error:
        raise CollectorError(
            f"the GPU {reported!r} is not in the catalog; name its type with --gpu, or add it to catalog/gpus.toml.",
            parameter="gpu",
            value=reported,
        ) from error
