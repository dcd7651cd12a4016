"""Text that says what allocated a block, made from the stack that PyTorch recorded with it; and the phase of each event.

A text is `operator[<outer operator] [raw:caller] [grad:node] [py:function<caller]`, as in the published histories. `raw:`
marks memory that belongs to no tensor: a kernel or a library requested it from the allocator. Stacks are those of
`torch.cuda.memory._record_memory_history(stacks="all")`, innermost frame first. With stacks="python" there is only `py:`,
and tensors cannot be told from workspaces.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from peakcast.histories.history import Action, History
from peakcast.timelines.timeline import Phase

NO_FRAMES = "no frames"
OPERATOR = re.compile(r"at::_ops::(\w+?)::(?:call|redispatch)\b")
STORAGE = re.compile(
    r"empty_generic|empty_strided_generic|empty_cuda|empty_strided_cuda|resize_bytes_cuda|resize_impl_cuda"
)
"""Functions of aten/src/ATen that make a tensor's storage (EmptyTensor.cpp, cuda/EmptyTensor.cpp, cuda/Resize.cpp)."""
ALLOCATOR = re.compile(r"CUDACachingAllocator|c10::Allocator|c10::DataPtr|unwind|CapturedTraceback|gather|libc10_cuda")
NODE = re.compile(r"torch::autograd::(?:generated::)?(\w+Backward\w*|\w*AccumulateGrad)\b")
ENGINE = "torch::autograd::Engine::"
MAX_FRAMES = 200
MAX_TEXT = 120
LOSS = re.compile(r"cross_entropy|nll_loss|log_softmax_backward|loss")


def category_of(frames: Iterable[Any]) -> str:
    """The text for a stack. Frames in any other form are ignored."""
    operators: list[str] = []
    python: list[str] = []
    caller, node, stored, native, engine = "", "", False, False, False
    for frame in _frames(frames):
        name, file = frame
        if "::" not in name and not file.endswith((".cpp", ".cu", ".h", "??")) and file:
            if len(python) < 2:
                python.append(_function(name, file))
            continue
        native = True
        if found := OPERATOR.search(name):
            if found[1] not in operators:
                operators.append(found[1])
        elif not operators:
            stored = stored or STORAGE.search(name) is not None
            if not caller and not ALLOCATOR.search(name):
                caller = name.split("(")[0].split("<")[0].split()[-1:][0] if name.split() else ""
        if not node and (found := NODE.search(name)):
            node = found[1]
        engine = engine or ENGINE in name
    parts = ["<".join((operators[0], operators[-1])) if len(operators) > 1 else "".join(operators)]
    parts += [f"raw:{caller}"] if native and not stored and caller else []
    parts += [f"grad:{node or 'engine'}"] if node or engine else []
    parts += ["py:" + "<".join(python)] if python else []
    return " ".join(part[:MAX_TEXT] for part in parts if part) or NO_FRAMES


def _frames(frames: Iterable[Any]) -> Iterator[tuple[str, str]]:
    for number, frame in enumerate(frames if isinstance(frames, list | tuple) else ()):
        if number == MAX_FRAMES:
            return
        if isinstance(frame, Mapping) and isinstance(name := frame.get("name"), str):
            file = frame.get("filename")
            yield name, file if isinstance(file, str) else ""


def _function(name: str, file: str) -> str:
    """The name of a Python function; for functions of torch, with their module."""
    _, torch, inside = file.replace("\\", "/").rpartition("/torch/")
    return f"torch:{inside.rpartition('/')[2].removesuffix('.py')}.{name}" if torch else name


def is_hidden(category: str) -> bool:
    """Whether the memory belongs to no tensor."""
    return " raw:" in category or category.startswith("raw:")


def phases(history: History) -> list[Phase]:
    """The phase of each event, as far as it was recorded: from an optimizer's marks, autograd's nodes, and functions that
    are named after a loss. INIT for allocations without a stack."""
    found: list[Phase] = []
    phase, stepping = Phase.INIT, False
    of = [_phase(text) for text in history.categories]
    for event in history.events:
        if event.action is Action.MARK and event.category >= 0:
            text = history.categories[event.category]
            if "Optimizer.step" in text:
                stepping = text.startswith("start")
                phase = Phase.OPTIMIZER_STEP if stepping else Phase.FORWARD
        elif event.action is Action.ALLOC:
            phase = Phase.OPTIMIZER_STEP if stepping else of[event.category] if event.category >= 0 else Phase.INIT
        found.append(phase)
    return found


def _phase(category: str) -> Phase:
    if category == NO_FRAMES:
        return Phase.INIT
    if "grad:" in category or "_make_grads" in category or "_engine_run_backward" in category:
        return Phase.BACKWARD
    if "torch:adam" in category or "torch:optimizer" in category or "torch:sgd" in category:
        return Phase.OPTIMIZER_STEP
    if "clip_grad" in category:
        return Phase.GRADIENT_CLIPPING
    return Phase.LOSS if LOSS.search(category) else Phase.FORWARD
