"""The table of default adapter targets is peft's own."""

from dataclasses import replace

import pytest

from peakcast.catalog import architecture
from peakcast.dialects.litgpt import from_litgpt
from peakcast.dialects.pasted import Pasted
from peakcast.models.analytical.adapter_scope import require_adapters, targets_taken
from peakcast.models.analytical.adapter_targets import DEFAULT_TARGETS, resolved_targets
from peakcast.models.analytical.ledger import ledger
from peakcast.models.analytical.scope import out_of_scope
from peakcast.spec import Finetuning, TrainingJob

LORA = Finetuning(method="lora", rank=8)

constants = pytest.importorskip("peft.utils.constants")
PEFTS = constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING


def test_every_row_is_pefts():
    assert {family: list(targets) for family, targets in DEFAULT_TARGETS.items()} == {
        family: PEFTS[family] for family in DEFAULT_TARGETS
    }


@pytest.mark.parametrize("family", ["olmo2", "phi3", "glm", "granite", "qwen3_moe", "starcoder2"])
def test_what_peft_does_not_know_has_no_row(family):
    assert family not in PEFTS
    assert family not in DEFAULT_TARGETS


def test_without_targets_and_a_default_the_answer_says_what_it_took():
    adapted = {name: TrainingJob(architecture=architecture(name), finetuning=LORA) for name in ("phi-3-mini", "qwen3-8b")}
    assert "taken to be on qkv_proj" in targets_taken(adapted["phi-3-mini"])
    assert "gate_up_proj" in targets_taken(adapted["phi-3-mini"])  # the way out: what can be named
    assert targets_taken(adapted["qwen3-8b"]) == ""


def test_a_stack_s_own_names_are_the_family_s_projections():
    llama, neox, phi3 = architecture("llama-3.1-8b"), architecture("pythia-1.4b"), architecture("phi-3-mini")
    assert resolved_targets(("lora_query", "lora_projection", "lora_head"), llama) == {"q_proj", "o_proj", "lm_head"}
    assert resolved_targets(("lora_query", "lora_value"), neox) == {"query_key_value"}
    assert resolved_targets(("lora_mlp",), phi3) == {"gate_up_proj", "down_proj"}
    assert resolved_targets(("q_proj", "output_proj"), llama) == {"q_proj", "o_proj"}


def test_a_part_of_a_fused_projection_is_taken_as_all_of_it_and_said():
    def adapted(*targets):
        return TrainingJob(architecture=architecture("pythia-1.4b"), finetuning=replace(LORA, targets=targets))

    assert targets_taken(adapted("lora_query")) == (
        "adapters on lora_query are taken to be one on the whole of query_key_value, which joins queries, keys and values."
    )
    assert targets_taken(adapted("lora_query", "lora_key", "lora_value")) == ""
    whole = ledger(adapted("query_key_value")).peak().num_bytes
    assert ledger(adapted("lora_query", "lora_value")).peak().num_bytes == whole
    assert "on the token table or the head" in out_of_scope(adapted("lora_head"))


def test_litgpt_adapts_a_fused_network():
    settings = {"checkpoint_dir": "checkpoints/EleutherAI/pythia-1.4b", "lora_r": 8, "precision": "bf16-true"}
    job = from_litgpt(Pasted(values=settings)).job
    assert job.finetuning.targets == ("lora_query", "lora_value")
    require_adapters(job)
