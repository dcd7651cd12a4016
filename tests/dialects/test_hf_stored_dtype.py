"""The dtype of weights where Hugging Face settings do not give it: as the config.json says, wherever that is."""

import json
from dataclasses import replace

import pytest

from peakcast.dialects.huggingface.job import from_huggingface
from tests.dialects.test_huggingface import LLAMA

UNSAID = {key: value for key, value in LLAMA.items() if key != "torch_dtype"}
EIGHT_BITS = {"load_in_8bit": True}


@pytest.mark.parametrize(
    ("network", "versions", "dtype", "warned"),
    [
        ("bert-large", {}, "float32", False),  # its checkpoint, whatever release loads it
        ("gpt2", {"transformers": "4.57"}, "float32", False),
        ("llama-3.2-1b", {"transformers": "5.13"}, "bfloat16", False),
        ("llama-3.2-1b", {"transformers": "4.57"}, "bfloat16", True),  # from_pretrained without torch_dtype: float32
    ],
)
def test_weights_without_a_dtype_are_loaded_as_they_are_stored(network, versions, dtype, warned):
    found = from_huggingface(network, {"per_device_train_batch_size": 1, "max_length": 128}, versions=versions)
    assert found.job.precision.parameters == dtype
    assert any(finding.parameter == "torch_dtype" for finding in found.findings) == warned


@pytest.mark.parametrize("said", [{"dtype": "float32"}, {"dtype": "float16"}, {}, {"quantization_config": EIGHT_BITS}])
def test_a_config_is_read_alike_as_a_mapping_a_file_a_folder_and_from_the_hub(said, tmp_path, monkeypatch):
    config = {**UNSAID, **said}
    folder = tmp_path / "hub/models--me--mine/snapshots/1"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    forms = (config, str(folder / "config.json"), str(folder), "me/mine")
    found = [from_huggingface(form, {"per_device_train_batch_size": 1}, {"r": 8}) for form in forms]
    assert {replace(one.job.architecture, name="") for one in found} == {replace(found[0].job.architecture, name="")}
    assert len({(one.job.precision, one.job.finetuning, one.warnings, one.assumptions) for one in found}) == 1
    assert found[0].job.precision.parameters == said.get("dtype", "bfloat16")
