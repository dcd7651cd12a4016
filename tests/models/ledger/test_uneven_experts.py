"""Experts that run one after the other: the fullest takes more than an equal share, in the peak and not in the replay."""

from dataclasses import replace

import pytest

from peakcast import catalog
from peakcast.core.fields import FrozenMapping
from peakcast.jobs.architecture import MixtureOfExperts
from peakcast.jobs.spec import ActivationCheckpointing, Finetuning, TrainingJob
from peakcast.models.baseline.baseline import baseline
from peakcast.models.baseline.evenly_routed import evenly_routed, fullest_expert
from peakcast.models.baseline.ledger import ledger
from peakcast.models.ledger.huggingface.blocks.routed import rows_of_groups

EIGHT = MixtureOfExperts(num_experts=8, num_experts_per_tok=2, moe_intermediate_size=128)
GPU = catalog.gpu("A100-80GB")


def job(release="4.45.2", **options):
    return TrainingJob(
        architecture=replace(catalog.architecture("mixtral-8x7b"), num_hidden_layers=1, vocab_size=512),
        framework="huggingface",
        sequence_length=1024,
        micro_batch_size=8,
        finetuning=Finetuning(method="lora", rank=8),
        activation_checkpointing=ActivationCheckpointing(mode="full"),
        versions=FrozenMapping({"transformers": release}),
        framework_options=FrozenMapping(options),
    )


def peak(one):
    return ledger(one, device=GPU, step="steady").peak().num_bytes


def test_equal_shares_are_a_group_each():
    assert rows_of_groups(1024, EIGHT, 8, 1) == [256] * 8


def test_the_fullest_of_eight_takes_twice_a_share_and_the_others_the_rest():
    rows = rows_of_groups(1024, EIGHT, 8, 2)  # of 2,048 rows 512, and a seventh of 1,536 each
    assert rows == [219] * 7 + [511]


def test_no_expert_takes_more_than_every_token():
    four = replace(EIGHT, num_experts=4)
    assert rows_of_groups(1024, four, 4, 8) == [341] * 3 + [1023]


def test_one_expert_of_a_group_is_the_fullest():
    many = replace(EIGHT, num_experts=64)
    assert rows_of_groups(1024, many, 16, 2) == [126] * 15 + [126 + 32]  # 4 experts a group, of 32 rows each; one of 64


def test_a_fuller_expert_raises_the_peak_and_nothing_that_is_kept():
    loads = [job(fullest_expert_load=load) for load in (1, 2, 4)]
    assert peak(loads[0]) < peak(loads[1]) < peak(loads[2])
    even, uneven = (ledger(one, device=GPU, step="steady").phase_peaks() for one in loads[:2])
    assert {phase.name for phase in even if even[phase] < uneven[phase]} == {"FORWARD", "BACKWARD"}


def test_the_cache_is_that_of_equal_shares_and_the_fullest_expert_comes_on_top():
    even, uneven = baseline(job(fullest_expert_load=1), GPU), baseline(job(), GPU)
    more = uneven.peak_allocated_bytes - even.peak_allocated_bytes
    assert more > 0
    assert uneven.peak_reserved_bytes - even.peak_reserved_bytes == more
    assert uneven.replayed_allocated_bytes - even.replayed_allocated_bytes == more


@pytest.mark.parametrize("release", ["5.1.0", "5.17.0"])
def test_grouped_products_do_not_depend_on_the_load(release):
    one = job(release)
    assert evenly_routed(one) == one
    assert fullest_expert(one) == ""
    assert peak(one) == peak(job(release, fullest_expert_load=8))


def test_the_load_is_among_the_assumptions_of_an_answer():
    assert "framework_options.fullest_expert_load=1" in fullest_expert(job())
    assert fullest_expert(job(fullest_expert_load=1)) == ""
