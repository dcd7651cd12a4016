"""Traces a user's own training step: any `nn.Module` with any step function, on fake tensors, in a process of its own.

The user's file has a function without arguments that returns `(model, step)`: the module on device "cuda", and a function
that runs one whole training step (forward, backward, optimizer). Phases are recognised from outside: the loss by torch's
loss functions, backward by `Tensor.backward`, clipping by `clip_grad_norm_`, the optimizer by its step hooks.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from peakcast import catalog
from peakcast.collectors.machine.packages import import_for_good
from peakcast.collectors.tracing.trace import fake_mode, timeline_from_mapping, timeline_to_mapping
from peakcast.core.bounded import is_file
from peakcast.core.errors import CollectorError, SpecError
from peakcast.core.extras import need
from peakcast.timelines.timeline import Category, Phase, Timeline


def trace_module(target: str, gpu: str | None = None, *, timeout_seconds: float = 600) -> dict[str, Timeline]:
    """`{"first": ..., "steady": ...}`: the timelines of two steps of `target`, "path/to/file.py:function". With a GPU of
    the catalog, memory that its kernels allocate for themselves is included.

    Raises: SpecError for an invalid target, CollectorError with the message of the traced process.
    """
    need("a trace", "torch")
    path, function = _target(target)
    command = [sys.executable, "-P", "-m", "peakcast.collectors.tracing.module", str(path), function]
    command += [gpu] if gpu is not None else []
    environment = {**os.environ, "PYTHONSAFEPATH": "1", "CUDA_VISIBLE_DEVICES": ""}
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_seconds, env=environment, check=False
        )
    except subprocess.TimeoutExpired as error:
        raise CollectorError(f"the trace took longer than {timeout_seconds:g} s; give it a smaller step.") from error
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise CollectorError(f"{target} cannot be traced: {last.removeprefix('peakcast: ')}", parameter="module")
    answer = json.loads(done.stdout.strip().splitlines()[-1])
    return {step: timeline_from_mapping(answer[step]) for step in ("first", "steady")}


def _target(target: str) -> tuple[Path, str]:
    file, colon, function = target.rpartition(":")
    if not colon or not function.isidentifier() or not file.endswith(".py"):
        raise SpecError(
            f"module={target!r} must be FILE.py:FUNCTION, a function that returns (model, step).",
            parameter="module",
            value=target,
        )
    path = Path(file)
    if not is_file(path):
        raise SpecError(f"module={target!r}: {path} is not a file; check the path.", parameter="module", value=target)
    return path.resolve(), function


# -- in the traced process ----------------------------------------------------------------------------------------------


def trace_here(path: Path, function: str, gpu: str | None = None) -> dict[str, Timeline]:
    """The same as `trace_module`, in this process, which it changes permanently."""
    import torch

    from peakcast.collectors.tracing import fake_cuda, fake_streams, inductor, patches
    from peakcast.collectors.tracing.tracer import Tracer

    fake_cuda.install()
    fake_streams.install()
    patches.install()
    tracer = Tracer()
    tracer.gpu = catalog.gpu(gpu) if gpu is not None else None
    spans: dict[str, tuple[int, int]] = {}
    # one thread: in autograd's own, tensors made in backward would not be fake
    with inductor.when_asked(tracer), fake_mode(), tracer, torch.autograd.set_multithreading_enabled(False):
        model, step = built(path, function)
        tracer.name(model.named_parameters(), Category.PARAMETERS)
        optimizers: list[Any] = []
        with tracer.watching(model), _phases(tracer, model, optimizers):
            for name in ("first", "steady"):
                start = tracer.now
                tracer.phase = Phase.FORWARD
                optimizers.clear()
                step()
                _name_states(tracer, model, optimizers)
                gc.collect()  # frees what compiling leaves in reference cycles, as for a job's trace
                spans[name] = (start, tracer.now)
    timelines = {name: tracer.timeline(*span) for name, span in spans.items()}
    if not timelines["steady"].names:
        raise CollectorError(
            f"{function}'s step did nothing on device 'cuda'; put model and data there by that name, since "
            "torch.cuda.is_available() says no in a trace."
        )
    return timelines


def built(path: Path, function: str) -> tuple[Any, Callable[[], object]]:
    """The result of the user's function, checked."""
    import torch

    sys.path.insert(0, str(path.parent))
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    code = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = code
    spec.loader.exec_module(code)
    build = getattr(code, function, None)
    if not callable(build):
        raise CollectorError(f"{path.name} has no function {function!r}; write one that returns (model, step).")
    made = build()
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[0], torch.nn.Module) and callable(made[1])):
        raise CollectorError(f"{function}() must return (model, step): an nn.Module and a function of no arguments.")
    return made


@contextlib.contextmanager
def _phases(tracer: Any, model: Any, optimizers: list[Any]) -> Iterator[None]:
    """A context that tells `tracer` which phase the step is in, and collects the optimizers that step."""
    from torch.optim import optimizer as hooks

    from peakcast.collectors.tracing.phases import announced

    def stepping(optimizer: Any, *_: Any) -> None:
        gradients = ((f"{name}.grad", p.grad) for name, p in model.named_parameters() if p.grad is not None)
        tracer.name(gradients, Category.GRADIENTS)
        optimizers.append(optimizer)
        tracer.phase = Phase.OPTIMIZER_STEP

    hook = hooks.register_optimizer_step_pre_hook(stepping)
    try:
        with announced(tracer):
            yield
    finally:
        hook.remove()


def _name_states(tracer: Any, model: Any, optimizers: list[Any]) -> None:
    import torch

    names = {id(parameter): name for name, parameter in model.named_parameters()}
    for optimizer in optimizers:
        for parameter, state in optimizer.state.items():
            tensors = {key: value for key, value in state.items() if isinstance(value, torch.Tensor)}
            owner = names.get(id(parameter), "state")
            tracer.name(((f"{owner}.{key}", value) for key, value in tensors.items()), Category.OPTIMIZER_STATES)


def main(arguments: list[str]) -> int:
    """Prints both timelines as a line of JSON and returns 0, or returns 2 after one sentence on standard error."""
    path, function, *gpu = arguments
    import_for_good(("torch",))
    try:
        timelines = trace_here(Path(path), function, *gpu)
    except CollectorError as error:
        print(f"peakcast: {error}", file=sys.stderr)
        return 2
    except ImportError as error:
        print(f"peakcast: a trace needs {error.name}; install it with pip in this environment.", file=sys.stderr)
        return 2
    except Exception as error:  # the user's code may raise anything
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        print(f"peakcast: {function} raised {reason}", file=sys.stderr)
        return 2
    print(json.dumps({step: timeline_to_mapping(timeline) for step, timeline in timelines.items()}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
