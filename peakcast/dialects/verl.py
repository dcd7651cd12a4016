"""verl's configurations and command lines: supervised fine-tuning, and the actor's update in reinforcement learning.

Source: volcengine/verl verl/trainer/config (sft_trainer.yaml 005a83db, sft_trainer_engine.yaml 0611191e,
actor/dp_actor.yaml 0978b9dc, engine/fsdp.yaml and model/hf_model.yaml 17aa18cb), workers/fsdp_workers.py: float32 weights
under FSDP's mixed precision, the reference's weights in host memory, log-probabilities of the reference and the old policy
computed before the update; verl 0.9.1 workers/config/optimizer.py `build_optimizer`.
"""

from __future__ import annotations

import re
from typing import Any

from peakcast.core.errors import SpecError
from peakcast.core.fields import flat
from peakcast.core.versions import compare
from peakcast.dialects.common.generation import Generation
from peakcast.dialects.common.mesh import with_shared_sequences
from peakcast.dialects.common.pasted import Pasted
from peakcast.dialects.common.translation import (
    Notes,
    Settings,
    Translation,
    note_two_layers,
    note_unsupported,
    states_direction,
)
from peakcast.dialects.huggingface.job import from_huggingface
from peakcast.dialects.huggingface.post_training import with_method
from peakcast.dialects.verl_megatron import megatron_job
from peakcast.jobs.spec import TrainingJob

ROLES = "actor_rollout_ref"
IGNORED = re.compile(
    r"(trainer|algorithm|reward|reward_model|custom_reward_function|critic|ray_init|ray_kwargs|global_profiler|transfer_queue"
    r"|checkpoint|profiler|defaults|hydra|reward_manager|distillation|teacher)(\..*|$)"
    r"|data\.(?!max_|micro_|train_batch_size).*|data\.train_batch_size|data\.max_(prompt|response)_length|data\.train_max_samples|data\.val_max_samples"
    rf"|({ROLES}\.)?(rollout|ref|hybrid_engine|nccl_timeout)(\..*|$)|{ROLES}\.(rollout|ref|hybrid_engine|nccl_timeout)(\..*|$)"
    r"|(.*\.)?(optim|policy_loss|checkpoint|profiler|router_replay|qat)\..*|(.*\.)?optim"
    r"|(.*\.)?fused_kernel_options\..*|(.*\.)?(clip_ratio\w*|entropy_coeff|kl_loss_\w+|use_kl_loss|loss_agg_mode|ppo_epochs|shuffle|grad_clip|data_loader_seed|_target_"
    r"|ppo_mini_batch_size|loss_scale_factor|tis_imp_ratio_cap|calculate_\w+|rollout_n|external_lib|trust_remote_code|use_shm"
    r"|tokenizer_path|hf_config_path|custom_chat_template|custom_cls|seed|forward_only|full_determinism|use_rollout_log_probs)"
    r"|(.*\.)?fsdp_config\.(wrap_policy.*|forward_prefetch|use_orig_params|_target_|dtype|seed|mixed_precision)"
    r"|(.*\.)?engine\.(wrap_policy.*|forward_prefetch|use_orig_params|seed|dtype)|.*\.log_prob_\w+|vllm_\w+"
)
NOT_SET = ("null", "None", "~")
"""How Hydra's command line writes that a setting has no value."""
OPTIMIZERS = {
    "torch.optim.AdamW": "adamw_torch", "torch.optim.Adam": "adamw_torch", "torch.optim.SGD": "sgd",
    "torch.optim.Adagrad": "adagrad", "torch.optim.RMSprop": "rmsprop",
    "bitsandbytes.optim.AdamW8bit": "adamw_bnb_8bit", "bitsandbytes.optim.PagedAdamW8bit": "paged_adamw_8bit",
    "bitsandbytes.optim.PagedAdamW32bit": "paged_adamw_32bit", "torchao.optim.AdamW8bit": "adamw_torch_8bit",
    "torchao.optim.AdamW4bit": "adamw_torch_4bit",
}  # fmt: skip
"""A class of an optimizer -> its name in transformers."""
QAT = "training for quantisation"
NEWER_SFT = re.compile(r"(^|[./])sft_trainer(_ray)?(\.py)?$")
"""verl's program of supervised fine-tuning since fsdp_sft_trainer."""
SFT_SWITCHES = ("data.use_dynamic_bsz", "model.use_remove_padding", "model.enable_gradient_checkpointing")
"""Switches that it has on by default (verl 0.9.1 trainer/config/sft_trainer_engine.yaml, model/hf_model.yaml)."""
FSDP_SFT_DEFAULTS = {"model.strategy": ("fsdp2", "0.4.0"), "model.enable_gradient_checkpointing": (True, "0.4.1")}
"""Setting -> (its value in fsdp_sft_trainer's own configuration file, the first release whose file has that value). Source:
verl 0.3.0, 0.4.0, 0.4.1 trainer/config/sft_trainer.yaml."""
DTYPES = {"fp32": "float32", "float32": "float32", "bf16": "bfloat16", "bfloat16": "bfloat16", "fp16": "float16"}


