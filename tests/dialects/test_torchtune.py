"""torchtune's recipes: what of their keys reaches the job."""

from __future__ import annotations

from typing import Any

import pytest

from peakcast.core.errors import SpecError
from peakcast.dialects.common.pasted import Pasted
from peakcast.dialects.common.translation import Translation
from peakcast.dialects.translate import ReadOptions, translated
from peakcast.jobs.conventions import conventions


def read(builder: str = "llama3_1.llama3_1_8b", *, num_gpus: int = 8, **values: Any) -> Translation:
    model = {"_component_": f"torchtune.models.{builder}", **values.pop("model", {})}
    recipe = {"model": model, "tokenizer": {"max_seq_len": 512}, "batch_size": 1, **values}
    return translated(Pasted(values=recipe), ReadOptions(num_gpus=num_gpus))


@pytest.mark.parametrize("suffix", ["", "_base", "_instruct"])
def test_a_builder_of_any_training_names_the_same_network(suffix):
    assert read(f"qwen2_5.lora_qwen2_5_1_5b{suffix}").job.architecture.name == "qwen2.5-1.5b"


def test_a_quantised_base_beside_dora_is_quantised():
    found = read("llama3.lora_llama3_8b", model={"use_dora": True, "quantize_base": True}).job.finetuning
    assert (found.method, found.quantization) == ("qlora", "nf4")
    assert read("llama3.lora_llama3_8b").job.finetuning.method == "lora"


@pytest.mark.parametrize("key", [{"fsdp_cpu_offload": True}, {"fsdp": {"cpu_offload": True}}])
def test_offload_is_read_where_either_version_says_it(key):
    assert read(**key).job.offload.parameters
    assert not read(num_gpus=1, **key).job.offload.parameters


@pytest.mark.parametrize(
    ("keys", "mode", "every"),
    [
        ({}, "none", 1),
        ({"enable_activation_checkpointing": True}, "full", 1),
        ({"ac_mode": "selective", "ac_option": 2}, "full", 2),
        ({"ac_mode": "selective", "ac_option": "op"}, "selective", 1),
    ],
)
def test_selective_checkpointing_takes_layers_or_operators(keys, mode, every):
    job = read(**keys).job
    assert (job.activation_checkpointing.mode, job.activation_checkpointing.every_n_layers) == (mode, every)
    assert conventions(job)["selective_checkpointing_matmuls"] == 2


def test_the_ends_are_units_of_their_own_where_the_recipe_says_so():
    ends = ["tok_embeddings", "output"]
    assert read(custom_sharded_layers=ends).job.framework_options == {"fsdp2_units": "ends"}
    assert read(memory_efficient_fsdp_wrap=True).job.framework_options == {"fsdp2_units": "ends"}
    assert read(custom_sharded_layers=ends, num_gpus=1).job.framework_options == {}
    one = read(custom_sharded_layers=["output"])
    assert any("custom_sharded_layers" in sentence for sentence in one.unsupported)


def test_weights_that_stay_gathered_are_part_of_the_job():
    assert read(fsdp_reshard_after_forward=False).job.framework_options["fsdp_reshard_after_forward"] is False
    assert "fsdp_reshard_after_forward" not in read(num_gpus=1, fsdp_reshard_after_forward=False).job.framework_options


def test_paged_states_are_paged():
    found = read(num_gpus=1, optimizer={"_component_": "bitsandbytes.optim.PagedAdamW8bit"})
    assert (found.job.optimizer.name, found.unsupported) == ("paged_adamw_8bit", ())


@pytest.mark.parametrize(
    ("component", "library"),
    [
        ("torchao.optim.AdamW8bit", "torchao"),
        ("torchao.prototype.low_bit_optim.AdamW8bit", "torchao"),
        ("bitsandbytes.optim.AdamW8bit", "bitsandbytes"),
    ],
)
def test_eight_bit_adamw_is_that_of_the_named_library(component: str, library: str):
    found = read(num_gpus=1, optimizer={"_component_": component})
    assert conventions(found.job)["adamw_8bit_library"] == library


def test_a_teacher_beside_the_student_is_refused():
    with pytest.raises(SpecError, match=r"teacher_model._component_.* is a teacher"):
        read(teacher_model={"_component_": "torchtune.models.llama3_1.llama3_1_8b"})


@pytest.mark.parametrize("other", [{"tasks": ["truthfulqa_mc2"], "limit": None}, {"max_new_tokens": 300, "top_k": 300}])
def test_a_recipe_that_evaluates_or_generates_trains_nothing(other):
    with pytest.raises(SpecError, match="is of a recipe that trains nothing; give what it serves as generation"):
        translated(Pasted(values={"model": {"_component_": "torchtune.models.llama2.llama2_7b"}, **other}))


def test_an_optimizer_in_backward_is_part_of_the_job():
    found = read(num_gpus=1, optimizer_in_bwd=True)
    assert found.job.framework_options["optimizer_in_backward"] is True
    assert not found.unsupported
    assert "optimizer_in_backward" not in read(num_gpus=1).job.framework_options


def test_what_a_torchtune_recipe_asks_beyond_the_ledger_has_its_direction():
    """QAT's fake-quantised copies need more; a reference that is gathered layer by layer needs less than TRL's."""
    recipe = {"model": {"_component_": "torchtune.models.llama3_1.llama3_1_8b"}, "batch_size": 1, "dtype": "bf16"}
    tuned = {**recipe, "quantizer": {"_component_": "torchtune.training.quantization.Int8DynActInt4WeightQATQuantizer"}}
    preferred = {
        **recipe,
        "loss": {"_component_": "torchtune.rlhf.loss.DPOLoss", "beta": 0.1, "label_smoothing": 0},
        "ref_checkpointer": {"checkpoint_dir": "/tmp/llama"},
    }
    for values, direction in ((tuned, "more"), (preferred, "less")):
        found = translated(Pasted(values=values), ReadOptions(num_gpus=8))
        assert found.unknown == ()
        assert direction in {each.direction for each in found.findings}
