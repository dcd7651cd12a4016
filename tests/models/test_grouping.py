from __future__ import annotations

from dataclasses import replace

import pytest

from peakcast.core.fields import FrozenMapping
from peakcast.core.units import GIB
from peakcast.jobs.architecture import MixtureOfExperts
from peakcast.jobs.spec import Parallelism
from peakcast.models.calibration.features import kinds
from peakcast.models.calibration.grouping import architecture_shape, bar_groups, layout_name, residual_group, size_of

MOE = MixtureOfExperts(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=512)


@pytest.mark.parametrize(
    ("sizes", "name"),
    [
        ({}, "single"),
        ({"data_parallel_size": 8}, "ddp"),
        ({"data_parallel_size": 8, "sharding": "fsdp2"}, "fsdp2"),
        ({"data_parallel_size": 8, "zero_stage": 3}, "zero3"),
        ({"tensor_parallel_size": 2, "sequence_parallel": True, "pipeline_parallel_size": 4}, "tp+sp+pp"),
        ({"context_parallel_size": 2, "data_parallel_size": 4, "expert_parallel_size": 4}, "ddp+cp+ep"),
    ],
)
def test_layouts_are_named_by_their_parts(fakes, sizes, name):
    architecture = fakes.architecture(moe=MOE) if "expert_parallel_size" in sizes else None
    assert layout_name(fakes.job(architecture=architecture, parallelism=Parallelism(**sizes))) == name


def test_megatron_fsdp_is_a_layout_of_its_own_that_gathers_weights(fakes):
    """Rows of the distributed optimizer, which it is set beside, say nothing of what it keeps and gathers."""
    layout = Parallelism(data_parallel_size=8, tensor_parallel_size=2, zero_stage=1)
    plain = fakes.job(framework="megatron", parallelism=layout)
    fsdp = plain.replace(framework_options=FrozenMapping({"use_megatron_fsdp": True}))
    assert [layout_name(job) for job in (plain, fsdp)] == ["zero1+tp", "megatron_fsdp+tp"]
    assert [kinds(job)["sharded"] for job in (plain, fsdp)] == [0, 1]


def test_one_shape_in_many_layouts_is_one_architecture(fakes):
    a = fakes.job(parallelism=Parallelism(tensor_parallel_size=2), sequence_length=512)
    assert architecture_shape(a) == architecture_shape(fakes.job()) == "llama/512x4/8"


def test_experts_make_another_architecture(fakes):
    assert architecture_shape(fakes.job(architecture=fakes.architecture(moe=MOE))) == "llama/512x4/8/e8"


def test_groups_of_bars_are_dense_or_routed_jobs_and_everything(fakes):
    job = fakes.job(framework="megatron", parallelism=Parallelism(tensor_parallel_size=2))
    assert bar_groups(job) == ("dense", "all")
    routed = job.replace(architecture=replace(job.architecture, moe=MOE))
    assert bar_groups(routed) == ("experts", "all")
    assert [residual_group(one) for one in (job, routed)] == ["megatron/tp", "megatron/tp/experts"]
    assert [size_of(size * GIB) for size in (0, 5, 20)] == ["small", "medium", "large"]
