"""TRL's head, which makes no whole logits: networks that recipes answer have it where TRL is installed to record it."""

import pytest

from peakcast.core.fields import FrozenMapping
from peakcast.dialects.common.asked_versions import AskedVersions
from peakcast.dialects.common.pasted import Pasted
from peakcast.dialects.huggingface import trl_loss
from peakcast.dialects.huggingface.trainer import from_trl

SIZES = {"hidden_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4}
RECORDED = {"model_type": "apertus", **SIZES, "intermediate_size": 4096, "vocab_size": 32_000}
GIVEN = {"max_length": 1024, "per_device_train_batch_size": 2, "dtype": "bfloat16", "bf16": False}
GIVEN |= {"gradient_checkpointing": False}


def _read(model, versions=None, **given):
    return from_trl(Pasted(values={**GIVEN, **given}, model=model, versions=AskedVersions(FrozenMapping(versions or {}))))


def test_the_ledger_counts_the_head_of_its_own_families():
    read = _read("llama-3.2-1b")
    assert read.job.framework_options["loss_kernel"] == "tiles"
    assert any(sentence.startswith("The release of trl is not given") for sentence in read.warnings)


@pytest.mark.parametrize("installed", [True, False])
def test_recordings_run_it_where_trl_is_installed(installed, monkeypatch):
    monkeypatch.setattr(trl_loss, "find_spec", lambda name: object() if installed else None)
    read = _read(RECORDED)
    assert (read.job.framework_options.get("loss_kernel") == "tiles") is installed
    assert any("all logits are counted: pip install trl" in sentence for sentence in read.unsupported) is not installed


def test_without_trl_it_is_said_that_a_run_needs_less(monkeypatch):
    monkeypatch.setattr(trl_loss, "find_spec", lambda name: None)
    [found] = [one for one in _read(RECORDED).findings if one.parameter == "loss_type"]
    assert found.direction == "less"


@pytest.mark.parametrize(
    ("trl", "metrics"),
    [
        ("0.14.0", None),
        ("0.21.0", "accuracy"),
        ("0.22.2", "entropy_of_sequences"),
        ("1.2.0", "entropy"),
        ("1.5.1", "entropy_of_a_copy"),
        ("1.16.0", None),
    ],
)
def test_what_each_release_computes_for_its_logs(trl, metrics):
    versions = {"trl": trl, "transformers": "5.17.0" if trl > "1" else "4.57.0"}
    assert _read("llama-3.2-1b", versions).job.framework_options.get("sft_metrics") == metrics
    assert "sft_metrics" not in _read("llama-3.2-1b", versions, use_liger_kernel=True).job.framework_options


def test_recordings_have_no_such_metrics_and_say_so():
    versions = {"trl": "1.5.1", "transformers": "5.17.0"}
    read = _read(RECORDED, versions, dtype="float32", bf16=True)
    assert "sft_metrics" not in read.job.framework_options
    [found] = [one for one in read.findings if one.parameter == "versions.trl"]
    assert found.direction == "more"
