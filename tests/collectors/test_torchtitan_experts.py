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
    "kept": [1_323_928_576, 1_353_224_192, 1_390_998_528, 822_446_080, 1_019_641_344],
    "recomputed": [848_609_280, 818_734_080, 1_205_518_848, 822_446_080, 1_019_641_344],
    "selective": [869_976_064, 840_231_936, 1_205_518_848, 822_446_080, 1_019_641_344],
    "shared_experts": [1_769_586_688, 1_657_594_880, 2_260_038_144, 1_768_566_784, 2_202_289_664],
    "sharded": [737_830_912, 577_992_192, 1_122_674_176, 428_043_776, 428_027_904],
    "divided": [1_160_553_472, 1_091_246_592, 1_208_786_944, 428_041_216, 428_027_904],
    "divided_selective": [807_134_208, 712_210_944, 1_023_401_984, 428_041_216, 428_027_904],
    "divided_recomputed_with_few_tokens": [443_009_024, 343_589_376, 546_872_832, 396_553_216, 396_539_904],
    "divided_among_all": [1_833_366_528, 1_726_554_624, 1_971_031_552, 901_101_568, 901_086_208],
}
"""Peaks of PHASES in a steady step, bytes: `trace_job(job(name))["steady"]` with the packages of constraints-stacks.txt."""


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
