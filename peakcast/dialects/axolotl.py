"""Axolotl's YAML: a Hugging Face Trainer run under other names.

Source: axolotl 0.4-0.13 src/axolotl/utils/schemas/config.py, core/builders/base.py and causal.py, loaders/model.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from peakcast.dialects.accelerate import launcher_beside, refuse_twice
from peakcast.dialects.axolotl_layout import divided
from peakcast.dialects.generation import READ, Generation, generation_of
from peakcast.dialects.huggingface import from_huggingface
from peakcast.dialects.pasted import Pasted
from peakcast.dialects.post_training import with_method
from peakcast.dialects.translation import (
    Notes,
    Settings,
    Translation,
    note_unsupported,
    refuse_teacher,
    renamed,
    speller,
    words,
)
from peakcast.errors import SpecError
from peakcast.fields import FrozenMapping

TRAINING = {
    "micro_batch_size": "per_device_train_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "sequence_len": "max_length",
    "sample_packing": "packing",
    "optimizer": "optim",
    "optim_target_modules": "optim_target_modules",
    "torch_compile": "torch_compile",
    "activation_offloading": "activation_offloading",
    "auto_find_batch_size": "auto_find_batch_size",
    "neftune_noise_alpha": "neftune_noise_alpha",
    "noisy_embedding_alpha": "neftune_noise_alpha",
    "torch_empty_cache_steps": "torch_empty_cache_steps",
}
ADAPTER = {
    "lora_r": "r", "lora_alpha": "lora_alpha", "lora_dropout": "lora_dropout", "lora_target_modules": "target_modules",
    "lora_modules_to_save": "modules_to_save", "peft_use_dora": "use_dora", "peft_use_rslora": "use_rslora",
    "peft_layers_to_transform": "layers_to_transform", "lora_target_parameters": "target_parameters",
    "lora_fan_in_fan_out": "fan_in_fan_out", "peft_autocast_adapter_dtype": "autocast_adapter_dtype",
    "peft_trainable_token_indices": "trainable_token_indices",
}  # fmt: skip
OPTIMIZERS = {
    "muon": "adamw_torch", "optimi_adamw": "adamw_hf", "ao_adamw_4bit": "adamw_torch_4bit",
    "ao_adamw_8bit": "adamw_torch_8bit", "adopt_adamw": "adamw_torch", "came_pytorch": "adafactor",
    "ao_adamw_fp8": "adamw_torch_8bit",
}  # fmt: skip
"""Axolotl's own optimizers, with the nearest of transformers'."""
SAME = ("ao_adamw_4bit", "ao_adamw_8bit")
ATTENTION = {
    "flash_attention": "flash_attention_2", "sdp_attention": "sdpa", "eager_attention": "eager",
    "flex_attention": "flex_attention", "xformers_attention": "xformers", "sage_attention": "sage",
}  # fmt: skip
OFFLOADED = ("legacy", "disk", "hidden_states")
"""Values of `activation_offloading` that move what true does, elsewhere or otherwise."""
SHORT = {"flash": "flash_attention_2", "flex": "flex_attention"}
"""Values of the newer key `attention` that transformers calls otherwise."""
KERNELS = {
    "lora_mlp_kernel": "fused LoRA kernels", "lora_qkv_kernel": "fused LoRA kernels", "lora_o_kernel": "fused LoRA kernels",
    "liger_rope": "Liger's rotary embedding", "liger_rms_norm": "Liger's RMSNorm",
    "liger_glu_activation": "Liger's SwiGLU", "liger_swiglu": "Liger's SwiGLU",
    "liger_cross_entropy": "Liger's cross entropy", "flash_attn_cross_entropy": "FlashAttention's cross entropy",
    "flash_attn_rms_norm": "FlashAttention's RMSNorm", "flash_attn_fuse_mlp": "FlashAttention's MLP",
    "unsloth_lora_mlp": "Unsloth's kernels", "unsloth_lora_qkv": "Unsloth's kernels", "unsloth_lora_o": "Unsloth's kernels",
    "unsloth_cross_entropy_loss": "Unsloth's kernels", "unsloth_rms_norm": "Unsloth's kernels",
    "chunked_cross_entropy": "the chunked cross entropy", "tiled_mlp": "the tiled MLP", "fp8": "FP8 training",
    "unfrozen_parameters": "training some parameters only", "relora": "ReLoRA", "relora_steps": "ReLoRA",
    "lisa_n_layers": "LISA",
    "loraplus_lr_ratio": "LoRA+", "gptq": "GPTQ loading", "qat": "quantization-aware training", "mora": "MoRA",
    "use_scattermoe": "ScatterMoE", "kd_trainer": "distillation", "llama4_linearized_experts": "linearized experts",
    "tensor_parallel_size": "the Trainer's tensor parallelism beside sharding",
    "context_parallel_size": "what ring-flash-attn keeps and passes on",
    "sequence_parallel_degree": "what ring-flash-attn keeps and passes on", "dp_replicate_size": "hybrid sharding",
    "expert_parallel_size": "expert parallelism",
    "process_reward_model": "process reward modelling", "resize_token_embeddings_to_32x": "a padded vocabulary",
    "gradient_checkpointing_offload": "activation offloading",
    "shrink_embeddings": "a shrunk vocabulary", "unsloth_rope": "Unsloth's kernels", "use_kernels": "kernels of the hub",
    "fused_attn_kernel": "the fused attention kernel", "diffusion": "diffusion training", "use_eaft": "EAFT's loss",
    "model_quantization_config": "a checkpoint that is loaded quantized",
    "quantize_moe_experts": "what experts quantized at load take in passing, their dequantized copies,",
}  # fmt: skip
"""What a job cannot say, and its name."""
LIGER = ("liger_rope", "liger_rms_norm", "liger_glu_activation")
"""What `use_liger_kernel` of transformers patches together in a decoder."""
OVERRIDES = words("output_router_logits rope_theta rope_scaling rope_parameters use_cache max_position_embeddings")
"""Keys of a network's configuration that may be overridden without another shape."""
IGNORED = words("""
    is_llama_derived_model
    accelerator_config adam_beta1 adam_beta2 adam_beta3 adam_epsilon adam_epsilon2 added_tokens_overrides
    auto_resume_from_checkpoints axolotl_config_path base_model_config base_model_ignore_patterns batch_flattening
    bench_dataset bench_split chat_template chat_template_jinja comet_mode comet_project_name cosine_constant_lr_ratio
    cosine_min_lr_ratio cpo_alpha curriculum_sampling dataloader_drop_last dataloader_num_workers
    dataloader_pin_memory dataloader_prefetch_factor dataset_exact_deduplication dataset_keep_in_memory
    dataset_num_proc dataset_prepared_path dataset_processes dataset_shard_idx dataset_shard_num dataset_shuffle
    datasets ddp ddp_broadcast_buffers ddp_bucket_cap_mb ddp_find_unused_parameters ddp_timeout debug
    default_system_message device device_map do_bench_eval do_causal_lm_eval dpo_beta dpo_use_logits_to_keep
    dpo_use_weighting early_stopping_patience embeddings_skip_upcast eot_tokens eval_batch_size eval_causal_lm_metrics
    eval_max_new_tokens eval_sample_packing eval_steps eval_strategy eval_table_size evals_per_epoch
    evaluation_strategy excess_length_strategy fix_untrained_tokens flash_attn_fuse_qkv flash_optimum
    flex_attn_compile_kwargs float32 fp8_enable_fsdp_float8_all_gather
    fsdp_final_state_dict_type gc_collect_steps gc_steps gpu_memory_limit
    greater_is_better group_by_length heads_k_stride hf_use_auth_token hub_model_id hub_strategy include_tkps
    include_tokens_per_second is_falcon_derived_model is_mistral_derived_model is_preprocess is_qwen_derived_model
    kto_desirable_weight kto_undesirable_weight learning_rate load_best_model_at_end local_rank logging_steps
    lora_model_dir loraplus_lr_embedding loss_watchdog_patience loss_watchdog_threshold low_cpu_mem_usage lr_groups
    lr_quadratic_warmup lr_scheduler lr_scheduler_kwargs max_grad_norm max_memory max_packed_sequence_len
    max_prompt_len max_steps mean_resizing_embeddings metric_for_best_model min_sample_len mlflow_experiment_name
    mlflow_tracking_uri model_type multipack_real_batches num_epochs
    num_labels optim_args orpo_alpha output_dir pad_to_sequence_len plugins
    pose_max_context_len pose_num_chunks pose_split_on_token_ids preprocess_iterable pretrain_multipack_attn
    pretrain_multipack_buffer_size pretraining_dataset pretraining_sample_concatenation profiler_steps
    push_dataset_to_hub quantization remove_unused_columns resume_from_checkpoint revision_of_model ring_attn_func
    rl_beta rpo_alpha s2_attention sample_packing_bin_size sample_packing_eff_est sample_packing_group_size
    sample_packing_sequentially save_first_step save_only_model save_safetensors save_steps save_strategy
    save_total_limit saves_per_epoch seed shuffle_before_merging_datasets shuffle_merged_datasets simpo_gamma
    skip_prepare_dataset special_tokens streaming strict test_datasets test_value tf32 tokenizer_config
    tokenizer_legacy tokenizer_type tokenizer_use_fast tokens torch_compile_backend torch_compile_mode
    total_num_tokens total_supervised_tokens train_on_inputs trl.beta trust_remote_code trust_remote_code_revision
    type_of_model use_mlflow use_pose use_tensorboard use_wandb val_set_size vllm wandb_entity wandb_log_model
    wandb_mode wandb_name wandb_project wandb_run_id wandb_watch warmup_ratio warmup_steps weight_decay world_size
    adam_eps cls_model_config eaft_alpha eaft_k eta_min experimental_skip_move_to_device gptq_disable_exllama
    jagged_restart_anneal_steps jagged_restart_steps jagged_restart_warmup_steps liger_layer_norm lisa_layers_attribute
    lisa_step_interval model_quantization_config_kwargs otel_metrics_host otel_metrics_port reinit_weights
    relora_cpu_offload relora_prune_ratio streaming_multipack_buffer_size swanlab_completion_log_interval
    swanlab_completion_max_buffer swanlab_completion_max_buffer_size swanlab_description
    swanlab_experiment_name swanlab_log_completions swanlab_log_model swanlab_mode swanlab_project
    swanlab_workspace use_otel_metrics use_swanlab
""")


