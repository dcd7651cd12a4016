"""Axolotl's keys that change memory beside the usual ones."""

from __future__ import annotations

from typing import Any

import pytest

from peakcast.core.errors import SpecError
from peakcast.dialects.common.pasted import Pasted
from peakcast.dialects.common.translation import Translation
from peakcast.dialects.translate import ReadOptions, translated

LIGER = {"liger_rope": True, "liger_rms_norm": True, "liger_glu_activation": True}
QLORA = {"adapter": "qlora", "load_in_4bit": True, "lora_r": 8, "lora_target_linear": True}


def read(model: str = "meta-llama/Llama-3.1-8B", **values: Any) -> Translation:
    usual = {"base_model": model, "micro_batch_size": 1, "sequence_len": 1024, "bf16": True}
    return translated(Pasted(values={**usual, **values}), ReadOptions(num_gpus=2))


def test_ligers_kernels_together_are_those_of_transformers():
    found = read(**LIGER, liger_layer_norm=True)
    assert found.job.framework_options["liger_kernels"]
    assert not found.job.loss.fused_linear_cross_entropy
    assert found.unsupported == ()


@pytest.mark.parametrize("key", LIGER)
def test_one_of_them_alone_is_said(key):
    found = read(**{key: True})
    assert "liger_kernels" not in found.job.framework_options
    assert any(key in sentence for sentence in found.unsupported)


def test_experts_are_quantised_where_axolotl_does_it():
    plain, asked = (read("mistralai/Mixtral-8x7B-v0.1", **QLORA, **more) for more in ({}, {"quantize_moe_experts": True}))
    assert "quantized_experts" not in plain.job.framework_options
    assert asked.job.framework_options["quantized_experts"]


@pytest.mark.parametrize("key", ["neftune_noise_alpha", "noisy_embedding_alpha"])
def test_noise_on_the_embeddings_is_read(key):
    assert read(**{key: 5}).job.framework_options["neftune"]


@pytest.mark.parametrize("key", ["overrides_of_model_config", "model_config"])
def test_another_shape_of_the_network_is_said(key):
    assert read(**{key: {"output_router_logits": True, "rope_theta": 1e6}}).unsupported == ()  # no experts here
    assert any("num_hidden_layers" in sentence for sentence in read(**{key: {"num_hidden_layers": 4}}).unsupported)


