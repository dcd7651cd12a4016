"""Every kind of configuration that can be read, and which of them one is, by its content."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from peakcast.core.fields import flat


class Dialect(NamedTuple):
    """A kind of configuration: its name in sentences, the keys that identify it, and its reader."""

    title: str
    signs: tuple[str, ...]
    """Each is a set of keys (dots lead into mappings, `|` separates alternatives); all keys of one set must be there."""
    reader: str
    """Module and function in `peakcast.dialects`."""
    weak: tuple[str, ...] = ()
    """Further sets of keys that other projects have too: with these, the dialect is likely but not certain."""


DIALECTS: dict[str, Dialect] = {
    "job": Dialect("a peakcast job", ("architecture",), "common.job_file:from_job"),
    "python_script": Dialect(
        "a Python program around transformers' trainers", ("trainer_calls",), "python_script:from_python_script"
    ),
    "axolotl": Dialect(
        "an Axolotl configuration",
        ("base_model micro_batch_size|sequence_len|adapter|datasets|sample_packing",),
        "axolotl.job:from_axolotl",
    ),
    "lmflow": Dialect(
        "an LMFlow command",
        (
            "model_name_or_path conversation_template|disable_group_texts|group_texts_batch_size|save_aggregated_lora"
            "|lora_model_path|use_lisa|lisa_activated_layers|use_customized_optim",
        ),
        "lmflow:from_lmflow",
        ("model_name_or_path dataset_path block_size",),
    ),
    "fms_tuning": Dialect(
        "a command of fms-hf-tuning",
        ("model_name_or_path fast_kernels|fused_lora|auto_gptq|bnb_qlora|training_data_path|data_config_path|fast_moe",),
        "fms_tuning:from_fms_tuning",
    ),
    "qlora": Dialect(
        "a command of QLoRA's own", ("model_name_or_path source_max_len|target_max_len|mmlu_split",), "qlora:from_qlora"
    ),
    "peft_sft": Dialect(
        "a command of peft's examples/sft",
        (
            "model_name_or_path use_peft_lora|use_4bit_quantization|use_8bit_quantization|use_nested_quant"
            "|chat_template_format",
        ),
        "peft_sft:from_peft_sft",
    ),
    "open_instruct": Dialect(
        "an open-instruct configuration",
        ("model_name_or_path dataset_mixer_list|mixer_list|use_slow_tokenizer|with_tracking|reduce_loss|use_qlora",),
        "open_instruct:from_open_instruct",
    ),
    "llamafactory_megatron": Dialect(
        "a LLaMA-Factory configuration for Megatron",
        (
            "model_name_or_path stage|finetuning_type|cutoff_len|template "
            "tensor_model_parallel_size|pipeline_model_parallel_size|expert_model_parallel_size|use_distributed_optimizer",
        ),
        "llamafactory.megatron:from_llamafactory_megatron",
    ),
    "llamafactory_v1": Dialect(
        "a LLaMA-Factory v1 configuration",
        ("model_class train_dataset|peft_config|dist_config",),
        "llamafactory.v1:from_llamafactory_v1",
    ),
    "llamafactory": Dialect(
        "a LLaMA-Factory configuration",
        ("model_name_or_path stage|finetuning_type|cutoff_len|template|lora_target",),
        "llamafactory.job:from_llamafactory",
        ("model_name_or_path lora_rank",),
    ),
    "swift_megatron": Dialect(
        "an ms-swift configuration for Megatron",
        (
            "model micro_batch_size|global_batch_size|recompute_granularity|tensor_model_parallel_size"
            "|pipeline_model_parallel_size|expert_model_parallel_size "
            "train_type|tuner_type|max_length|finetune|load_safetensors",
        ),
        "swift.megatron:from_swift_megatron",
    ),
    "swift": Dialect(
        "an ms-swift configuration",
        (
            "model train_type|tuner_type|sft_type|rlhf_type|attn_impl|quant_bits|loss_scale",
            "model model_author|split_dataset_ratio|dataset_num_proc per_device_train_batch_size|deepspeed|max_length",
        ),
        "swift.job:from_swift",
    ),
    "openrlhf": Dialect(
        "an OpenRLHF command",
        ("pretrain|model_name_or_path micro_train_batch_size|generate_max_len|max_len|zero_stage",),
        "openrlhf:from_openrlhf",
    ),
    "verl": Dialect(
        "a verl configuration",
        (
            "actor_rollout_ref.model|actor_rollout_ref.actor",
            "model.partial_pretrain",
            "data.train_files model|model.path trainer",
        ),
        "verl:from_verl",
    ),
    "oumi": Dialect(
        "an Oumi configuration",
        ("model.model_name training.trainer_type|training.use_peft",),
        "oumi:from_oumi",
        ("model.model_name training.per_device_train_batch_size|training.enable_gradient_checkpointing",),
    ),
    "automodel": Dialect(
        "a NeMo AutoModel recipe", ("step_scheduler model|model.pretrained_model_name_or_path",), "automodel:from_automodel"
    ),
    "gpt_neox": Dialect("a GPT-NeoX configuration", ("pipe_parallel_size|pipe-parallel-size",), "gpt_neox:from_gpt_neox"),
    "megatron_bridge": Dialect(
        "a Megatron-Bridge configuration",
        (
            "model|model.tensor_model_parallel_size train.micro_batch_size|train.global_batch_size|mixed_precision "
            "ddp|checkpoint|rng",
        ),
        "megatron_bridge:from_megatron_bridge",
    ),
    "nemo_2": Dialect(
        "a NeMo 2 recipe",
        ("trainer.strategy data.micro_batch_size|data.seq_length|data.global_batch_size",),
        "nemo_2:from_nemo_2",
    ),
    "nanotron": Dialect(
        "a nanotron configuration", ("model.model_config parallelism|tokens",), "nanotron.job:from_nanotron"
    ),
    "torchtune": Dialect("a torchtune recipe", ("model._component_",), "torchtune:from_torchtune"),
    "torchtitan": Dialect(
        "a torchtitan configuration",
        (
            "model.flavor training|parallelism",
            "model_spec training",
            "training.seq_len|training.local_batch_size parallelism|model|activation_checkpoint|hf_assets_path",
        ),
        "torchtitan.job:from_torchtitan",
    ),
    "litgpt": Dialect(
        "a LitGPT configuration",
        ("checkpoint_dir|model_name|model_config.n_layer|model.n_layer train.micro_batch_size|train.global_batch_size",),
        "litgpt.job:from_litgpt",
        ("checkpoint_dir lora_r|precision",),
    ),
    "nemo": Dialect(
        "a NeMo 1 GPT configuration",
        ("model.num_layers model.micro_batch_size model.encoder_seq_length",),
        "nemo:from_nemo",
    ),
    "slime": Dialect(
        "a slime command", ("actor-num-nodes|actor-num-gpus-per-node rollout-batch-size|num-rollout",), "slime:from_slime"
    ),
    "megatron_yaml": Dialect(
        "a Megatron-LM --yaml-cfg file", ("language_model model_parallel",), "megatron.launch:from_megatron_yaml"
    ),
    "megatron": Dialect(
        "Megatron-LM arguments",
        (
            "num_layers|num-layers|yaml_cfg|yaml-cfg hidden_size|hidden-size|yaml_cfg|yaml-cfg "
            "seq_length|seq-length|micro_batch_size|micro-batch-size|yaml_cfg|yaml-cfg|encoder_seq_length|encoder-seq-length",
            "num-layers|hidden-size|seq-length|micro-batch-size tensor-model-parallel-size|num-layers|hidden-size",
        ),
        "megatron.launch:from_megatron_flags",
    ),
    "accelerate": Dialect(
        "an accelerate configuration",
        ("distributed_type", "compute_environment", "fsdp_config mixed_precision"),
        "huggingface.trainer:from_accelerate",
    ),
    "deepspeed": Dialect(
        "a DeepSpeed configuration",
        ("zero_optimization", "train_micro_batch_size_per_gpu", "bf16.enabled", "fp16.enabled"),
        "huggingface.trainer:from_deepspeed",
        ("train_batch_size",),
    ),
    "peft": Dialect("a PEFT adapter_config.json", ("peft_type",), "huggingface.trainer:from_peft"),
    "deepspeed_script": Dialect(
        "arguments of a script around DeepSpeed's engine",
        ("deepspeed_config model_name batch_size",),
        "huggingface.deepspeed_script:from_deepspeed_script",
    ),
    "training": Dialect(
        "Hugging Face training arguments",
        (
            "per_device_train_batch_size",
            "model_name_or_path dataset_name|train_file|learning_rate|max_length|max_seq_length|use_peft|bf16"
            "|num_train_epochs",
            "output_dir learning_rate|num_train_epochs|gradient_checkpointing|gradient_accumulation_steps|bf16",
        ),
        "huggingface.trainer:from_training",
    ),
    "trl": Dialect("arguments of TRL's trainers", (), "huggingface.trainer:from_trl"),
    "transformers": Dialect("arguments of transformers' own Trainer", (), "huggingface.trainer:from_transformers"),
    "fsdp": Dialect(
        "an FSDP configuration of transformers' Trainer",
        ("transformer_layer_cls_to_wrap", "fsdp_transformer_layer_cls_to_wrap", "fsdp_version", "fsdp_sharding_strategy"),
        "huggingface.trainer:from_fsdp",
    ),
    "hf_config": Dialect(
        "a Hugging Face config.json",
        ("model_type hidden_size|n_embd|d_model|text_config|num_hidden_layers", "architectures"),
        "huggingface.trainer:from_config",
    ),
}
"""Every dialect; those with more specific keys come first."""
HUGGING_FACE_PARTS = ("hf_config", "peft", "deepspeed", "accelerate", "training")
"""Files that may accompany another one as parts of one Hugging Face run."""


PROGRAMS = {
    "llamafactory-cli": ("llamafactory_v1", "llamafactory_megatron", "llamafactory"), "axolotl": ("axolotl",),
    "axolotl.cli.train": ("axolotl",), "tune": ("torchtune",), "litgpt": ("litgpt",),
    "openrlhf": ("openrlhf",), "verl": ("verl",), "automodel": ("automodel",), "run_recipe.py": ("megatron_bridge",),
    "swift": ("swift",), "llm_sft.py": ("swift",), "megatron": ("swift_megatron",), "torchtitan.train": ("torchtitan",),
    "run_train.sh": ("torchtitan",), "oumi": ("oumi",),
}  # fmt: skip
"""Programs that only read one project's configurations -> its dialects; the last is used if no key identifies another."""


