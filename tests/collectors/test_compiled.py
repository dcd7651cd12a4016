"""torch.compile around the measured network: really compiled here by the CPU's Inductor, and traced for a GPU."""

import json
import os
import shutil
import subprocess
import sys
import tempfile

import numpy as np
import pytest

from peakcast.collectors.measure.grid import expand
from peakcast.collectors.tracing.trace import trace_here
from peakcast.core.errors import CollectorError
from peakcast.jobs.spec import job_to_mapping
from peakcast.models.baseline.agreement import ONE_GPU_TOLERANCE
from peakcast.models.baseline.ledger import ledger
from peakcast.models.ledger.scope.scope import out_of_scope
from peakcast.timelines.timeline import Category, Phase

pytest.importorskip("transformers")
FLOAT32 = {"precision.parameters": "float32", "precision.compute": "float32"}
LAYERS = {"framework_options": {"compiled_regions": "layers"}}
CHECKPOINTED = {"activation_checkpointing.mode": "full"}
REAL = """
import gc, json, sys, torch
from torch._dynamo.utils import counters
from torch.profiler import ProfilerActivity, profile, record_function
from peakcast.collectors.stacks import build
from peakcast.dialects.common.job_file import job_from_mapping
said, losses = [], []
def mark(phase):
    with record_function(f"phase {phase}"): pass
def step(training):
    mark("FORWARD")
    loss = training.forward(lambda: said.append(training.job.compile))
    mark("BACKWARD"); training.backward(loss)
    last = float(loss.detach()); del loss
    mark("GRADIENT_CLIPPING"); training.clip()
    mark("OPTIMIZER_STEP"); training.step(); training.zero_grad()
    return last
def run(compiled):
    torch.manual_seed(0)
    training = build(job_from_mapping({**json.loads(sys.argv[1]), "compile": compiled}), "cpu")
    gc.collect()
    losses.append([step(training) for _ in range(2)][-1])
    return training.facts()
with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
    facts = run(True)
run(False)
ATTENTION = "aten::_scaled_dot_product_flash_attention_for_cpu"
KERNELS = ("aten::mm", ATTENTION, ATTENTION + "_backward")
events = []  # moment, bytes or phase, address, kernel that runs
def walk(event, kernel):
    if event.tag.name == "Allocation":
        events.append((event.start_time_ns, event.extra_fields.alloc_size, event.extra_fields.ptr, kernel))
    if event.name.startswith("phase "):
        events.append((event.start_time_ns, event.name[6:], 0, None))
    for child in event.children:
        walk(child, kernel or (id(event) if event.name in KERNELS else None))
for root in profiled.profiler.kineto_results.experimental_event_tree():
    walk(root, None)
events.sort(key=lambda event: event[0])
alive, scratch = {}, set()  # what a kernel takes and gives back by itself, or what was there before: no tensor of the step
for number, (_, size, address, kernel) in enumerate(events):
    if isinstance(size, str):
        continue
    if size > 0:
        alive[address] = number, kernel
    else:
        born, maker = alive.pop(address, (number, kernel))
        if born == number or (maker is not None and maker == kernel):
            scratch |= {born, number}
total, phase, peaks = 0, "", {}
for number, (_, size, _, _) in enumerate(events):
    if isinstance(size, str):
        phase, peaks[size] = size, total
    elif number not in scratch:
        total += size
        peaks[phase] = max(peaks.get(phase, 0), total)
print("FOUND", json.dumps({"losses": losses, "said": said, "peaks": peaks, "graphs": counters["stats"]["unique_graphs"],
                           "facts": facts, "breaks": sum(counters["graph_break"].values())}))
"""
FAKE = """
import json, sys, torch
from peakcast.collectors.tracing import inductor, tracer
from peakcast.collectors.tracing.trace import _train, fake_mode
from peakcast.dialects.common.job_file import job_from_mapping
tracer.ALLOCATION_UNIT_BYTES = 1  # the CPU's allocator counts every byte
traced = tracer.Tracer("cpu")
with inductor.compiling(traced), fake_mode(), torch.autograd.set_multithreading_enabled(False):
    step = _train(job_from_mapping({**json.loads(sys.argv[1]), "compile": True}), "cpu", traced)["steady"]
print("FOUND", json.dumps({"peaks": {phase.name: size for phase, size in step.phase_peaks().items()}}))
"""


def job(**changes):
    network = {
        "model_type": "llama", "name": "tiny", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1,
        "num_attention_heads": 2, "vocab_size": 100,
    }  # fmt: skip
    return expand({"include": [{"architecture": network, "sequence_length": 32, **changes}]})[0]


