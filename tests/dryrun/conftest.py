"""Scripts of `scripts/`, run in copies of this process, which has the libraries already."""

from __future__ import annotations

import importlib
import runpy
import sys
import warnings
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parent / "scripts"


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Copies of a process in which other tests have run backward passes may abort: these run in one of their own."""
    for item in items:
        if Path(__file__).parent in item.path.parents and item.get_closest_marker("benchmarks") is None:
            item.add_marker("apart")


@pytest.fixture(scope="session")
def run_script():
    """A function that dry-runs `name` of `scripts/` with arguments."""
    pytest.importorskip("transformers")
    from accelerate.state import AcceleratorState
    from transformers import GPT2LMHeadModel, LlamaForCausalLM, Qwen2ForCausalLM, Trainer  # noqa: F401

    from peakcast.collectors.dryrun.script import LIBRARIES
    from peakcast.dryrunning import dryrun

    for library in LIBRARIES:  # its copies need not import them
        importlib.import_module(library)

    def run(name, *arguments, gpu="H100-80GB", **options):
        script = str(SCRIPTS / name)

        def program():
            warnings.simplefilter("default")  # a library's own fail no script
            AcceleratorState._reset_state(reset_partial_state=True)  # which other tests have left on the CPU
            sys.argv = [script, *arguments]
            runpy.run_path(script, run_name="__main__")

        return dryrun(program, gpu, **options)

    return run