class Recognised(NamedTuple):
    """The dialect that was assumed for a mapping, and why."""

    name: str
    rests_on: str
    """The program or the keys by which it was recognised, in words."""
    sure: bool


def recognised(values: Mapping[str, Any], program: str = "") -> list[Recognised]:
    """The dialects in which a mapping may be written, the most likely first; after a certain one, no others are listed."""
    word = program.split(" ")[0].rsplit("/", 1)[-1]
    word = word if word in PROGRAMS else word.split(".")[0]  # openrlhf.cli.train_sft
    keys = keys_of(values)
    found: list[Recognised] = []
    for name, dialect in DIALECTS.items():
        if word in PROGRAMS and name not in PROGRAMS[word]:
            continue
        for sign, sure in (*((sign, True) for sign in dialect.signs), *((sign, False) for sign in dialect.weak)):
            matched = [next((option for option in word.split("|") if option in keys), "") for word in sign.split()]
            if all(matched):
                found.append(Recognised(name, " and ".join(matched), sure))
                break
        if found and found[-1].sure:
            break
    if word in PROGRAMS:
        name = found[0].name if found else PROGRAMS[word][-1]
        return [Recognised(name, f"the program {word}", True)]
    return found


def dialect_of(values: Mapping[str, Any]) -> str | None:
    """The dialect in which a mapping is written; None if it cannot be recognised."""
    found = recognised(values)
    return found[0].name if found else None


def keys_of(values: Mapping[str, Any]) -> set[str]:
    """The keys of a mapping and of mappings inside it, with their paths."""
    keys = {str(key) for key in flat(values)} | {str(key) for key in values}
    return keys | {key.rpartition(".")[0] for key in keys} | {".".join(key.split(".")[:2]) for key in keys}
