"""torchtitan and torchtune by release: the ledger against traces of loops that do as they do."""

from __future__ import annotations

import pytest

from peakcast.collectors.measure.grid import expand
from peakcast.jobs.spec import TrainingJob
from peakcast.models.baseline.ledger import ledger
from peakcast.timelines.timeline import Timeline

NETWORK = {
    "name": "llama-3.1-8b", "hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 3, "num_attention_heads": 8,
    "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 8192,
}  # fmt: skip
MIXED = {"parameters": "float32", "compute": "bfloat16", "gradients": "float32", "optimizer_states": "float32"}
BASE = {
    "architecture": NETWORK, "framework": "torch", "sequence_length": 512, "precision": MIXED,
    "parallelism": {"data_parallel_size": 4, "sharding": "fsdp2"}, "optimizer.implementation": "fused",
}  # fmt: skip
CELLS = {
    "ends in the root, operators kept": {
        "versions": {"torchtitan": "0.1.0"}, "activation_checkpointing.mode": "selective",
    },
    "ends in the root, last layer stays": {"versions": {"torchtitan": "0.1.0"}},
    "loss not compiled": {"versions": {"torchtitan": "0.0.2"}, "compile": True},
    "loss alone compiled": {
        "versions": {"torchtitan": "0.2.2"}, "compile": True, "framework_options": {"compiled_regions": "loss"},
    },
    "checkpoints around compiled layers": {
        "versions": {"torchtune": "0.6.1"}, "compile": True, "activation_checkpointing.mode": "full",
        "precision": dict.fromkeys(MIXED, "bfloat16"),
        # the loop is torchtune's with a compiled loss, and the network transformers'
        "framework_options": {
            "sdpa_repeats_key_value": False, "logits_upcast": "loss", "norm_kernel": "eager", "compiles_loss": True,
        },
    },
}  # fmt: skip
PHASES = ("FORWARD", "LOSS", "BACKWARD", "GRADIENT_CLIPPING", "OPTIMIZER_STEP")
TRACED = {
    "ends in the root, operators kept": [105_349_632, 138_909_696, 141_000_192, 71_359_488, 71_342_080],
    "ends in the root, last layer stays": [129_737_216, 163_297_280, 165_387_776, 71_359_488, 71_342_080],
    "loss not compiled": [118_727_168, 152_287_232, 154_377_728, 71_359_488, 71_342_080],
    "loss alone compiled": [117_151_232, 117_160_960, 128_689_152, 71_359_488, 71_342_080],
    "checkpoints around compiled layers": [73_576_960, 62_051_328, 85_136_384, 35_706_368, 35_688_960],
}
"""Peaks of PHASES in a steady step, bytes: `trace_job(job(name))["steady"]` with transformers 5.17 and torch 2.13."""


def job(name: str) -> TrainingJob:
    return expand({"base": BASE, "include": [CELLS[name]]})[0]


def peaks(timeline: Timeline) -> list[int]:
    found = {phase.name: size for phase, size in timeline.phase_peaks().items()}
    return [found[phase] for phase in PHASES]


@pytest.mark.parametrize("name", CELLS)
def test_the_ledger_equals_what_was_traced(name):
    assert peaks(ledger(job(name), step="steady")) == pytest.approx(TRACED[name], rel=3e-4)


@pytest.mark.parametrize(
    "name", ["ends in the root, operators kept", pytest.param("loss alone compiled", marks=pytest.mark.whole)]
)
def test_a_trace_gives_the_same_today(name, traced):
    pytest.importorskip("transformers")
    assert peaks(traced(job(name))["steady"]) == pytest.approx(TRACED[name], rel=1e-5)
