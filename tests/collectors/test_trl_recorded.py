"""TRL's trainers with networks that recipes answer: its head is recorded, and its preference losses are traced."""

import pytest

from peakcast.api import predict
from peakcast.dialects.common.pasted import Pasted
from peakcast.dialects.huggingface.trainer import from_trl
from peakcast.doors.recording import record_recipe

SIZES = {"hidden_size": 1024, "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 4}
RECORDED = {"model_type": "apertus", **SIZES, "intermediate_size": 4096, "vocab_size": 32_000}
GIVEN = {"max_length": 1024, "per_device_train_batch_size": 2, "dtype": "bfloat16", "bf16": False}


@pytest.mark.slow
@pytest.mark.needs("trl")
def test_what_is_recorded_of_the_head_is_what_is_traced():
    job = from_trl(Pasted(values=GIVEN | {"gradient_checkpointing": False}, model=RECORDED)).job
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
