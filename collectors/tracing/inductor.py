"""Lets `torch.compile` compile and run a step for a GPU on a machine without one, on fake `cuda` tensors.

Dynamo, AOTAutograd's partitioner and Inductor are the real ones. They decide what is saved for backward, what is fused, in
which order kernels run and which buffers are reused, lowered for CUDA. The Python code that Inductor writes around its
kernels, which allocates and frees every buffer, is really run; only the kernels do nothing. So nothing is simulated, and
memory that a kernel would allocate for itself is not seen.

Decisions that Inductor makes by timing kernels on the GPU are not made here: matrices whose sizes are not multiples of 8
elements stay unpadded (`fx_passes/pad_mm.py`), and `max_autotune` is off, as it is by default. So are CUDA graphs.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import importlib
import os
import re
import tempfile
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorConverter
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

from peakcast.collectors.tracing.fake_cuda import COMPUTE_CAPABILITY
from peakcast.collectors.tracing.flop_counts import of_matrices
from peakcast.collectors.tracing.tracer import Tracer
from peakcast.collectors.tracing.triton_stub import find_stubs


class DeviceProperties(types.SimpleNamespace):
    """What `torch.cuda.get_device_properties` gives. A type of its own: compiled code may have it as a constant."""


PROPERTIES = DeviceProperties(
    name="NVIDIA A100-SXM4-80GB",
    major=COMPUTE_CAPABILITY[0],
    minor=COMPUTE_CAPABILITY[1],
    multi_processor_count=108,
    max_threads_per_multi_processor=2048,
    max_threads_per_block=1024,
    regs_per_multiprocessor=65536,
    warp_size=32,
    gcnArchName="",  # for AMD only, but read for all
)
"""The GPU for which Inductor compiles: it splits long reductions by the number of multiprocessors. Source: NVIDIA A100
architecture whitepaper, table 1; CUDA C++ programming guide, technical specifications of compute capability 8.0."""


NEED_A_GPU = {
    "max_autotune": False,
    "max_autotune_gemm": False,
    "max_autotune_pointwise": False,
    "coordinate_descent_tuning": False,
    "triton.cudagraphs": False,
}
"""Options of Inductor that choose by timing kernels, or record CUDA graphs, switched off however a script asks for them."""


class _OnCpu(TorchDispatchMode):  # type: ignore[misc]
    """Makes on the CPU what would be made on a GPU."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") is not None:
            kwargs["device"] = "cpu"
        return func(*args, **kwargs)


class Generator(torch.Generator):  # type: ignore[misc]
    """A GPU's random generator: compiled code passes its earlier state to a kernel that runs again."""

    device = torch.device("cuda", 0)

    def get_state(self) -> torch.Tensor:
        return torch.zeros(16, dtype=torch.uint8, device="cpu")  # seed and offset

    def set_state(self, new_state: torch.Tensor) -> torch.Generator:
        return self

    def clone_state(self) -> torch.Generator:
        return Generator()

    def graphsafe_get_state(self) -> torch.Generator:
        return self

    def graphsafe_set_state(self, new_state: torch.Generator) -> torch.Generator:
        return self


class _ReportedKernel:
    """A Triton kernel that is launched and does nothing. `code`: Inductor's, with the script's own if that wrote it."""

    def __init__(self, name: str, tracer: Tracer, code: str = "") -> None:
        self.name = re.sub(r"_\d+$", "", name)  # without its number, so that equal kernels of several layers share a name
        self.tracer = tracer
        self._multiplies = "user_autotune" in code and "tl.dot" in code

    def run(self, *arguments: Any, **_: Any) -> None:
        self.tracer.compiled = True
        given = [getattr(leaf, "base", leaf) for leaf in tree_leaves(arguments)]  # of a descriptor, its tensor
        tensors = [leaf for leaf in given if isinstance(leaf, torch.Tensor)]
        self.tracer.launched(self.name, tensors, of_matrices(tensors) if self._multiplies else 0)


@contextlib.contextmanager
def compiling(tracer: Tracer) -> Iterator[None]:
    """A context in which this process compiles for `PROPERTIES` and reports kernels to `tracer`; compiled code is in files
    until the context ends. To be used after `fake_cuda.install`."""
    with tempfile.TemporaryDirectory(prefix="peakcast-inductor-") as directory:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = directory
        _install(tracer)
        yield


