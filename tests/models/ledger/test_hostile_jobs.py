"""Jobs that nobody should run: outside the ledger's scope they are answered with their reason or refused, never a fault."""

from __future__ import annotations

import random
from typing import Any

import pytest

import peakcast
from peakcast.core.errors import SpecError
from peakcast.dialects.common.job_file import job_from_mapping
from peakcast.doors.answering import answer
from peakcast.doors.questions import question
from peakcast.jobs import lengths
from peakcast.models.ledger.scope.scope import out_of_scope

LAYERS = {"num_hidden_layers": 4, "vocab_size": 512, "hidden_size": 64, "num_attention_heads": 4}
NETWORKS: dict[str, dict[str, Any]] = {
    "llama": {**LAYERS, "model_type": "llama", "intermediate_size": 128, "num_key_value_heads": 1},
    "tied": {**LAYERS, "model_type": "qwen2", "intermediate_size": 128, "tie_word_embeddings": True},
    "gpt2": {"model_type": "gpt2", "n_layer": 4, "n_embd": 64, "n_head": 4, "vocab_size": 512, "n_positions": 64},
    "bert": {**LAYERS, "model_type": "bert", "intermediate_size": 128, "max_position_embeddings": 64},
    "t5": {
        **{"model_type": "t5", "num_layers": 4, "num_decoder_layers": 4, "d_model": 64, "num_heads": 4, "d_kv": 16},
        **{"d_ff": 128, "vocab_size": 512},
    },
    "mixtral": {**LAYERS, "model_type": "mixtral", "intermediate_size": 128, "num_local_experts": 4},
    "deepseek": {
        **{**LAYERS, "model_type": "deepseek_v3", "intermediate_size": 128, "moe_intermediate_size": 32},
        **{"n_routed_experts": 8, "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1},
        **{"kv_lora_rank": 16, "q_lora_rank": 24, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16},
    },
    "mamba": {"model_type": "mamba", "num_hidden_layers": 4, "hidden_size": 64, "vocab_size": 512},
}
CHOICES: dict[str, tuple[Any, ...]] = {
    "framework": ("huggingface", "torch", "megatron", "deepspeed"),
    "task": ("train", "train", "train", "inference"),
    "inference.new_tokens": (0, 3),
    "inference.cache": ("dynamic", "static"),
    "gradient_accumulation_steps": (1, 2, 4),
    "precision.parameters": ("bfloat16", "float32"),
    "precision.compute": ("bfloat16", "float8"),
    "optimizer.name": ("adamw", "lomo", "paged_adamw_8bit", "muon", "adafactor"),
    "finetuning.method": ("full", "full", "lora", "qlora"),
    "attention": ("sdpa", "eager", "flex"),
    "activation_checkpointing.mode": ("none", "full", "selective"),
    "loss.fused_linear_cross_entropy": (False, True),
    "loss.kind": ("cross_entropy", "cross_entropy", "dpo", "reward", "kto", "grpo"),
    "compile": (False, True),
    "batch.form": ("rows", "masked", "padding_free"),
    "parallelism.data_parallel_size": (1, 2, 3),
    "parallelism.sharding": ("none", "fsdp1", "fsdp2", "hsdp"),
    "parallelism.zero_stage": (0, 0, 1, 2, 3),
    "parallelism.tensor_parallel_size": (1, 1, 2, 4),
    "parallelism.sequence_parallel": (False, True),
    "parallelism.pipeline_parallel_size": (1, 1, 2),
    "parallelism.virtual_pipeline_stages": (1, 1, 2),
    "parallelism.pipeline_schedule": ("1f1b", "gpipe", "interleaved_1f1b", "zero_bubble"),
    "parallelism.context_parallel_size": (1, 1, 2),
    "offload.parameters": (False, True),
    "offload.optimizer": (False, True),
    "offload.activations": (False, True),
}


def drawn(seed: int) -> dict[str, Any]:
    """A job of every framework's and method's fields at once, a third of them set."""
    draw = random.Random(seed)
    values: dict[str, Any] = {
        "architecture": draw.choice(list(NETWORKS.values())),
        "sequence_length": 32,
        "finetuning": {"rank": 4},
    }
    for path, choices in CHOICES.items():
        if draw.random() < 0.35:
            *parents, name = path.split(".")
            place = values
            for parent in parents:
                place = place.setdefault(parent, {})
            place[name] = draw.choice(choices)
    if values["finetuning"].get("method") == "qlora":  # weights that all train are not quantised
        values["finetuning"]["quantization"] = "nf4"
    return values


def test_any_mixture_of_fields_is_answered_or_refused_with_the_parameter() -> None:
    refusals, answered = [], 0
    for seed in range(120):
        try:
            found = answer(question(drawn(seed), "H100-80GB"))
        except SpecError as refusal:
            refusals.append(refusal)
        else:
            answered += 1
            assert found.peak_allocated_bytes.baseline == sum(found.composition.values()), seed
    assert answered > 40
    assert [refusal.message for refusal in refusals if not refusal.parameter] == []


@pytest.mark.parametrize("changes", [{"loss": {"kind": "kto"}}, {"activation_checkpointing": {"mode": "full"}}])
def test_zero_3_under_a_pipeline_is_answered_with_its_reason(changes: dict[str, Any]) -> None:
    """Its first stage has no head; and where backward is made in two halves, a recomputation may keep nothing."""
    layout = {"zero_stage": 3, "data_parallel_size": 2, "pipeline_parallel_size": 2, "virtual_pipeline_stages": 2}
    schedule = {} if "loss" in changes else {"pipeline_schedule": "dualpipe_v"}
    job = {"architecture": NETWORKS["llama"], "framework": "torch", "sequence_length": 32, "gradient_accumulation_steps": 8}
    found = peakcast.predict(job | changes | {"parallelism": layout | schedule}, "H100-80GB")
    assert found.peak_allocated_bytes.baseline > 0
    assert any("zero_stage=3" in finding.sentence for finding in found.findings)


@pytest.mark.parametrize("targets", [["nothing"], ["lm_head"]])
def test_adapters_on_nothing_are_refused_with_the_names_there_are(targets: list[str]) -> None:
    job = {"architecture": "llama-3.2-1b", "finetuning": {"method": "lora", "rank": 8, "targets": targets}}
    with pytest.raises(SpecError, match="nothing would train; name some of q_proj, k_proj") as refused:
        peakcast.predict(job, "H100-80GB")
    assert refused.value.parameter == "finetuning.targets"


@pytest.mark.parametrize(
    ("architecture", "targets", "reason"),
    [
        ("llama-3.2-1b", ["q_proj", "lm_head"], "names lm_head"),
        ("qwen1.5-moe-a2.7b", ["q_proj", "gate_proj"], "shared experts"),
        ("llama-3.2-1b", ["all-linear"], ""),
        ("llama-3.2-1b", ["q_proj", "c_attn"], ""),
    ],
)
def test_adapters_that_the_ledger_does_not_count_are_named(architecture: str, targets: list[str], reason: str) -> None:
    job = job_from_mapping(
        {"architecture": architecture, "finetuning": {"method": "lora", "rank": 8, "targets": targets}}
    )
    assert reason in out_of_scope(job)
    assert bool(out_of_scope(job)) == bool(reason)


def test_targets_of_other_families_are_passed_over_with_a_word() -> None:
    job = {"architecture": "llama-3.2-1b", "finetuning": {"method": "lora", "rank": 8, "targets": ["q_proj", "c_attn"]}}
    with_both = peakcast.predict(job, "H100-80GB")
    assert any("'c_attn'" in sentence for sentence in with_both.assumptions)
    del job["finetuning"]["targets"][1]  # type: ignore[index]
    assert peakcast.predict(job, "H100-80GB").peak_allocated_bytes == with_both.peak_allocated_bytes


def test_virtual_stages_need_a_pipeline() -> None:
    with pytest.raises(SpecError, match="pipeline_parallel_size=1 is none"):
        job_from_mapping({"architecture": "gpt2", "parallelism": {"virtual_pipeline_stages": 2}})


def test_drawn_lengths_can_be_shared_by_the_ranks_that_share_a_sequence() -> None:
    layout = {"tensor_parallel_size": 4, "sequence_parallel": True}
    job = job_from_mapping(
        {"architecture": "llama-3.2-1b", "framework": "torch", "sequence_length": 64, "parallelism": layout}
        | {"batch": {"shortest_sequence": 1}}
    )
    drawn_steps = lengths.steps(job)
    parts = [part.sequence_length for _ in range(lengths.CHANGING_STEPS) for part in next(drawn_steps)]
    assert len(set(parts)) > 1
    assert all(length % 4 == 0 and length <= 64 for length in parts)


@pytest.mark.parametrize("name", ["gpt-oss-20b", "bert-base", "llama-3.1-8b"])
def test_deepspeed_driven_by_the_trainer_is_the_trainer_where_it_shards_nothing(name: str) -> None:
    peaks = [
        peakcast.predict({"architecture": name, "framework": framework}, "H200").peak_allocated_bytes.baseline
        for framework in ("huggingface", "deepspeed")
    ]
    assert peaks[0] == peaks[1]


@pytest.mark.parametrize(
    ("changes", "parameter"),
    [
        ({"micro_batch_size": 10**12}, "micro_batch_size"),
        ({"sequence_length": 10**12}, "sequence_length"),
        ({"sequence_length": 6 * 10**10, "attention": "eager"}, "sequence_length"),
        ({"parallelism": {"data_parallel_size": 10**9}}, "parallelism.data_parallel_size"),
        ({"parallelism": {"data_parallel_size": 2, "sharding": "fsdp2", "zero_stage": 3}}, "parallelism.sharding"),
    ],
)
def test_what_nobody_runs_is_refused_by_name(changes: dict[str, Any], parameter: str) -> None:
    with pytest.raises(SpecError) as refused:
        peakcast.predict({"architecture": "llama-3.1-8b", **changes}, "H100-80GB")
    assert refused.value.parameter == parameter
