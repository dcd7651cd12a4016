"""How much GPU memory each library takes when it is first used: `python -P -m peakcast.collectors.measure.first_uses
FILE.json`.

All steps of `STEPS` run in this one process, in order. Each gets three figures: `outside_bytes`, what the driver counts and
PyTorch's allocator does not (handles, kernels, communicators); `kept_bytes`, what stays allocated (workspaces);
`temporary_bytes`, what was allocated beyond that and freed again. For a library that is not installed or fails, a sentence
says so, and the other steps still run.
"""

from __future__ import annotations

import gc
import importlib
import itertools
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from peakcast.collectors.machine import probes
from peakcast.collectors.machine.nvml import Nvml
from peakcast.collectors.measure.growth import Growth

WIDTH = 1024
TOKENS = 8192
"""Above the 3072 from which the embedding's backward sorts its indices (where-memory-goes.md, F5)."""
VOCABULARY = 32_000
BACKENDS = {0: "math", 1: "flash", 2: "efficient", 3: "cudnn", -1: "none"}
"""Codes of torch._fused_sdp_choice (torch 2.13 aten/src/ATen/SDPBackend.h)."""
BUSY = (
    "another process had memory on the GPU before the first reading: what it took or freed since is counted in; read again "
    "when the GPU is idle."
)

UseStep = Callable[[str], Any]


def _matrix(device: str, *, grad: bool = False) -> torch.Tensor:
    return torch.randn(WIDTH, WIDTH, dtype=torch.bfloat16, device=device, requires_grad=grad)


def _elementwise(device: str) -> Any:
    return _matrix(device).sin().add_(1).sum()


def _matmul(device: str) -> Any:
    return _matrix(device) @ _matrix(device)


def _matmul_backward(device: str) -> None:
    (_matrix(device) @ _matrix(device, grad=True)).sum().backward()


def _linear_with_bias(device: str) -> Any:
    return F.linear(_matrix(device), _matrix(device), _matrix(device)[0])


def _convolution(device: str) -> Any:
    return F.conv1d(_matrix(device)[None], torch.randn(WIDTH, 1, 4, dtype=torch.bfloat16, device=device), groups=WIDTH)


def _attention(backend: SDPBackend) -> UseStep:
    def run(device: str) -> None:
        query = torch.randn(1, 8, 512, 64, dtype=torch.bfloat16, device=device, requires_grad=True)
        with sdpa_kernel(backend):
            F.scaled_dot_product_attention(query, query, query, is_causal=True).sum().backward()

    return run


def _embedding_backward(device: str) -> None:
    table = torch.randn(VOCABULARY, WIDTH, dtype=torch.bfloat16, device=device, requires_grad=True)
    F.embedding(torch.randint(VOCABULARY, (TOKENS,), device=device), table).sum().backward()


def _cross_entropy(device: str) -> None:
    logits = torch.randn(TOKENS, VOCABULARY, dtype=torch.bfloat16, device=device, requires_grad=True)
    F.cross_entropy(logits.float(), torch.randint(VOCABULARY, (TOKENS,), device=device)).backward()


def _adamw(implementation: str) -> UseStep:
    def run(device: str) -> None:
        weight = torch.nn.Parameter(_matrix(device))
        weight.grad = torch.ones_like(weight)
        torch.optim.AdamW([weight], foreach=implementation == "foreach", fused=implementation == "fused").step()

    return run


def _triton(device: str) -> Any:
    triton = importlib.import_module("triton")
    from peakcast.collectors.measure.triton_kernel import add_one

    x = torch.zeros(WIDTH, device=device)
    triton.jit(add_one)[(1,)](x, WIDTH)
    return x


def _inductor(device: str) -> Any:
    return torch.compile(lambda x: (x.sin() * 2).sum())(_matrix(device))


def _liger(device: str) -> None:
    norm = importlib.import_module("liger_kernel.transformers").LigerRMSNorm(WIDTH).to(device)
    norm(torch.randn(8, WIDTH, device=device, requires_grad=True)).sum().backward()


def _bitsandbytes_4bit(device: str) -> Any:
    functional = importlib.import_module("bitsandbytes").functional
    return functional.dequantize_4bit(*functional.quantize_4bit(_matrix(device), quant_type="nf4"))


def _bitsandbytes_8bit_adamw(device: str) -> None:
    weight = torch.nn.Parameter(_matrix(device))
    weight.grad = torch.ones_like(weight)
    importlib.import_module("bitsandbytes").optim.AdamW8bit([weight]).step()


def _transformer_engine(device: str) -> None:
    engine = importlib.import_module("transformer_engine.pytorch")
    layer = engine.Linear(WIDTH, WIDTH, params_dtype=torch.bfloat16, device=device)
    layer(_matrix(device, grad=True)).sum().backward()


def _nccl(device: str) -> None:
    import torch.distributed as dist

    dist.init_process_group("nccl", rank=0, world_size=1, store=dist.HashStore())
    dist.all_reduce(torch.ones(WIDTH, device=device))
    if device != "cpu":
        torch.cuda.synchronize()


