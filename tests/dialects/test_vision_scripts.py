"""Scripts that train vision-language models with the Trainer's arguments, in the words of three projects."""

import json

import pytest

from peakcast.dialects.common.pasted import Pasted
from peakcast.dialects.huggingface.trainer import from_training

TEXT = {
    **{"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2},
    **{"intermediate_size": 64, "vocab_size": 512},
}
SEES = {"model_type": "llava", "vision_config": {"model_type": "clip_vision_model", "hidden_size": 32}, "text_config": TEXT}


def _read(tmp_path, config, **values):
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    given = {"model_name_or_path": str(tmp_path), "model_max_length": "128", "bf16": "true", **values}
    return from_training(Pasted(values=given, where="train.sh", program="train.py"))


@pytest.mark.parametrize(
    ("given", "frozen"),
    [
        ({"tune_mm_llm": "True", "tune_mm_vision": "False", "tune_mm_mlp": "False"}, ("vision", "projector")),
        ({"tune_mm_llm": "True", "tune_mm_vision": "True", "tune_mm_mlp": "True"}, ()),
        ({"tune_mm_llm": "True"}, ("vision", "projector")),  # each is false unless given
        ({"freeze_llm": "False", "freeze_mlp": "False", "freeze_backbone": "True"}, ("vision",)),
        ({"freeze_llm": "True", "freeze_mlp": "True"}, ("projector", "language")),
        ({"freeze_vision_tower": "True", "freeze_merger": "False", "freeze_llm": "False"}, ("vision",)),
        ({}, ()),
    ],
)
def test_parts_train_as_each_project_says_it(given, frozen, tmp_path):
    read = _read(tmp_path, SEES, **given)
    assert read.job.finetuning.frozen == frozen
    assert not set(given) & set(read.unknown)
    assert read.job.attention == ("flash_attention_2" if given else "sdpa")


def test_sizes_of_images_and_data_are_known_settings(tmp_path):
    given = {"max_pixels": "451584", "min_pixels": "12544", "data_flatten": "True", "vision_tower_lr": "1e-6"}
    read = _read(tmp_path, SEES, tune_mm_llm="True", **given)
    assert not read.unknown
    assert not read.unsupported
    assert any(sentence.startswith("data_flatten puts a batch in one row") for sentence in read.assumptions)
    assert not read.job.images.per_sequence  # 576 tokens of an image would not fit into 128
    longer = _read(tmp_path, SEES, tune_mm_llm="True", **given, max_length="1024").job
    assert (longer.images.per_sequence, longer.images.size) == (1, (672, 672))
    blind = _read(tmp_path, TEXT, tune_mm_llm="True", **given)
    assert any(sentence.startswith("max_pixels is a setting of images, but") for sentence in blind.unsupported)


def test_checkpoints_of_internvl_have_their_own_word(tmp_path):
    read = _read(tmp_path, SEES, freeze_backbone="True", freeze_mlp="False", grad_checkpoint="True")
    assert read.job.activation_checkpointing.mode == "full"


def test_adapters_that_are_not_read_are_said(tmp_path):
    read = _read(tmp_path, SEES, freeze_backbone="True", freeze_mlp="True", freeze_llm="True", use_llm_lora="16")
    assert any(sentence.startswith("use_llm_lora") for sentence in read.unsupported)