@pytest.mark.parametrize("prefix", ["", "fsdp_"])
def test_units_of_another_rule_than_layers_are_said(prefix):
    usual = {f"{prefix}transformer_layer_cls_to_wrap": "LlamaDecoderLayer"}
    layers = read(fsdp_config={**usual, f"{prefix}auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}, fsdp_version=2)
    assert (layers.unsupported, layers.unknown, layers.job.parallelism.sharding) == ((), (), "fsdp2")
    sizes = read(fsdp_config={f"{prefix}auto_wrap_policy": "SIZE_BASED_WRAP"}, fsdp_version=2)
    assert any("SIZE_BASED_WRAP" in sentence for sentence in sizes.unsupported)


FSDP2 = {"fsdp_version": 2, "fsdp_config": {"reshard_after_forward": True}}


@pytest.mark.parametrize("key", ["context_parallel_size", "sequence_parallel_degree"])
def test_ranks_that_share_a_sequence_or_a_layer_reach_the_job_and_are_said(key):
    found = read(**FSDP2, **{key: 2}, sample_packing=True, flash_attention=True)
    layout = found.job.parallelism
    assert (layout.context_parallel_size, layout.data_parallel_size, layout.world_size) == (2, 1, 2)
    assert found.job.batch.form == "rows"
    assert any(f"({key})" in sentence for sentence in found.unsupported)
    tensor = read(**FSDP2, tensor_parallel_size=2).job.parallelism
    assert (tensor.tensor_parallel_size, tensor.world_size) == (2, 2)


def test_ranks_that_do_not_divide_the_run_are_refused_with_the_way_out():
    words = r"sequence_parallel_degree=8 is of a layout of 8 ranks .* do not divide the 2 .*say --num-gpus 8"
    with pytest.raises(SpecError, match=words):
        read(sequence_parallel_degree=8)


@pytest.mark.parametrize("way", ["legacy", "disk", True])
def test_every_way_of_offloading_activations_offloads_them(way):
    assert read(activation_offloading=way, gradient_checkpointing=True).job.offload.activations


def test_a_teacher_beside_the_student_is_refused():
    with pytest.raises(SpecError, match="gkd_teacher='Qwen/Qwen3-4B' is a teacher"):
        read(gkd_teacher="Qwen/Qwen3-4B")


def test_ranks_that_hold_replicas_of_what_others_share():
    usual = {"base_model": "meta-llama/Llama-3.1-8B", "micro_batch_size": 1, "sequence_len": 1024, "bf16": True, **FSDP2}
    for sizes in ({"dp_replicate_size": 4}, {"dp_replicate_size": 4, "dp_shard_size": 2}):
        found = translated(Pasted(values={**usual, **sizes}), ReadOptions(num_gpus=8))
        layout = found.job.parallelism
        assert (layout.sharding, layout.data_parallel_size, found.unsupported) == ("hsdp", 8, ())
        assert found.job.framework_options["shard_group_size"] == 2


def test_experts_are_computed_and_spread_as_asked():
    found = read("mistralai/Mixtral-8x7B-v0.1", **FSDP2, experts_implementation="eager", expert_parallel_size=2)
    assert found.job.framework_options["experts_implementation"] == "loop"
    assert found.job.parallelism.expert_parallel_size == found.job.parallelism.data_parallel_size == 2
    other = read("mistralai/Mixtral-8x7B-v0.1", experts_implementation="scattermoe")
    assert other.unsupported == ("experts_implementation=scattermoe is not modelled; grouped_mm is assumed.",)
    with pytest.raises(SpecError, match="needs a mixture-of-experts architecture"):
        read(expert_parallel_size=2)


@pytest.mark.parametrize("asked", [{"tiled_mlp": True, "tiled_mlp_num_shards": 4}, {"unfrozen_parameters": ["lm_head"]}])
def test_what_needs_less_than_the_answer_is_said(asked):
    found = read(**asked)
    assert ["needs less than the answer" in sentence for sentence in found.unsupported] == [True]
    assert found.unknown == ()


def test_the_plugin_alone_turns_cut_cross_entropy_on():
    """Its `CutCrossEntropyArgs.cut_cross_entropy` is true by default."""
    plugins = ["axolotl.integrations.cut_cross_entropy.CutCrossEntropyPlugin"]
    asked = [read(plugins=plugins), read(plugins=plugins, cut_cross_entropy=False), read()]
    assert [found.job.loss.fused_linear_cross_entropy for found in asked] == [True, False, False]


def test_fsdp2_has_the_units_of_axolotls_own_preparation():
    """Layers and the root, so that a fused loss beside adapters runs."""
    fsdp = {"fsdp_version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"}
    found = read(fsdp_config=fsdp, adapter="lora", lora_r=8, lora_target_linear=True, liger_fused_linear_cross_entropy=True)
    assert found.job.framework_options["fsdp2_units"] == "root"
    assert "fsdp2_units" not in read().job.framework_options


def test_an_evaluation_of_more_sequences_than_training_passes_is_said():
    """As many as training passes, unless eval_batch_size says otherwise; none without something held out."""
    evaluates = {"val_set_size": 0.05, "evals_per_epoch": 4}
    found = [each for each in read(**evaluates, eval_batch_size=4).findings if "Evaluation" in each.sentence]
    assert [(each.parameter, each.direction) for each in found] == [("eval_batch_size", "more")]
    for other in (evaluates, {"eval_batch_size": 4, "val_set_size": 0.0}, {"eval_batch_size": 4, "val_set_size": 0.05}):
        assert not any("Evaluation" in said for said in read(**other).unsupported)
        assert read(**other).unknown == ()


def test_the_balancing_loss_of_experts_is_said():
    found = read("mistralai/Mixtral-8x7B-v0.1", overrides_of_model_config={"output_router_logits": True}).findings
    assert [each.direction for each in found if each.parameter == "output_router_logits"] == ["more"]


def test_four_bits_are_stored_and_scaled_as_their_own_arguments_say():
    """axolotl 0.19 loaders/model.py `_set_quantization_config`."""
    shards = {"fsdp_version": 2, "fsdp_config": {"offload_params": False}}
    stored = read(**QLORA, **shards, bnb_config_kwargs={"bnb_4bit_quant_storage": "uint8"}).job
    assert stored.framework_options["quantized_storage"] == "uint8"
    assert "quantized_storage" not in read(**QLORA, **shards).job.framework_options
    once = read(**QLORA, bnb_config_kwargs={"bnb_4bit_use_double_quant": False, "bnb_4bit_quant_type": "fp4"})
    assert (once.job.finetuning.double_quantization, once.unknown) == (False, ())


def test_four_bits_with_adapters_on_whole_weights_are_refused():
    with pytest.raises(SpecError, match="load_in_4bit=True has no effect with adapter: lora"):
        read(**{**QLORA, "adapter": "lora"})


def test_the_rank_of_an_optimizers_projection_is_read_as_a_mapping_or_a_text():
    """core/builders/base.py: either becomes transformers' optim_args."""
    for given in ({"rank": 1024, "scale": 0.25}, "rank=1024,scale=0.25"):
        job = read(optimizer="galore_adamw", optim_target_modules=["mlp", "attn"], optim_args=given).job
        assert job.framework_options["galore_rank"] == 1024


def test_vllm_beside_the_step_has_its_own_section():
    """axolotl 0.19 core/trainers/grpo/__init__.py: section `vllm` has its share of the GPU, and trl's default is 0.3."""
    own = {"rl": "grpo", "vllm": {"gpu_memory_utilization": 0.6}}
    together = read(**own, trl={"use_vllm": True, "vllm_mode": "colocate", "max_completion_length": 512})
    assert together.job.other_memory_fraction == 0.6
    loss = read(**own, trl={"use_vllm": True, "use_liger_loss": True, "loss_of_something": 1, "temperature": 1.0})
    assert [each.direction for each in loss.findings if each.parameter == "trl.use_liger_loss"] == ["less"]
    assert loss.unknown == ("trl.loss_of_something",)


@pytest.mark.parametrize("more", [{"qat": {"weight_dtype": "int4"}}, {"kd_trainer": True}])
def test_what_needs_more_than_the_answer_makes_it_uncertain(more):
    (key,) = more
    assert [each.direction for each in read(**more).findings if each.parameter == key] == ["more"]
