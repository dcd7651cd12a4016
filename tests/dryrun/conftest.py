"""Scripts of `scripts/`, run as functions: copies of one process, which has the libraries already."""

from __future__ import annotations

import runpy
import sys
import warnings
from dataclasses import replace
from pathlib import Path

import pytest

from peakcast.models.recipes import shelf
from peakcast.timelines.timeline import Category

SCRIPTS = Path(__file__).parent / "scripts"


@pytest.fixture(scope="session")
def run_script():
    """A function that dry-runs `name` of `scripts/` with arguments."""
    pytest.importorskip("transformers")
    from transformers import GPT2LMHeadModel, LlamaForCausalLM, Qwen2ForCausalLM, Trainer  # noqa: F401

    from peakcast.doors.dryrunning import dryrun

    def run(name, *arguments, gpu="H100-80GB", **options):
        script = str(SCRIPTS / name)

        def program():
            warnings.simplefilter("default")  # a library's own fail no script
            sys.argv = [script, *arguments]
            runpy.run_path(script, run_name="__main__")

        return dryrun(program, gpu, **options)

    return run


@pytest.fixture(scope="module")
def recorded_elsewhere(tmp_path_factory):
    """What dry runs of a module record on the way lies in a folder of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PEAKCAST_RECIPES", str(tmp_path_factory.mktemp("recipes")))
        patch.setattr(shelf, "_found", {})
        yield


@pytest.fixture(scope="session")
def of_tensors():
    """A function that gives a timeline without what kernels take for themselves, which depends on the GPU."""

    def tensors(timeline):
        kept = timeline.categories != Category.WORKSPACES
        columns = {name: getattr(timeline, name)[kept] for name in ("categories", "num_bytes", "born", "dies")}
        names = {
            name: [text for text, keep in zip(getattr(timeline, name), kept, strict=True) if keep]
            for name in ("names", "modules")
        }
        return replace(timeline, **columns, **names, streams=None, reusable=None)

    return tensors
