"""open-instruct's YAML and command lines: its own training loop with accelerate, without the Trainer and with other
defaults.

Source: allenai/open-instruct open_instruct/finetune.py (FlatArguments, main), 2025: bfloat16 weights, adapters on seven
projections, bitsandbytes' paged AdamW for QLoRA, otherwise torch's fused AdamW. With adapters on weights that are not
quantised, gradient_checkpointing has no effect (`if args.use_lora: ... elif args.gradient_checkpointing`).
"""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

from peakcast.core.errors import SpecError
from peakcast.core.fields import FrozenMapping
from peakcast.dialects.common.pasted import Pasted
from peakcast.dialects.common.translation import Notes, Settings, Translation, note_unsupported, note_widened_ends, words
from peakcast.dialects.huggingface.accelerate import launcher_beside
from peakcast.dialects.huggingface.job import from_huggingface
from peakcast.dialects.huggingface.parallelism import without_second_checkpoints
from peakcast.dialects.huggingface.post_training import with_method
from peakcast.jobs.spec import TrainingJob

TARGETS = ["q_proj", "o_proj", "v_proj", "k_proj", "gate_proj", "up_proj", "down_proj"]
REINFORCES = words("""
    response_length num_samples_per_prompt_rollout num_unique_prompts_rollout total_episodes vllm_num_engines async_mode
    local_rollout_batch_size non_stop_penalty
""")
"""Keys that only open-instruct's GRPO, PPO and online DPO have."""
PREFERENCES = {"dpo_tune": False, "dpo_tune_cache": True, "dpo": True}
"""Programs of DPO -> whether they compute the reference's log-probabilities before training."""
OLMO_CORE = "dpo"
"""The program that trains OLMo-core's network under its FSDP2 (open_instruct/dpo.py c4b10fc1)."""
DEGREES = {
    "tensor_parallel_degree": "OLMo-core's tensor parallelism",
    "context_parallel_degree": "OLMo-core's context parallelism",
    "pipeline_parallel_degree": "OLMo-core's pipeline parallelism",
}  # fmt: skip
NODE = 8
"""GPUs of a node; OLMo-core shards within one and replicates over nodes unless `shard_degree` or `num_replicas` says."""
ATTENTION = {"auto": "flash_attention_2", "flash_2": "flash_attention_2", "flash_3": "flash_attention_2", "torch": "sdpa"}
"""OLMo-core's attention (`attn_backend` of its dpo.py), with the kernel whose memory is counted for it."""
SUPERVISED = ("", "finetune")
IGNORED = re.compile(
    r"dataset_.*|mixer_list|model_revision|tokenizer_.*|use_slow_tokenizer|use_fast|add_bos|chat_template_name|trust_remote_code|exp_name"
    r"|preprocessing_num_workers|learning_rate|lr_scheduler_type|warmup_ratio|weight_decay|num_train_epochs|output_dir|seed"
    r"|with_tracking|report_to|wandb_.*|logging_steps|checkpointing_steps|keep_last_n_checkpoints|max_train_(steps|samples)"
    r"|push_to_hub|hf_.*|save_to_hub|try_.*|gs_bucket_path|oe_eval_.*|run_name|do_not_randomize_output_dir|timeout"
    r"|overwrite_cache|num_epochs|reference_logprobs_cache_path|resume_from_checkpoint|cache_dataset_only|clip_grad_norm|low_cpu_mem_usage|dpo_.*"
    r"|beta|loss_type|gamma_beta_ratio|label_smoothing|concatenated_forward|profiling|max_grad_norm|add_seed_and_date_to_exp_name|eval_\w+"
    r"|transform_fn|target_columns|cache_mode|local_cache_dir|skip_cache|config_hash|sync_each_batch|cache_logprobs_only|(no_)?compile_model"
    r"|config_name"
)


def _generates(pasted: Pasted) -> SpecError:
    return SpecError(
        f"{pasted.where} generates and trains by turns ({pasted.program or 'with rollouts'}), which is not read here; "
        "give the update as a job: --model, --sequence-length (pack_length), --micro-batch-size "
        "(per_device_train_batch_size), --framework deepspeed --zero-stage (deepspeed_stage), --set loss.kind=grpo.",
        parameter="program",
    )


