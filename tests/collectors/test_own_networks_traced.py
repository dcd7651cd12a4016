"""Recipes of LitGPT's and torchtune's own networks against traces of these, where the libraries are installed."""

from __future__ import annotations

import importlib.util
from typing import Any

import pytest

from peakcast.collectors.tracing.trace import trace_job
from peakcast.dialects.common.job_file import job_from_mapping
from peakcast.doors.recording import record_recipe
from peakcast.jobs.spec import TrainingJob
from peakcast.models.baseline.ledger import ledger
from peakcast.models.ledger.scope.scope import out_of_scope

SIZES = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256, "vocab_size": 512}
EXPERTS = {"num_local_experts": 4, "num_key_value_heads": 2}
LORA = {"method": "lora", "rank": 4, "adapter_dtype": "bfloat16"}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "litgpt of parallel blocks": ("litgpt", {"architecture": {"model_type": "gpt_neox", **SIZES}}),
    "litgpt of adapters": ("litgpt", {"finetuning": {**LORA, "targets": ["q_proj", "v_proj"]}}),
    "litgpt of experts": ("litgpt", {"architecture": {"model_type": "mixtral", **SIZES, **EXPERTS}}),
    "torchtune of chunks": ("torchtune", {"framework_options": {"loss_kernel": "chunked_logits", "logits_chunks": 8}}),
    "torchtune of checkpoints": ("torchtune", {"activation_checkpointing": {"mode": "full"}}),
}


def _job(library: str, changes: dict[str, Any]) -> TrainingJob:
    dtypes = dict.fromkeys(("parameters", "compute", "gradients", "optimizer_states"), "bfloat16")
    base = {"architecture": {"model_type": "llama", **SIZES}, "framework": "torch", "versions": {library: "main"}}
    return job_from_mapping({**base, "precision": dtypes, "micro_batch_size": 2, "sequence_length": 304, **changes})


@pytest.mark.whole
@pytest.mark.parametrize("case", CASES)
def test_a_recipe_is_what_the_librarys_own_network_allocates(case: str) -> None:
    """torchtune's at another batch and length than was recorded, LitGPT's at its own, of which alone it holds."""
    library, changes = CASES[case]
    if importlib.util.find_spec(library) is None:
        pytest.skip(f"{library} is not installed")
    job = _job(library, changes)
    record_recipe(job)
    if library == "torchtune":
        job = job.replace(micro_batch_size=3, sequence_length=512)
    assert out_of_scope(job) == ""
    found, traced = ledger(job).peak(), trace_job(job)["steady"].peak()
    assert found.num_bytes == pytest.approx(traced.num_bytes, rel=0.001)
    assert found.phase == traced.phase
