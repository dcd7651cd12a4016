"""Which Python programs do not train: those of packages that install, compile or test."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

from peakcast.core.bounded import first_bytes, is_file

TOOLS = (
    *("pip", "ensurepip", "venv", "compileall", "multiprocessing", "ninja", "cmake"),
    *("torch._inductor", "torch.utils", "peakcast"),
)
"""Modules that do not train and are run normally."""
PACKAGES = re.compile(r"[/\\](?:site|dist)-packages[/\\]")
"""Folders of installed packages: `trl sft` starts a file that lies there (trl 1.16 `cli/accelerate_launcher.py`)."""
IMPORTED = re.compile(r"^from ([\w.]+) import \S+$", re.MULTILINE)
"""The line of a console script that names the module of its package (pip 26 `_vendor/distlib/scripts.py`)."""


def console_module(script: str) -> str:
    """The module that a package's console script (`/env/bin/trl`) calls; "" for other files."""
    text = first_bytes(Path(script), 2000).decode(errors="replace") if is_file(script) else ""
    found = IMPORTED.search(text) if text.startswith("#!") and "python" in text.split("\n")[0] else None
    return found[1] if found is not None and not script.endswith(".py") else ""


def is_tool(script: str) -> bool:
    """Whether a program does not train, judging by its name: a module or a console script of TOOLS, or a file of the
    environment that is in none of its packages."""
    name, packaged = script, PACKAGES.split(script)
    if module := console_module(script):
        name = module
    elif len(packaged) > 1:
        name = packaged[-1].removesuffix(".py").removesuffix(f"{os.sep}__main__").replace(os.sep, ".")
    return any(name == tool or name.startswith(f"{tool}.") for tool in TOOLS) or name.startswith(
        (sys.prefix + os.sep, sys.base_prefix + os.sep)
    )