def from_axolotl(pasted: Pasted) -> Translation:
    """The job of an Axolotl configuration. Raises: SpecError naming the key, its value, the rule and the way out."""
    notes = Notes()
    settings = Settings(pasted.values, notes, "axolotl")
    training = renamed(settings, TRAINING)
    if (where := str(training.get("activation_offloading")).lower()) in OFFLOADED:
        training["activation_offloading"] = True
        notes.assumptions.append(f"activation_offloading={where!r} is taken as true: activations move to host memory.")
    if "per_device_train_batch_size" not in training:
        steps, total = settings.integer("gradient_accumulation_steps"), settings.integer("batch_size")
        training["per_device_train_batch_size"] = total // steps if steps and total else settings.size("micro_batch_size")
    settings.size("sequence_len", 512, assume=True)
    training.setdefault("max_length", 512)
    method = settings.text("rl", "reward" if settings.switch("reward_model") else "sft").lower()
    generation = _generation(settings) if method == "grpo" else None
    if generation is not None:
        training["max_length"] = generation.sequence_length
    named = settings.text("base_model")
    model = pasted.model or named
    if not model:
        raise settings.refuse("base_model", "is required: the model's hub id, its folder, or its config.json", None)
    refuse_teacher(settings, "gkd_teacher")
    _precision(settings, training)
    _memory(settings, training)
    adapter = _adapter(settings, training)
    if settings.switch("sample_packing"):
        _packing(settings, training)
    engine = settings.raw("deepspeed")
    deepspeed = pasted.file(engine, "deepspeed", "deepspeed") if engine else None
    training["fsdp"] = list(settings.words("fsdp")) or None
    fsdp = settings.raw("fsdp_config")
    version = settings.integer("fsdp_version")
    if fsdp and version:
        fsdp = {"fsdp_version": version, **fsdp}
    launcher = launcher_beside(pasted, notes)
    refuse_twice(fsdp or None, launcher.fsdp, "fsdp_config", pasted.where)
    refuse_twice(deepspeed, launcher.deepspeed, "deepspeed", pasted.where)
    deepspeed = deepspeed if deepspeed is not None else launcher.deepspeed
    num_gpus = launcher.gpus(pasted, notes)
    _rest(settings)
    translation = from_huggingface(
        model, training, adapter, deepspeed, fsdp or launcher.fsdp, num_gpus, spell=speller(TRAINING, ADAPTER)
    )
    job = notes.include(translation)
    if settings.switch("quantize_moe_experts") and job.finetuning.quantization and job.architecture.moe is not None:
        job = job.replace(framework_options=FrozenMapping({**job.framework_options, "quantized_experts": True}))
    job = with_method(
        divided(job, settings),
        method,
        "rl",
        notes,
        refers=generation is not None and generation.refers,
        precomputed=settings.switch("precompute_ref_log_probs"),
        whole_logits="trl 1.9, which axolotl 0.19 requires,",
    )
    return notes.finish(job)


