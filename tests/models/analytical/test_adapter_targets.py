"""The table of default adapter targets is peft's own."""

import pytest

from peakcast.models.analytical.adapter_targets import DEFAULT_TARGETS

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
