"""KTO and GRPO as TRL, Axolotl and LLaMA-Factory write them."""

import pytest

from peakcast.core.errors import SpecError
from peakcast.core.fields import FrozenMapping
from peakcast.dialects.common.asked_versions import AskedVersions, asked_versions
from peakcast.dialects.huggingface.batch import LENGTHS_CHANGE
from peakcast.dialects.translate import ReadOptions
from peakcast.doors.questions import translation_of
from peakcast.jobs.conventions import conventions

MODEL = {"model_name_or_path": "qwen2.5-7b", "output_dir": "o"}
GRPO = {
    **MODEL, "per_device_train_batch_size": 8, "num_generations": 8, "max_prompt_length": 256, "learning_rate": 1e-6,
    "max_completion_length": 768, "temperature": 0.9, "reward_weights": [1.0], "scale_rewards": "group", "bf16": True,
}  # fmt: skip
KTO = {
    **MODEL, "per_device_train_batch_size": 4, "desirable_weight": 1.0, "undesirable_weight": 1.2, "beta": 0.1,
    "max_length": 2048, "loss_type": "kto", "sync_ref_model": False, "train_sampling_strategy": "sequential",
}  # fmt: skip
AXOLOTL_GRPO = {
    "base_model": "qwen2.5-1.5b", "rl": "grpo", "micro_batch_size": 4, "sequence_len": 512, "bf16": True,
    "max_prompt_len": 512, "vllm": {"host": "0.0.0.0", "port": 8000, "gpu_memory_utilization": 0.85},
    "trl": {
        "beta": 0.001, "max_completion_length": 256, "use_vllm": True, "vllm_mode": "server", "num_generations": 4,
        "vllm_server_host": "0.0.0.0", "reward_funcs": ["rewards.accuracy"], "reward_weights": [1.0],
    },
}  # fmt: skip
OLDER = ("fsdp_sft_trainer", "partial_pretrain")
AXOLOTL_KTO = {
    "base_model": "llama-3.2-1b", "rl": "kto", "rl_beta": 0.1, "kto_desirable_weight": 0.2, "micro_batch_size": 4,
    "sequence_len": 1024, "bf16": True, "adapter": "lora", "lora_r": 8, "lora_target_linear": True,
}  # fmt: skip
LLAMAFACTORY_KTO = {
    "model_name_or_path": "llama-3-8b", "stage": "kto", "do_train": True, "finetuning_type": "lora", "lora_rank": 8,
    "lora_target": "all", "pref_beta": 0.1, "dataset": "kto_en_demo", "template": "llama3", "cutoff_len": 2048,
    "per_device_train_batch_size": 1, "gradient_accumulation_steps": 8, "bf16": True,
}  # fmt: skip


def test_processes_that_a_recipe_names_are_gpus():
    assert translation_of({**GRPO, "num_processes": 7}).job.parallelism.data_parallel_size == 7
    assert translation_of(GRPO).job.parallelism.data_parallel_size == 1


@pytest.mark.parametrize(
    ("values", "kind", "reference", "sequences", "length"),
    [
        (GRPO, "grpo", "none", 8, 1024),
        ({**GRPO, "beta": 0.0}, "grpo", "none", 8, 1024),
        ({**GRPO, "beta": 0.04}, "grpo", "model", 8, 1024),
        ({**GRPO, "beta": 0.04, "use_peft": True}, "grpo", "adapter_off", 8, 1024),
        (KTO, "kto", "model", 4, 2048),
        ({**KTO, "precompute_ref_log_probs": True}, "kto", "precomputed", 4, 2048),
        ({**KTO, "use_peft": True}, "kto", "adapter_off", 4, 2048),
        (AXOLOTL_GRPO, "grpo", "model", 4, 768),
        (AXOLOTL_KTO, "kto", "adapter_off", 4, 1024),
        (LLAMAFACTORY_KTO, "kto", "adapter_off", 1, 2048),
    ],
)
def test_each_sequence_counts_once_and_every_key_is_known(values, kind, reference, sequences, length):
    read = translation_of(values)
    assert (read.job.loss.kind, read.job.reference) == (kind, reference)
    assert (read.job.micro_batch_size, read.job.sequence_length) == (sequences, length)
    assert read.unknown == ()


def test_grpo_scores_completions_of_the_length_that_is_asked_for():
    assert translation_of({**GRPO, "max_completion_length": 96}).job.loss.completion_length == 96


