"""Transformer Engine's own Python code, run in a trace with kernels that do nothing (`pip install --no-deps
transformer_engine`).

The package is Python around two binary libraries, which need a GPU. Here `transformer_engine_torch` returns what its C++
returns: new tensors of the same sizes, in the same order, fake if their inputs are. What the kernels allocate for
themselves (workspaces, cuDNN's accumulators) is not seen.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
import types
from collections.abc import Callable
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from peakcast.collectors.tracing import triton_stub
from peakcast.collectors.tracing.transformer_engine_kernels import EXTENSIONS, KERNELS

ABSENT = ("einops", "onnxscript", "onnx", "triton")
"""Packages that its modules import and that a trace never calls."""


class _AnyMember:
    """An enumeration of C++, in which every name exists and is its own value."""

    def __init__(self, kind: str) -> None:
        self._kind = kind
        self._known: dict[str, _Name] = {}
        for name in INDICES.get(kind, ()):
            getattr(self, name)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return self._known.setdefault(name, _Name(len(self._known), f"{self._kind}.{name}"))

    def __or__(self, other: Any) -> Any:  # in annotations
        return Any

    __ror__ = __or__


class _Name(int):
    """A member: an index with a name, as in pybind."""

    def __new__(cls, value: int, name: str) -> _Name:
        member = super().__new__(cls, value)
        member.name = name  # type: ignore[attr-defined]
        return member

    def __hash__(self) -> int:
        return hash(self.name)  # type: ignore[attr-defined]

    def __eq__(self, other: object) -> bool:
        return self is other

    def __repr__(self) -> str:
        return str(self.name)  # type: ignore[attr-defined]


ENUMERATIONS = (
    "DType", "CommOverlapType", "CommOverlapAlgo", "Float8BlockScaleTensorFormat", "FP8BwdTensors", "FP8FwdTensors",
    "NVTE_Bias_Type", "NVTE_Fused_Attn_Backend", "NVTE_Mask_Type", "NVTE_QKV_Format", "NVTE_QKV_Layout",
    "NVTE_Softmax_Type",
)  # fmt: skip
QUANTIZED_TENSORS = {
    "float8_tensor": "Float8Tensor", "float8_blockwise_tensor": "Float8BlockwiseQTensor", "mxfp8_tensor": "MXFP8Tensor",
}  # fmt: skip
"""The classes of FP8 parameters by their modules."""
INDICES = {
    "FP8FwdTensors": [f"GEMM{i}_{part}" for i in (1, 2, 3) for part in ("INPUT", "WEIGHT", "OUTPUT")],
    "FP8BwdTensors": [f"GRAD_{part}{i}" for i in (1, 2, 3) for part in ("OUTPUT", "INPUT")],
}
"""Members that are indices of lists, in order (csrc/common.h)."""


def install() -> bool:
    """Make `import transformer_engine` give its Python with kernels that do nothing; False if it is not installed."""
    for name in [name for name in sys.modules if name.split(".")[0] == "transformer_engine"]:
        del sys.modules[name]  # half imported by a library that found no binaries
    found = importlib.util.find_spec("transformer_engine")
    if found is None or found.loader is None:
        return False
    triton_stub.install(*ABSENT)
    _install_extensions()
    os.environ["NVTE_PROJECT_BUILDING"] = "1"  # common/__init__.py: loads no libraries
    extension = types.ModuleType("transformer_engine_torch")
    extension.__getattr__ = _missing  # type: ignore[method-assign]
    for name in ENUMERATIONS:
        setattr(extension, name, _AnyMember(name))
    for name, function in KERNELS.items():
        setattr(extension, name, function)
    package = importlib.util.module_from_spec(found)
    sys.modules["transformer_engine"] = package
    common: Any = importlib.import_module("transformer_engine.common")
    common.load_framework_extension = lambda framework: None
    sys.modules["transformer_engine_torch"] = extension
    found.loader.exec_module(package)
    base = importlib.import_module("transformer_engine.pytorch.module.base")
    base.get_cublas_workspace_size_bytes = lambda: 1  # type: ignore[attr-defined]  # a kernel's own, which no trace has
    choice: Any = importlib.import_module("transformer_engine.pytorch.attention.dot_product_attention.utils")
    choice.get_attention_backend = _of_tensors(choice.get_attention_backend)
    module: Any = base.TransformerEngineBaseModule
    module.__init__ = _with_gpu(module.__init__)
    _run_operations_of_data()
    for part, name in QUANTIZED_TENSORS.items():
        _let_data_be_fake(getattr(importlib.import_module(f"transformer_engine.pytorch.tensor.{part}"), name))
    return True


def _install_extensions() -> None:
    """Install apex's kernels that megatron-core's own modules call: products into main gradients, softmax with its mask,
    norms."""
    for name, kernels in EXTENSIONS.items():
        extension = types.ModuleType(name)
        extension.__dict__.update(kernels)
        sys.modules[name] = extension


def _of_tensors(choose: Callable[..., Any]) -> Callable[..., Any]:
    """The function that chooses an attention backend, changed so that it accepts fake tensors."""

    def chosen(parameters: Any) -> Any:
        if issubclass(parameters.qkv_type, FakeTensor):
            parameters.qkv_type = torch.Tensor
        return choose(parameters)

    return chosen


class _OfData(tuple[Any, ...]):
    """The list of types that a quantised tensor gives its data's dispatch: the operation is on the data alone."""


def _let_data_be_fake(kind: Any) -> None:
    """Let the data of this class of quantised tensors be fake. An operation on such a tensor is done by the data's own
    `__torch_dispatch__`, which fake tensors refuse beside types that they do not know."""
    dispatch = kind.__torch_dispatch__.__func__

    def dispatched(kind: Any, operation: Any, types: Any, arguments: Any, keywords: Any = None) -> Any:
        return dispatch(kind, operation, _OfData(), arguments, keywords)

    kind.__torch_dispatch__ = classmethod(dispatched)


def _run_operations_of_data() -> None:
    """Let fake tensors run what a quantised tensor asks of its data."""
    dispatch = FakeTensor.__torch_dispatch__.__func__  # type: ignore[attr-defined]

    def dispatched(kind: Any, operation: Any, types: Any, arguments: Any = (), keywords: Any = None) -> Any:
        if isinstance(types, _OfData):
            return operation(*arguments, **(keywords or {}))
        return dispatch(kind, operation, types, arguments, keywords or {})

    FakeTensor.__torch_dispatch__ = classmethod(dispatched)  # type: ignore[assignment]


def _with_gpu(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, within which there seems to be a GPU. Modules ask once, when they are made; answering yes everywhere
    would mislead fake tensors."""

    def asked(*arguments: Any, **keywords: Any) -> Any:
        available, torch.cuda.is_available = torch.cuda.is_available, lambda: True
        try:
            return function(*arguments, **keywords)
        finally:
            torch.cuda.is_available = available

    return asked


def _missing(name: str) -> Any:
    """A class for use in annotations; calling it raises an error that names the kernel without a replacement."""
    if name.startswith("__"):
        raise AttributeError(name)

    def construct(self: Any, *_: Any, **__: Any) -> None:
        raise NotImplementedError(f"transformer_engine_torch.{name} has no stand-in for traces")

    return type(name, (), {"__init__": construct})
