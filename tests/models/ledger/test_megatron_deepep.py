"""DeepEP's and HybridEP's dispatch, counted by hand: how many tokens a rank gets, what is made of them; what is not
covered, by name."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest

from peakcast.dialects.megatron.job import from_megatron
from peakcast.jobs.spec import TrainingJob
from peakcast.models.ledger.megatron.contexts import expert_context
from peakcast.models.ledger.megatron.ledger import megatron_ledger
from peakcast.models.ledger.scope.ignored import ignored_findings
from peakcast.models.ledger.scope.scope import out_of_scope
from peakcast.timelines.timeline import Phase

T, H, EXPERTS, TOP = 512, 256, 16, 4
SMALL: dict[str, Any] = {
    "num_layers": 1, "hidden_size": H, "ffn_hidden_size": 512, "num_attention_heads": 4, "micro_batch_size": 1,
    "seq_length": T, "max_position_embeddings": T, "vocab_size": 512, "bf16": True, "swiglu": True,
    "position_embedding_type": "rope", "normalization": "RMSNorm", "disable_bias_linear": True,
    "untie_embeddings_and_output_weights": True, "attention_backend": "fused", "attention_dropout": 0.0,
    "hidden_dropout": 0.0, "num_experts": EXPERTS, "moe_router_topk": TOP, "moe_ffn_hidden_size": 128,
    "moe_grouped_gemm": True, "moe_permute_fusion": True, "moe_router_dtype": "fp32", "expert_model_parallel_size": 4,
    "moe_token_dispatcher_type": "flex",
}  # fmt: skip


def job(num_gpus: int = 4, **arguments: Any) -> TrainingJob:
    return from_megatron({**SMALL, "global_batch_size": num_gpus, **arguments}, num_gpus).job


def enumerated(local: int, groups: int, chosen: int) -> float:
    """Share of all choices of TOP experts in `chosen` of `groups` groups that have one of the first `local` experts."""
    size, hits, all_of_them = EXPERTS // groups, 0, 0
    for some in combinations(range(groups), chosen):
        allowed = [group * size + i for group in some for i in range(size)]
        for experts in combinations(allowed, TOP):
            all_of_them += 1
            hits += min(experts) < local
    return hits / all_of_them


@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
@pytest.mark.parametrize(("groups", "chosen"), [(1, 1), (4, 2), (8, 4), (4, 4)])
def test_a_rank_gets_a_token_once_however_many_of_its_experts_it_chose(ranks: int, groups: int, chosen: int) -> None:
    limits = {"moe_router_num_groups": groups, "moe_router_group_topk": chosen} if groups > 1 else {}
    experts = expert_context(job(ranks, expert_model_parallel_size=ranks, **limits))
    assert experts.received_tokens(T) == round(T * ranks * enumerated(EXPERTS // ranks, groups, chosen))
    assert experts.received_rows(T) == T * TOP


def test_all_tokens_come_where_the_worst_is_assumed() -> None:
    experts = expert_context(job(moe_routing="worst_case"))
    assert experts.received_tokens(T) == T * 4


def made(one: TrainingJob, name: str) -> set[int]:
    timeline = megatron_ledger(one)
    phases = timeline.phases
    named = zip(timeline.names, timeline.num_bytes, timeline.born, strict=True)
    return {int(size) for each, size, born in named if each == name and phases[born] == Phase.FORWARD}


def in_blocks(num_bytes: int) -> int:
    return -(-num_bytes // 512) * 512


def test_what_arrives_is_copied_for_experts_and_added_up_before_it_goes_back() -> None:
    flex = job()
    arrived = expert_context(flex).received_tokens(T)
    assert made(flex, "dispatch.deepep") == made(flex, "combine.unpermute") == {arrived * H * 2}
    assert made(flex, "dispatch.permute") == {T * TOP * H * 2}
    assert made(flex, "dispatch.deepep_probabilities") == {in_blocks(arrived * TOP * 4)}
    assert made(flex, "dispatch.multihot_probabilities") == {in_blocks(arrived * EXPERTS // 4 * 4)}
    assert made(flex, "combine.deepep") == {T * H * 2}


def test_hybridep_makes_rows_for_experts_at_once() -> None:
    """What arrives and what goes back lies in buffers outside PyTorch, so nothing is permuted or added up beside them."""
    hybrid = job(moe_flex_dispatcher_backend="hybridep")
    assert made(hybrid, "dispatch.hybridep") == {T * TOP * H * 2}
    assert made(hybrid, "dispatch.hybridep_probabilities") == {in_blocks(T * TOP * 4)}
    assert made(hybrid, "combine.hybridep") == {T * H * 2}
    assert made(hybrid, "dispatch.permute") == made(hybrid, "combine.unpermute") == set()


def test_an_older_exchange_is_counted_as_the_newer_with_a_word() -> None:
    older, newer = (job(moe_token_dispatcher_type=kind) for kind in ("alltoall_seq", "alltoall"))
    assert megatron_ledger(older).peak() == megatron_ledger(newer).peak()
    assert "alltoall_seq" in out_of_scope(older)


def test_buffers_outside_pytorch_are_a_finding() -> None:
    (found,) = [each for each in ignored_findings(job()) if each.parameter == "framework_options.moe_token_dispatcher_type"]
    assert (found.code, found.direction) == ("setting_ignored", "more")
    assert not out_of_scope(job())


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"moe_flex_dispatcher_backend": "hybridep"}, "HybridEP"),
        ({"moe_expert_capacity_factor": 1.0}, "moe_expert_capacity_factor"),
        ({"expert_model_parallel_size": 1}, "without expert parallelism"),
        ({"tensor_model_parallel_size": 2, "sequence_parallel": True, "num_gpus": 8}, "expert tensor parallelism"),
    ],
)
def test_what_is_not_covered_is_named(arguments: dict[str, Any], named: str) -> None:
    assert named in str(out_of_scope(job(**arguments)))
