"""The default adapter targets of families are peft's own."""

import pytest

from peakcast.catalog import architecture
from peakcast.jobs.spec import Finetuning, TrainingJob
from peakcast.models.ledger.scope.assumptions import assumption_on_adapter_targets
from peakcast.networks.families import counted_as, model_types

LORA = Finetuning(method="lora", rank=8)

constants = pytest.importorskip("peft.utils.constants")
PEFTS = constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING


TARGETS = {family: list(counted_as(family).libraries.peft_targets) for family in model_types()}


def test_every_default_is_pefts():
    assert {family: targets for family, targets in TARGETS.items() if targets} == {
        family: PEFTS[family] for family, targets in TARGETS.items() if targets
    }


@pytest.mark.parametrize("family", ["olmo2", "phi3", "glm", "granite", "qwen3_moe", "starcoder2"])
def test_what_peft_does_not_know_has_no_default(family):
    assert family not in PEFTS
    assert TARGETS[family] == []


def test_without_targets_and_a_default_the_answer_says_what_it_took():
    adapted = {name: TrainingJob(architecture=architecture(name), finetuning=LORA) for name in ("phi-3-mini", "qwen3-8b")}
    assert "assumed to be on qkv_proj" in assumption_on_adapter_targets(adapted["phi-3-mini"])
    assert "gate_up_proj" in assumption_on_adapter_targets(adapted["phi-3-mini"])  # the way out: what can be named
    assert assumption_on_adapter_targets(adapted["qwen3-8b"]) == ""
