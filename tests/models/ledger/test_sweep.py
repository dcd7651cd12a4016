"""The sweep against the ledger itself: the same peaks, to the byte, for whatever knobs are turned."""

from __future__ import annotations

import itertools
import os
import random
import signal
from dataclasses import replace

import numpy as np
import pytest

from peakcast.catalog import architecture, gpu
from peakcast.core.errors import SpecError
from peakcast.core.workers import LostError
from peakcast.jobs.spec import Parallelism, Precision, TrainingJob
from peakcast.models.baseline.knobs import with_knobs
from peakcast.models.baseline.ledger import ledger
from peakcast.models.baseline.sweep import REFUSED, _map, sweep

DEVICE = gpu("H100-80GB")
LLAMA = architecture("llama-3.2-1b")
FULL = Precision(gradients="float32", optimizer_states="float32", main_parameters="float32")
MEGATRON = TrainingJob(
    architecture=LLAMA, framework="megatron", precision=FULL, gradient_accumulation_steps=8, sequence_length=4096
)


def grid(knobs: dict[str, list]) -> dict[str, list]:
    """Every combination, one array a knob."""
    combinations = list(itertools.product(*knobs.values()))
    return {name: [values[i] for values in combinations] for i, name in enumerate(knobs)}


def peak(job: TrainingJob) -> int:
    """The largest peak of a steady step over all pipeline stages."""
    layout = job.parallelism
    per_stage = layout.world_size // layout.pipeline_parallel_size
    ranks = [stage * per_stage for stage in range(layout.pipeline_parallel_size)]
    return max(ledger(job, device=DEVICE, rank=rank).peak().num_bytes for rank in ranks)


CASES = {
    "huggingface": (
        TrainingJob(architecture=LLAMA),
        {
            "micro_batch_size": [1, 2, 3, 5, 8, 17, 64],
            "sequence_length": [100, 512, 1000, 2048, 8192],
            "activation_checkpointing.mode": ["none", "full"],
        },
    ),
    "eager attention keeps the square of the length": (
        TrainingJob(architecture=LLAMA, attention="eager"),
        {"micro_batch_size": [1, 2, 3, 4, 7], "sequence_length": [512, 1024, 1500, 4096]},
    ),
    "sharded": (
        TrainingJob(architecture=LLAMA),
        {
            "micro_batch_size": [1, 2, 4, 8],
            "sequence_length": [1024, 4096],
            "parallelism.zero_stage": [0, 1, 2, 3],
            "parallelism.data_parallel_size": [1, 2, 3, 64],
        },
    ),
    "megatron": (
        MEGATRON,
        {
            "micro_batch_size": [1, 2, 3, 8],
            "sequence_length": [2048, 4096, 16384, 32768],
            "gradient_accumulation_steps": [1, 4, 64],
            "activation_checkpointing.mode": ["none", "selective", "full"],
            "parallelism.tensor_parallel_size": [1, 8],
            "parallelism.pipeline_parallel_size": [1, 4],
            "parallelism.data_parallel_size": [1, 8],
            "parallelism.zero_stage": [0, 1],
        },
    ),
    "interleaved, with context parallelism": (
        MEGATRON.replace(parallelism=Parallelism(pipeline_parallel_size=2, virtual_pipeline_stages=2)),
        {
            "micro_batch_size": [1, 2, 4],
            "sequence_length": [4096, 8192],
            "parallelism.context_parallel_size": [1, 2, 4],
            "parallelism.zero_stage": [0, 1],
        },
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_peaks_are_those_of_the_ledger(name):
    job, knobs = CASES[name]
    columns = grid(knobs)
    peaks = sweep(job, columns, device=DEVICE)
    chosen = random.Random(0).sample(range(len(peaks)), min(40, len(peaks)))
    for i in chosen:
        changes = {knob: values[i] for knob, values in columns.items()}
        assert peaks[i] == peak(with_knobs(job, changes)), changes


def test_combinations_that_are_no_job_are_marked_and_the_others_answered():
    job = TrainingJob(architecture=LLAMA)
    columns = grid({"parallelism.tensor_parallel_size": [1, 5], "micro_batch_size": [0, 1, 2]})
    peaks = sweep(job, columns)
    assert [p == REFUSED for p in peaks] == [True, False, False, True, True, True]


def test_lengths_that_a_layout_cannot_divide_are_marked():
    peaks = sweep(MEGATRON, grid({"sequence_length": [4096, 4098], "parallelism.context_parallel_size": [1, 4]}))
    assert [p == REFUSED for p in peaks] == [False, False, False, True]


def test_two_processes_give_what_one_gives():
    job, knobs = CASES["sharded"]
    job = job.replace(architecture=replace(job.architecture, num_hidden_layers=4))
    columns = grid({**knobs, "activation_checkpointing.mode": ["none", "full"]})
    assert np.array_equal(sweep(job, columns, processes=2), sweep(job, columns))


def ends_its_process(task):
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_process_that_was_killed_is_said():
    with pytest.raises(LostError, match=r"one of the 2 processes of the sweep was killed, .*processes=1"):
        list(_map(ends_its_process, [None, None], 2))


def test_no_knobs_is_the_job_itself():
    assert sweep(MEGATRON, {}, device=DEVICE).tolist() == [peak(MEGATRON)]


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"parallelism.tensor_parallel": [1]}, "parallelism.tensor_parallel"),
        ({"micro_batch_size": [1, 2], "sequence_length": [512]}, "length"),
        ({"micro_batch_size": [[1, 2]]}, "one for each combination"),
    ],
)
def test_knobs_that_are_none_are_refused(knobs, message):
    with pytest.raises(SpecError, match=message):
        sweep(MEGATRON, knobs)
