"""Packages whose kernels transformers calls if they are installed: for linear attention and state spaces.

Kernels of flash-linear-attention are written in Triton and do nothing in a trace; what their Python code allocates is seen.
If a package is missing, transformers runs its own code instead, which takes more memory and loops over the sequence.
"""

from __future__ import annotations

import importlib.util
import re
from typing import Any

from peakcast.collectors.tracing import triton_stub

TRITON_KERNELS = ("fla",)
"""Modules with Triton kernels only."""
_FALLS_BACK = re.compile(r"`(?P<function>\w+)` is falling back .*`(?P<package>[\w-]+)` is not installed")
"""The message of transformers about a missing package (5.17 integrations/hub_kernels.py,
`use_kernel_func_from_hub_with_fallback`)."""

replaced: dict[str, str] = {}
"""Function that ran as transformers' own code in this process -> the package that has a kernel for it."""


def install() -> None:
    """Make kernels of installed packages do nothing, and record which packages are missing, permanently in this process."""
    if any(importlib.util.find_spec(module) for module in TRITON_KERNELS):
        triton_stub.load_others()
        triton_stub.install()
    try:
        from transformers.integrations import hub_kernels
    except ImportError:  # the module is younger than the release
        return
    logger: Any = getattr(hub_kernels, "logger", None)  # 4.57 has the module, but no such fallback yet
    if getattr(logger, "warning_once", None) is not None:
        logger.warning_once = _noticed


def _noticed(message: str, *arguments: Any, **keywords: Any) -> None:
    found = _FALLS_BACK.search(message)
    if found is not None:
        replaced[found["function"]] = found["package"]