def from_verl(pasted: Pasted) -> Translation:
    """The job of a verl configuration. Raises: SpecError naming the key, its value, the rule and the way out."""
    notes = Notes()
    values = {str(key).lstrip("+"): None if value in NOT_SET else value for key, value in flat(pasted.values).items()}
    settings = Settings(values, notes, "verl")
    updates = any(key.startswith(ROLES) for key in values) or "main_ppo" in pasted.program
    if not updates and pasted.program:
        values = {**_sft_defaults(values, pasted, notes), **values}
        settings = Settings(values, notes, "verl")
    inside = f"{ROLES}.actor." if updates else ""
    model = f"{ROLES}.model." if updates else "model."
    name = settings.model(pasted.model, f"{model}path", f"{model}partial_pretrain")
    num_gpus = _gpus(settings, pasted)
    generation = _generation(settings) if updates else None
    shared = max(settings.integer(key, 1) or 1 for key in _ulysses(inside))
    training = _training(settings, inside, model, max(1, num_gpus // shared), generation)
    section = _megatron(settings, inside, pasted)
    if section:
        job = _megatron_job(settings, section, name, pasted, num_gpus, training)
    else:
        training["optim"] = _optimizer(settings, inside)
        fsdp = _fsdp(settings, inside, training)
        adapter = _adapter(settings, model)
        versions = pasted.versions.of("huggingface")
        given = (name, training, adapter, None, fsdp, num_gpus)
        job = notes.include(from_huggingface(*given, versions=versions, widens_for_fsdp=()))  # verl wraps it by itself
        job = _sequence_parallelism(settings, inside, job)
        if generation is not None:
            notes.assumptions.append(
                "log-probabilities of the reference are made before the update, and its weights are in host memory then."
            )
            who = "verl (workers/actor/dp_actor.py)"
            job = with_method(job, "grpo", "the program", notes, generation=generation, whole_logits=who)
    settings.note_left(IGNORED)
    return notes.finish(job)


def _sft_defaults(values: dict[str, Any], pasted: Pasted, notes: Notes) -> dict[str, Any]:
    """The defaults of verl's SFT program for settings that `values` does not give. A settings file that is given without a
    program is one of verl's own, which gives all of them."""
    if NEWER_SFT.search(pasted.program):
        defaults: dict[str, Any] = {key: True for key in SFT_SWITCHES if key not in values}
        notes.assumptions += [f"{key} is not given; the default of verl's sft_trainer is True." for key in defaults]
        return defaults
    first = "data.micro_batch_size" in values and "data.micro_batch_size_per_gpu" not in values  # see `_batch`
    release = pasted.versions.given.get("verl", "0.2" if first else "main")
    not_given = {key: since for key, since in FSDP_SFT_DEFAULTS.items() if key not in values}
    defaults = {key: value for key, (value, since) in not_given.items() if compare(release, f">={since}")}
    for key, value in defaults.items():
        notes.assumptions.append(
            f"{key} is not given; verl's default is {value} since {not_given[key][1]}; for an older release --versions "
            "verl=0.3."
        )
    return defaults


def _megatron(settings: Settings, inside: str, pasted: Pasted) -> str:
    """The name of the section with Megatron's settings; "" for FSDP. Raises: SpecError for any other engine."""
    strategy = settings.text(f"{inside}strategy", settings.text("engine.strategy", settings.text("model.strategy")))
    for key in (f"{inside}strategy", "engine.strategy", "model.strategy", "engine", "model_engine"):
        settings.given(key)
    section = f"{inside}megatron." if inside else "engine."
    there = any(key.startswith((f"{inside}megatron.", "engine.tensor_model")) for key in settings.left())
    if strategy == "megatron" or (there and not strategy):
        return section
    if strategy not in ("", "fsdp", "fsdp2"):
        raise SpecError(
            f"{inside}strategy={strategy!r} of {pasted.where} is not modelled; fsdp, fsdp2 and megatron are.",
            parameter=f"{inside}strategy",
            value=strategy,
        )
    return ""


def _megatron_job(
    settings: Settings, section: str, name: Any, pasted: Pasted, num_gpus: int, training: dict[str, Any]
) -> TrainingJob:
    """The job of an actor under Megatron, with notes about the parts of verl's step that it does not contain."""
    settings.notes.unsupported.append(
        "The loss over log-probabilities of Megatron's vocabulary-parallel logits is not modelled; the cross entropy's "
        "is assumed.",
        f"{section}tensor_model_parallel_size",
    )
    key = f"{ROLES}.ref.megatron.param_offload"
    refers = settings.switch(f"{ROLES}.actor.use_kl_loss") or settings.switch("algorithm.use_kl_in_reward")
    if refers and not settings.switch(key):
        settings.notes.unsupported.append(
            f"The reference's weights, which stay on the GPU ({key} is off), are not in the number.", key, "more"
        )
    if training["padding_free"]:
        settings.notes.assumptions.append("micro-batches are treated as full rows of tokens without padding.")
    return megatron_job(settings, section, name, pasted, num_gpus, training)


def _gpus(settings: Settings, pasted: Pasted) -> int:
    nodes, each = settings.integer("trainer.nnodes", 1) or 1, settings.integer("trainer.n_gpus_per_node")
    if pasted.num_gpus is not None:
        return pasted.num_gpus
    return nodes * each if each else pasted.gpus(settings.notes, 8 * nodes, ", the default of verl for each node")


def _training(settings: Settings, inside: str, model: str, num_gpus: int, generation: Generation | None) -> dict[str, Any]:
    """The training settings under the names of transformers' TrainingArguments."""
    batch = _batch(settings, inside, num_gpus, generation)
    dynamic = settings.switch(f"{inside}use_dynamic_bsz" if inside else "data.use_dynamic_bsz")
    unpadded = settings.switch(f"{model}use_remove_padding", settings.switch("use_remove_padding", bool(dynamic)))
    checkpoints = settings.switch(f"{model}enable_gradient_checkpointing", bool(inside))
    if not settings.given(f"{model}enable_gradient_checkpointing"):
        settings.notes.assumptions.append(f"enable_gradient_checkpointing is not given; {checkpoints} is assumed.")
    dtype = _dtype(settings, inside)
    _note_unmodelled(settings, inside, model)
    return {
        **batch,
        "padding_free": unpadded,
        "bf16": True,
        "torch_dtype": dtype,
        "attn_implementation": settings.text(f"{model}override_config.attn_implementation", "flash_attention_2"),
        "gradient_checkpointing": checkpoints,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
        "use_liger_kernel": settings.switch(f"{model}use_liger"),
        "activation_offloading": settings.switch(f"{model}enable_activation_offload"),
    }


def _optimizer(settings: Settings, inside: str) -> str:
    """The optimizer of FSDP's ranks, by its class and the module that has it."""
    named = settings.text(f"{inside}optim.optimizer", "AdamW")
    name = f"{settings.text(f'{inside}optim.optimizer_impl', 'torch.optim')}.{named}"
    override = f"{inside}optim.override_optimizer_config."
    if name not in OPTIMIZERS:
        settings.notes.unsupported.append(
            f"The optimizer {name} is not modelled; torch.optim.AdamW is assumed instead.",
            settings.spell(f"{inside}optim.optimizer"),
            states_direction(named.lower()),
        )
    found = OPTIMIZERS.get(name, "adamw_torch")
    return f"{found}_fused" if found == "adamw_torch" and settings.switch(f"{override}fused") else found


def _batch(settings: Settings, inside: str, num_gpus: int, generation: Generation | None) -> dict[str, int | None]:
    """The micro-batch, the number of them in a step, and the length. With `use_dynamic_bsz` a micro-batch is one row with
    the largest number of tokens that is allowed."""
    own = f"{inside}ppo_" if inside else "data."
    dynamic = settings.switch(f"{inside}use_dynamic_bsz" if inside else "data.use_dynamic_bsz")
    tokens_key = f"{inside}ppo_max_token_len_per_gpu" if inside else "data.max_token_len_per_gpu"
    micro, whole = settings.integer(f"{own}micro_batch_size_per_gpu"), settings.integer(f"{own}micro_batch_size")
    if micro is None and whole is not None:  # of all ranks together (`_normalize_config_bsz`, verl until 0.2)
        micro = max(1, whole // num_gpus)
        settings.notes.assumptions.append(
            f"{settings.spell(f'{own}micro_batch_size')}={whole} counts the samples of all GPUs together, as in verl's "
            f"first releases: {micro} on each. Later releases read only {own}micro_batch_size_per_gpu."
        )
    tokens = settings.integer(tokens_key, 16384 if inside else 8192)
    total = settings.integer(f"{own}mini_batch_size" if inside else "data.train_batch_size", 256)
    if total is not None and inside:  # of prompts, each with its completions
        total *= settings.integer(f"{ROLES}.rollout.n", 1) or 1
    length: int | None = generation.sequence_length if generation else settings.size("data.max_length", 1024, assume=True)
    samples = micro or 1
    if dynamic:
        samples = max(1, (tokens or 1) // (length or 1))  # of full length, in a row of `tokens`
        micro, length = 1, tokens
        settings.notes.assumptions.append(
            f"use_dynamic_bsz fills micro-batches up to {settings.spell(tokens_key)}={tokens} tokens."
        )
    elif micro is None:
        if inside:
            raise settings.missing(f"{own}micro_batch_size_per_gpu", "add it")
        micro = samples = settings.size(f"{own}micro_batch_size_per_gpu", 4, assume=True)
    for key in ("mini_batch_size", "micro_batch_size"):
        settings.given(f"{own}{key}")
    return {
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": max(1, (total or 256) // (samples * num_gpus)),
        "max_length": length,
    }


def _dtype(settings: Settings, inside: str) -> str:
    """The dtype of the weights, which three sections may name."""
    own = f"{inside}fsdp_config.model_dtype"
    dtype = settings.text(own, settings.text("engine.model_dtype", "fp32"))
    dtype = settings.text("model.fsdp_config.model_dtype", dtype)
    if dtype not in DTYPES:
        raise settings.refuse(own, f"must be one of {', '.join(DTYPES)}", dtype)
    for key in (own, "engine.model_dtype"):
        settings.given(key)
    return DTYPES[dtype]


def _note_unmodelled(settings: Settings, inside: str, model: str) -> None:
    fused = settings.switch(f"{model}use_fused_kernels") or settings.switch(f"{inside}use_fused_kernels")
    if fused:
        settings.notes.unsupported.append(
            "verl's fused kernels (use_fused_kernels), which make no whole logits, are not modelled.",
            "use_fused_kernels",
            "less",
        )
    if settings.number(f"{inside}entropy_coeff", 0) and not settings.switch(f"{inside}entropy_checkpointing"):
        settings.notes.unsupported.append(
            "The entropy of all logits (entropy_coeff) is not modelled.", "entropy_coeff", "more"
        )
    if settings.switch(f"{model}enable_activation_offload"):
        note_two_layers(settings.notes, settings.spell(f"{model}enable_activation_offload"))
    note_unsupported(settings, {f"{inside}{key}qat.enable": QAT for key in ("", "fsdp_config.")}, "more")
    note_unsupported(settings, {"distillation.enabled": "distillation from a teacher"}, "more")
    for key in ("entropy_checkpointing", "entropy_from_logits_with_chunking", "use_torch_compile"):
        settings.given(f"{inside}{key}")


def _fsdp(settings: Settings, inside: str, training: dict[str, Any]) -> dict[str, Any]:
    """FSDP's settings under accelerate's names. `param_offload` and `optimizer_offload` move states to the host only
    between phases: during the update they are on the GPU."""
    notes = settings.notes
    strategy = settings.text(f"{inside}strategy", settings.text("engine.strategy", settings.text("model.strategy", "fsdp")))
    sections = (f"{inside}fsdp_config.", "engine.", "model.fsdp_config.")

    def given(name: str, default: Any) -> Any:
        found = [settings.raw(f"{section}{name}") for section in sections]
        return next((value for value in found if value is not None), default)

    names = ("offload_policy", "cpu_offload", "offload_params")

    def asks(name: str) -> bool:
        return True in [settings.switch(f"{section}{name}") for section in sections]

    stays = [asks(name) for name in names]
    moved = [name for name in ("param_offload", "optimizer_offload") if asks(name)]
    if moved:
        notes.assumptions.append(f"{' and '.join(moved)}: what leaves the GPU between phases is back during the update.")
    group = int(given("fsdp_size", -1) or -1)
    reshards = str(given("reshard_after_forward", True)).lower() != "false"
    hybrid = group > 1
    return {
        "fsdp_version": 2 if strategy == "fsdp2" else 1,
        "fsdp_sharding_strategy": "hybrid_shard" if hybrid else "full_shard",
        "fsdp_reshard_after_forward": reshards,
        "fsdp_offload_params": any(stays),
        "mixed_precision": "bf16",
    }


def _adapter(settings: Settings, model: str) -> dict[str, Any] | None:
    rank = settings.integer(f"{model}lora_rank", settings.integer(f"{model}lora.rank", 0, least=0), least=0)
    alpha = settings.number(f"{model}lora_alpha", settings.number(f"{model}lora.alpha", 16))
    targets = settings.words(f"{model}target_modules")
    excluded = settings.raw(f"{model}exclude_modules")
    settings.given(f"{model}lora.rank")
    if not rank:
        return None
    whole = targets in ((), ("all-linear",))
    adapter = {"r": rank, "lora_alpha": alpha, "target_modules": "all-linear" if whole else list(targets)}
    return adapter | ({"exclude_modules": excluded} if excluded else {})


def _sequence_parallelism(settings: Settings, inside: str, job: TrainingJob) -> TrainingJob:
    """`job` with a rank's part of its sequences under Ulysses. If micro-batches are filled up to a number of tokens per
    GPU, each rank has that many tokens (verl 0.6.1 workers/actor/dp_actor.py `max_token_len`)."""
    names = _ulysses(inside)
    if not settings.switch(f"{inside}use_dynamic_bsz" if inside else "data.use_dynamic_bsz"):
        return with_shared_sequences(job, settings, *names)
    what = "Ulysses sequence parallelism over GPUs, and the buffers of its exchange for attention,"
    note_unsupported(settings, dict.fromkeys(names, what))
    return job


def _ulysses(inside: str) -> list[str]:
    """The keys that may say by how many ranks each sequence is shared."""
    key = "ulysses_sequence_parallel_size"
    return list(dict.fromkeys((f"{inside}{key}", f"{inside}fsdp_config.{key}", f"engine.{key}", key)))


def _generation(settings: Settings) -> Generation:
    """The actor's update: the length of prompts with completions, and what else is on its GPUs while it runs."""
    notes = settings.notes
    prompt, answer = (
        settings.size("data.max_prompt_length", 512, assume=True),
        settings.size("data.max_response_length", 512),
    )
    notes.assumptions.append(
        f"the sequences of the actor's update are prompts with their completions, of {prompt + answer} tokens."
    )
    key = f"{ROLES}.rollout.gpu_memory_utilization"
    share, frees = settings.number(key, 0.5) or 0.5, settings.switch(f"{ROLES}.rollout.free_cache_engine", True)
    engine = settings.text(f"{ROLES}.rollout.name", "vllm")
    what = f"{engine} takes {key}={share:g} × the same GPU's memory"
    what += (
        ", freed during the update (free_cache_engine): what it keeps is not in the number" if frees else ", also during it"
    )
    notes.warnings.append(f"The number is that of the actor's update; {what}.", key, "more")
    estimator = settings.text("algorithm.adv_estimator", "gae")
    if estimator != "gae":
        notes.assumptions.append(f"algorithm.adv_estimator={estimator} has no critic.")
    else:
        notes.unsupported.append(
            "The critic on the same GPUs (algorithm.adv_estimator=gae) is not in the number.",
            "algorithm.adv_estimator",
            "more",
        )
    held = 0.0 if frees else share
    return Generation(
        sequence_length=prompt + answer, completion_length=None, refers=False, other_memory_fraction=held
    )
