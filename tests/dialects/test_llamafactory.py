"""LLaMA-Factory's keys and names that change memory beside the usual ones."""

from __future__ import annotations

import json
from typing import Any

import pytest

from peakcast.core.errors import SpecError
from peakcast.dialects.common.pasted import Pasted
from peakcast.dialects.common.translation import Translation
from peakcast.dialects.translate import ReadOptions, translated
from peakcast.doors.questions import translation_of


def read(model: str = "meta-llama/Meta-Llama-3-8B-Instruct", **values: Any) -> Translation:
    usual = {"model_name_or_path": model, "stage": "sft", "finetuning_type": "lora", "template": "llama3", "bf16": True}
    return translated(Pasted(values={**usual, "per_device_train_batch_size": 1, **values}), ReadOptions(num_gpus=2))


@pytest.mark.parametrize(
    ("name", "quantization"),
    [
        ("TechxGenus/Meta-Llama-3-8B-Instruct-GPTQ", "gptq"),
        ("unsloth/llama-3-8b-bnb-4bit", "nf4"),
        ("meta-llama/Meta-Llama-3-8B-Instruct", None),
    ],
)
def test_a_checkpoint_that_is_quantised_by_name_is_quantised(name, quantization):
    assert read(name).job.finetuning.quantization == quantization


def test_a_quantisation_without_a_model_here_is_said():
    found = read("TechxGenus/Meta-Llama-3-8B-Instruct-AWQ")
    assert any("'awq'" in sentence for sentence in found.unsupported)


def test_what_the_arguments_say_counts_more_than_the_name():
    assert read("TechxGenus/Meta-Llama-3-8B-Instruct-GPTQ", quantization_bit=8).job.finetuning.quantization == "int8"


def test_orthogonal_adapters_are_read():
    plain = read(finetuning_type="oft").job.finetuning
    assert (plain.method, plain.rank, plain.targets, dict(plain.settings)) == ("oft", None, ("all-linear",), {})
    wide = read(finetuning_type="oft", oft_block_size=64, oft_target="q_proj,v_proj").job.finetuning
    assert (wide.targets, dict(wide.settings)) == (("q_proj", "v_proj"), {"oft_block_size": 64})
    with pytest.raises(SpecError, match="oft_block_size=0 must be at least 1 without an oft_rank"):
        read(finetuning_type="oft", oft_block_size=0)


def test_noise_on_the_embeddings_is_read():
    assert read(neftune_noise_alpha=5).job.framework_options["neftune"]


