"""Projects whose configurations peakcast cannot read: how they are recognised, and what the user can give instead."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

JOB = "give the model and the step as a job: --model, --micro-batch-size, --sequence-length, --sharding and the like"
TRACE = "give the step itself: peakcast explain --trace --module FILE.py:FUNCTION runs it on fake tensors"
XLA = "give it to MaxText's own train_compile, which prints what XLA plans: peakcast counts PyTorch's allocator"
DRYRUN = (
    "run it on fake tensors instead, which needs no GPU: peakcast dryrun --gpu H100-80GB -- COMMAND, with its own command"
)
SERVED = (
    "give what it serves as generation: --model, --set task=inference --set inference.prompt_length=2048 --set "
    "inference.new_tokens=256, --micro-batch-size for sequences at once, --tensor-parallel-size; the answer says how many "
    "tokens of cache a server has room for"
)
JAX = "it runs on JAX, and peakcast counts PyTorch's allocator"
FLAGS = "give model, layout and batch as Megatron-LM flags (peakcast megatron --num-layers ...), named as its fields are"
NEMO = (
    "its recipes are Python functions around Megatron-LM, so give their fields as flags: peakcast megatron --num-layers "
    "... (shapes of the model's config), --tensor-model-parallel-size and the like (of MegatronStrategy), "
    "--micro-batch-size, --global-batch-size, --seq-length (of data), --bf16 --use-distributed-optimizer (of optim), and "
    "--num-gpus (num_nodes × devices)"
)
"""Source: NVIDIA/NeMo nemo/collections/llm/recipes/llama3_8b.py, recipes/optim/adam.py (2.x)."""

POLICY = f"{JOB} (--set loss.kind=grpo for the update of a policy)"
SWIFT = ("infer", "deploy", "rollout", "eval", "export", "sample", "app", "web-ui")


class Foreign(NamedTuple):
    """How the configuration of such a project is recognised."""

    title: str
    way_out: str
    signs: tuple[str, ...] = ()
    """Sets of keys, as for a dialect."""
    words: tuple[str, ...] = ()
    """Prefixes of its `_target_`, `recipe`, program or imports."""
    programs: str = ""
    """A regular expression for the file names of its scripts."""


FOREIGN: tuple[Foreign, ...] = (
    Foreign(
        "a Megatron-Bridge configuration",
        FLAGS,
        ("ConfigContainer", "model_config train_config|ddp_config", "perf_matrix"),
        ("megatron.bridge",),
        r"setup_experiment\.py",
    ),
    Foreign("a NeMo 2 recipe", NEMO, (), ("nemo.", "nemo_run", "nemo llm", "nemo vlm")),
    Foreign(
        "an LLM Foundry configuration",
        JOB,
        ("train_loader|fsdp_config global_train_batch_size|device_train_microbatch_size",),
        ("composer",),
    ),
    Foreign(
        "an OLMo configuration",
        JOB,
        ("model.d_model device_train_microbatch_size|fsdp",),
        ("olmo", "olmo_core"),
    ),
    Foreign(
        "a NeMo RL configuration",
        POLICY,
        ("policy.model_name policy.dtensor_cfg|policy.megatron_cfg|cluster.gpus_per_node|cluster.num_nodes",),
    ),
    Foreign(
        "an open-instruct command of reinforcement learning",
        POLICY,
        ("num_unique_prompts_rollout|num_samples_per_prompt_rollout|local_rollout_batch_size response_length",),
        (),
        r"grpo_fast\.py|(grpo|ppo|online_dpo)_vllm_thread\w*\.py",
    ),
    Foreign("a SkyRL command", POLICY, ("trainer.policy.model.path generator.n_samples_per_prompt",), ("skyrl",)),
    Foreign("an AReaL configuration", POLICY, ("allocation_mode actor|gconfig|model", "actor.mb_spec"), ("areal",)),
    Foreign("an EasyR1 configuration", POLICY, ("worker.actor worker.rollout",), ("verl.trainer.main worker",)),
    Foreign(
        "a ROLL configuration",
        POLICY,
        ("actor_train.strategy_args|sft_train.strategy_args|dpo_train.strategy_args|student.strategy_args",),
        ("roll.", "start_rlvr_pipeline"),
    ),
    Foreign("a prime-rl configuration", POLICY, ("model.name data.seq_len optim", "trainer orchestrator"), ("prime_rl",)),
    Foreign(
        "a Tunix configuration", JAX, ("rl_training_config model_config|actor_model_config",), ("tunix",)
    ),
    Foreign(
        "a Levanter configuration",
        JAX,
        ("trainer.per_device_parallelism|trainer.train_batch_size model.type data",),
        ("levanter",),
    ),
    Foreign(
        "an H2O LLM Studio experiment",
        f"{JOB}; its backbone_dtype int4 and lora are --method qlora",
        ("llm_backbone problem_type|training",),
    ),
    Foreign("a Firefly configuration", f"{JOB}; its QLoRA is --method qlora", ("template_name train_file|train_mode",)),
    Foreign(
        "an alpaca-lora command",
        f"{JOB}; its LoRA on weights of 8 bits is --method qlora --quantization int8 --lora-rank 8",
        ("base_model cutoff_len train_on_inputs|lora_target_modules|group_by_length|lora_r",),
    ),
    Foreign("a FlagEmbedding command", DRYRUN, (), ("FlagEmbedding",)),
    Foreign("a torchtune recipe of PPO", POLICY, ("policy_model._component_",)),
    Foreign("a Colossal-AI program", JOB, (), ("colossalai",)),
    Foreign("a BMTrain program", JOB, (), ("bmtrain",)),
    Foreign("a fairseq2 command", JOB, (), ("fairseq2",)),
    Foreign(
        "a command like DeepSpeed-Chat's",
        f"{JOB}, with --framework deepspeed and its --zero-stage",
        (
            "zero_stage|actor_zero_stage per_device_train_batch_size|per_device_training_batch_size "
            "data_split|lora_dim|max_seq_len|max_prompt_seq_len",
        ),
    ),
    Foreign("a Primus experiment", FLAGS, ("modules.pre_trainer", "modules.post_trainer")),
    Foreign("an InternEvo configuration", JOB, ("hybrid_zero_optimizer parallel",), ("internlm", "internevo")),
    Foreign("an XTuner configuration", JOB, (), ("xtuner", "mmengine")),
    Foreign("an ms-swift command that trains nothing", JOB, (), tuple(f"swift {verb}" for verb in SWIFT)),
    Foreign(
        "an inference server",
        SERVED,
        ("gpu-memory-utilization|max-model-len",),
        ("vllm", "sglang", "text-generation-launcher"),
    ),
    Foreign(
        "a nanochat run",
        DRYRUN,
        (
            "model_config.n_kv_head model_config.sequence_len",
            "depth device_batch_size|target_param_data_ratio|aspect_ratio",
        ),
        ("nanochat", "scripts.base_train", "scripts.mid_train", "scripts.chat_sft", "scripts.chat_rl"),
    ),
    Foreign("a nanoGPT run", DRYRUN, ("block_size n_layer|n_head|n_embd",)),
    Foreign(
        "a MaxText configuration",
        XLA,
        ("per_device_batch_size max_target_length", "base_emb_dim base_num_decoder_layers", "ici_fsdp_parallelism"),
        ("MaxText", "maxtext"),
    ),
    Foreign("a SimpleTuner configuration, which trains an image model", TRACE, ("model_family data_backend_config",)),
    Foreign(
        "a diffusers script, which trains an image model",
        TRACE,
        ("pretrained_model_name_or_path resolution|instance_prompt|unet_lr|network_dim",),
        ("diffusers",),
        r"train_(text_to_image|dreambooth|controlnet|instruct_pix2pix|unconditional)\w*\.py"
        r"|sdxl_train\w*\.py",
    ),
)


_PROGRAM = re.compile(
    r"^[ \t]*(?:python[\d.]*[ \t]+-m[ \t]+)?"
    r"((?:openrlhf|verl|swift|nemo_run|nemo_automodel|automodel|composer|MaxText|vllm\.|sglang|text-generation-launcher"
    r"|colossalai|fairseq2|skyrl|tunix|areal|prime_rl)[.\w]*"
    r"|(?:megatron|nemo|vllm) \w+)",
    re.MULTILINE,
)
_IMPORT = re.compile(r"^[ \t]*(?:from|import)[ \t]+([A-Za-z_][\w.]*)", re.MULTILINE)

_ASSIGNED = re.compile(r"^([A-Za-z_]\w*)[ \t]*=", re.MULTILINE)


def foreign_program(text: str) -> str:
    """The sentence of `foreign` about a program that a script's `text` runs at the beginning of a line."""
    return next(filter(None, (foreign((), {}, name) for name in _PROGRAM.findall(text))), "")


