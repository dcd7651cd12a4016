"""The ledger of tensor, pipeline and context parallelism against the trace of the real libraries, on fake groups."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from peakcast.collectors.grid import expand
from peakcast.collectors.tracing.trace import trace_job
from peakcast.models.analytical.ledger import ledger
from peakcast.models.analytical.scope import out_of_scope
from peakcast.timeline import Phase

pytest.importorskip("transformers")

QWEN = {"name": "qwen3-0.6b", "num_hidden_layers": 2}
SPLIT = {"tensor_parallel_size": 2, "sequence_parallel": True}
CELLS = {
    "transformers_plan": {"framework": "huggingface", "parallelism": {"tensor_parallel_size": 2}},
    "torchtitan_plan": {"parallelism": SPLIT, "activation_checkpointing.mode": "full"},
    "under_fsdp2": {"parallelism": {**SPLIT, "data_parallel_size": 4, "sharding": "fsdp2"}},
}


@pytest.fixture(scope="module")
def traces():
    base = {"framework": "torch", "architecture": QWEN, "sequence_length": 256, "micro_batch_size": 2}
    jobs = {name: expand({"base": base, "include": [cell]})[0] for name, cell in CELLS.items()}
    with ThreadPoolExecutor(2) as pool:
        timelines = dict(zip(jobs, pool.map(trace_job, jobs.values()), strict=True))
    return {name: (jobs[name], timelines[name]) for name in jobs}


@pytest.mark.parametrize("name", CELLS)
def test_the_ledger_equals_the_trace_phase_by_phase(traces, name):
    """Within 0.5 % of the phase's peak and 0.1 % of the whole step's, in the first and in a steady step."""
    job, timelines = traces[name]
    assert out_of_scope(job) == ""
    for step, trace in timelines.items():
        closed_form = ledger(job, step=step)
        assert closed_form.peak().num_bytes == pytest.approx(trace.peak().num_bytes, rel=1e-3)
        for phase, size in trace.phase_peaks().items():
            if phase is not Phase.INIT:
                assert closed_form.peak(phase).num_bytes == pytest.approx(size, rel=5e-3), (step, phase.name)


def test_what_dtensor_computes_on_the_side_is_no_part_of_a_trace(traces):
    """To know a global shape DTensor makes a tensor of that shape: the whole lm_head, were it seen."""
    job, timelines = traces["transformers_plan"]
    first = timelines["first"]
    made = {size for name, size in zip(first.names, first.num_bytes.tolist(), strict=True) if "empty" in name}
    assert job.architecture.vocab_size * job.architecture.hidden_size * 2 not in made