def test_megatrons_sizes_make_it_a_run_of_megatron():
    sizes = {"tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 2, "use_distributed_optimizer": True}
    found = read(finetuning_type="full", bf16=True, moe_grouped_gemm=True, **sizes)
    layout, precision = found.job.parallelism, found.job.precision
    assert (found.job.framework, layout.pipeline_parallel_size, layout.data_parallel_size) == ("megatron", 2, 1)
    assert (layout.zero_stage, precision.gradients, precision.main_parameters) == (1, "float32", "float32")
    assert found.unknown == ()
    assert found.unsupported == ()
    with pytest.raises(SpecError, match="finetuning_type='oft' is not modelled with Megatron"):
        read(finetuning_type="oft", **sizes)


def test_fusions_of_megatron_are_off_unless_asked_for():
    """mcore_adapter's defaults, which are not Megatron-LM's."""
    sizes = {"finetuning_type": "full", "bf16": True, "pipeline_model_parallel_size": 2}
    plain, fused = (read(**sizes, **more).job for more in ({}, {"bias_activation_fusion": True, "apply_rope_fusion": True}))
    assert plain.framework_options["bias_swiglu_fusion"] is False
    assert plain.framework_options["apply_rope_fusion"] is False
    assert "bias_swiglu_fusion" not in fused.framework_options
    assert "apply_rope_fusion" not in fused.framework_options


@pytest.mark.parametrize(("key", "value"), [("fp8", "e4m3"), ("mtp_num_layers", 1), ("packing", True)])
def test_what_megatron_has_and_a_job_has_not_is_said(key, value):
    found = read(finetuning_type="full", bf16=True, pipeline_model_parallel_size=2, **{key: value})
    assert any(key in sentence for sentence in found.unsupported)


V1 = {"model": "qwen3-0.6b", "model_class": "llm", "train_dataset": "data.yaml", "cutoff_len": 2048}


def test_one_block_of_layers_at_a_time_is_refused_and_not_taken_for_all():
    with pytest.raises(SpecError, match="use_badam=True trains one block of layers at a time"):
        read(finetuning_type="full", use_badam=True)


@pytest.mark.parametrize(
    ("given", "frozen"),
    [
        ({}, ("vision", "projector")),
        ({"freeze_vision_tower": False, "freeze_multi_modal_projector": False}, ()),
        ({"freeze_language_model": True, "freeze_multi_modal_projector": False}, ("vision", "language")),
    ],
)
def test_parts_of_a_vision_language_model_are_frozen_as_told(given, frozen, tmp_path):
    """By default the vision tower and the projector are (hparams/finetuning_args.py)."""
    vision = {"model_type": "clip_vision_model", "hidden_size": 32}
    text = {"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    text |= {"intermediate_size": 64, "vocab_size": 512}
    config = {"model_type": "llava", "vision_config": vision, "text_config": text}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = read(str(tmp_path), finetuning_type="full", **given)
    assert found.job.finetuning.frozen == frozen
    assert not found.unknown
    assert (found.job.images.per_sequence, found.job.images.size) == (1, (768, 768))  # the most that an image may have
    assert any("image_max_pixels allows, 768 x 768" in sentence for sentence in found.assumptions)


def test_a_network_of_text_alone_has_nothing_frozen():
    assert read(freeze_vision_tower=True).job.finetuning.frozen == ()


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("peft_config", {"name": "freeze"}, "peft_config.name='freeze' is not modelled"),
        ("dist_config", {"name": "mindspeed"}, "dist_config.name='mindspeed' is not modelled; fsdp2 and deepspeed are"),
        ("quant_config", {"name": "bnb", "quantization_bit": 4}, "quant_config.quantization_bit=4 needs adapters"),
        ("dist_config", "fsdp2", "dist_config='fsdp2' must be a mapping with the plug-in's name"),
    ],
)
def test_a_plug_in_of_v1_that_is_not_read_is_refused(key, value, says):
    with pytest.raises(SpecError) as caught:
        translated(Pasted(values={**V1, key: value}))
    assert says in caught.value.message


def test_v1_trains_what_its_command_says():
    job = translated(Pasted(values=V1, program="llamafactory-cli dpo")).job
    assert (job.loss.kind, job.micro_batch_size, job.sequence_length) == ("dpo", 2, 2048)


def test_v1s_muon_is_a_jobs_muon():
    found = translated(
        Pasted(values={**V1, "optim_config": {"name": "muon"}, "dist_config": {"name": "fsdp2"}}, num_gpus=2)
    )
    assert (found.job.optimizer.name, found.job.parallelism.sharding) == ("muon", "fsdp2")
    assert [finding.direction for finding in found.findings if "Muon" in finding.sentence] == ["more"]


@pytest.mark.parametrize(
    ("keys", "name", "rank", "unsupported"),
    [
        ({"use_galore": True, "galore_rank": 64}, "galore", 64, ()),
        ({"use_apollo": True}, "galore", 16, ("apollo_adamw is not modelled",)),
        ({"use_galore": True, "galore_layerwise": True}, "galore", 16, ("updates each layer in backward",)),
        ({"use_muon": True}, "muon", None, ("LLaMA-Factory's own Muon",)),
        ({"use_adam_mini": True}, "adam_mini", None, ()),
    ],
)
def test_switches_of_optimizers_are_jobs_optimizers_or_said(keys, name, rank, unsupported):
    found = read(finetuning_type="full", pure_bf16=True, **keys)
    assert (found.job.optimizer.name, found.job.framework_options.get("galore_rank")) == (name, rank)
    assert all(any(words in sentence for sentence in found.unsupported) for words in unsupported)
    assert len(found.unsupported) == len(unsupported)


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"export_dir": "out"}, "export_dir"),
        ({"do_predict": True}, "do_predict"),
        ({"infer_backend": "vllm"}, "infer_backend"),
    ],
)
def test_a_file_that_trains_nothing_is_refused_with_how_to_ask_for_generation(values, key):
    with pytest.raises(SpecError, match=f"{key}=.* trains nothing; .*task=inference"):
        read(**values)
    if key != "export_dir":
        assert read(do_train=True, dataset="identity", **values).job.task == "train"


