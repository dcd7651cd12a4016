"""torch.compile around the measured network: really compiled here, by the CPU's inductor."""

import json
import shutil
import subprocess
import sys

import pytest

from peakcast.collectors.grid import expand
from peakcast.collectors.tracing.trace import trace_job
from peakcast.errors import CollectorError
from peakcast.spec import job_to_mapping

pytest.importorskip("transformers")
RUN = """
import json, sys, torch
from torch._dynamo.utils import counters
from peakcast.collectors.frameworks import build
from peakcast.dialects.job_file import job_from_mapping
said = []
losses = []
for compiled in (False, True):
    job = job_from_mapping({**json.loads(sys.argv[1]), "compile": compiled})
    torch.manual_seed(0)
    training = build(job, "cpu")
    for _ in range(2):
        loss = training.forward(lambda: said.append(compiled))
        training.backward(loss)
        training.clip(); training.step(); training.zero_grad()
    losses.append(float(loss))
    facts = training.facts()
print("FOUND", json.dumps({"losses": losses, "said": said, "facts": facts, "graphs": counters["stats"]["unique_graphs"],
                           "breaks": sum(counters["graph_break"].values()), "frames": counters["frames"]["ok"]}))
"""


def job(**changes):
    network = {
        "model_type": "llama", "name": "tiny", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1,
        "num_attention_heads": 2, "vocab_size": 100,
    }  # fmt: skip
    cell = {"architecture": network}
    plain = {"sequence_length": 32, "precision.parameters": "float32", "precision.compute": "float32"}
    return expand({"include": [cell | plain | changes]})[0]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="the compiler's back end needs a C++ compiler")
def test_a_compiled_step_is_one_graph_that_trains_the_same_and_announces_no_loss():
    command = [sys.executable, "-P", "-c", RUN, json.dumps(job_to_mapping(job()))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=400, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(next(line for line in done.stdout.splitlines() if line.startswith("FOUND"))[6:])
    assert found["losses"][0] == pytest.approx(found["losses"][1], rel=1e-4)
    assert found["said"] == [False, False]
    assert found["facts"]["compiled"] == "inductor"
    assert (found["graphs"], found["breaks"]) == (1, 0)  # compiled once, for both steps, and whole


def test_a_compiled_job_is_not_traced():
    with pytest.raises(CollectorError, match="compile=True cannot be traced"):
        trace_job(job(compile=True))
