"""Packages whose kernels transformers calls where they are installed: linear attention's, state spaces'.

Kernels of flash-linear-attention are Triton's, and do nothing in a trace; what its Python code allocates is seen. Where a
package is missing, transformers runs code of its own instead, which takes more memory and loops over the sequence.
"""

from __future__ import annotations

import importlib.util
import re
from typing import Any

from peakcast.collectors.tracing import triton_stub

TRITON_KERNELS = ("fla",)
"""Modules whose kernels are Triton's alone."""
_FALLS_BACK = re.compile(r"`(?P<function>\w+)` is falling back .*`(?P<package>[\w-]+)` is not installed")
"""What transformers says of it (5.17 integrations/hub_kernels.py, `use_kernel_func_from_hub_with_fallback`)."""

replaced: dict[str, str] = {}
"""Functions that ran as transformers' own code in this process, and the packages that have kernels of them."""


def install() -> None:
    """Let kernels of installed packages do nothing, and notice which are missing; in this process, for good."""
    if any(importlib.util.find_spec(module) for module in TRITON_KERNELS):
        triton_stub.load_others()
        triton_stub.install()
    try:
        from transformers.integrations import hub_kernels
    except ImportError:  # releases before 4.57
        return
    logger: Any = hub_kernels.logger
    if getattr(logger, "warning_once", None) is not None:
        logger.warning_once = _noticed


def _noticed(message: str, *arguments: Any, **keywords: Any) -> None:
    found = _FALLS_BACK.search(message)
    if found is not None:
        replaced[found["function"]] = found["package"]
