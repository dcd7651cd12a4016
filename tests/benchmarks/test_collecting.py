"""What a cell costs, and how much of it is the step itself: `python -P -m pytest tests/benchmarks -m benchmarks`.

The same cells as traces with the warm parent, and each in an interpreter of its own: what forking saves.
"""

from __future__ import annotations

import time

import pytest

from peakcast.collectors.measure.grid import expand
from peakcast.collectors.measure.runner import collect
from peakcast.collectors.measure.settings import CollectSettings
from peakcast.collectors.tracing.trace import trace_job

pytestmark = pytest.mark.benchmarks
SMALL = expand(
    {
        "base": {"sequence_length": 256},
        "axes": {
            "architecture": [{"name": name, "num_hidden_layers": 2} for name in ("gpt2", "pythia-160m", "smollm2-135m")],
            "activation_checkpointing.mode": ["none", "full"],
        },
    }
)


def test_the_cost_of_a_cell_and_the_share_of_its_steps(benchmark, tmp_path):
    pytest.importorskip("transformers")
    shards = (tmp_path / f"{number}.jsonl" for number in range(100))
    summary = benchmark.pedantic(lambda: collect(SMALL, next(shards), CollectSettings(trace=True, processes=1)), rounds=2)
    assert (summary.finished, summary.failed) == (len(SMALL), 0)
    cells = len(SMALL)
    started = time.monotonic()
    trace_job(SMALL[0])
    alone = time.monotonic() - started
    found = {
        "seconds_a_cell": round(summary.seconds / cells, 3),
        "seconds_a_cell_without_the_parents_start": round(summary.cell_seconds / cells, 3),
        "share_of_steps": round(summary.step_seconds / summary.cell_seconds, 3),
        "times_faster_than_its_own_interpreter": round(alone * cells / summary.seconds, 2),
    }
    benchmark.extra_info.update(found)
    print(found)
    assert 0 < summary.step_seconds <= summary.cell_seconds <= summary.seconds
    assert summary.seconds < alone * cells
