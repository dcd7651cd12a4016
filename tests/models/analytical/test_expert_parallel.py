"""Expert parallelism of a torch loop: who has which experts, and what the scope says of the rest."""

from __future__ import annotations

import pytest

from peakcast import catalog
from peakcast.architecture import Architecture
from peakcast.models.analytical.ledger import ledger
from peakcast.models.analytical.scope import out_of_scope
from peakcast.models.analytical.stored_parameters import stored_parameters
from peakcast.spec import Parallelism, TrainingJob

RANKS = 8


@pytest.fixture(scope="module")
def network() -> Architecture:
    return catalog.architecture("olmoe-1b-7b")


def job(network: Architecture, experts: int, **layout: object) -> TrainingJob:
    parallelism = Parallelism(data_parallel_size=RANKS, expert_parallel_size=experts, **layout)  # type: ignore[arg-type]
    return TrainingJob(architecture=network, framework="torch", sequence_length=256, parallelism=parallelism)


def bytes_between_steps(one: TrainingJob) -> int:
    return int(ledger(one, step="steady").totals[-1])


def test_a_rank_has_its_part_of_the_experts_and_all_of_the_rest(network):
    moe, width = network.moe, network.hidden_size
    experts = network.num_hidden_layers * moe.num_experts * 3 * moe.moe_intermediate_size * width
    whole, part = (sum(t.numel for t in stored_parameters(job(network, ep))) for ep in (1, 4))
    assert whole - part == experts * 3 // 4


def test_replicas_without_sharding_keep_their_experts_alone(network):
    moe, width = network.moe, network.hidden_size
    experts = network.num_hidden_layers * moe.num_experts * 3 * moe.moe_intermediate_size * width
    saved = bytes_between_steps(job(network, 1)) - bytes_between_steps(job(network, 2))
    assert saved == pytest.approx(experts // 2 * (2 + 2 + 2 + 2), rel=0.01)  # weights, two states, DDP's bucket


def test_sharding_leaves_as_much_of_every_expert_however_they_are_divided(network):
    found = {bytes_between_steps(job(network, experts, sharding="fsdp2")) for experts in (1, 2, 4, 8)}
    assert len(found) == 1


def test_fewer_experts_are_gathered_at_a_time(network):
    peaks = [ledger(job(network, n, sharding="fsdp2"), step="steady").peak().num_bytes for n in (1, 2, 8)]
    assert peaks == sorted(peaks, reverse=True)
    assert peaks[0] > peaks[-1]


def test_experts_of_more_ranks_than_experts_are_cut_along_their_width(network):
    layout = Parallelism(data_parallel_size=256, expert_parallel_size=8, sharding="fsdp2")
    one = job(network, 8).replace(parallelism=layout)
    parts = bytes_between_steps(one)
    even = sum(t.numel for t in stored_parameters(job(network, 1))) // 256 * 6  # weights and two states
    assert parts == pytest.approx(even, rel=0.02, abs=70 * 2**20)  # cuBLAS's workspaces


def test_the_scope_says_what_is_left_out(network):
    assert "exchange of tokens" in out_of_scope(job(network, 2, sharding="fsdp2"))
    assert "all experts" in out_of_scope(job(network, 2, zero_stage=1))
    assert out_of_scope(job(network, 1, sharding="fsdp2")) == ""