def from_open_instruct(pasted: Pasted) -> Translation:
    """The job of an open-instruct configuration. Raises: SpecError naming the key, its value, the rule and the way out."""
    notes = Notes()
    settings = Settings(pasted.values, notes, "open-instruct")
    if REINFORCES & set(pasted.values):
        raise _generates(pasted)
    quantised = settings.switch("use_qlora")
    adapters = settings.switch("use_lora")
    if quantised and not adapters:
        raise settings.refuse("use_qlora", "has adapters only with use_lora: true; add it")
    model = settings.model(pasted.model, "model_name_or_path")
    peft = _adapters(settings) if adapters else None
    training = _training(settings, quantised=quantised, adapters=adapters)
    launcher = launcher_beside(pasted, notes)
    program, num_gpus, fsdp = Path(pasted.program).stem, launcher.gpus(pasted, notes), launcher.fsdp
    _packing(settings, training, program)
    if program == OLMO_CORE and num_gpus > 1:
        fsdp = {"fsdp_version": 2}
    without_second_checkpoints(training, fsdp)
    translation = from_huggingface(
        model,
        training,
        peft,
        launcher.deepspeed,
        fsdp,
        num_gpus,
        versions=pasted.versions.of("huggingface"),
        widens_for_fsdp=(1,) if program == OLMO_CORE else (1, 2),
    )
    job = notes.include(translation)
    if job.framework == "huggingface":  # the loop's variable `outputs` keeps them until its next assignment
        options = {**job.framework_options, "outputs_dropped": False}
        job = job.replace(framework_options=FrozenMapping(options))
    job = _with_loss(job, program, settings)
    if program == OLMO_CORE:
        job = _with_olmo_core(job, settings)
    settings.note_left(IGNORED)
    return notes.finish(job)


def _with_loss(job: TrainingJob, program: str, settings: Settings) -> TrainingJob:
    """`job` with the loss of the program that runs; without a program, with the one whose arguments are given."""
    notes = settings.notes
    if program in PREFERENCES or any(key.startswith("dpo_") for key in settings.left()):
        precomputed = PREFERENCES.get(program, False)
        whose = "open-instruct (dpo_utils.py)"
        job = with_method(job, "dpo", "the program", notes, precomputed=precomputed, whole_logits=whose, log_softmax=True)
    elif program not in SUPERVISED:
        notes.unsupported.append(
            f"{program}.py of open-instruct is not known here; supervised fine-tuning (finetune.py) is assumed.", "program"
        )
    return job


def _packing(settings: Settings, training: dict[str, Any], program: str) -> None:
    """Set packing in `training`: samples are joined into one row without padding. A row has all samples of a micro-batch;
    for OLMo-core's network it has as many as fit into `max_seq_length`, and chosen and rejected samples have separate rows
    (padding_free_collator.py 005366f7, `max_seq_length`)."""
    if not settings.switch("packing"):
        return
    if program != OLMO_CORE:
        training["padding_free"] = True
        return
    training["per_device_train_batch_size"] = 1
    settings.notes.assumptions.append(
        "packing fills one row of max_seq_length tokens with chosen samples and one with rejected ones, as open-instruct's "
        "newest dpo.py does, whatever per_device_train_batch_size is; its first releases joined that many samples."
    )


def _with_olmo_core(job: TrainingJob, settings: Settings) -> TrainingJob:
    """`job` in the layout of OLMo-core's trainer, with notes about what else differs."""
    notes = settings.notes
    notes.unsupported.append(
        "open-instruct's dpo.py trains OLMo-core's network; transformers' is assumed, under FSDP2 on several GPUs, with "
        "weights and states in bfloat16, which its newest releases keep in float32.",
        "program",
        "more",
    )
    note_unsupported(settings, DEGREES, "less")
    budget = settings.number("activation_memory_budget", 1)
    compiles = settings.switch("compile_model", True) and not settings.switch("no_compile_model")
    if budget is not None and budget < 1 and compiles:  # ac_config of open_instruct/dpo.py
        notes.unsupported.append(
            f"activation_memory_budget={budget:g}, with which compiled layers recompute a part of their activations, is "
            "not modelled.",
            "activation_memory_budget",
            "less",
        )
    ranks = job.parallelism.data_parallel_size
    replicas, group = settings.integer("num_replicas"), settings.integer("shard_degree")
    if group is None and replicas is None and ranks > NODE:
        group = NODE
        notes.assumptions.append(f"OLMo-core shards over the {NODE} GPUs of a node, and nodes hold replicas.")
    group = group or ranks // (replicas or 1)
    if not 1 < group < ranks:
        return job
    options = {**job.framework_options, "shard_group_size": group}
    layout = replace(job.parallelism, sharding="hsdp")
    return job.replace(parallelism=layout, framework_options=FrozenMapping(options))


