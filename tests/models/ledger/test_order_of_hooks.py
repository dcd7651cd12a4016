"""What stands at once because one hook comes before another, counted by hand."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from peakcast.dialects.common.job_file import job_from_mapping
from peakcast.jobs.spec import TrainingJob
from peakcast.models.baseline.ledger import ledger
from peakcast.models.ledger.scope.scope import out_of_scope
from peakcast.timelines.timeline import Phase, Timeline

WIDTH, INNER, WORDS, LAYERS = 256, 512, 4096, 3
"""So that every tensor is a multiple of the 512 bytes that the allocator rounds to."""
LLAMA = {
    **{"name": "small", "model_type": "llama", "hidden_size": WIDTH, "num_hidden_layers": LAYERS, "num_attention_heads": 4},
    **{"num_key_value_heads": 4, "head_dim": 64, "intermediate_size": INNER, "vocab_size": WORDS},
    "tie_word_embeddings": False,
}
FSDP1 = {"data_parallel_size": 2, "sharding": "fsdp1"}
LORA = {"method": "lora", "rank": 8, "targets": ["q_proj", "v_proj"]}


def job(**said: Any) -> TrainingJob:
    made = job_from_mapping({"architecture": LLAMA, "sequence_length": 128, **said})
    assert out_of_scope(made) == ""
    return made


def most_at_once(timeline: Timeline, phase: Phase, name: str, num_bytes: int = 0) -> int:
    """Of the tensors of a name (of at least so many bytes), how many stand together at most in a phase."""
    found = np.array([n == name and size >= num_bytes for n, size in zip(timeline.names, timeline.num_bytes, strict=True)])
    instants = np.flatnonzero(np.asarray(timeline.phases) == phase)
    return max(int((found & (timeline.born <= i) & (i < timeline.dies)).sum()) for i in instants)


@pytest.mark.parametrize("words", [WORDS, 2 * WORDS])
@pytest.mark.parametrize("accumulated", [1, 2])
def test_a_shared_table_has_two_halves_of_a_gradient_and_their_sum(words: int, accumulated: int) -> None:
    """Under ZeRO-3 as without it: lm_head's half waits for the embedding's."""
    timeline = ledger(
        job(
            architecture={**LLAMA, "vocab_size": words, "tie_word_embeddings": True},
            framework="deepspeed",
            gradient_accumulation_steps=accumulated,
            precision={"optimizer_states": "float32", "main_parameters": "float32"},
            parallelism={"data_parallel_size": 4, "zero_stage": 3},
        )
    )
    table = words * WIDTH * 2
    backward = (i for i, phase in enumerate(timeline.phases) if phase == Phase.BACKWARD)
    *_, at = (i for i in backward if timeline.labels[i] == "tied_weight")
    alive = (timeline.born <= at) & (at < timeline.dies)
    sizes = {name: int(timeline.num_bytes[alive][i]) for i, name in enumerate(np.array(timeline.names)[alive])}
    assert sizes["lm_head.weight.grad"] == table
    assert sizes["tied_weight.temporary"] == 2 * table


@pytest.mark.parametrize("prefetch", ["", "BACKWARD_PRE"])
@pytest.mark.parametrize("checkpointing", [{"mode": "none"}, {"mode": "full"}, {"mode": "full", "use_reentrant": True}])
def test_two_frozen_layers_are_gathered_at_a_time(prefetch: str, checkpointing: dict[str, Any]) -> None:
    options = {"fsdp1_backward_prefetch": prefetch}
    one = job(parallelism=FSDP1, finetuning=LORA, activation_checkpointing=checkpointing, framework_options=options)
    layer = (4 * WIDTH * WIDTH + 3 * WIDTH * INNER) * 2
    backward = most_at_once(ledger(one), Phase.BACKWARD, "flat_param.gathered", layer)
    assert backward == 2 + 1  # and the root, whose two tables are larger


@pytest.mark.parametrize("sharding", ["fsdp1", "fsdp2"])
def test_what_is_not_resharded_after_forward_is_all_there_when_the_loss_is_made(sharding: str) -> None:
    layout = {"data_parallel_size": 2, "sharding": sharding}
    stays, goes = (
        ledger(job(parallelism=layout, framework_options={"fsdp_reshard_after_forward": reshards}))
        for reshards in (False, True)
    )
    layers = LAYERS * (4 * WIDTH * WIDTH + 3 * WIDTH * INNER + 2 * WIDTH) * 2
    table = WORDS * WIDTH * 2 if sharding == "fsdp2" else 0  # the embedding's own unit; FSDP1's root stays anyway
    assert stays.peak(Phase.LOSS).num_bytes - goes.peak(Phase.LOSS).num_bytes == layers + table


def test_the_flat_gradient_of_a_partition_within_one_tensor_is_a_view() -> None:
    """Of four ranks the first has a part of the token table alone: nothing is joined, and in fp32 nothing widened."""
    wide = {"parameters": "float32", "compute": "float32", "gradients": "float32", "optimizer_states": "float32"}
    stage = {"data_parallel_size": 4, "zero_stage": 1}
    timeline = ledger(job(framework="deepspeed", precision=wide, parallelism=stage, optimizer={"implementation": "fused"}))
    made = {name for name, born in zip(timeline.names, timeline.born, strict=True) if born > 0}
    assert "fp32_partition.grad" not in made
    assert sum(name == "partition.flat_gradient" for name in timeline.names) == 1  # of the group without weight decay


@pytest.mark.parametrize(
    ("said", "named"),
    [
        (
            {
                "parallelism": FSDP1,
                "offload": {"activations": True},
                "activation_checkpointing": {"mode": "full"},
                "framework_options": {"checkpoints_around_units": True},
            },
            "activations cannot be offloaded",
        ),
        (
            {
                "parallelism": FSDP1,
                "framework_options": {"fsdp_reshard_after_forward": False, "fsdp1_use_orig_params": True},
            },
            "fsdp_reshard_after_forward",
        ),
        (
            {
                "parallelism": {"data_parallel_size": 2},
                "gradient_accumulation_steps": 2,
                "framework_options": {"ddp_gradient_as_bucket_view": True},
            },
            "ddp_gradient_as_bucket_view",
        ),
    ],
)
def test_what_no_trace_has_confirmed_is_named(said: dict[str, Any], named: str) -> None:
    assert named in out_of_scope(job_from_mapping({"architecture": LLAMA, "sequence_length": 128, **said}))
