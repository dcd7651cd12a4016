"""Published rows of the shared row format: every one comes out, with the job it says, and the card counts them."""

import json
from collections import Counter

import pytest

from peakcast.collectors.published.optimum_benchmark import read_optimum_benchmark
from peakcast.collectors.published.peft_method_comparison import UNPADDED, read_peft_method_comparison
from peakcast.collectors.published.plain_rows import ImportedRow, measurement, row_job
from peakcast.core.errors import RecordError
from peakcast.dialects.common.job_file import job_from_mapping
from peakcast.measurements.store import datasets_folder

SOURCES = datasets_folder() / "published" / "sources"
READ = {
    "optimum_benchmark": (read_optimum_benchmark, "A100-80GB", 197),
    "peft_method_comparison": (read_peft_method_comparison, "L40S", 155),
}


def lines(name):
    return [json.loads(line) for line in (SOURCES / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def rows():
    return {name: read(SOURCES / f"{name}.jsonl") for name, (read, _, _) in READ.items()}


@pytest.mark.parametrize("name", READ)
def test_no_row_is_dropped_and_none_is_changed(rows, name):
    _, gpu, number = READ[name]
    own, found = rows[name], lines(name)
    assert Counter(row.gpu for row in own) == {gpu: number}
    assert len({row.key for row in own}) == len({row.case for row in own}) == number
    for row, line in zip(own, found, strict=True):
        kept = {**row.environment.get("unread", {}), **line["measured"]}
        assert kept == line["measured"]
        read = {quantity: getattr(row, quantity) for quantity in line["measured"]} | row.environment.get("as_read", {})
        assert all(value in (None, line["measured"][quantity]) for quantity, value in read.items())
        assert {quantity for quantity, value in read.items() if value is None} == set(row.environment.get("unread", {}))
        assert row.environment["versions"] == line["versions"]
        assert line["note"].strip(".") in row.assumptions[0]


def test_a_job_that_the_source_writes_out_is_the_row_s_job(rows):
    """But for what a module adds: adapters' scaling, which takes no memory, rotary positions, and that PEFT's unpadded
    batches stand for padded ones."""
    for name, own in rows.items():
        for row, line in zip(own, lines(name), strict=True):
            if not line.get("job") or row.out_of_scope:
                continue
            said = job_from_mapping(line["job"])
            options = UNPADDED if name == "peft_method_comparison" else {}
            assert dict(row.job.framework_options) == {**said.framework_options, **options}
            added = {name: getattr(said, name) for name in ("finetuning", "inference", "framework_options")}
            assert row.job.replace(**added) == said
            assert row.job.finetuning.rank == said.finetuning.rank
            assert set(row.job.finetuning.targets) == set(said.finetuning.targets)


def test_a_row_without_a_job_gets_the_nearest():
    (line, *_) = (
        one for one in lines("optimum_benchmark") if "GPTQ" in one["method"] and "2.1.0" in one["versions"]["torch"]
    )
    job = row_job(line, task="inference")
    network = job.architecture
    assert (network.hidden_size, network.num_hidden_layers, network.num_key_value_heads) == (4096, 32, 32)
    assert (job.micro_batch_size, job.sequence_length, job.attention) == (line["batch"], 256, "eager")
    assert job.versions["torch"] == "2.1.0"


def test_stage_two_of_fsdp_keeps_weights_gathered():
    (line, *_) = lines("peft_method_comparison")
    layout = {"data_parallel_size": 8, "sharding": "fsdp2", "zero_stage": 2}
    job = row_job({**line, "framework": "torch", "optimizer": "adamw fused", "layout": layout, "num_gpus": 8})
    assert (job.parallelism.sharding, job.parallelism.zero_stage, job.parallelism.world_size) == ("fsdp2", 0, 8)
    assert job.framework_options["fsdp_reshard_after_forward"] is False
    row = measurement(line | {"num_gpus": 8}, ImportedRow(job=job, out_of_scope=("One.", "Two.")))
    assert (row.collectives, row.out_of_scope) == ("nccl", "One. Two.")


def test_the_drivers_reserve_is_no_use_of_the_gpu(rows):
    """nvidia-smi shows nothing used on an idle A100, version 1 of NVML's call 881 MiB: 81,920 of NVML, 81,039 of CUDA."""
    found = [row for row in rows["optimum_benchmark"] if row.peak_device_bytes]
    assert found
    for row in found:
        assert row.environment["as_read"]["peak_device_bytes"] - row.peak_device_bytes == 881 * 2**20
        assert row.peak_device_bytes - row.peak_reserved_bytes > 400 * 2**20  # the context


def test_reserved_memory_that_loading_left_is_kept_aside(rows):
    old = [row for row in rows["optimum_benchmark"] if row.source_version.startswith("6a25a6db")]
    assert any(set(row.environment.get("unread", {})) == {"peak_reserved_bytes", "peak_device_bytes"} for row in old)
    for row in old:
        assert row.peak_reserved_bytes is row.peak_device_bytes is None
        assert row.peak_allocated_bytes > 10**9
        assert bool(row.out_of_scope) == (row.job.inference.new_tokens == 1)


@pytest.mark.parametrize("name", READ)
def test_a_reason_is_a_sentence(rows, name):
    assert all(row.out_of_scope.endswith(".") for row in rows[name] if row.out_of_scope)


def test_a_damaged_source_is_refused_by_line(tmp_path):
    source = tmp_path / "optimum_benchmark.jsonl"
    line = lines("optimum_benchmark")[0]
    source.write_text(json.dumps(line) + "\n" + json.dumps({key: line[key] for key in line if key != "measured"}))
    with pytest.raises(RecordError, match=r"optimum_benchmark\.jsonl, line 2: .*restore the source file"):
        read_optimum_benchmark(source)