def found(script, cell):
    command = [sys.executable, "-P", "-c", script, json.dumps(job_to_mapping(cell))]
    with tempfile.TemporaryDirectory() as kernels:  # those that a process which was killed has left are no good
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": kernels}
        done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False, env=environment)
    if "main.so: undefined symbol" in done.stderr:
        pytest.skip("this machine's C++ compiler makes kernels that cannot be loaded")
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(next(line for line in done.stdout.splitlines() if line.startswith("FOUND"))[6:])


@pytest.mark.whole  # a minute and a half of a C++ compiler
@pytest.mark.skipif(shutil.which("g++") is None, reason="the compiler's back end needs a C++ compiler")
def test_a_compiled_step_trains_the_same_and_a_trace_of_it_on_fake_tensors_is_what_the_allocator_gave():
    real, fake = found(REAL, job(**FLOAT32)), found(FAKE, job(**FLOAT32))
    assert real["losses"][0] == pytest.approx(real["losses"][1], rel=1e-4)
    assert real["said"] == [False, False]  # what is compiled announces no loss
    assert real["facts"]["compiled"] == "inductor"
    assert (real["graphs"], real["breaks"]) == (1, 0)  # compiled once, for both steps, and whole
    for phase in ("FORWARD", "BACKWARD", "GRADIENT_CLIPPING"):
        assert fake["peaks"][phase] == real["peaks"][phase]


@pytest.mark.whole
def test_layers_compiled_one_by_one_are_one_graph_and_keep_what_is_counted_by_hand(traced):
    """Ten layers: were each compiled anew, Dynamo would give up at the ninth and run it uncompiled."""
    hidden, f, heads, kv_heads, tokens, layers = 256, 512, 4, 2, 512, 10
    network = {
        "model_type": "llama", "hidden_size": hidden, "intermediate_size": f, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "vocab_size": 1024, "num_hidden_layers": layers,
    }  # fmt: skip
    cell = job(architecture=network, sequence_length=tokens, compile=True, **LAYERS)
    steady = traced(cell)["steady"]
    before_loss = list(steady.phases).index(Phase.LOSS)
    kept = np.flatnonzero(steady.alive_at(before_loss) & (steady.categories == Category.ACTIVATIONS))
    of_layer = [0] * layers
    for number in kept.tolist():
        _, _, index = steady.modules[number].rpartition("layers.")
        if index.isdecimal():
            of_layer[int(index)] += int(steady.num_bytes[number])
    bf16 = 4 * hidden  # both norms' results, the stream after attention and after the feed-forward
    bf16 += 2 * hidden + 2 * kv_heads * hidden // heads  # rotated q, attention's result, rotated k, v
    bf16 += 3 * f  # gate, up, their product
    fp32 = heads + 2  # attention's statistics, both norms' factors
    assert of_layer == [tokens * (2 * bf16 + 4 * fp32) + 2 * 512] * layers  # and attention's seed and offset
    agree(ledger(cell, step="steady"), steady)


@pytest.mark.whole
def test_the_ledger_of_a_network_compiled_whole_is_its_trace(traced):
    """Two sequences: transformers builds a mask for each, since it cannot look at values inside what is compiled."""
    llama = {"name": "llama-3.1-8b", "num_hidden_layers": 2}
    cell = job(architecture=llama, sequence_length=512, micro_batch_size=2, compile=True)
    assert out_of_scope(cell) == ""
    steady = traced(cell)["steady"]
    assert any(label.startswith("_scaled_dot_product_efficient_attention") for label in steady.labels)
    agree(ledger(cell, step="steady"), steady)


def agree(found, traced):
    wanted = traced.phase_peaks()
    assert found.phase_peaks() == {phase: pytest.approx(size, rel=ONE_GPU_TOLERANCE) for phase, size in wanted.items()}


@pytest.mark.whole
def test_a_checkpointed_layer_is_recomputed_inside_what_is_compiled(traced):
    steady = traced(job(compile=True, **CHECKPOINTED))["steady"]
    attention = [label for label in steady.labels if label.startswith("_scaled_dot_product")]
    assert len(attention) == 3  # forward, the same again, backward


@pytest.mark.parametrize(
    ("parameter", "changes"),
    [
        ("several ranks", {"parallelism": {"data_parallel_size": 2, "sharding": "fsdp1"}}),
        ("Liger", {"framework_options": {"liger_kernels": True}}),
        ("flex", {"attention": "flex"}),
    ],
)
def test_what_was_never_traced_beside_the_compiler_is_refused_by_name(parameter, changes):
    with pytest.raises(CollectorError, match=f"compile=True cannot be traced: not yet with .*{parameter}"):
        trace_here(job(compile=True, **changes))  # before it changes anything of this process
