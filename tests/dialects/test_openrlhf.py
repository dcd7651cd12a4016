"""OpenRLHF's flags, older and newer."""

import pytest

from peakcast.doors.questions import translation_of

OLDER_SFT = (
    "deepspeed --module openrlhf.cli.train_sft --max_len 4096 --dataset x --train_batch_size 256 "
    "--micro_train_batch_size 2 "
    "--pretrain qwen2.5-7b --zero_stage 2 --packing_samples --bf16 --gradient_checkpointing --lora_rank 16 --adam_offload\n"
)
NEWER_SFT = (
    "deepspeed --module openrlhf.cli.train_sft --data.max_len 4096 --data.dataset x --train.batch_size 256 "
    "--train.micro_batch_size 2 --model.model_name_or_path qwen2.5-7b --ds.zero_stage 2 --ds.packing_samples "
    "--ds.param_dtype bf16 --model.gradient_checkpointing_enable --ds.lora.rank 16 --ds.adam_offload --adam.lr 5e-6 "
    "--logger.wandb.key x --ckpt.output_dir out\n"
)
NEWER_PPO = (
    "python3 -m openrlhf.cli.train_ppo_ray --actor.num_nodes 1 --actor.num_gpus_per_node 8 --train.colocate_all "
    "--vllm.num_engines 4 --vllm.gpu_memory_utilization 0.5 --vllm.enable_sleep "
    "--algo.advantage.estimator reinforce_baseline "
    "--actor.model_name_or_path qwen2.5-7b --reward.remote_url x --train.micro_batch_size 2 --train.batch_size 128 "
    "--rollout.n_samples_per_prompt 8 --data.max_len 4096 --ds.zero_stage 3 --actor.gradient_checkpointing_enable "
    "--ds.packing_samples --algo.kl.init_coef 1e-4"
)


def test_flags_with_their_section_say_what_older_ones_said():
    """openrlhf 0.11.2 cli/train_sft.py."""
    older, newer = translation_of(OLDER_SFT), translation_of(NEWER_SFT)
    assert newer.job == older.job
    assert (newer.unknown, newer.job.sequence_length, newer.job.finetuning.rank) == ((), 4096, 16)


def test_the_newer_update_of_a_policy_is_as_long_as_prompts_with_completions():
    read = translation_of(f"{NEWER_PPO}\n")
    job = read.job
    assert (job.micro_batch_size, job.sequence_length, job.loss.kind, job.reference) == (2, 4096, "grpo", "model")
    assert (read.unknown, job.parallelism.data_parallel_size, job.parallelism.zero_stage) == ((), 8, 3)
    assert any("vllm_gpu_memory_utilization=0.5" in said for said in read.warnings)


@pytest.mark.parametrize("flag", ["--actor.entropy_coef 0", "--entropy_loss_coef 0.001"])
def test_an_entropy_is_said_whatever_its_coefficient(flag):
    name = flag.split()[0][2:]
    found = [each for each in translation_of(f"{NEWER_PPO} {flag}\n").findings if each.parameter == name]
    assert [each.direction for each in found] == ["more"]


def test_muon_is_the_engines_optimizer():
    assert translation_of(f"{NEWER_SFT.rstrip()} --optim muon\n").job.optimizer.name == "muon"


def test_a_method_has_its_own_usual_length():
    command = "deepspeed --module openrlhf.cli.train_{} --pretrain qwen2.5-7b --zero_stage 2 --micro_train_batch_size 1\n"
    assert [translation_of(command.format(name)).job.sequence_length for name in ("sft", "dpo", "rm")] == [2048, 512, 512]


@pytest.mark.parametrize(("flag", "share"), [("", 0.5), ("--train.async_enable", 0.0)])
def test_vllm_has_gpus_of_its_own_where_it_generates_beside_the_update(flag, share):
    """openrlhf cli/train_ppo_ray.py: `if args.train.colocate_all and not args.train.async_enable`."""
    awake = NEWER_PPO.replace("--vllm.enable_sleep ", f"{flag} ")
    assert translation_of(f"{awake}\n").job.other_memory_fraction == share
