"""Jobs that the tests of explanations share."""

from __future__ import annotations

from typing import Any

import pytest

from peakcast.doors.questions import translation_of
from peakcast.jobs.spec import TrainingJob

FP32 = {"gradients": "float32", "optimizer_states": "float32", "main_parameters": "float32"}
JOBS: dict[str, dict[str, Any]] = {
    "full": {"architecture": "llama-3.1-8b"},
    "long_lora": {
        "architecture": "llama-3.1-8b",
        "sequence_length": 16384,
        "finetuning": {"method": "lora", "rank": 16},
    },
    "big_vocabulary": {
        "architecture": "gemma-2b",
        "sequence_length": 8192,
        "activation_checkpointing": {"mode": "full"},
        "optimizer": {"implementation": "fused"},
    },
    "checkpointed": {
        "architecture": "llama-2-7b",
        "sequence_length": 4096,
        "micro_batch_size": 8,
        "activation_checkpointing": {"mode": "full"},
        "finetuning": {"method": "lora", "rank": 16},
    },
    "megatron": {
        "architecture": "llama-3.1-8b",
        "framework": "megatron",
        "precision": FP32,
        "gradient_accumulation_steps": 8,
        "parallelism": {
            "tensor_parallel_size": 2,
            "sequence_parallel": True,
            "pipeline_parallel_size": 2,
            "data_parallel_size": 2,
            "zero_stage": 1,
        },
    },
}


def job(mapping: dict[str, Any]) -> TrainingJob:
    """The job of a mapping."""
    return translation_of(mapping).job


@pytest.fixture
def jobs() -> dict[str, TrainingJob]:
    return {name: job(mapping) for name, mapping in JOBS.items()}
