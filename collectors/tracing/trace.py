"""Traces a job: the same stack and the same phases as a measurement, on fake tensors, in a process of its own."""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

from peakcast.errors import CollectorError
from peakcast.spec import TrainingJob, job_to_mapping
from peakcast.timeline import Category, Entry, Phase, Timeline

NUM_STEPS = 2
"""The first step makes the optimizer states; the second is steady."""


def trace_job(job: TrainingJob, *, rank: int = 0, timeout_seconds: float = 600) -> dict[str, Timeline]:
    """`{"first": ..., "steady": ...}`: the timelines of the two steps of `job` on `rank`, traced in a subprocess without a
    GPU.

    Raises: CollectorError with what the subprocess said.
    """
    command = [sys.executable, "-P", "-m", "peakcast.collectors.tracing", "-", str(rank)]
    environment = {**os.environ, "PYTHONSAFEPATH": "1", "CUDA_VISIBLE_DEVICES": ""}
    try:
        done = subprocess.run(
            command,
            input=json.dumps(job_to_mapping(job)),
            capture_output=True,
            text=True,
            timeout=timeout_seconds,
            env=environment,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise CollectorError(f"the trace took longer than {timeout_seconds:g} s; give it more time.") from error
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise CollectorError(f"the trace failed: {last.removeprefix('peakcast: ')}")
    answer = json.loads(done.stdout.strip().splitlines()[-1])
    return {step: timeline_from_mapping(answer[step]) for step in ("first", "steady")}


def trace_here(job: TrainingJob, rank: int = 0) -> dict[str, Timeline]:
    """As `trace_job`, in this process, which it changes for good (fake CUDA, patched attention)."""
    import torch

    from peakcast.collectors.frameworks import build, layouts
    from peakcast.collectors.tracing import dtensors, fake_cuda, fake_streams, patches, triton_stub
    from peakcast.collectors.tracing.tracer import Tracer

    fake_cuda.install()
    patches.install()
    if job.loss.fused_linear_cross_entropy or job.framework_options.get("liger_kernels"):
        triton_stub.install()
    if job.parallelism.world_size > 1:
        fake_streams.install()
        dtensors.install()
    layouts.start_group(job, rank)
    tracer = Tracer()
    steps: dict[str, tuple[int, int]] = {}
    if job.task == "inference":
        with fake_mode(), tracer:
            steps = {"first": _generate(job, tracer)}
        steps["steady"] = steps["first"]
        return {step: tracer.timeline(*span) for step, span in steps.items()}
    # one thread: autograd's own would not know that tensors made in backward are fake too
    with fake_mode(), tracer, torch.autograd.set_multithreading_enabled(False):
        training = build(job, "cuda:0")
        gc.collect()  # what wrapping has replaced hangs in cycles of references
        tracer.name(training.model.named_parameters(), Category.PARAMETERS)
        with tracer.watching(training.model):
            for step in ("first", "steady")[:NUM_STEPS]:
                start = tracer.now
                run_step(training, tracer)
                steps[step] = (start, tracer.now)
    return {step: tracer.timeline(*span) for step, span in steps.items()}


def fake_mode() -> Any:
    """The mode in which every tensor is fake."""
    import torch
    from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

    class Mode(FakeTensorMode):  # type: ignore[misc]
        """Answers `.item()`: 1 for a number (step counters and norms are read back, never shapes), False for a truth value
        (OPT asks whether to drop a layer)."""

        def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            try:
                return super().dispatch(func, types, args, kwargs or {})
            except DataDependentOutputException:
                return False if args and getattr(args[0], "dtype", None) is torch.bool else 1.0

    return Mode(allow_non_fake_inputs=True)


def _generate(job: TrainingJob, tracer: Any) -> tuple[int, int]:
    """Prefill and decoding of `job`, all of it forward; the operations from and to."""
    from peakcast.collectors.frameworks.huggingface_inference import build_inference

    inference = build_inference(job, "cuda:0")
    tracer.name(inference.model.named_parameters(), Category.PARAMETERS)
    start = tracer.now
    tracer.phase = Phase.FORWARD
    with tracer.watching(inference.model):
        inference.generate()
    return start, tracer.now


def run_step(training: Any, tracer: Any) -> None:
    """One training step, telling the tracer its phases and what the tensors are."""

    def begin(phase: Phase) -> None:
        tracer.phase = phase

    if hasattr(training, "run_schedule"):
        training.run_schedule(begin)
    else:
        for _ in range(training.job.gradient_accumulation_steps):
            begin(Phase.FORWARD)
            loss = training.forward(lambda: begin(Phase.LOSS))
            begin(Phase.BACKWARD)
            training.backward(loss)
            del loss
    parameters = dict(training.model.named_parameters())
    gradients = ((f"{name}.grad", p.grad) for name, p in parameters.items() if p.grad is not None)
    tracer.name(gradients, Category.GRADIENTS)
    tracer.phase = Phase.GRADIENT_CLIPPING
    training.clip()
    tracer.phase = Phase.OPTIMIZER_STEP
    training.step()
    tracer.name(_states(training.optimizer), Category.OPTIMIZER_STATES)
    training.zero_grad()


def _states(optimizer: Any) -> list[tuple[str, Any]]:
    import torch

    return [
        (f"state.{name}", value)
        for state in optimizer.state.values()
        for name, value in state.items()
        if isinstance(value, torch.Tensor)
    ]


def timeline_to_mapping(timeline: Timeline) -> dict[str, Any]:
    """A timeline as JSON-able columns."""
    return {
        "names": list(timeline.names),
        "modules": list(timeline.modules),
        "categories": timeline.categories.tolist(),
        "num_bytes": timeline.num_bytes.tolist(),
        "born": timeline.born.tolist(),
        "dies": timeline.dies.tolist(),
        "phases": timeline.phases.tolist(),
        "labels": list(timeline.labels),
    }


def timeline_from_mapping(mapping: Mapping[str, Any]) -> Timeline:
    """The timeline of `timeline_to_mapping`."""
    columns = ("names", "categories", "num_bytes", "born", "dies", "modules")
    entries = [
        Entry(name, Category(category), size, born, dies, module)
        for name, category, size, born, dies, module in zip(*(mapping[c] for c in columns), strict=True)
    ]
    return Timeline.from_entries(entries, mapping["phases"], mapping["labels"])
