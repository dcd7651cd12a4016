"""ms-swift's own keys: offloading of activations, what leaves the GPU for generation, checkpoints of Megatron's."""

import json

import pytest

from peakcast.core.errors import SpecError
from peakcast.doors.questions import translation_of

LORA = "NPROC_PER_NODE=2 swift sft --model qwen3-8b --train_type lora --max_length 4096 --gradient_checkpointing false"


def test_activations_are_offloaded_by_a_key_of_fsdps_file(tmp_path):
    """swift/callbacks/activation_cpu_offload.py of ms-swift 4, which is verl's utils/activation_offload.py."""
    (tmp_path / "own.json").write_text(json.dumps({"fsdp_config": {"fsdp_version": 2, "activation_cpu_offload": True}}))
    (tmp_path / "run.sh").write_text(f"{LORA} --fsdp own.json\n")
    read = translation_of(tmp_path / "run.sh")
    assert (read.job.parallelism.sharding, read.job.offload.activations) == ("fsdp2", True)
    found = [each for each in read.findings if each.parameter == "activation_cpu_offload"]
    assert [each.direction for each in found] == ["more"]
    assert "two layers' activations" in found[0].sentence


@pytest.mark.parametrize("key", ["--lisa_activated_layers 2", "--use_galore true", "--freeze_parameters_ratio 0.9"])
def test_what_trains_less_or_keeps_less_needs_less(key):
    read = translation_of(f"swift sft --model qwen2.5-7b --train_type full --max_length 512 {key}\n")
    name = key.split()[0][2:]
    assert [each.direction for each in read.findings if each.parameter == name] == ["less"]


def test_what_leaves_the_gpu_for_generation_is_back_for_the_update():
    command = "NPROC_PER_NODE=8 swift rlhf --rlhf_type grpo --model qwen2.5-7b --train_type full --use_vllm true"
    read = translation_of(f"{command} --vllm_mode colocate --max_completion_length 512 --offload_optimizer true\n")
    assert any(said.startswith("offload_optimizer: what leaves the GPU") for said in read.assumptions)
    assert "offload_optimizer" not in read.unknown
    assert not read.job.offload.optimizer


@pytest.mark.parametrize("key", ["load", "mcore_model"])
def test_a_checkpoint_of_megatrons_does_not_name_the_network(key):
    command = f"NPROC_PER_NODE=8 megatron sft --{key} qwen3-8b-mcore --train_type full --max_length 512"
    with pytest.raises(SpecError, match=f"{key}='qwen3-8b-mcore' is a checkpoint of Megatron's.*by --model"):
        translation_of(command + "\n")
    assert translation_of(f"{command} --model qwen3-8b\n").job.architecture.name == "qwen3-8b"


@pytest.mark.parametrize(("key", "direction"), [("modules_to_save embed_tokens", "more"), ("target_regex a.*", "either")])
def test_what_is_trained_beside_adapters_under_megatron_needs_more(key, direction):
    command = "NPROC_PER_NODE=8 megatron sft --model qwen3-8b --train_type lora --max_length 512"
    read = translation_of(f"{command} --{key}\n")
    assert [each.direction for each in read.findings if each.parameter == key.split()[0]] == [direction]
    buckets = translation_of(f"{command} --ddp_bucket_size 1000000 --ddp_timeout 60\n")
    assert "ddp_bucket_size" not in buckets.ignored


def test_the_script_of_ms_swift_2_is_read(tmp_path):
    """examples/pytorch/llm/scripts/qwen_14b_chat/qlora/sft.sh of ms-swift 1 and 2."""
    job = translation_of(
        "CUDA_VISIBLE_DEVICES=0 python llm_sft.py --model_id_or_path Qwen/Qwen1.5-14B-Chat --sft_type lora --dtype bf16 "
        "--quantization_bit 4 --lora_target_modules q_proj v_proj --lora_rank 4 --batch_size 3 --max_length 1024\n"
    ).job
    assert (job.finetuning.method, job.finetuning.rank, job.micro_batch_size) == ("qlora", 4, 3)
    assert set(job.finetuning.targets) == {"q_proj", "v_proj"}


def test_an_evaluation_of_more_sequences_than_training_passes_is_said():
    """It evaluates whenever it saves, on what was held out, one sequence at once by default."""
    held_out = f"{LORA} --val_dataset val.jsonl"
    found = translation_of(f"{held_out} --per_device_eval_batch_size 4\n").findings
    assert [(each.parameter, each.direction) for each in found if "Evaluation" in each.sentence] == [
        ("per_device_eval_batch_size", "more")
    ]
    eight = "--per_device_eval_batch_size 8"
    for other in (held_out, f"{LORA} {eight}", f"{held_out} --eval_strategy no {eight}"):
        assert not any("Evaluation" in said for said in translation_of(f"{other}\n").unsupported)


@pytest.mark.parametrize(("processes", "spread"), [("", 4), ("NPROC_PER_NODE=2 ", 2), ("NPROC_PER_NODE=4 ", 1)])
def test_a_network_is_said_to_lie_on_the_gpus_that_have_no_process_of_their_own(processes, spread):
    command = f"CUDA_VISIBLE_DEVICES=0,1,2,3 {processes}swift sft --model Qwen/Qwen2-7B-Instruct --train_type lora\n"
    read = translation_of(command)
    assert any(f"layers over {spread} of the 4 GPUs" in sentence for sentence in read.unsupported) is (spread > 1)
