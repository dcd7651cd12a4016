"""The default adapter targets of families are peft's own."""

from dataclasses import replace

import pytest

from peakcast.catalog import architecture
from peakcast.core.fields import FrozenMapping
from peakcast.jobs.spec import Finetuning, Parallelism, TrainingJob
from peakcast.models.baseline.ledger import ledger
from peakcast.models.ledger.huggingface.stored_parameters import stored_parameters
from peakcast.models.ledger.scope.assumptions import assumption_on_adapter_targets
from peakcast.models.ledger.scope.scope import out_of_scope
from peakcast.networks.families import counted_as, model_types

LORA = Finetuning(method="lora", rank=8)

constants = pytest.importorskip("peft.utils.constants")
PEFTS = constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING


TARGETS = {family: list(counted_as(family).libraries.peft_targets) for family in model_types()}


def test_every_default_is_pefts():
    assert {family: targets for family, targets in TARGETS.items() if targets} == {
        family: PEFTS[family] for family, targets in TARGETS.items() if targets
    }


@pytest.mark.parametrize("family", ["olmo2", "phi3", "glm", "granite", "qwen3_moe", "starcoder2"])
def test_what_peft_does_not_know_has_no_default(family):
    assert family not in PEFTS
    assert TARGETS[family] == []


def test_without_targets_and_a_default_the_answer_says_what_it_took():
    adapted = {name: TrainingJob(architecture=architecture(name), finetuning=LORA) for name in ("phi-3-mini", "qwen3-8b")}
    assert "assumed to be on qkv_proj" in assumption_on_adapter_targets(adapted["phi-3-mini"])
    assert "gate_up_proj" in assumption_on_adapter_targets(adapted["phi-3-mini"])  # the way out: what can be named
    assert assumption_on_adapter_targets(adapted["qwen3-8b"]) == ""


EVERY_LINEAR = replace(LORA, targets=("all-linear",))
MIXTRAL = replace(architecture("mixtral-8x7b"), num_hidden_layers=1)


def adapted(network=MIXTRAL, tuning=EVERY_LINEAR, **changes):
    return TrainingJob(architecture=network, finetuning=tuning, sequence_length=512, **changes)


def test_peft_takes_names_of_projections_for_the_experts_of_the_families_that_it_lists():
    conversion = pytest.importorskip("peft.utils.transformers_weight_conversion")
    pattern, mapping = conversion._MODEL_TO_CONVERSION_PATTERN, conversion._MOE_TARGET_MODULE_MAPPING
    for family in model_types():
        named = {name for name in mapping.get(pattern.get(family), {}) if name != "gate"}
        assert set(counted_as(family).libraries.peft_adapts_experts) == named, family


def test_an_expert_has_an_adapter_of_each_projection_and_gate_and_up_have_theirs_together():
    """By hand: 8 experts of width 4096 and 14336; rank 8, or 16 for gate and up; the router's beside them."""
    of_experts = [t for t in stored_parameters(adapted()) if ".lora_" in t.name and t.name.startswith("mlp.")]
    ranks = 8 * 8
    gate_up, down, router = 2 * ranks * (4096 + 2 * 14336), ranks * (14336 + 4096), 8 * (4096 + 8)
    assert sum(tensor.numel for tensor in of_experts) == gate_up + down + router
    assert all(tensor.trains for tensor in of_experts)


def test_an_adapter_on_experts_changes_their_weights_which_are_saved_whole():
    weights = {"gate_up": 8 * 2 * 14336 * 4096 * 2, "down": 8 * 14336 * 4096 * 2}
    both = (("q_proj", "w1", "w2", "w3"), ("q_proj",))
    with_adapters, without = (ledger(adapted(tuning=replace(LORA, targets=named))).phase_peaks() for named in both)
    more = {phase.name: with_adapters[phase] - without[phase] for phase in without}
    assert more["LOSS"] > sum(weights.values())  # saved for the gradients of the experts' inputs
    assert more["LOSS"] == pytest.approx(sum(weights.values()), rel=0.1)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, ""),
        ({"tuning": replace(LORA, targets=("q_proj", "down_proj"))}, ""),  # no name of Mixtral's experts
        ({"tuning": replace(LORA, targets=("w1",))}, "are not counted"),  # peft refuses w1 without w3
        ({"tuning": replace(EVERY_LINEAR, dropout=0.1)}, "fails in peft 0.21"),
        ({"versions": FrozenMapping({"transformers": "4.50.0"})}, "are not counted"),
        ({"versions": FrozenMapping({"peft": "0.19.0"})}, "are counted as peft 0.21 makes them"),
        ({"parallelism": Parallelism(data_parallel_size=4, sharding="fsdp1")}, "fail under FSDP1"),
        ({"parallelism": Parallelism(data_parallel_size=4, sharding="fsdp2")}, ""),
        ({"tuning": replace(EVERY_LINEAR, method="qlora", quantization="nf4")}, ""),
        ({"network": architecture("deepseek-v2-lite")}, ""),  # its shared experts get none
        ({"network": architecture("qwen1.5-moe-a2.7b")}, "shared experts"),
    ],
)
def test_what_of_adapters_on_experts_is_not_counted(changes, said):
    found = out_of_scope(adapted(**changes))
    assert (said in found) if said else not found
