"""accelerate's `parallelism_config`: the axes of a run's ranks."""

from __future__ import annotations

import pytest

from peakcast.core.errors import SpecError
from peakcast.dialects.huggingface.job import from_huggingface
from peakcast.doors.questions import translation_of

FSDP2 = {"fsdp_version": 2}
LAUNCHER = """
distributed_type: FSDP
fsdp_config: {fsdp_version: 2, fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP}
mixed_precision: bf16
num_processes: 16
parallelism_config:
  parallelism_config_dp_replicate_size: 2
  parallelism_config_dp_shard_size: 4
  parallelism_config_tp_size: 1
  parallelism_config_cp_size: 2
  parallelism_config_cp_comm_strategy: alltoall
---
model_name_or_path: meta-llama/Llama-3.1-8B
per_device_train_batch_size: 1
max_length: 4096
"""


def layout(num_gpus, fsdp=FSDP2, **sizes):
    found = from_huggingface("llama-3.1-8b", {"parallelism_config": sizes}, fsdp=fsdp, num_gpus=num_gpus)
    return found, found.job.parallelism


def test_a_launchers_file_reaches_the_job():
    found = translation_of(LAUNCHER)
    spread = found.job.parallelism
    assert (spread.sharding, spread.data_parallel_size, spread.context_parallel_size) == ("hsdp", 8, 2)
    assert found.job.framework_options["shard_group_size"] == 4 * 2  # ranks of one sequence share the weights too
    assert found.job.framework_options["context_parallel_rotation"] == "alltoall"
    assert (found.unsupported, found.unknown) == ((), ())


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        ({"dp_shard_size": 8}, ("fsdp2", 8, 1, 1)),
        ({"dp_shard_size": 4, "tp_size": 2}, ("fsdp2", 4, 1, 2)),
        ({"cp_size": 8}, ("fsdp2", 1, 8, 1)),
        ({"dp_replicate_size": 8}, ("none", 8, 1, 1)),
        ({"dp_replicate_size": 2, "dp_shard_size": 4}, ("hsdp", 8, 1, 1)),
        ({}, ("fsdp2", 8, 1, 1)),
    ],
)
def test_sizes_are_axes_of_the_layout(sizes, expected):
    spread = layout(8, **sizes)[1]
    axes = (spread.data_parallel_size, spread.context_parallel_size, spread.tensor_parallel_size)
    assert (spread.sharding, *axes) == expected
    assert spread.world_size == 8


def test_what_a_job_cannot_say_is_said():
    found, spread = layout(8, dp_shard_size=2, sp_size=4, sp_backend="deepspeed", seats=9)
    assert spread.context_parallel_size == 4
    assert "Ulysses" in found.unsupported[0]
    assert found.unknown == ("seats",)
    ring, ulysses = (layout(8, dp_shard_size=2, cp_size=4, cp_backend=backend)[0] for backend in ("torch", "deepspeed"))
    assert (ring.unsupported, ulysses.unsupported) == ((), found.unsupported)
    older = layout(8, {"fsdp_version": 1}, dp_replicate_size=2, dp_shard_size=4)[0]
    assert "not modelled with fsdp1" in older.unsupported[0]


def test_sizes_that_do_not_make_up_the_run_are_refused():
    words = r"tp_size=4 is of a layout of 8 ranks \(.*dp_shard_size=2 × .*tp_size=4\), which are not the 16 .* --num-gpus 8"
    with pytest.raises(SpecError, match=words):
        layout(16, dp_shard_size=2, tp_size=4)
    with pytest.raises(SpecError, match="dp_shard_size=4 is of a layout of 4 ranks"):
        layout(8, dp_shard_size=4)


@pytest.mark.parametrize("number", [1e12, 2.5, float("nan"), "8", True, 0])
def test_a_number_of_gpus_is_a_whole_number_of_at_most_a_million_or_so(number):
    with pytest.raises(SpecError, match=r"num_gpus=.* must be a whole number from 1 to 1,048,576, such as 8"):
        layout(number)
    assert layout(8.0)[1].data_parallel_size == 8
