"""Parts of a vision-language model that ms-swift freezes; LLaMA-Factory's are in test_llamafactory.py."""

import json

import pytest

from peakcast.dialects.common.pasted import Pasted
from peakcast.dialects.swift.job import from_swift

TEXT = {
    **{"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2},
    **{"intermediate_size": 64, "vocab_size": 512},
}
SEES = {"model_type": "llava", "vision_config": {"model_type": "clip_vision_model", "hidden_size": 32}, "text_config": TEXT}


@pytest.mark.parametrize(
    ("config", "given", "frozen"),
    [
        (SEES, {}, ("vision", "projector")),
        (SEES, {"freeze_vit": "false", "freeze_aligner": "false"}, ()),
        (SEES, {"freeze_llm": "true", "freeze_aligner": "false"}, ("vision", "language")),
        (TEXT, {"freeze_vit": "true"}, ()),
    ],
)
def test_parts_are_frozen_as_told(config, given, frozen, tmp_path):
    """By default the vision tower and what aligns it are, and the language model trains."""
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    values = {"model": str(tmp_path), "train_type": "full", "max_length": "128", **given}
    read = from_swift(Pasted(values=values, where="swift sft", program="swift sft"))
    assert read.job.finetuning.frozen == frozen
    assert any("projector by default" in sentence for sentence in read.assumptions) == (config is SEES and not given)
    limits = from_swift(Pasted(values=values, where="swift sft", program="swift sft", env={"MAX_PIXELS": "1003520"}))
    assert any(said.startswith("MAX_PIXELS is a setting of images, but") for said in limits.unsupported) == (config is TEXT)
    assert not [finding for finding in read.findings if "freeze" in finding.parameter]
