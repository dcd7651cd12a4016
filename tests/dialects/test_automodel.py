"""NeMo AutoModel's recipes: what their optimizers keep, and networks that are no language models."""

import copy

import pytest

from peakcast.core.errors import SpecError
from peakcast.dialects.translate import ReadOptions
from peakcast.doors.questions import translation_of

TE = "transformer_engine.pytorch.optimizers.fused_adam.FusedAdam"
HALF = {"exp_avg_dtype": "torch.bfloat16", "exp_avg_sq_dtype": "torch.bfloat16"}
RECIPE = {
    "step_scheduler": {"global_batch_size": 64, "local_batch_size": 4},
    "model": {
        "_target_": "nemo_automodel.NeMoAutoModelForCausalLM.from_pretrained",
        "pretrained_model_name_or_path": "meta-llama/Llama-3.2-1B",
    },
    "distributed": {"_target_": "nemo_automodel.components.distributed.fsdp2.FSDP2Manager", "tp_size": 1},
    "dataset": {"seq_length": 2048},
    "optimizer": {"_target_": "torch.optim.AdamW"},
}


def read(**sections):
    recipe = copy.deepcopy(RECIPE)
    for name, fields in sections.items():
        recipe[name] = {**recipe.get(name, {}), **fields}
    return translation_of(recipe, ReadOptions(num_gpus=8))


@pytest.mark.parametrize(
    ("optimizer", "states", "main", "implementation"),
    [
        ({}, "bfloat16", None, "foreach"),
        ({"foreach": False}, "bfloat16", None, "loop"),
        ({"fused": True}, "bfloat16", None, "fused"),
        ({"_target_": TE}, "float32", None, "fused"),  # its moments are float32 whatever the weights are
        ({"_target_": TE, "master_weights": True}, "float32", "float32", "fused"),
        ({"_target_": TE, **HALF}, "bfloat16", None, "fused"),
    ],
)
def test_the_optimizers_own_dtypes(optimizer, states, main, implementation):
    found = read(optimizer=optimizer)
    precision = found.job.precision
    assert (precision.parameters, precision.optimizer_states, precision.main_parameters) == ("bfloat16", states, main)
    assert found.job.optimizer.implementation == implementation
    assert found.unknown == ()


def test_what_no_job_expresses_is_said():
    remainders = read(optimizer={"_target_": TE, "master_weights": True, "store_param_remainders": True})
    assert [finding.direction for finding in remainders.findings if "remainders" in finding.parameter] == ["less"]
    fp8 = read(model={"backend": {"linear": "te", "te_fp8": {"recipe": "block"}}})
    assert any("FP8 training (model.backend.te_fp8.recipe)" in sentence for sentence in fp8.unsupported)


def test_a_unit_that_stays_whole_after_forward():
    assert read(parallelizer={"reshard_after_forward": False}).job.framework_options["fsdp_reshard_after_forward"] is False


def test_other_networks_are_refused():
    for kind in ("NeMoAutoModelForBiencoder", "NeMoAutoModelBiEncoder", "NeMoAutoModelForSequenceClassification"):
        with pytest.raises(SpecError, match="trains no language model"):
            read(model={"_target_": f"nemo_automodel.{kind}.from_pretrained"})


def test_four_bits_and_eight_are_both_said_in_a_recipe():
    """nemo_automodel 0.7.0 components/quantization/qlora.py `create_bnb_config`: storage in bfloat16 by default."""
    four = {"load_in_4bit": True, "load_in_8bit": False, "bnb_4bit_quant_type": "nf4"}
    found = read(quantization=four, peft={"_target_": "nemo_automodel.components._peft.lora.PeftConfig", "dim": 16})
    assert (found.job.finetuning.quantization, found.unknown) == ("nf4", ())
    assert "quantized_storage" not in found.job.framework_options
