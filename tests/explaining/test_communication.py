"""Volumes of communication: hand counts, the papers' own results, and what all ranks send together."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from peakcast.answers.explanation import Collective
from peakcast.doors.questions import translation_of
from peakcast.explaining.communication import communication
from peakcast.jobs.spec import TrainingJob
from peakcast.models.ledger.parameters.inventory import num_parameters

HIDDEN = 2048 * 4096 * 2
"""One [tokens, hidden_size] tensor of llama-3.1-8b in bfloat16, 2,048 tokens."""


def job(layout: dict[str, Any], **others: Any) -> TrainingJob:
    return translation_of({"architecture": "llama-3.1-8b", "parallelism": layout, **others}).job


def megatron(layout: dict[str, Any], **others: Any) -> TrainingJob:
    return job(layout, framework="megatron", **others)


def sent(rows: tuple[Collective, ...], axis: str, where: str = "") -> int:
    return sum(row.sent_per_iteration_bytes for row in rows if row.axis == axis and where in row.where)


def test_tensor_parallelism_by_hand() -> None:
    """Two all-reduces a layer forward and two backward (Shoeybi et al. 2019); each sends 2(n−1)/n of a hidden state."""
    rows = communication(megatron({"tensor_parallel_size": 4}), 0)
    assert {row.function for row in rows} == {"all-reduce"}
    assert sent(rows, "tensor parallel", "forward, each layer") == 32 * 2 * HIDDEN * 6 // 4
    assert sent(rows, "tensor parallel", "backward, each layer") == 32 * 2 * HIDDEN * 6 // 4
    loss = [row for row in rows if row.where.startswith("loss")]
    assert sum(row.calls_per_iteration for row in loss) == 3
    assert {row.message_bytes for row in loss} == {2048 * 4}


def test_sequence_parallelism_moves_as_much_and_gathers_the_inputs_once_more() -> None:
    """Korthikanti et al. 2022, section 4.2.2: the same volume, except what the weight gradients gather again."""
    plain = communication(megatron({"tensor_parallel_size": 4}), 0)
    shared = communication(megatron({"tensor_parallel_size": 4, "sequence_parallel": True}), 0)
    layers = "each layer"
    again = [row for row in shared if "again, for weight gradients" in row.what]
    assert sum(row.sent_per_iteration_bytes for row in again) == 32 * 2 * HIDDEN * 3 // 4
    assert sent(shared, "tensor parallel", layers) == sent(plain, "tensor parallel", layers) + sum(
        row.sent_per_iteration_bytes for row in again
    )


def test_recomputation_repeats_the_forward_exchanges() -> None:
    rows = communication(megatron({"tensor_parallel_size": 2}, activation_checkpointing={"mode": "full"}), 0)
    assert sent(rows, "tensor parallel", "recomputed layers") == sent(rows, "tensor parallel", "forward, each layer")


def test_gradients_of_norms_are_summed_under_sequence_parallelism() -> None:
    rows = communication(megatron({"tensor_parallel_size": 2, "sequence_parallel": True}), 0)
    (norms,) = [row for row in rows if "norms" in row.what]
    assert norms.message_bytes == (2 * 32 + 1) * 4096 * 2
    assert (norms.calls_per_micro_batch, norms.calls_per_iteration) == (0, 1)


def test_context_parallel_keys_and_values_go_around_the_ring() -> None:
    """n − 1 hops forward; backward the keys and values again and their gradients (Transformer Engine, KV P2P)."""
    rows = communication(megatron({"context_parallel_size": 4}), 0)
    key_values = 2 * (2048 // 4) * 8 * 128 * 2
    assert sent(rows, "context parallel", "forward") == 32 * 3 * key_values
    assert sent(rows, "context parallel", "backward") == 32 * 6 * key_values


def test_pipeline_sends_by_hand() -> None:
    """Each stage but the last sends its hidden states forward, each but the first gradients back, per micro-batch."""
    layout = {"pipeline_parallel_size": 4, "tensor_parallel_size": 2, "sequence_parallel": True}
    pipelined = megatron(layout, gradient_accumulation_steps=8)
    for rank, sends in ((0, 1), (2, 2), (4, 2), (6, 1)):
        rows = communication(pipelined, rank)
        assert sent(rows, "pipeline parallel") == sends * 8 * HIDDEN // 2


def test_an_interleaved_pipeline_sends_once_per_chunk() -> None:
    layout = {"pipeline_parallel_size": 4, "virtual_pipeline_stages": 2, "pipeline_schedule": "interleaved_1f1b"}
    pipelined = megatron(layout, gradient_accumulation_steps=4)
    assert sent(communication(pipelined, 0), "pipeline parallel") == (2 + 1) * 4 * HIDDEN
    assert sent(communication(pipelined, 1), "pipeline parallel") == (2 + 2) * 4 * HIDDEN


def test_a_tied_embedding_is_summed_between_the_ends() -> None:
    layout = {"pipeline_parallel_size": 4}
    tied = translation_of({"architecture": "llama-3.2-1b", "framework": "megatron", "parallelism": layout}).job
    table = 128_256 * 2048 * 2
    assert sent(communication(tied, 0), "embedding") == sent(communication(tied, 3), "embedding") == table
    assert sent(communication(tied, 1), "embedding") == 0


def test_experts_tokens_go_and_come_in_both_directions() -> None:
    mixtral = translation_of(
        {
            "architecture": "mixtral-8x7b",
            "framework": "megatron",
            "parallelism": {"data_parallel_size": 8, "expert_parallel_size": 8},
            "framework_options": {"moe_token_dispatcher_type": "alltoall"},
        }
    ).job
    rows = communication(mixtral, 0)
    tokens = 2048 * 4096 * 2 * 2  # two experts a token
    assert sent(rows, "expert parallel") == 32 * 4 * tokens * 7 // 8
    assert {row.function for row in rows if row.axis == "expert parallel"} == {"all-to-all"}


# -- data parallelism: Rajbhandari et al. 2019, section 7, with Ψ the bytes of the parameters -----------------------------

PSI = 2 * 8_030_261_248
PART = 7 / 8
"""(n − 1) / n of eight ranks, which the paper takes for 1."""


@pytest.mark.parametrize(
    ("layout", "others", "volume"),
    [
        ({}, {}, 2.0),
        ({"zero_stage": 1}, {"framework": "deepspeed"}, 2.0),
        ({"zero_stage": 2}, {"framework": "deepspeed"}, 2.0),
        ({"zero_stage": 3}, {"framework": "deepspeed"}, 3.0),
    ],
)
def test_zero_moves_what_its_paper_says(layout: dict[str, int], others: dict[str, Any], volume: float) -> None:
    rows = communication(job({"data_parallel_size": 8, **layout}, **others), 0)
    assert sent(rows, "data parallel") == pytest.approx(volume * PSI * PART, rel=1e-6)


def test_fsdp_gathers_layers_twice_and_the_rest_once() -> None:
    rows = communication(job({"data_parallel_size": 8, "sharding": "fsdp2"}), 0)
    rest = 2 * (2 * 128_256 * 4096 + 4096)
    assert sent(rows, "data parallel") == pytest.approx((3 * PSI - rest) * PART, rel=1e-6)


def test_accumulated_gradients_travel_once_except_under_zero_2() -> None:
    once = communication(job({"data_parallel_size": 8}, gradient_accumulation_steps=4), 0)
    assert sent(once, "data parallel") == pytest.approx(2 * PSI * PART, rel=1e-6)
    stage_2 = job({"data_parallel_size": 8, "zero_stage": 2}, framework="deepspeed", gradient_accumulation_steps=4)
    every = communication(stage_2, 0)
    assert sent(every, "data parallel") == pytest.approx((4 + 1) * PSI * PART, rel=1e-6)


def test_adapters_alone_are_summed() -> None:
    adapted = job({"data_parallel_size": 8}, finetuning={"method": "lora", "rank": 16})
    elements = 32 * 16 * ((4096 + 4096) + (4096 + 1024))  # q and v, A and B
    assert sent(communication(adapted, 0), "data parallel") == pytest.approx(2 * 4 * elements * PART, rel=1e-4)


@pytest.mark.parametrize(
    ("method", "elements"),
    [
        ("ia3", 32 * (4096 + 1024 + 1024)),  # a number for each output of q, k and v
        ("vera", 32 * (256 + 4096 + 256 + 1024)),  # a number for each row of both products; the shared matrices are frozen
    ],
)
def test_adapters_of_other_methods_are_summed_too(method: str, elements: int) -> None:
    rank = {"rank": 256} if method == "vera" else {"targets": ["q_proj", "k_proj", "v_proj"]}
    targets = {"targets": ["q_proj", "v_proj"]} if method == "vera" else {}
    adapted = job({"data_parallel_size": 8}, finetuning={"method": method, **rank, **targets})
    assert sent(communication(adapted, 0), "data parallel") == pytest.approx(2 * 4 * elements * PART, rel=1e-4)


def test_the_distributed_optimizer_scatters_gradients_and_gathers_weights() -> None:
    precision = {"gradients": "float32"}
    rows = communication(megatron({"data_parallel_size": 8, "zero_stage": 1}, precision=precision), 0)
    elements = num_parameters(megatron({}).architecture)
    by_function = {row.function: row for row in rows}
    assert by_function["reduce-scatter"].sent_per_iteration_bytes == 4 * elements * 7 // 8
    assert by_function["all-gather"].sent_per_iteration_bytes == 2 * elements * 7 // 8


def test_the_cluster_sends_what_its_ranks_send(jobs: dict[str, TrainingJob]) -> None:
    ranks = Counter[str]()
    cluster: dict[str, int] = {}
    for rank in range(8):
        for row in communication(jobs["megatron"], rank):
            key = f"{row.axis} {row.function} {row.what} {row.where}"
            ranks[key] += row.sent_per_iteration_bytes
            cluster[key] = row.sent_in_cluster_bytes
    assert dict(ranks) == cluster


def test_every_kind_has_a_source_and_one_rank_talks_to_nobody(jobs: dict[str, TrainingJob]) -> None:
    assert all(row.source for row in communication(jobs["megatron"], 0))
    assert communication(jobs["full"], 0) == ()


def test_everything_counts_what_other_stages_send() -> None:
    """A tied embedding's gradient is summed by the first and the last of four stages; it is listed, with no calls, for a
    stage between them, so that every rank shows the same sums of the cluster."""
    pipelined = translation_of(
        {"architecture": "llama-3.2-1b", "framework": "megatron", "parallelism": {"pipeline_parallel_size": 4}}
    ).job
    listed = [communication(pipelined, rank) for rank in range(4)]
    assert len({sum(row.sent_in_cluster_bytes for row in rows) for rows in listed}) == 1
    (between,) = (row for row in listed[1] if "embedding" in row.what)
    assert (between.calls_per_iteration, between.sent_per_iteration_bytes) == (0, 0)
    assert between.sent_in_cluster_bytes == 2 * 128256 * 2048 * between.message_bytes // (128256 * 2048)
