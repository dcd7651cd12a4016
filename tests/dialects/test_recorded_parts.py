"""Configurations as their projects document them that say too little by themselves, and how they are read."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from peakcast.core.errors import SpecError
from peakcast.dialects.opening import opened
from peakcast.dialects.recognise import ReadOptions
from peakcast.doors.questions import translation_of

RECORDED = Path(__file__).parent / "recorded"
REFUSED = {
    "accelerate/fsdp.yaml": "the training arguments and the model are missing",
    "llamafactory/ds_z3_config.json": "is a DeepSpeed configuration, which does not say what is trained",
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_answered_gets_a_sentence_that_helps(name):
    with pytest.raises(SpecError) as caught:
        translation_of(RECORDED / name)
    assert REFUSED[name] in caught.value.message


def test_what_a_script_names_may_be_given_beside_it(tmp_path):
    script = tmp_path / "train.sh"
    script.write_text((RECORDED / "llamafactory" / "fsdp_qlora.sh").read_text(encoding="utf-8"), encoding="utf-8")
    with pytest.raises(SpecError, match=r"give it by --with fsdp_offload\.yaml"):
        translation_of(script)
    files = (RECORDED / "accelerate" / "fsdp_offload.yaml", RECORDED / "llamafactory" / "llama3_qlora_fsdp.yaml")
    found = translation_of(script, ReadOptions(files=files))
    assert found.job == translation_of(RECORDED / "llamafactory" / "fsdp_qlora.sh").job
    assert not [sentence for sentence in found.warnings if "does not use it" in sentence]


def test_the_readers_of_yaml_agree():
    text = (RECORDED / "trl" / "zephyr_7b_sft_qlora.yaml").read_text(encoding="utf-8")
    assert opened(text).values == yaml.safe_load(text)
