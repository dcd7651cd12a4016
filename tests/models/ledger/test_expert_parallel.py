"""Expert parallelism of a torch loop: who has which experts, and what the scope says of the rest."""

from __future__ import annotations

import pytest

from peakcast import catalog
from peakcast.core.fields import FrozenMapping
from peakcast.jobs.architecture import Architecture
from peakcast.jobs.spec import Loss, Optimizer, Parallelism, TrainingJob
from peakcast.models.baseline.ledger import ledger
from peakcast.models.ledger.huggingface.stored_parameters import stored_parameters
from peakcast.models.ledger.scope.scope import out_of_scope

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


TITAN = FrozenMapping({"torchtitan": "0.3"})


def test_torchtitans_exchange_is_in_scope_under_fsdp2_alone(network):
    titan = job(network, 2, sharding="fsdp2").replace(versions=TITAN)
    assert out_of_scope(titan) == ""
    for changed in ({"optimizer": Optimizer(name="adafactor")}, {"loss": Loss(fused_linear_cross_entropy=True)}):
        assert "compared with its trace" in out_of_scope(titan.replace(**changed))
    assert "without other parallelism" in out_of_scope(job(network, 2, sharding="hsdp").replace(versions=TITAN))


def test_sent_tokens_stand_beside_what_was_sent_and_what_they_are_sorted_into(network):
    """`_permute` runs while the caller still names the rows that it sent and those that came: three times all pairs."""
    titan = job(network, 2, sharding="fsdp2").replace(versions=TITAN)
    timeline = ledger(titan, step="steady")
    instant = timeline.labels.index("mlp.experts.permute")
    rows = 256 * network.moe.num_experts_per_tok * network.hidden_size * 2
    alive = timeline.alive_at(instant)
    named = ("mlp.experts.take", "mlp.experts.send", "mlp.experts.permute")
    found = [int(timeline.num_bytes[i]) for i, name in enumerate(timeline.names) if alive[i] and name in named]
    assert found == [rows] * 3
    assert timeline.labels.count("mlp.experts.send") == 2 * network.num_hidden_layers  # and the gradients' way back


def test_experts_of_one_rank_each_are_copied_and_never_gathered(network):
    """Two groups in a layer: of the experts' there is no buffer of all ranks where nobody shares them."""
    for experts, buffers in ((4, 2), (RANKS, 1)):
        timeline = ledger(job(network, experts, sharding="fsdp2").replace(versions=TITAN), step="steady")
        pairs = list(zip(timeline.names, timeline.modules, strict=True))
        assert pairs.count(("all_gather.output", "layers.3")) == 2 * buffers  # in forward and in backward
