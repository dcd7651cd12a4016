"""Memory outside PyTorch's allocator: estimates that agree with published readings."""

import csv
from statistics import median

import pytest

from peakcast.catalog import gpu
from peakcast.core.fields import FrozenMapping
from peakcast.core.units import KIB, MIB
from peakcast.jobs.spec import Parallelism
from peakcast.measurements.store import datasets_folder, read_measurements
from peakcast.models.baseline.baseline import baseline
from peakcast.models.baseline.device_memory import (
    AMPERE_COMMUNICATOR_BYTES,
    AMPERE_NCCL_BYTES,
    communicator_bytes,
    context_bytes,
    contexts_and_kernels_bytes,
    cuda_major,
    num_contexts,
    one_communicator_bytes,
)


@pytest.fixture(scope="module")
def readings():
    path = datasets_folder() / "published" / "constants" / "device_constants_h100.csv"
    with path.open(newline="") as file:
        return [row for row in csv.DictReader(file) if not row["left_out"]]


@pytest.mark.parametrize(("cuda", "mib"), [("12", 1510), ("13", 1176)])
def test_context_and_communicator_are_what_processes_of_eight_ranks_hold(readings, cuda, mib):
    held = [int(row["process_bytes"]) for row in readings if row["cuda"].startswith(cuda) and row["process_bytes"]]
    assert median(held) == mib * MIB
    versions = {"cuda": cuda}
    estimate = context_bytes(gpu("H100-80GB"), versions) + one_communicator_bytes(gpu("H100-80GB"), 8, versions)
    assert estimate == mib * MIB


def test_context_and_kernels_are_what_lies_beside_reserved_memory():
    """Of one process on A100, on all days but two, whose float16 rows and GPTQ rows differ in other ways."""
    rows = read_measurements(datasets_folder() / "published" / "optimum_benchmark.csv")
    alike = [row for row in rows if row.peak_reserved_bytes and not row.source_version.startswith(("9a0db86", "6a25a6d"))]
    beside = [row.peak_device_bytes - row.peak_reserved_bytes for row in alike if not row.out_of_scope]
    job = alike[0].job
    assert len(beside) == 120
    assert median(beside) == pytest.approx(contexts_and_kernels_bytes(job, gpu("A100-80GB")), abs=4 * MIB)


def test_the_release_of_cuda_follows_from_what_a_job_says():
    assert cuda_major({"cuda": "12.6", "torch": "2.11"}) == 12
    assert cuda_major({"torch": "2.1.1+cu118"}) == 11
    assert cuda_major({"torch": "2.10.0"}) == 12
    assert cuda_major({"torch": "2.11.0"}) == 13


def test_processes_that_touch_every_gpu_have_a_context_on_each(fakes):
    """Of 16 ranks the 8 of a node. accelerate's get_max_memory makes a tensor on every GPU that a process sees."""
    a100, everywhere = gpu("A100-80GB"), FrozenMapping({"contexts_on_every_gpu": True})
    layouts = [Parallelism(data_parallel_size=ranks) for ranks in (1, 2, 16)]
    jobs = [fakes.job(parallelism=layout, framework_options=everywhere) for layout in layouts]
    assert [num_contexts(job, a100) for job in jobs] == [1, 2, 8]
    assert num_contexts(fakes.job(parallelism=layouts[1]), a100) == 1
    alone, both = (baseline(job, a100, 0, ledger=fakes.ledger) for job in (fakes.job(parallelism=layouts[1]), jobs[1]))
    assert both.peak_device_bytes - alone.peak_device_bytes == context_bytes(a100, {})


def test_a_smaller_communicator_takes_less():
    for name in ("A100-80GB", "H100-80GB"):
        assert 0 < one_communicator_bytes(gpu(name), 2, {}) < one_communicator_bytes(gpu(name), 8, {})


def test_nccls_kernels_are_there_once_and_only_where_ranks_are(fakes):
    a100 = gpu("A100-80GB")
    two = one_communicator_bytes(a100, 2, {})
    layouts = ({}, {"tensor_parallel_size": 2}, {"tensor_parallel_size": 2, "pipeline_parallel_size": 2})
    held = [communicator_bytes(fakes.job(parallelism=Parallelism(**sizes)), a100) for sizes in layouts]
    assert held == [0, two + AMPERE_NCCL_BYTES, 2 * two + AMPERE_NCCL_BYTES]


def test_a_communicator_on_a100_is_what_its_channels_need():
    shared = 32 * 16 * 512 * KIB
    pair, more = AMPERE_COMMUNICATOR_BYTES
    assert pair == shared + 24 * 12 * MIB
    assert more == shared + 36 * 12 * MIB