def foreign_python(text: str) -> str:
    """The sentence of `foreign` about a Python program with this `text`, recognised by its imports; without any it is a
    configuration, and its keys are the names that it sets."""
    imported = _IMPORT.findall(text)
    if not imported:
        return foreign(_ASSIGNED.findall(text), {}, "")
    return next(filter(None, (foreign((), {}, name) for name in imported)), "")


def foreign(keys: Iterable[str], values: Mapping[str, Any], program: str) -> str:
    """The sentence that names the project to which a mapping's `keys` and `values`, or the `program`, belong; "" if it is
    not known."""
    known = set(keys)
    places = [place for place in (values, values.get("model")) if isinstance(place, Mapping)]
    run = {"ddp", "train", "model"} <= known  # keys of the file that a run of Megatron-Bridge saves
    named = [program, *(str(place.get(key, "")) for place in places for key in ("_target_", "recipe") if not run)]
    for each in FOREIGN:
        calls = bool(each.words) and any(name.startswith(each.words) for name in named)
        calls |= bool(each.programs) and re.fullmatch(each.programs, program.rsplit("/", 1)[-1]) is not None
        looks = any(all(known.intersection(word.split("|")) for word in sign.split()) for sign in each.signs)
        if calls or looks:
            return f"is {each.title}, which is not read here; {each.way_out}."
    return ""
