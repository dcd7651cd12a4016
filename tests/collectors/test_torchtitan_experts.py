"""torchtitan's experts: the ledger against traces of its own module."""

from __future__ import annotations

import pytest

from peakcast.collectors.measure.grid import expand
from peakcast.collectors.tracing.trace import trace_job
from peakcast.jobs.spec import TrainingJob
from peakcast.models.baseline.ledger import ledger
from peakcast.timelines.timeline import Timeline

BASE = {
    "framework": "torch", "versions": {"torchtitan": "0.3"}, "micro_batch_size": 2, "sequence_length": 1024,
    "framework_options": {"outputs_dropped": False},  # as when they were traced
}  # fmt: skip
SMALL = {"num_hidden_layers": 2, "vocab_size": 8192}
QWEN3 = {
    "name": "qwen3-30b-a3b", **SMALL, "hidden_size": 1024, "num_attention_heads": 8,
    "moe": {"num_experts": 16, "num_experts_per_tok": 8, "moe_intermediate_size": 768},
}  # fmt: skip
DEEPSEEK = {
    "name": "deepseek-v2-lite", **SMALL,
    "moe": {
        "num_experts": 16, "num_experts_per_tok": 6, "moe_intermediate_size": 704, "shared_expert_intermediate_size": 1408,
    },
}  # fmt: skip
SHARDED = {
    "parallelism": {"data_parallel_size": 4, "sharding": "fsdp2"}, "optimizer.implementation": "fused",
    "precision": {
        "parameters": "float32", "compute": "bfloat16", "gradients": "float32", "optimizer_states": "float32",
    },
}  # fmt: skip
HALVES, APART = (
    {**SHARDED, "parallelism": {**SHARDED["parallelism"], "expert_parallel_size": ranks}} for ranks in (2, 4)
)
"""Each expert on two ranks, and on one."""
CELLS = {
    "kept": {"architecture": QWEN3},
    "recomputed": {"architecture": QWEN3, "activation_checkpointing.mode": "full"},
    "selective": {"architecture": QWEN3, "activation_checkpointing.mode": "selective"},
    "shared_experts": {"architecture": DEEPSEEK, "activation_checkpointing.mode": "selective"},
    "sharded": {"architecture": QWEN3, "activation_checkpointing.mode": "selective", **SHARDED},
    "divided": {"architecture": QWEN3, **HALVES},
    "divided_selective": {"architecture": QWEN3, "activation_checkpointing.mode": "selective", **HALVES},
    "divided_recomputed_with_few_tokens": {
        "architecture": QWEN3, "activation_checkpointing.mode": "full", "sequence_length": 64, **HALVES,
    },
    "divided_among_all": {"architecture": DEEPSEEK, **APART},
}
PHASES = ("FORWARD", "LOSS", "BACKWARD", "GRADIENT_CLIPPING", "OPTIMIZER_STEP")
TRACED = {
    "kept": [1_323_912_192, 1_353_207_808, 1_390_982_144, 822_429_696, 1_019_624_960],
    "recomputed": [848_592_896, 818_717_696, 1_205_502_464, 822_429_696, 1_019_624_960],
    "selective": [869_959_680, 840_215_552, 1_205_502_464, 822_429_696, 1_019_624_960],
    "shared_experts": [1_769_570_304, 1_657_578_496, 2_260_021_760, 1_768_550_400, 2_202_273_280],
    "sharded": [737_814_528, 577_975_808, 1_122_657_792, 428_027_392, 428_011_520],
    "divided": [1_160_537_088, 1_091_230_208, 1_208_770_560, 428_024_832, 428_011_520],
    "divided_selective": [807_117_824, 712_194_560, 1_023_385_600, 428_024_832, 428_011_520],
    "divided_recomputed_with_few_tokens": [443_008_000, 343_588_352, 546_871_808, 396_552_192, 396_538_880],
    "divided_among_all": [1_833_350_144, 1_726_538_240, 1_971_015_168, 901_085_184, 901_069_824],
}
"""Peaks of PHASES in a steady step, bytes: `trace_job(job(name))["steady"]` with torchtitan 0.3.0, transformers 5.17 and
torch 2.13 (pip install --no-deps torchtitan==0.3.0 spmd_types==0.2.3 tyro torchdata, and what these name as missing)."""


def job(name: str) -> TrainingJob:
    return expand({"base": BASE, "include": [CELLS[name]]})[0]


def peaks(timeline: Timeline) -> list[int]:
    found = {phase.name: size for phase, size in timeline.phase_peaks().items()}
    return [found[phase] for phase in PHASES]


@pytest.mark.parametrize("name", CELLS)
def test_the_ledger_equals_what_was_traced(name):
    """Within 0.1 % in every phase of a steady step."""
    assert peaks(ledger(job(name), step="steady")) == pytest.approx(TRACED[name], rel=1e-3)


@pytest.mark.needs("torchtitan")
@pytest.mark.parametrize("name", CELLS)
def test_a_trace_gives_the_same_today(name):
    assert peaks(trace_job(job(name))["steady"]) == pytest.approx(TRACED[name], rel=1e-5)
