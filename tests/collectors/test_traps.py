"""Each replacement that traces need, shown to matter: with it the step is a GPU's, without it the trace silently differs.

A trace changes its process for good, so each runs in one of its own, forked from one that has imported the libraries; one
that goes without a replacement undoes just that one.
"""

import json
import subprocess
import sys

import pytest

from peakcast.collectors.measure.grid import expand
from peakcast.jobs.spec import job_to_mapping

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytestmark = pytest.mark.whole  # what a trace without a replacement would be changes with releases of torch alone

PROGRAM = """
import importlib, json, os, sys
import torch
from peakcast.dialects.common.job_file import job_from_mapping
from peakcast.collectors.machine.packages import import_for_good
from peakcast.collectors.tracing import fake_cuda, patches
from peakcast.collectors.tracing.trace import trace_here
from peakcast.collectors.measure.worker import LIBRARIES
import_for_good(LIBRARIES)
install = patches.install
sdpa = torch.nn.functional.scaled_dot_product_attention
import transformers.masking_utils as masks
packed = masks.find_packed_sequence_indices
ones = masks.is_tracing
def installed(**switches):
    install(**switches)
    exec(undo)
patches.install = installed
for job, undo in json.load(sys.stdin):
    if os.fork():
        os.wait()
        continue
    if undo.startswith("before:"):
        exec(undo.removeprefix("before:"))
        undo = ""
    job = job_from_mapping(job)
    steady = trace_here(job)["steady"]
    peaks = {phase.name: size for phase, size in steady.phase_peaks().items()}
    print(json.dumps({"peaks": peaks, "labels": sorted(set(steady.labels))}))
    break
"""
SMALL = {"name": "llama-3.1-8b", "num_hidden_layers": 1, "hidden_size": 256, "intermediate_size": 1024, "vocab_size": 512}
PLAIN = {"architecture": SMALL | {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 32}}
AUTOCAST = PLAIN | {"precision.parameters": "float32", "framework_options": {"autocast": True}}
OPT = {"architecture": {"name": "opt-125m", "num_hidden_layers": 1}}
UNDO = {
    "foreach": (
        PLAIN,
        "for name in ('torch.utils._foreach_utils', 'torch.optim.optimizer'):\n"
        "    importlib.import_module(name)._foreach_supported_types[:] = [torch.Tensor]",
    ),
    "attention": (PLAIN, "torch.nn.functional.scaled_dot_product_attention = sdpa"),
    "mask": (PLAIN, "masks.find_packed_sequence_indices = packed"),
    "decomposition": (PLAIN, "before:torch.library.Library.impl = lambda *a, **k: None"),
    "autocast": (
        AUTOCAST,
        "importlib.import_module('torch.cuda.amp.common').amp_definitely_not_available = lambda: True\n"
        "torch.cuda.is_available = lambda: False",
    ),
    "padding": (OPT, "masks.is_tracing = ones"),
}


WITH_ALL = {"none": PLAIN, "none, padding": OPT, "none, autocast": AUTOCAST}


def job(cell):
    (one,) = expand({"base": {"sequence_length": 128, "micro_batch_size": 2}, "include": [cell]})
    return one


def peaks_of(timeline):
    return {phase.name: size for phase, size in timeline.phase_peaks().items()}


@pytest.fixture(scope="module")
def found(traced):
    if torch.cuda.is_available():
        pytest.skip("on a machine with a GPU nothing needs to be replaced")
    command = [sys.executable, "-P", "-c", PROGRAM]
    question = json.dumps([(job_to_mapping(job(cell)), undo) for cell, undo in UNDO.values()])
    done = subprocess.run(command, input=question, capture_output=True, text=True, check=False)
    answers = done.stdout.splitlines()
    assert len(answers) == len(UNDO), done.stderr[-2000:]
    whole = {name: traced(job(cell))["steady"] for name, cell in WITH_ALL.items()}
    return {
        **dict(zip(UNDO, map(json.loads, answers), strict=True)),
        **{name: {"peaks": peaks_of(steady), "labels": sorted(set(steady.labels))} for name, steady in whole.items()},
    }


def has(trace, start):
    return any(label.startswith(start) for label in trace["labels"])


def test_default_choices_take_the_foreach_path(found):
    assert has(found["none"], "_foreach_norm")  # clip_grad_norm_ chooses by itself
    assert not has(found["foreach"], "_foreach_norm")


def test_attention_is_fused(found):
    assert has(found["none"], "_scaled_dot_product_flash_attention.")
    assert not has(found["attention"], "_scaled_dot_product_flash_attention.")
    assert found["attention"]["peaks"]["BACKWARD"] > found["none"]["peaks"]["BACKWARD"]


def test_no_mask_is_built_for_unpacked_sequences(found):
    assert not has(found["none"], "_scaled_dot_product_efficient_attention")
    assert has(found["mask"], "_scaled_dot_product_efficient_attention")  # a mask of b·s·s bytes forbids flash
    assert found["mask"]["peaks"]["BACKWARD"] > found["none"]["peaks"]["BACKWARD"]


def test_a_padding_mask_of_ones_is_dropped(found):
    assert has(found["none, padding"], "_scaled_dot_product_flash_attention.")
    assert not has(found["padding"], "_scaled_dot_product_flash_attention.")


@pytest.mark.skipif(torch.backends.cuda.is_built(), reason="a build with CUDA has these kernels")
def test_operators_with_a_cuda_kernel_are_not_decomposed(found):
    assert has(found["none"], "silu_backward")
    assert not has(found["decomposition"], "silu_backward")


def test_autocast_is_on(found):
    # as many wide parameters and states in both; narrow activations only where autocast works
    assert found["none, autocast"]["peaks"]["FORWARD"] != found["autocast"]["peaks"]["FORWARD"]
    assert has(found["none, autocast"], "_to_copy")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_a_framework_notes_on_a_parameter_stays_on_it(dtype):
    """Megatron's experts are marked `allreduce = False`: without it they would lie in the dense parameters' buffers."""
    from peakcast.collectors.tracing.patches import _apply

    layer = torch.nn.Linear(4, 4)
    layer.weight.allreduce = False
    _apply(layer, lambda tensor: tensor.to(dtype))
    assert layer.weight.allreduce is False
    assert layer.weight.dtype is dtype
