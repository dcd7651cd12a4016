"""The same question has the same answer in every process: nothing hangs on the order of a set, which Python's hashes of
texts shuffle anew in each."""

import json
import os
import subprocess
import sys

JOBS = [
    {"architecture": "gpt2", "framework": "deepspeed", "parallelism": {"data_parallel_size": 2, "zero_stage": 3}},
    {"architecture": "llama-3.2-1b", "parallelism": {"data_parallel_size": 4, "sharding": "fsdp2"}},
    {"architecture": "llama-3.2-1b", "compile": True},
    {
        "architecture": "mixtral-8x7b",
        "framework": "megatron",
        "parallelism": {"data_parallel_size": 8, "expert_parallel_size": 8},
    },
]
SAY = """
import json, sys
from peakcast.doors.batching import predict_batch
from peakcast.dialects.common.job_file import job_from_mapping
from peakcast.models.baseline.ledger import ledger
for job in json.load(sys.stdin):
    step = ledger(job_from_mapping(job))
    columns = [list(step.names), list(step.modules), step.num_bytes.tolist(), step.born.tolist(), step.dies.tolist()]
    print(json.dumps([columns, *predict_batch([{"gpu": "H100-80GB", "job": job}])]))
"""


def test_timelines_and_answers_do_not_hang_on_hashes() -> None:
    said = set()
    for seed in "12":
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        asked = {"input": json.dumps(JOBS), "env": environment, "text": True}
        said.add(subprocess.run([sys.executable, "-P", "-c", SAY], capture_output=True, check=True, **asked).stdout)
    assert len(said) == 1
    assert said.pop().count('"peak_device_bytes": {') == len(JOBS)