def _generation(settings: Settings) -> Generation:
    """GRPO's settings, which `trl` holds under trl's names, and `vllm` for a server (`axolotl vllm-serve`)."""
    given = settings.raw("trl")
    values = {key: value for key, value in (given if isinstance(given, Mapping) else {}).items() if value is not None}
    values.setdefault("beta", settings.number("rl_beta", 0.0))
    values.setdefault("max_prompt_length", settings.integer("max_prompt_len"))
    read = {key: values[key] for key in READ if values.get(key) is not None}
    return generation_of(Settings(read, settings.notes, "axolotl"), "micro_batch_size")


def _packing(settings: Settings, training: dict[str, Any]) -> None:
    """The micro-batch joined in one row for flash attention; rows of their own otherwise (`multipack_real_batches`)."""
    flash = training.get("attn_implementation") == "flash_attention_2"
    if not flash or settings.switch("multipack_real_batches"):
        return
    training["packing_strategy"] = "bfd"
    settings.notes.assumptions.append("sample_packing joins the micro-batch in one full row without padding.")


def _precision(settings: Settings, training: dict[str, Any]) -> None:
    """The weights' dtype follows bf16 and fp16 (loaders/model.py), float32 without either."""
    word = settings.text("bf16", "false" if any(map(settings.given, ("fp16", "float16", "float32"))) else "auto").lower()
    bf16 = word in ("auto", "full") or settings.switch("bfloat16") or (word != "auto" and settings.switch("bf16"))
    if word == "auto":
        given = "bf16=auto" if settings.given("bf16") else "bf16 is not given; axolotl's default, auto,"
        settings.notes.assumptions.append(f"{given} is bfloat16 on every GPU since Ampere.")
    fp16 = not bf16 and (
        settings.text("fp16", "false").lower() == "full" or settings.switch("fp16") or settings.switch("float16")
    )
    if bf16:
        training["bf16"] = True
    elif fp16:
        training["fp16"] = True
    half = "bfloat16" if bf16 else "float16" if fp16 or settings.switch("load_in_8bit") else "float32"
    training["torch_dtype"] = half
    if not bf16 and not fp16:
        settings.notes.assumptions.append(f"neither bf16 nor fp16 is set: the weights are {half}.")


