"""Ray and SLURM (submitit's own executor here) really run cells: each answer once, a lost worker's cell run again."""

import textwrap

import pytest

from peakcast import api
from peakcast.collectors.measure.grid import expand
from peakcast.collectors.measure.settings import CollectSettings
from peakcast.collectors.processes.engines import find_engine
from peakcast.core.errors import CollectorError
from peakcast.measurements import store

JOBS = expand({"axes": {"architecture": ["gpt2", "pythia-160m", "opt-125m"]}, "base": {"sequence_length": 128}})
CELL = """
import os, pathlib, signal
from peakcast.dialects.common.job_file import job_from_mapping
from peakcast.measurements.records import Measurement

def parent_of(pid):
    return int(open(f"/proc/{pid}/stat").read().rsplit(")", 1)[1].split()[1])

def work(question):
    job = job_from_mapping(question["job"])
    mark = pathlib.Path({folder!r}) / job.architecture.name
    if job.architecture.name == "opt-125m" and not mark.exists():
        mark.touch()
        os.kill(parent_of(os.getppid()), signal.SIGKILL)  # the engine's worker: of it the warm parent, of that the cell
    return Measurement(job=job, gpu="A100-80GB", provenance="traced", source="peakcast", peak_allocated_bytes=1)
"""
OPTIONS = {
    "ray": {"num_gpus": 0, "num_cpus": 1},
    "slurm": {"cluster": "local", "cpus_per_task": 1},
}


@pytest.fixture
def work(tmp_path, monkeypatch):
    (tmp_path / "lost_once.py").write_text(textwrap.dedent(CELL.replace("{folder!r}", repr(str(tmp_path)))))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    return "lost_once:work"


@pytest.mark.filterwarnings("ignore")  # Ray's and submitit's own
@pytest.mark.whole  # Ray starts for seconds, and submitit asks every few seconds; test_runner.py has the local engine
@pytest.mark.parametrize("name", ["ray", "slurm"])
def test_every_answer_comes_once_and_a_lost_worker_is_replaced(tmp_path, work, name):
    pytest.importorskip({"ray": "ray", "slurm": "submitit"}[name])
    from peakcast.collectors.measure.runner import collect
    from peakcast.collectors.measure.settings import CollectSettings

    options = OPTIONS[name] | ({"folder": str(tmp_path / "jobs")} if name == "slurm" else {})
    shard = tmp_path / "cells.jsonl"
    settings = CollectSettings(trace=True, engine=name, engine_options=options, timeout_seconds=60)
    summary = collect(JOBS, shard, settings, work=work)
    rows, bad = store.read_shard(shard)
    assert (summary.finished, summary.failed, bad) == (3, 0, []), summary.reasons
    assert sorted(row.job.architecture.name for row in rows) == ["gpt2", "opt-125m", "pythia-160m"]
    assert (tmp_path / "opt-125m").exists()  # its worker was killed indeed


def test_an_unknown_engine_and_an_option_that_it_has_not_are_named(tmp_path):
    with pytest.raises(CollectorError, match=r"engine='rey' is not known; did you mean 'ray'"):
        find_engine("rey")
    with pytest.raises(CollectorError, match=r"engine_options=.*'partition'.* are not those of engine='local'"):
        api.collect(JOBS, tmp_path / "x.jsonl", CollectSettings(trace=True, engine_options={"partition": "gpu"}))