@pytest.mark.parametrize(
    ("values", "says", "held"),
    [
        (GRPO, "transformers generates before it", 0),
        ({**GRPO, "use_vllm": True}, "takes vllm_gpu_memory_utilization=0.3 × its memory, also during the step", 0.3),
        (
            {**GRPO, "use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.5,
             "vllm_tensor_parallel_size": 4, "vllm_enable_sleep_mode": True},
            "=0.5 × its memory, its weights over 4 GPUs, freed while the step runs", 0,
        ),
        ({**GRPO, "use_vllm": True, "vllm_mode": "server"}, "a server of its own", 0),
        (AXOLOTL_GRPO, "a server of its own", 0),
    ],
)  # fmt: skip
def test_grpo_warns_of_what_generation_takes_beside_its_step(values, says, held):
    (warning,) = (said for said in translation_of(values).warnings if said != LENGTHS_CHANGE)
    assert translation_of(values).job.other_memory_fraction == held
    assert says in warning
    assert "not in the number" in warning


def test_hydras_null_is_no_value():
    command = (
        "torchrun --nproc_per_node=8 -m verl.trainer.sft_trainer data.train_files=a.parquet model.path=qwen3-8b "
        "engine=megatron engine.tensor_model_parallel_size=2 engine.virtual_pipeline_model_parallel_size=null\n"
    )
    read = translation_of(command)
    assert (read.job.framework, read.job.parallelism.virtual_pipeline_stages, read.unknown) == ("megatron", 1, ())


def test_verls_newer_program_of_fine_tuning_fills_rows_of_tokens_and_checkpoints():
    """verl 0.9.1 trainer/config/sft_trainer_engine.yaml and model/hf_model.yaml; its first program fills no rows."""
    command = "torchrun --nproc_per_node=8 -m verl.trainer.{} model.{}=qwen3-8b data.micro_batch_size_per_gpu=4\n"
    newer, older = (translation_of(command.format(*words)).job for words in (("sft_trainer", "path"), OLDER))
    assert (newer.micro_batch_size, newer.sequence_length, newer.activation_checkpointing.mode) == (1, 8192, "full")
    assert (older.micro_batch_size, older.sequence_length, older.activation_checkpointing.mode) == (4, 1024, "full")
    rows = translation_of(command.format("sft_trainer", "path").rstrip() + " data.use_dynamic_bsz=False\n").job
    assert (rows.micro_batch_size, rows.sequence_length, rows.batch.form) == (4, 1024, "padding_free")


@pytest.mark.parametrize(
    ("release", "sharding", "checkpoints"), [(None, "fsdp2", "full"), ("0.4.0", "fsdp2", "none"), ("0.3", "fsdp1", "none")]
)
def test_verls_first_program_of_fine_tuning_has_the_defaults_of_its_release(release, sharding, checkpoints):
    """verl 0.3.0, 0.4.0 and 0.4.1 trainer/config/sft_trainer.yaml."""
    command = (
        "torchrun --nproc_per_node=8 -m verl.trainer.fsdp_sft_trainer model.partial_pretrain=qwen3-8b data.max_length=4096 "
        "data.micro_batch_size_per_gpu=2 data.train_batch_size=64{}\n"
    )
    versions = asked_versions({"verl": release} if release else None)
    found = translation_of(command.format(""), ReadOptions(versions=versions)).job
    assert (found.parallelism.sharding, found.activation_checkpointing.mode) == (sharding, checkpoints)
    said = translation_of(command.format(" model.strategy=fsdp model.enable_gradient_checkpointing=false")).job
    assert (said.parallelism.sharding, said.activation_checkpointing.mode) == ("fsdp1", "none")


def test_ranks_of_ulysses_share_rows_but_not_a_number_of_tokens_for_each_gpu():
    """verl 0.6.1 trainer/fsdp_sft_trainer.py slices rows over the ranks; workers/actor/dp_actor.py multiplies
    ppo_max_token_len_per_gpu by their number before."""
    own = "model.partial_pretrain=qwen3-8b data.max_length=4096 data.micro_batch_size_per_gpu=2 data.train_batch_size=64"
    shared = "ulysses_sequence_parallel_size=4 use_remove_padding=true"
    job = translation_of(f"torchrun --nproc_per_node=8 -m verl.trainer.fsdp_sft_trainer {own} {shared}\n").job
    assert (job.micro_batch_size, job.sequence_length, job.gradient_accumulation_steps) == (2, 1024, 16)
    filled = translation_of(
        "python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=qwen3-8b data.max_prompt_length=1024 "
        "data.max_response_length=3072 actor_rollout_ref.actor.use_dynamic_bsz=true "
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=8192 actor_rollout_ref.actor.ulysses_sequence_parallel_size=4 "
        "trainer.n_gpus_per_node=8\n"
    )
    assert filled.job.sequence_length == 8192
    assert any("Ulysses" in sentence for sentence in filled.unsupported)


