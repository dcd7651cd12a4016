"""Runs the script or the function of one question in this process."""

from __future__ import annotations

import contextlib
import gc
import os
import re
import runpy
import sys
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

from peakcast.collectors.dryrun.sent_functions import unpack
from peakcast.collectors.machine.packages import import_for_good

TORCH_MODULES = ("torch", "torch.distributed.fsdp", "torch._dynamo")


def main(question: Mapping[str, Any]) -> NoReturn:
    """Run the script that `question` names, with its own arguments, or its function."""
    from peakcast.collectors.dryrun import file_overlay, outside, ranks
    from peakcast.collectors.dryrun.confined import confine

    _limit_memory(int(question["memory_bytes"]))
    outside.set_environment(Path(question["folder"]))
    confine(Path(question["folder"]))
    launched = bool(question["launched"])
    ranks.set_environment(question["rank"], question["world_size"], question["ranks_per_node"], launched=launched)
    ranks.set_settings_of_accelerate(question["accelerate"])
    os.environ["PEAKCAST_DRYRUN_RANK"] = str(question["rank"])
    if question.get("walks"):
        os.environ["OMP_NUM_THREADS"] = "1"  # before torch is loaded: a forked process has no threads
    os.environ.pop("PYTHONSAFEPATH", None)  # this process's own, not that of programs that the script starts
    import_for_good(TORCH_MODULES)
    gc.freeze()  # every step ends with a collection, which would go through all that these libraries hold
    from peakcast.collectors.dryrun.session import Session
    from peakcast.collectors.dryrun.walked import WalkedSession

    overlay = file_overlay.install(Path(question["folder"]))
    session = WalkedSession if question.get("walks") else Session
    session(question, overlay).run(lambda: _run_function(question) if "function" in question else _run_script(question))


def _run_function(question: Mapping[str, Any]) -> None:
    from torch.utils._python_dispatch import _disable_current_modes

    with _disable_current_modes():  # tensors in its closure have values
        function = unpack(Path(question["function"]))
    function()


def _run_script(question: Mapping[str, Any]) -> None:
    """Run the script as the interpreter would run it."""
    script, arguments = question["script"], list(question["arguments"])
    sys.argv = [script, *arguments]
    if question["as_module"]:
        sys.path.insert(0, os.getcwd())
        runpy.run_module(script, run_name="__main__", alter_sys=True)
    else:
        sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
        program = exported_script(script, Path(question["folder"])) if script.endswith(".ipynb") else script
        runpy.run_path(program, _of_notebook(program), run_name="__main__")


def exported_script(notebook: str, folder: Path) -> str:
    """A script in `folder` of the code of a notebook's cells, without their `%` and `!` lines."""
    from peakcast.core.bounded import json_value
    from peakcast.dialects.python.notebook import notebook_source

    source = notebook_source(json_value(Path(notebook).read_text(encoding="utf-8")))
    script = folder / Path(notebook).with_suffix(".py").name
    code = re.sub(r"^(%|(?P<indent>[ \t]*)!).*", r"\g<indent>pass", source, flags=re.MULTILINE)
    script.write_text(code, encoding="utf-8")
    return str(script)


def _of_notebook(script: str) -> dict[str, Any]:
    """The functions that a script exported from a notebook calls for its `%` and `!` lines; they do nothing."""
    text = Path(script).read_text(encoding="utf-8", errors="replace")
    if "get_ipython()." not in text or "IPython" in text:
        return {}
    shell = types.SimpleNamespace(
        **dict.fromkeys(("system", "run_line_magic", "run_cell_magic", "magic"), lambda *_, **__: None),
        getoutput=lambda *_, **__: [],
    )
    return {"get_ipython": lambda: shell}


def _limit_memory(num_bytes: int) -> None:
    """Limit the memory of this process: a script that needs more gets a MemoryError, and the machine is not affected."""
    with contextlib.suppress(ImportError, OSError, ValueError):
        import resource

        resource.setrlimit(resource.RLIMIT_DATA, (num_bytes, num_bytes))