def test_experts_on_the_cpu_are_refused():
    with pytest.raises(SpecError, match="use_kt=True computes the experts on the CPU"):
        read(use_kt=True)


def test_flash_attn_was_a_switch():
    """As the command of hiyouga/LLaMA-Factory issue 3259 has it, of April 2024: `--bf16 --flash_attn`."""
    text = (
        "#!/bin/bash\ndeepspeed --num_gpus 8 src/train_bash.py --stage sft --finetuning_type full --cutoff_len 32768 "
        "--model_name_or_path gpt2 --template qwen --per_device_train_batch_size 1 --output_dir o --bf16 --flash_attn\n"
    )
    assert translation_of(text).job.attention == "flash_attention_2"


def test_an_evaluation_of_more_sequences_than_training_passes_is_said():
    """transformers' default is 8 of them; src/llamafactory/hparams/training_args.py has no other."""
    found = [each for each in read(eval_strategy="steps", val_size=0.1).findings if "Evaluation" in each.sentence]
    assert [(each.parameter, each.direction) for each in found] == [("per_device_eval_batch_size", "more")]
    assert not any("Evaluation" in said for said in read(eval_strategy="steps", per_device_eval_batch_size=1).unsupported)
    assert not any("Evaluation" in said for said in read(per_device_eval_batch_size=8).unsupported)


def test_the_balancing_loss_of_experts_is_said_with_its_size():
    """Of 48 layers with 128 experts, 8 for each token: 6 bytes for each logit, and 12 for each element of the masks
    (transformers 4 `load_balancing_loss_func`)."""
    found = read("Qwen/Qwen3-30B-A3B", moe_aux_loss_coef=0.001, cutoff_len=4096)
    logits = 4096 * 128 * 48
    said = next(each for each in found.findings if each.parameter == "moe_aux_loss_coef")
    assert f"{6 * logits / 2**30:.2f} GiB" in said.sentence
    assert f"{12 * 8 * logits / 2**30:.1f} GiB" in said.sentence
    for model, coefficient in (("Qwen/Qwen3-30B-A3B", 0.0), ("Qwen/Qwen3-8B", 0.001)):
        assert not any("balancing" in one for one in read(model, moe_aux_loss_coef=coefficient).unsupported)


def test_fully_trained_weights_are_widened_however_they_are_divided():
    """0.9.5 model/adapter.py `init_adapter`: except by ZeRO-3 and pure_bf16; before, accelerate widened FSDP's."""
    for divided, gpus in (("full_shard auto_wrap", 1), ("full_shard auto_wrap", 2), ("", 1)):
        values = {"model_name_or_path": "Qwen/Qwen3-8B", "stage": "sft", "finetuning_type": "full", "template": "qwen3"}
        pasted = Pasted(values={**values, "bf16": True, "per_device_train_batch_size": 1, "fsdp": divided})
        assert translated(pasted, ReadOptions(num_gpus=gpus)).job.precision.parameters == "float32"


def test_pretraining_packs_unless_told_otherwise():
    """hparams/parser.py `get_train_args`."""
    packed = [not any("padded to" in said for said in read(**asked).assumptions) for asked in (
        {"stage": "pt"}, {"stage": "pt", "packing": False}, {"stage": "sft"},
    )]  # fmt: skip
    assert packed == [True, False, False]


def test_the_reference_is_a_network_of_its_own_unless_lora_alone_is_trained():
    """0.9.5 train/trainer_utils.py `create_ref_model`."""
    def reference(**asked):
        return read(stage="dpo", **asked).job.reference

    assert reference() == "adapter_off"
    assert reference(ref_model="meta-llama/Meta-Llama-3-8B-Instruct") == "model"
    assert reference(finetuning_type="oft") == "model"
    assert reference(finetuning_type="oft", pref_loss="orpo") == "none"
    assert reference(finetuning_type="full", pure_bf16=True) == "model"