def test_a_mini_batch_of_verl_is_of_prompts_with_several_completions_each():
    """256 prompts × 5 completions over 8 GPUs: 40 micro-batches of 4; filled by tokens, 20 rows of 8 samples of 3,072."""
    command = (
        "python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=qwen3-8b data.max_prompt_length=1024 "
        "data.max_response_length=2048 actor_rollout_ref.actor.ppo_mini_batch_size=256 actor_rollout_ref.rollout.n=5 "
        "trainer.n_gpus_per_node=8 {}\n"
    )
    fixed = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4"
    filled = "actor_rollout_ref.actor.use_dynamic_bsz=True actor_rollout_ref.actor.ppo_max_token_len_per_gpu=24576"
    jobs = [translation_of(command.format(flags)).job for flags in (fixed, filled)]
    assert [(job.micro_batch_size, job.sequence_length, job.gradient_accumulation_steps) for job in jobs] == [
        (4, 3072, 40),
        (1, 24576, 20),
    ]


def test_ranks_of_openrlhfs_ring_share_rows():
    """openrlhf models/ring_attn_utils.py: each rank passes its part of the packed tokens."""
    command = (
        "deepspeed --module openrlhf.cli.train_dpo --pretrain llama-3-8b --micro_train_batch_size 1 --max_len 8192 "
        "--zero_stage 3 --bf16 --ring_attn_size {}\n"
    )
    found = [translation_of(command.format(size)) for size in (1, 2)]
    said = [[each.direction for each in some.findings if each.parameter == "ring_attn_size"] for some in found]
    assert said == [[], ["more"]]
    jobs = [each.job for each in found]
    assert [(job.sequence_length, job.gradient_accumulation_steps) for job in jobs] == [(8192, 16), (4096, 32)]


def test_openrlhfs_distillation_is_refused_and_its_newer_flag_of_the_model_read():
    flags = "--model_name_or_path llama-3.2-1b --micro_train_batch_size 2 --max_len 2048 --param_dtype bf16"
    with pytest.raises(SpecError, match="program='train_kd' is not modelled; sft, dpo"):
        translation_of(f"torchrun --nproc-per-node 8 -m openrlhf.cli.train_kd {flags} --teacher_model llama-3.1-8b")
    read = translation_of(f"torchrun --nproc-per-node 8 -m openrlhf.cli.train_sft {flags} --backend fsdp2")
    assert (read.job.architecture.name, read.job.parallelism.sharding) == ("llama-3.2-1b", "fsdp2")
    assert not any("zero_stage" in sentence for sentence in read.assumptions)


@pytest.mark.parametrize(
    ("optimizer", "name", "directions"),
    [
        ("optimizer=AdamW8bit {0}optimizer_impl=bitsandbytes.optim", "adamw_8bit", []),
        ("optimizer=SGD", "sgd", []),
        ("optimizer=Lion {0}optimizer_impl=lion_pytorch", "adamw", ["less"]),
    ],
)
def test_verls_optimizer_is_the_class_of_a_module(optimizer, name, directions):
    optim = "actor_rollout_ref.actor.optim."
    command = (
        "python3 -m verl.trainer.main_ppo actor_rollout_ref.model.path=qwen3-8b trainer.n_gpus_per_node=8 "
        f"actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 {optim}{optimizer.format(optim)}\n"
    )
    read = translation_of(command)
    assert read.job.optimizer.name == name
    assert [finding.direction for finding in read.findings if finding.parameter == f"{optim}optimizer"] == directions


def test_older_commands_of_openrlhf_have_eager_attention_unless_they_ask():
    command = (
        "deepspeed --module openrlhf.cli.train_sft --pretrain llama-3-8b --micro_train_batch_size 1 --max_len 2048 "
        "--zero_stage 3 {}\n"
    )
    asked = ("--bf16", "--bf16 --flash_attn", "--param_dtype bf16")
    others = [translation_of(command.format(flags)).others for flags in asked]
    assert [[other.job.attention for other in found] for found in others] == [["eager"], [], []]