@contextlib.contextmanager
def when_asked(tracer: Tracer) -> Iterator[None]:
    """Like `compiling`, but beginning with the first call of `torch.compile`, so that a step that compiles nothing does not
    wait for it."""
    compile_it, asked = torch.compile, False
    with contextlib.ExitStack() as stack:

        @functools.wraps(compile_it)
        def compiled(*arguments: Any, **keywords: Any) -> Any:
            nonlocal asked
            if not asked:
                asked = True
                if torch.compile is compiled:  # a library may have wrapped it
                    torch.compile = compile_it
                stack.enter_context(compiling(tracer))
            return compile_it(*arguments, **keywords)

        torch.compile = compiled
        yield


def load() -> None:
    """Import code that would examine Triton, before it is replaced by a stub."""
    for name in ("compile_fx", "codegen.triton", "codegen.wrapper"):
        importlib.import_module(f"torch._inductor.{name}")


def _install(tracer: Tracer) -> None:
    from torch._dynamo import trace_rules
    from torch._dynamo.convert_frame import CatchErrorsWrapper
    from torch._functorch._aot_autograd import runtime_wrappers
    from torch._inductor import async_compile, config, scheduler, select_algorithm
    from torch._inductor.fx_passes import joint_graph
    from torch.utils import _triton

    load()
    if _triton.has_triton_package():
        _see_kernels_of_scripts()
    else:
        find_stubs("triton")  # generated code imports it
    config.force_disable_caches = True  # a kernel of an earlier trace, or of a real run, is not this one
    config.compile_threads = 1
    # an operator's rule for fake tensors may have other strides than its kernel, which older releases accepted
    config.size_asserts = config.alignment_asserts = False
    _without_a_gpu()
    _answer_for_the_gpu()
    scheduler.has_triton = lambda: True  # type: ignore[attr-defined]
    _triton.triton_hash_with_backend = lambda: ""  # type: ignore[assignment]
    async_compile.AsyncCompile.triton = (  # type: ignore[method-assign]
        lambda self, name, code="", *arguments, **keywords: _ReportedKernel(name, tracer, code)
    )
    async_compile.AsyncCompile.cpp_pybinding = (  # type: ignore[method-assign]
        lambda self, *arguments, **keywords: _ReportedKernel("cpp_fused", tracer).run
    )
    # a template (flex attention) is written into the graph's code; the file that would be timed on the GPU is not loaded
    select_algorithm.PyCodeCache = types.SimpleNamespace(  # type: ignore[assignment,misc]
        load=lambda code, extra, **_: types.SimpleNamespace(__file__="", key="")
    )
    trace_rules.check = _without_own_frames(trace_rules.check)
    CatchErrorsWrapper.__call__ = _unseen(CatchErrorsWrapper.__call__)  # type: ignore[method-assign]
    if (backward := getattr(runtime_wrappers, "_AutogradBackwardCompiler", None)) is not None:  # from torch 2.12 on
        backward.get_or_compile = _unseen(backward.get_or_compile)
    FakeTensorConverter.from_real_tensor = _of_changed_views(FakeTensorConverter.from_real_tensor)  # type: ignore[method-assign]
    folder = joint_graph.UniformValueConstantFolder  # looks at the values of one-element tensors
    for name in ("run", "_add_peephole_patterns"):
        setattr(folder, name, _on_cpu(getattr(folder, name)))


def _see_kernels_of_scripts() -> None:
    """Let Dynamo take a script's own Triton kernels for kernels, as it does where a GPU is available: their code is
    analysed, so that the graph has what they write. Otherwise it would follow their launch, which does nothing, and what
    they write would be memory that backward can make again."""
    from torch.utils import _triton

    for name in ("fx_passes.pad_mm", "kernel.mm_grouped"):  # these keep the answer no: they would time kernels
        importlib.import_module(f"torch._inductor.{name}")
    _triton.has_triton = lambda: True  # type: ignore[assignment]
    _triton._device_supports_tma = lambda: torch.cuda.get_device_capability() >= (9, 0)  # type: ignore[assignment]
    _triton.has_triton_tensor_descriptor_host_tma.cache_clear()


def _without_a_gpu() -> None:
    """Switch off what needs a GPU in every later `torch.compile`."""
    wrapper: Any = torch._TorchCompileInductorWrapper
    make = wrapper.__init__

    def made(self: Any, *arguments: Any, **keywords: Any) -> None:
        make(self, *arguments, **keywords)
        self.config.update(NEED_A_GPU)

    wrapper.__init__ = made


COLLECTORS = os.path.dirname(os.path.dirname(__file__))
STANDS_IN = tuple(os.path.join(COLLECTORS, folder, "") for folder in ("tracing", "dryrun"))
"""Folders with the code that stands in for CUDA."""


