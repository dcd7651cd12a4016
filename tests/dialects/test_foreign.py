"""Configurations of projects that are not read: each is named, with what to give in its place."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from peakcast.core.errors import SpecError
from peakcast.dialects.common.foreign import FOREIGN
from peakcast.dialects.translate import ReadOptions
from peakcast.doors.questions import translation_of

BRIDGE = "_target_: megatron.bridge.training.config.ConfigContainer\nmodel: {num_layers: 36, hidden_size: 2880}\n"
OVERRIDES = "model_config: {tensor_model_parallel_size: 2}\ntrain_config: {micro_batch_size: 4}\n"
PERFORMANCE = "ConfigContainer: {model: {cross_entropy_fusion_impl: te}}\nperf_matrix: {h100: {}}\n"
FOUNDRY_MPT = "train_loader: {name: text}\nmodel: {d_model: 4096}\ndevice_train_microbatch_size: 8\nfsdp_config: {}\n"
FOUNDRY = "max_seq_len: 2048\nglobal_train_batch_size: 512\nmodel: {name: mpt_causal_lm}\nfsdp_config: {}\n"
NEMO_2 = "_target_: nemo.collections.llm.api.pretrain\nmodel: {config: {num_layers: 32}}\n"
SWIFT = "swift infer --model Qwen/Qwen2.5-7B-Instruct --stream true\n"
OLMO = "model: {d_model: 4096, n_layers: 32}\ndevice_train_microbatch_size: 2\nglobal_train_batch_size: 1024\nfsdp: {}\n"
NEMO_RL = "policy: {model_name: Qwen/Qwen2.5-1.5B, train_micro_batch_size: 4, dtensor_cfg: {enabled: true}}\n"
PRIMUS = "modules: {pre_trainer: {framework: megatron, overrides: {micro_batch_size: 2}}}\n"
XTUNER = "from mmengine.dataset import DefaultSampler\nfrom xtuner.engine.runner import TrainLoop\nbatch_size = 1\n"
NANO_GPT = "block_size: 1024\nn_layer: 12\nn_head: 12\nbatch_size: 12\n"
REFUSED = Path(__file__).parent / "refused"
"""Files in the shape and with the keys that the projects publish."""
FOUND = {
    "a Megatron-Bridge configuration": [BRIDGE, OVERRIDES, PERFORMANCE, REFUSED / "bridge_performance.sh"],
    "a NeMo 2 recipe": [NEMO_2, "nemo vlm finetune --factory x", "nemo.collections.llm.recipes.llama3_8b"],
    "an LLM Foundry configuration": [FOUNDRY, FOUNDRY_MPT],
    "an OLMo configuration": [OLMO],
    "a NeMo RL configuration": [NEMO_RL, "uv run examples/run_grpo.py policy.model_name=x cluster.gpus_per_node=8\n"],
    "a Primus experiment": [PRIMUS],
    "an XTuner configuration": [XTUNER],
    "an InternEvo configuration": [REFUSED / "internevo.py"],
    "an ms-swift command that trains nothing": [SWIFT],
    "an inference server": [
        "vllm serve meta-llama/Llama-3.1-8B-Instruct --tensor-parallel-size 2 --gpu-memory-utilization 0.9\n",
        REFUSED / "sglang.sh",
    ],
    "an open-instruct command of reinforcement learning": [
        "python open_instruct/grpo_fast.py --beta 0.0 --num_unique_prompts_rollout 128 --response_length 8192 "
        "--per_device_train_batch_size 1 --deepspeed_stage 3\n",
    ],
    "a SkyRL command": [
        "uv run -m skyrl.train.entrypoints.main_base trainer.policy.model.path=x\n",
        "trainer: {policy: {model: {path: x}}}\ngenerator: {n_samples_per_prompt: 5}\n",
    ],
    "an AReaL configuration": [
        "allocation_mode: sglang:d4p1t1+d4p1t1\nactor: {path: x, mb_spec: {max_tokens_per_mb: 10240}}\n"
    ],
    "an EasyR1 configuration": [
        "data: {max_prompt_length: 2048}\nworker: {actor: {global_batch_size: 1}, rollout: {n: 5}}\n"
    ],
    "a ROLL configuration": [
        "pretrain: x\nsequence_length: 128\nsft_train: {strategy_args: {strategy_name: megatron_train}}\n"
    ],
    "a prime-rl configuration": ['[model]\nname = "x"\n[data]\nseq_len = 4096\n[optim]\nlr = 2e-5\n[inference]\n'],
    "a Tunix configuration": ["model_config: {model_id: x}\nrl_training_config: {mini_batch_size: 128}\n"],
    "a Levanter configuration": [
        "model: {type: llama, seq_len: 4096}\ntrainer: {train_batch_size: 32}\ndata: {tokenizer: x}\n",
    ],
    "a Firefly configuration": ['{"template_name": "qwen", "train_file": "a.jsonl", "lora_rank": 64, "output_dir": "o"}'],
    "an alpaca-lora command": [
        "python finetune.py --base_model x --data_path y --micro_batch_size 4 --cutoff_len 512 --lora_r 8 --train_on_inputs"
    ],
    "a FlagEmbedding command": [
        "torchrun --nproc_per_node 2 -m FlagEmbedding.finetune.embedder.encoder_only.base --model_name_or_path x --fp16"
    ],
    "an H2O LLM Studio experiment": [
        "architecture: {backbone_dtype: int4}\nllm_backbone: x\nproblem_type: text_causal_language_modeling\n"
    ],
    "a torchtune recipe of PPO": [
        "policy_model: {_component_: torchtune.models.mistral.mistral_7b}\nbatch_size: 64\ngradient_accumulation_steps: 1\n"
    ],
    "a SimpleTuner configuration, which trains an image model": [
        '{"model_family": "flux", "data_backend_config": "x.json", "optimizer": "adamw_bf16", "train_batch_size": 1}'
    ],
    "a Colossal-AI program": [
        "colossalai run --nproc_per_node 8 train.py --plugin zero2\n",
        "import colossalai\nfrom x import y\n",
    ],
    "a BMTrain program": ["import bmtrain as bmt\nbmt.init_distributed()\n"],
    "a fairseq2 command": ["fairseq2 lm instruction_finetune /out --config model.name=x\n"],
    "a command like DeepSpeed-Chat's": [
        "deepspeed main.py --per_device_train_batch_size 4 --zero_stage 3 --deepspeed --lora_dim 8",
        "deepspeed main.py --model_name_or_path a --per_device_train_batch_size 4 --zero_stage 3 --max_seq_len 1536",
    ],
    "a nanoGPT run": [NANO_GPT],
    "a nanochat run": [REFUSED / "nanochat.sh", '{"model_config": {"sequence_len": 2048, "n_layer": 20, "n_kv_head": 10}}'],
    "a MaxText configuration": [
        REFUSED / "maxtext.yml",
        REFUSED / "maxtext_model.yml",
        "python3 -m MaxText.train MaxText/configs/base.yml run_name=x per_device_batch_size=4\n",
    ],
    "a diffusers script, which trains an image model": [REFUSED / "sdxl.sh"],
}


@pytest.mark.parametrize("project", FOREIGN, ids=lambda project: project.title)
def test_each_is_named_with_the_way_out(project):
    for text in FOUND[project.title]:
        with pytest.raises(SpecError, match=f"is {project.title}, which is not read here; ") as caught:
            translation_of(text)
        assert project.way_out in caught.value.message


def test_a_torchtitan_command_for_a_python_function_needs_the_function():
    if importlib.util.find_spec("torchtitan") is not None:
        pytest.skip("torchtitan is installed, whose functions are read then")
    with pytest.raises(SpecError, match="module='llama3' names Python functions of torchtitan, and neither a checkout"):
        translation_of(REFUSED / "torchtitan_module.sh")


def test_a_recipe_of_megatron_bridge_needs_the_package():
    with pytest.raises(SpecError, match="recipe='llama32_1b_pretrain_config' is a Python function of Megatron-Bridge"):
        translation_of(REFUSED / "bridge.sh")


@pytest.mark.parametrize("name", ["automodel.sh", "hydra_automodel.sh"])
def test_a_command_of_automodel_needs_the_recipe_that_it_names(name):
    with pytest.raises(SpecError, match=r"give it by --with llama3_2_1b_squad\.yaml"):
        translation_of(REFUSED / name)


def test_a_torchtitan_command_for_a_file_needs_that_file_and_then_is_read():
    with pytest.raises(SpecError, match=r"give it by --with llama3_8b\.toml"):
        translation_of(REFUSED / "torchtitan.sh")
    file = Path(__file__).parent / "recorded" / "torchtitan" / "llama3_8b.toml"
    job = translation_of(REFUSED / "torchtitan.sh", ReadOptions(files=(file,))).job
    layout = job.parallelism
    assert (job.micro_batch_size, layout.tensor_parallel_size, layout.world_size) == (2, 2, 8)


def test_a_nemo_1_command_needs_the_file_that_it_names_and_then_is_read():
    with pytest.raises(SpecError, match=r"give it by --with megatron_gpt_config\.yaml"):
        translation_of(REFUSED / "nemo_1.sh")
    file = Path(__file__).parent / "recorded" / "nemo" / "megatron_gpt_config.yaml"
    job = translation_of(REFUSED / "nemo_1.sh", ReadOptions(files=(file,))).job
    assert (job.framework, job.micro_batch_size, job.parallelism.tensor_parallel_size) == ("megatron", 4, 2)


@pytest.mark.parametrize(
    ("imports", "title"),
    [
        ("from nanochat.gpt import GPT", "a nanochat run"),
        ("import MaxText", "a MaxText configuration"),
        ("from diffusers import StableDiffusionXLPipeline", "a diffusers script"),
        ("from megatron.bridge import AutoBridge", "a Megatron-Bridge configuration"),
    ],
)
def test_a_python_program_is_named_by_what_it_imports(imports, title, tmp_path):
    (tmp_path / "train.py").write_text(f"import os\n{imports}\n")
    with pytest.raises(SpecError, match=title):
        translation_of(tmp_path / "train.py")


def test_every_refused_file_is_used():
    used = {file for files in FOUND.values() for file in files if isinstance(file, Path)}
    others = {"torchtitan.sh", "torchtitan_module.sh", "nemo_1.sh", "hydra_automodel.sh", "automodel.sh", "bridge.sh"}
    assert {file.name for file in REFUSED.iterdir()} == {file.name for file in used} | others