def _memory(settings: Settings, training: dict[str, Any]) -> None:
    """Attention, checkpointing, the loss, and the optimizer."""
    used = [name for key, name in ATTENTION.items() if settings.switch(key)]
    named = settings.text("attn_implementation", settings.text("attention", used[0] if used else ""))
    if named:
        training["attn_implementation"] = SHORT.get(named, named)
    word = settings.text("gradient_checkpointing", "false").lower()
    if word in ("offload", "offload_disk", "unsloth"):
        settings.notes.unsupported.append(f"gradient_checkpointing={word} is taken as checkpoints that go to host memory.")
        training["activation_offloading"] = True
    if word in ("offload", "offload_disk", "unsloth") or settings.switch("gradient_checkpointing"):
        training["gradient_checkpointing"] = True
        given = settings.raw("gradient_checkpointing_kwargs")
        training["gradient_checkpointing_kwargs"] = given or {"use_reentrant": False}
        if not given:
            settings.notes.assumptions.append("use_reentrant is not given; the default of axolotl, False, is taken.")
    if settings.text("torch_compile").lower() == "auto":
        training["torch_compile"] = False
        settings.notes.assumptions.append("torch_compile=auto is taken as off.")
    optimizer = settings.text("optimizer", "adamw_torch_fused")
    if not settings.given("optimizer"):
        settings.notes.assumptions.append(f"optimizer is not given; the default of axolotl, {optimizer}, is taken.")
    if optimizer in OPTIMIZERS and optimizer not in SAME:
        settings.notes.unsupported.append(
            f"optimizer={optimizer} is not modelled; {OPTIMIZERS[optimizer]} is taken in its place."
        )
    training["optim"] = OPTIMIZERS.get(optimizer, optimizer)
    if all(settings.switch(key) for key in LIGER):
        training["liger_kernels"] = True
    if settings.switch("liger_fused_linear_cross_entropy"):
        training["fused_linear_cross_entropy"] = True
    if settings.switch("cut_cross_entropy"):
        training["fused_linear_cross_entropy"] = True
        settings.notes.unsupported.append("Cut cross entropy is taken as Liger's fused linear cross entropy.")