def _without_own_frames(skips: Callable[..., bool]) -> Callable[..., bool]:
    """Leave code of `STANDS_IN` out of what Dynamo compiles by itself: it replaces C functions, which have no frames
    (FSDP1, whose own frames are left out, calls `record_stream`). What compiled code calls is compiled with it."""

    @functools.wraps(skips)
    def skipped(one: Any, *arguments: Any, **keywords: Any) -> bool:
        code = getattr(one, "__code__", one)
        return getattr(code, "co_filename", "").startswith(STANDS_IN) or skips(one, *arguments, **keywords)

    return skipped


def _unseen(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile outside of the modes that see what runs; torch leaves them on for backward, and for what
    `DistributedDataParallel` wraps."""

    @functools.wraps(function)
    def compiled(*arguments: Any, **keywords: Any) -> Any:
        with _disable_current_modes():
            return function(*arguments, **keywords)

    return compiled


def _of_changed_views(convert: Callable[..., Any]) -> Callable[..., Any]:
    """Compile code that changes a view of a weight in place under no_grad. torch 2.13 asks the view whether it is a leaf,
    which autograd refuses to tell; a tensor of the same storage is asked instead."""

    @functools.wraps(convert)
    def converted(self: Any, fake_mode: Any, tensor: torch.Tensor, *arguments: Any, **keywords: Any) -> Any:
        try:
            return convert(self, fake_mode, tensor, *arguments, **keywords)
        except RuntimeError as error:
            if "view was created in no_grad mode" not in str(error):
                raise
            return convert(self, fake_mode, tensor.detach().requires_grad_(tensor.requires_grad), *arguments, **keywords)

    return converted


def forget_flex_attention() -> None:
    """Free at once what compiling transformers' flex attention leaves in reference cycles (arguments of its first call); in
    a real run, Python's next collection frees it."""
    from torch._dynamo.utils import counters
    from transformers.integrations import flex_attention

    attend = flex_attention.compile_friendly_flex_attention

    @functools.wraps(attend)
    def attended(*arguments: Any, **keywords: Any) -> Any:
        compiled = counters["stats"]["unique_graphs"]
        answer = attend(*arguments, **keywords)
        if counters["stats"]["unique_graphs"] != compiled:
            gc.collect()
        return answer

    flex_attention.compile_friendly_flex_attention = attended


OF_THE_PROCESS = ("device_count", "current_device")
"""What a process answers that is one rank of several: which GPU is its own, and how many there are."""


def _answer_for_the_gpu() -> None:
    from torch._dynamo import utils as dynamo_utils
    from torch._dynamo.device_interface import CudaInterface
    from torch._dynamo.variables import torch as in_graph

    cuda, answers = torch.cuda, torch._C._dynamo.guards
    replaced: dict[str, Any] = {
        "get_device_properties": lambda device=None: PROPERTIES,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "is_bf16_supported": lambda including_emulation=True: True,
        "_exchange_device": lambda device: 0,
        "_maybe_exchange_device": lambda device: 0,
    }
    for name, otherwise in replaced.items():  # each a function of its own: Dynamo tells them apart
        own = getattr(cuda, name)
        answer = own if name in OF_THE_PROCESS and own.__module__ != cuda.__name__ else otherwise
        setattr(cuda, name, answer)
        if hasattr(CudaInterface, name.removeprefix("_")):
            setattr(CudaInterface, name.removeprefix("_"), staticmethod(answer))
    # what Dynamo folds of torch's own functions, it folds of those in their place
    folded = ("get_device_properties", "current_device", "is_available", "is_initialized")
    in_graph.constant_fold_functions.update(dict.fromkeys(getattr(cuda, name) for name in folded))
    dynamo_utils.common_constant_types.add(DeviceProperties)
    cuda.default_generators = cuda.default_generators or (Generator(),)
    cuda._DeviceGuard = lambda device: contextlib.nullcontext()  # type: ignore[assignment,misc]
    torch._C._cuda_getCurrentRawStream = lambda device: 0  # type: ignore[attr-defined]
    # C functions that would make real tensors on the GPU, or from a fake tensor's storage
    answers._empty_strided_cuda = functools.partial(_empty, device="cuda:0")  # type: ignore[attr-defined]
    answers._empty_strided_cpu = functools.partial(_empty, device="cpu")  # type: ignore[attr-defined]
    answers._reinterpret_tensor = lambda whole, size, stride, offset=0: torch.as_strided(  # type: ignore[attr-defined]
        whole, size, stride, whole.storage_offset() + offset
    )


def _empty(size: Any, stride: Any, dtype: torch.dtype, *, device: str) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device=device)


def _on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(function)
    def deduced(*arguments: Any, **keywords: Any) -> Any:
        with _OnCpu():
            return function(*arguments, **keywords)

    return deduced
