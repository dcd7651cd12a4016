"""TRL's trainers with networks that recipes answer: its head, which makes no whole logits, is recorded where TRL is
installed, and its preference losses are traced there."""

import pytest

from peakcast.api import predict
from peakcast.dialects.common.pasted import Pasted
from peakcast.dialects.huggingface import trl_loss
from peakcast.dialects.huggingface.trainer import from_trl
from peakcast.doors.recording import record_recipe

SIZES = {"hidden_size": 1024, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 4}
RECORDED = {"model_type": "apertus", **SIZES, "intermediate_size": 4096, "vocab_size": 32_000}
GIVEN = {"max_length": 1024, "per_device_train_batch_size": 2, "dtype": "bfloat16", "bf16": False}
GIVEN |= {"gradient_checkpointing": False}


def _read(model, **given):
    return from_trl(Pasted(values={**GIVEN, **given}, model=model))


def test_the_ledger_counts_the_head_of_its_own_families():
    read = _read("llama-3.2-1b")
    assert read.job.framework_options["loss_kernel"] == "tiles"
    assert any(sentence.startswith("The release of trl is not given") for sentence in read.warnings)


@pytest.mark.parametrize("installed", [True, False])
def test_recordings_run_it_where_trl_is_installed(installed, monkeypatch):
    monkeypatch.setattr(trl_loss, "find_spec", lambda name: object() if installed else None)
    read = _read(RECORDED)
    assert (read.job.framework_options.get("loss_kernel") == "tiles") is installed
    assert any("whole ones are counted: pip install trl" in sentence for sentence in read.unsupported) is not installed


def test_without_trl_it_is_said_that_a_run_needs_less(monkeypatch):
    monkeypatch.setattr(trl_loss, "find_spec", lambda name: None)
    [found] = [one for one in _read(RECORDED).findings if one.parameter == "loss_type"]
    assert found.direction == "less"


@pytest.mark.slow
@pytest.mark.needs("trl")
def test_what_is_recorded_of_the_head_is_what_is_traced():
    job = _read(RECORDED | {"num_hidden_layers": 3}).job
    record_recipe(job)
    recorded, traced = (predict(job, "H100-80GB", baseline=which) for which in ("auto", "trace"))
    assert recorded.peak_allocated_bytes.point == pytest.approx(traced.peak_allocated_bytes.point, rel=1e-4)
    assert not [one for one in recorded.findings if one.parameter == "framework_options"]


@pytest.mark.slow
@pytest.mark.needs("trl")
@pytest.mark.parametrize("loss", ["dpo", "kto", "reward"])
def test_preference_losses_of_such_a_network_are_traced(loss):
    """A reference network, which DPO and KTO have, takes the weights once more."""
    given = {"micro_batch_size": 4, "sequence_length": 256, "loss": {"kind": loss}}
    answer = predict({"architecture": RECORDED, **given}, "H100-80GB", baseline="trace")
    weights = answer.composition["parameters"] + answer.composition.get("inputs", 0)
    once = predict({"architecture": RECORDED, **given, "loss": {}}, "H100-80GB", baseline="trace").composition["parameters"]
    assert weights == pytest.approx(once * (1 if loss == "reward" else 2), rel=0.1)
