"""The dtype of weights where Hugging Face settings do not give it: what `from_pretrained` makes of it."""

import json
from dataclasses import replace

import pytest

from peakcast.dialects.common.job_file import read_job
from peakcast.dialects.huggingface.job import from_huggingface
from tests.dialects.test_huggingface import LLAMA

UNSAID = {key: value for key, value in LLAMA.items() if key != "torch_dtype"}
EIGHT_BITS = {"load_in_8bit": True}
BERT = {
    "architectures": ["BertForMaskedLM"], "model_type": "bert", "hidden_size": 64, "intermediate_size": 256,
    "num_attention_heads": 4, "num_hidden_layers": 2, "max_position_embeddings": 512, "type_vocab_size": 2,
    "vocab_size": 30522,
}  # fmt: skip
"""A config.json of 2018, which has no dtype."""


def same_as_from_pretrained(config: dict, folder, **asked) -> str:
    """The dtype in which the installed transformers loads a checkpoint of `config` in float32 that is saved in `folder`."""
    transformers = pytest.importorskip("transformers")
    own = dict(config)
    network = transformers.AutoModelForMaskedLM.from_config(transformers.AutoConfig.for_model(own.pop("model_type"), **own))
    network.float().save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return str(transformers.AutoModelForMaskedLM.from_pretrained(folder, **asked).dtype).removeprefix("torch.")


@pytest.mark.parametrize("asked", [{}, {"dtype": "auto"}, {"dtype": "bfloat16"}])
@pytest.mark.parametrize("said", [{}, {"dtype": "bfloat16"}, {"torch_dtype": "float16"}])
def test_the_dtype_is_the_one_of_from_pretrained(said, asked, tmp_path):
    config = {**BERT, **said}
    found = from_huggingface(config, {"per_device_train_batch_size": 1, "max_length": 128, **asked})
    assert found.job.precision.parameters == same_as_from_pretrained(config, tmp_path, **asked)


@pytest.mark.parametrize(("asked", "dtype"), [({"torch_dtype": "auto"}, "bfloat16"), ({}, "float32")])
def test_transformers_4_takes_the_configurations_dtype_only_where_it_is_told_auto(asked, dtype):
    training = {"per_device_train_batch_size": 1, "max_length": 128, **asked}
    assert from_huggingface(LLAMA, training, versions={"transformers": "4.57"}).job.precision.parameters == dtype


def test_transformers_4_loads_what_it_quantises_in_float16():
    training = {"per_device_train_batch_size": 1, "max_length": 128, "quantization_config": EIGHT_BITS}
    found = from_huggingface(LLAMA, training, {"r": 8}, versions={"transformers": "4.57"})
    assert found.job.precision.parameters == "float16"


@pytest.mark.parametrize(
    ("network", "versions", "dtype", "warned"),
    [
        ("bert-large", {}, "float32", False),  # its checkpoint, whatever release loads it
        ("gpt2", {"transformers": "4.57"}, "float32", False),
        ("llama-3.2-1b", {"transformers": "5.13"}, "bfloat16", False),
        ("llama-3.2-1b", {"transformers": "4.57"}, "float32", False),  # from_pretrained without torch_dtype: float32
        (LLAMA, {"transformers": "4.57"}, "float32", False),
        (LLAMA, {}, "bfloat16", False),
        (BERT, {}, "float32", True),  # that of its checkpoint, which is not here
        (BERT, {"transformers": "4.57"}, "float32", False),
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
    assert found[0].job.precision.parameters == said.get("dtype", "float32")


@pytest.mark.parametrize(
    ("network", "given", "said"),
    [
        (BERT, {}, "the checkpoint's, which is float32 in old ones"),
        ("bert-base", {}, "transformers loads bert-base in float32"),
        (BERT, {"precision": {"parameters": "float32"}}, ""),
        (BERT, {"framework": "torch"}, ""),
        (LLAMA, {}, ""),
    ],
)
def test_a_job_without_a_precision_says_where_transformers_loads_more(network, given, said):
    found = [one for one in read_job({"architecture": network, **given}).findings if one.parameter == "precision"]
    assert [one.direction for one in found] == ["more"] * bool(said)
    assert all(said in one.sentence for one in found)