def _adapters(settings: Settings) -> dict[str, Any]:
    return {
        "r": settings.size("lora_rank", 64, assume=True),
        "lora_alpha": settings.number("lora_alpha", 16),
        "lora_dropout": settings.number("lora_dropout", 0.1, assume=True),
        "target_modules": TARGETS,
    }


def _training(settings: Settings, *, quantised: bool, adapters: bool) -> dict[str, Any]:
    """The training settings under the names of transformers' TrainingArguments."""
    notes = settings.notes
    training: dict[str, Any] = {
        "per_device_train_batch_size": settings.size("per_device_train_batch_size", 8, assume=True),
        "gradient_accumulation_steps": settings.size("gradient_accumulation_steps", 1),
        "torch_dtype": "bfloat16",
        "bf16": True,
        "attn_implementation": ATTENTION[settings.one_of("attn_backend", "auto", tuple(ATTENTION))],
    }
    if not settings.switch("use_flash_attn", True):
        training["attn_implementation"] = "eager"
    if settings.given("max_seq_length"):
        training["max_seq_length"] = settings.raw("max_seq_length")
    training["optim"] = _optimizer(settings, quantised=quantised)
    checkpoints = settings.switch("gradient_checkpointing")
    training["gradient_checkpointing"] = checkpoints and (quantised or not adapters)
    if checkpoints and not training["gradient_checkpointing"]:
        notes.warnings.append(
            "gradient_checkpointing has no effect with use_lora and without use_qlora (open_instruct/finetune.py): nothing "
            "is checkpointed.",
            "gradient_checkpointing",
        )
    if quantised:
        training["gradient_checkpointing_kwargs"] = {"use_reentrant": True}  # peft's default there
        training["quantization_config"] = {"load_in_4bit": True, "bnb_4bit_use_double_quant": True}
        note_widened_ends(notes)
    training |= _loss(settings)
    if settings.raw("additional_model_arguments"):
        notes.unsupported.append("additional_model_arguments are not read.", "additional_model_arguments")
    return training


def _optimizer(settings: Settings, *, quantised: bool) -> str:
    """The optimizer, by its name in transformers: paged for quantised weights, else fused unless asked otherwise."""
    eight, fused = settings.switch("use_8bit_optimizer"), settings.switch("fused_optimizer", True)
    if quantised:
        return "paged_adamw_8bit" if eight else "paged_adamw_32bit"
    if eight:
        sentence = "use_8bit_optimizer has no effect without use_qlora (open_instruct/finetune.py)."
        settings.notes.warnings.append(sentence, "use_8bit_optimizer")
    return "adamw_torch_fused" if fused else "adamw_torch"


def _loss(settings: Settings) -> dict[str, Any]:
    """The training settings of the loss; losses that are not modelled are noted."""
    notes, loss = settings.notes, dict[str, Any]()
    mean = settings.one_of("reduce_loss", "mean", ("mean", "sum")) == "mean"
    if settings.switch("use_liger_kernel"):
        loss = {"liger_kernels": True, "fused_linear_cross_entropy": mean}
    elif not mean:
        sentence = "The loss of reduce_loss=sum, on shifted copies of the logits, is not modelled."
        notes.unsupported.append(sentence, "reduce_loss", "more")
    if settings.switch("load_balancing_loss"):
        notes.unsupported.append("The load balancing loss is not modelled.", "load_balancing_loss", "more")
    settings.number("load_balancing_weight", 0.5)
    return loss