@pytest.mark.parametrize(("limit", "length"), [({}, 1024), ({"vllm_max_model_length": 900}, 900),
                                               ({"vllm_max_model_len": 4096}, 1024)])  # fmt: skip
def test_vllm_ends_completions_at_its_own_length(limit, length):
    assert translation_of({**GRPO, "use_vllm": True, **limit}).job.sequence_length == length
    assert translation_of({**GRPO, **limit}).job.sequence_length == 1024  # transformers generates


@pytest.mark.parametrize("key", ["gamma_beta_ratio", "simpo_gamma", "cpo_alpha"])
def test_keys_of_cpo_and_simpo_are_no_dpo(key):
    """princeton-nlp/SimPO training_configs/llama-3-8b-instruct-simpo.yaml and trl's CPOConfig: no reference is kept."""
    read = translation_of({**MODEL, "per_device_train_batch_size": 2, "beta": 2.5, key: 0.5, "max_length": 2048})
    assert (read.job.loss.kind, read.job.reference, read.job.micro_batch_size) == ("cross_entropy", "none", 4)
    assert read.unknown == ()


@pytest.mark.parametrize(
    ("trl", "changes", "loss_kernel", "direction"),
    [
        ("1.16.0", "", "tiles", None),
        ("1.16.0", "loss_type: dft\n", "tiles", None),
        ("1.16.0", "use_liger_kernel: true\n", "tiles", None),
        ("1.10.0", "", "eager", "less"),  # in chunks of 256 tokens, which are not counted
        ("1.10.0", "use_liger_kernel: true\n", "fused_linear", None),
        ("1.5.1", "", "eager", None),
        ("1.5.1", "loss_type: chunked_nll\n", "eager", "less"),
    ],
)
def test_sft_makes_no_whole_logits_from_trl_1_15_on(trl, changes, loss_kernel, direction):
    text = f"model_name_or_path: Qwen/Qwen2.5-0.5B\nper_device_train_batch_size: 2\nmax_length: 512\n{changes}"
    read = translation_of(text, ReadOptions(versions=AskedVersions(FrozenMapping({"trl": trl, "transformers": "5.17.0"}))))
    assert conventions(read.job)["loss_kernel"] == loss_kernel
    said = [finding.direction for finding in read.findings if finding.parameter == "loss_type"]
    assert said == ([direction] if direction else [])


def test_a_release_of_trl_that_is_not_given_is_said():
    read = translation_of("model_name_or_path: Qwen/Qwen2.5-0.5B\nper_device_train_batch_size: 2\nmax_length: 512\n")
    assert [finding.direction for finding in read.findings if finding.parameter == "versions.trl"] == ["more"]


@pytest.mark.parametrize(("release", "says"), [("1.14", "made from whole logits"), ("1.15", "made without whole logits")])
def test_the_answer_says_how_that_release_makes_log_probabilities(release, says):
    read = translation_of(KTO, ReadOptions(versions=AskedVersions(FrozenMapping({"trl": release}))))
    (said,) = [sentence for sentence in read.assumptions if "log-probabilities are made" in sentence]
    assert says in said


def test_verl_divides_weights_by_itself_in_the_dtype_that_it_loads():
    """verl 0.9.1 workers/engine/fsdp: accelerate, which would widen them, has no part in it."""
    command = "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.model.path=qwen2.5-7b "
    command += "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1 trainer.n_gpus_per_node=8 "
    for strategy in ("fsdp", "fsdp2"):
        given = f"{command}actor_rollout_ref.actor.strategy={strategy} "
        assert translation_of(f"{given}\n").job.precision.parameters == "float32"
        narrow = translation_of(f"{given}actor_rollout_ref.actor.fsdp_config.model_dtype=bfloat16\n").job.precision
        assert (narrow.parameters, narrow.optimizer_states) == ("bfloat16", "bfloat16")


@pytest.mark.parametrize("key", ["distillation.enabled", "actor_rollout_ref.actor.fsdp_config.qat.enable"])
def test_what_verl_adds_to_an_update_is_said(key):
    command = "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo actor_rollout_ref.model.path=qwen2.5-7b "
    command += "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1 trainer.n_gpus_per_node=8 "
    read = translation_of(f"{command}{key}=True\n")
    assert [each.direction for each in read.findings if each.parameter == key] == ["more"]