STEPS: dict[str, UseStep] = {
    "elementwise": _elementwise,
    "cublas": _matmul,
    "cublas in backward": _matmul_backward,  # autograd's thread has a handle and a workspace of its own
    "cublaslt": _linear_with_bias,
    "cudnn": _convolution,
    "attention: math": _attention(SDPBackend.MATH),
    "attention: flash": _attention(SDPBackend.FLASH_ATTENTION),
    "attention: efficient": _attention(SDPBackend.EFFICIENT_ATTENTION),
    "attention: cudnn": _attention(SDPBackend.CUDNN_ATTENTION),
    "embedding backward": _embedding_backward,
    "cross entropy": _cross_entropy,
    "adamw: foreach": _adamw("foreach"),
    "adamw: fused": _adamw("fused"),
    "nccl": _nccl,
    "triton": _triton,
    "inductor": _inductor,
    "liger": _liger,
    "bitsandbytes: nf4": _bitsandbytes_4bit,
    "bitsandbytes: adamw_8bit": _bitsandbytes_8bit_adamw,
    "transformer engine": _transformer_engine,
}
"""Step -> its first use. A library comes after the libraries that it calls, so that each figure is of that library
alone."""


def first_uses(device: str, growth: Growth, steps: dict[str, UseStep] = STEPS) -> list[dict[str, Any]]:
    """The figures of each of `steps`, one mapping per step; a step that failed has none."""
    found: list[dict[str, Any]] = []
    for name, step in steps.items():
        try:
            before = _allocated()
            step(device)
            peak = _peak()  # waits for the GPU, which tells only then what went wrong in a kernel
        except Exception as error:  # libraries raise errors of any class
            found.append({"step": name, "reason": _reason(error)})
            growth.mark(f"{name} (failed)")
            continue
        gc.collect()
        kept = _allocated() - before
        taken = {"kept_bytes": kept, "temporary_bytes": peak - before - kept}
        found.append({"step": name, "outside_bytes": growth.mark(name), **taken})
    return found


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]


def _allocated() -> int:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    return int(torch.cuda.memory_allocated())


def _peak() -> int:
    torch.cuda.synchronize()
    return int(torch.cuda.max_memory_allocated())


def chosen_attention(device: str) -> list[dict[str, Any]]:
    """The attention kernel that PyTorch chooses, by dtype, head dimension, grouped heads and mask."""
    found = []
    cases = itertools.product(("bfloat16", "float32"), (64, 96, 128, 256), (8, 2), (False, True))
    for dtype, size, key_heads, masked in cases:
        query = torch.empty((1, 8, 256, size), dtype=getattr(torch, dtype), device=device)
        key = torch.empty((1, key_heads, 256, size), dtype=query.dtype, device=device)
        mask = torch.zeros((1, 1, 256, 256), dtype=query.dtype, device=device) if masked else None
        asked = {"attn_mask": mask, "is_causal": not masked, "enable_gqa": key_heads != 8}
        code = int(torch._fused_sdp_choice(query, key, key, **asked))
        case = {"dtype": dtype, "head_dim": size, "grouped": key_heads != 8, "mask": masked}
        found.append({**case, "backend": BACKENDS.get(code, str(code))})
    return found


def main(arguments: list[str]) -> int:
    """Returns exit code 0; the file is complete once it exists. Raises: CollectorError without a GPU."""
    from peakcast.core.durable import replace_file

    probes.require_gpu()
    nvml = Nvml()
    idle, busy = nvml.settled_bytes(), nvml.is_in_use()
    growth = Growth(nvml.used_bytes, torch.cuda.memory_reserved, idle)
    probes.open_context()
    nvml.check(probes.cuda_uuid())
    context = growth.mark("context")
    steps = first_uses("cuda", growth) if context is not None else []  # without the driver's count they would tell nothing
    remarks = [*([BUSY] if busy else []), *nvml.remarks(nvml.processes())]
    attention: list[dict[str, Any]] = []
    try:
        attention = chosen_attention("cuda")
    except Exception as error:  # a torch that takes other arguments, or a step that has lost the context
        remarks.append(f"the choice of attention kernels was not read: {_reason(error)}")
    answer = {
        **probes.cuda_environment(),
        "versions": probes.versions(),
        "driver": nvml.driver(),
        "num_gpus": torch.cuda.device_count(),
        "context_bytes": context,
        "steps": steps,
        "attention": attention,
        "nvml": remarks,
    }
    replace_file(Path(arguments[0]), json.dumps(answer, indent=1).encode())
    return 0


if __name__ == "__main__":
    from peakcast.core.errors import PeakcastError

    try:
        usage = "usage: python -P -m peakcast.collectors.measure.first_uses FILE.json"
        sys.exit(main(sys.argv[1:]) if len(sys.argv) == 2 else usage)
    except PeakcastError as error:
        sys.exit(f"peakcast: {error}")
