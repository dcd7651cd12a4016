"""Configurations of projects that are not read: each is named, with what to give in its place."""

from __future__ import annotations

import pytest

from peakcast.dialects.foreign import FOREIGN
from peakcast.errors import SpecError
from peakcast.questions import translation_of

BRIDGE = "_target_: megatron.bridge.training.config.ConfigContainer\nmodel: {num_layers: 36, hidden_size: 2880}\n"
OVERRIDES = "model_config: {tensor_model_parallel_size: 2}\ntrain_config: {micro_batch_size: 4}\n"
PERFORMANCE = "ConfigContainer: {model: {cross_entropy_fusion_impl: te}}\nperf_matrix: {h100: {}}\n"
VERL = """torchrun --standalone --nnodes=1 --nproc_per_node=8 -m verl.trainer.fsdp_sft_trainer \\
    data.train_files=gsm8k.parquet data.micro_batch_size_per_gpu=4 model.partial_pretrain=Qwen/Qwen2.5-0.5B-Instruct
"""
OPENRLHF = """read -r -d '' training_commands <<EOF
openrlhf.cli.train_sft \\
   --max_len 2048 --micro_train_batch_size 2 --pretrain meta-llama/Meta-Llama-3-8B --zero_stage 2
EOF
deepspeed --module $training_commands
"""
NEO_X = '{"pipe_parallel_size": 1, "model_parallel_size": 1, "num_layers": 12, "hidden_size": 768, "seq_length": 2048}'
FOUNDRY = "max_seq_len: 2048\nglobal_train_batch_size: 512\nmodel: {name: mpt_causal_lm}\nfsdp_config: {}\n"
AUTOMODEL = "step_scheduler: {global_batch_size: 64}\nmodel: {_target_: nemo_automodel.NeMoAutoModelForCausalLM}\n"
NEMO_2 = "_target_: nemo.collections.llm.api.pretrain\nmodel: {config: {num_layers: 32}}\n"
SWIFT = "swift sft --model Qwen/Qwen2.5-7B-Instruct --train_type lora --dataset x\n"
FOUND = {
    "a Megatron-Bridge configuration": [BRIDGE, OVERRIDES, PERFORMANCE],
    "a NeMo AutoModel recipe": [AUTOMODEL],
    "a NeMo 2 recipe": [NEMO_2],
    "a GPT-NeoX configuration": [NEO_X],
    "an LLM Foundry configuration": [FOUNDRY],
    "a verl configuration": [VERL],
    "an OpenRLHF command": [OPENRLHF],
    "an ms-swift command": [SWIFT],
}


@pytest.mark.parametrize("project", FOREIGN, ids=lambda project: project.title)
def test_each_is_named_with_the_way_out(project):
    for text in FOUND[project.title]:
        with pytest.raises(SpecError, match=f"is {project.title}, which is not read here; give ") as caught:
            translation_of(text)
        assert project.way_out in caught.value.message