def _adapter(settings: Settings, training: dict[str, Any]) -> dict[str, Any] | None:
    kind = settings.text("adapter").lower()
    adapter = renamed(settings, ADAPTER)
    linear = settings.switch("lora_target_linear")
    four, eight = settings.switch("load_in_4bit"), settings.switch("load_in_8bit")
    if not kind or kind in ("none", "false"):
        if four or eight:
            raise SpecError(
                "load_in_4bit or load_in_8bit without an adapter cannot train; set adapter: qlora or lora, or neither.",
                parameter="adapter",
            )
        return None
    if kind not in ("lora", "qlora"):
        settings.notes.unsupported.append(f"adapter={kind} is not modelled; LoRA is taken in its place.")
    if linear:
        adapter["target_modules"] = "all-linear"
    if "r" not in adapter:
        settings.size("lora_r")
    if four:
        # loaders/model.py: BitsAndBytesConfig(nf4, double quantization) unless bnb_config_kwargs say otherwise
        training["quantization_config"] = {"load_in_4bit": True, "bnb_4bit_use_double_quant": True}
        settings.notes.assumptions.append("4-bit weights are NF4 with double quantization, axolotl's default.")
        if settings.raw("bnb_config_kwargs"):
            settings.notes.unsupported.append("bnb_config_kwargs are not modelled; axolotl's defaults are taken.")
    elif eight:
        training["quantization_config"] = {"load_in_8bit": True}
    return adapter


def _rest(settings: Settings) -> None:
    together = all(settings.switch(key) for key in LIGER)
    note_unsupported(settings, {key: what for key, what in KERNELS.items() if not (together and key in LIGER)})
    for name in ("overrides_of_model_config", "model_config"):
        given = settings.raw(name)
        others = sorted(set(given) - OVERRIDES) if isinstance(given, Mapping) else []
        if others:
            settings.notes.unsupported.append(
                f"Another shape of the network ({name}: {', '.join(map(str, others))}) is not read; give it by --model."
            )
    for key in ("batch_size", "rl", "trl", "dp_shard_size", "revision_of_model", "bnb_config_kwargs"):
        settings.given(key)
    for key in settings.left():
        (settings.notes.ignored if key in IGNORED else settings.notes.unknown).append(key)
