"""Hugging Face's training settings as tables: optimizers, quantization, and the keys that do not affect memory.

Sources: transformers 4.48 and 5.17 training_args.py, peft 0.21 LoraConfig, trl 0.13-0.24 SFTConfig, DeepSpeed 0.19 runtime
config, accelerate 1.15 FullyShardedDataParallelPlugin.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from peakcast.jobs.spec import OptimizerName


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


class OptimizerChoice(NamedTuple):
    """The meaning of a value of TrainingArguments.optim."""

    name: OptimizerName
    implementation: Literal["fused", "foreach", "loop"] = "foreach"
    library: str = ""
    """The library that implements it, if it is not the framework's usual one."""


OPTIMIZERS: dict[str, OptimizerChoice] = {
    "adamw_torch": OptimizerChoice("adamw"),
    "adamw_torch_fused": OptimizerChoice("adamw", "fused"),
    "adamw_hf": OptimizerChoice("adamw", "loop"),
    "adamw_apex_fused": OptimizerChoice("adamw", "fused"),
    "adamw_bnb_8bit": OptimizerChoice("adamw_8bit", "fused"),
    "adamw_8bit": OptimizerChoice("adamw_8bit", "fused"),
    "adamw_torch_8bit": OptimizerChoice("adamw_8bit", "fused", "torchao"),
    "adamw_torch_4bit": OptimizerChoice("adamw_4bit", "fused"),
    "paged_adamw": OptimizerChoice("paged_adamw_32bit", "fused"),
    "paged_adamw_32bit": OptimizerChoice("paged_adamw_32bit", "fused"),
    "paged_adamw_8bit": OptimizerChoice("paged_adamw_8bit", "fused"),
    "lion_32bit": OptimizerChoice("lion", "fused"),
    "lion_8bit": OptimizerChoice("lion_8bit", "fused"),
    "paged_lion_32bit": OptimizerChoice("paged_lion_32bit", "fused"),
    "paged_lion_8bit": OptimizerChoice("paged_lion_8bit", "fused"),
    "ademamix": OptimizerChoice("ademamix", "fused"),
    "ademamix_8bit": OptimizerChoice("ademamix_8bit", "fused"),
    "paged_ademamix_32bit": OptimizerChoice("paged_ademamix_32bit", "fused"),
    "paged_ademamix_8bit": OptimizerChoice("paged_ademamix_8bit", "fused"),
    "sgd": OptimizerChoice("sgd"),
    "adagrad": OptimizerChoice("adagrad"),
    "rmsprop": OptimizerChoice("rmsprop"),
    "rmsprop_bnb": OptimizerChoice("rmsprop", "fused", "bitsandbytes"),
    "rmsprop_bnb_32bit": OptimizerChoice("rmsprop", "fused", "bitsandbytes"),
    "rmsprop_bnb_8bit": OptimizerChoice("rmsprop_8bit", "fused"),
    "adafactor": OptimizerChoice("adafactor", "loop"),
    "lomo": OptimizerChoice("lomo", "loop"),
    "adalomo": OptimizerChoice("adalomo", "loop"),
    "galore_adamw": OptimizerChoice("galore", "loop"),
}
OTHER_OPTIMIZERS: dict[str, OptimizerChoice] = {
    "adamw_anyprecision": OptimizerChoice("adamw"),
    "apollo_adamw": OptimizerChoice("galore", "loop"),
    "galore_adafactor": OptimizerChoice("galore", "loop"),
    "galore_adamw_8bit": OptimizerChoice("galore", "loop"),
    "galore_adamw_layerwise": OptimizerChoice("galore", "loop"),
    "galore_adamw_8bit_layerwise": OptimizerChoice("galore", "loop"),
    "galore_adafactor_layerwise": OptimizerChoice("galore", "loop"),
    "apollo_adamw_layerwise": OptimizerChoice("galore", "loop"),
    "grokadamw": OptimizerChoice("adamw", "loop"),
    "schedule_free_radam": OptimizerChoice("adamw"),
    "schedule_free_sgd": OptimizerChoice("adamw"),
    "schedule_free_adamw": OptimizerChoice("adamw"),
    "stable_adamw": OptimizerChoice("adamw", "loop"),
}
"""Optimizers for which a job has no name -> the most similar one, which is used and reported as unsupported."""

DTYPES: dict[str, Literal["float32", "bfloat16", "float16"]] = {
    "float32": "float32", "fp32": "float32", "float": "float32", "torch.float32": "float32",
    "bfloat16": "bfloat16", "bf16": "bfloat16", "torch.bfloat16": "bfloat16",
    "float16": "float16", "fp16": "float16", "half": "float16", "torch.float16": "float16",
}  # fmt: skip

SHARDING: dict[str, Literal["fsdp1", "no_shard", "hsdp"]] = {
    "full_shard": "fsdp1", "1": "fsdp1", "shard_grad_op": "fsdp1", "2": "fsdp1", "no_shard": "no_shard", "3": "no_shard",
    "hybrid_shard": "hsdp", "4": "hsdp", "hybrid_shard_zero2": "hsdp", "5": "hsdp",
}  # fmt: skip
"""FSDP sharding strategies by torch's names and accelerate's numbers, in lower case."""

LAYER_LINEARS = "all-linear"
"""peft's word for every Linear except the head."""

IGNORED_TRAINING = _words("""
    accelerator_config adam_beta1 adam_beta2 adam_epsilon assistant_only_loss average_tokens_across_devices
    batch_eval_metrics bf16_full_eval chars_per_token chat_template_path completion_only_loss data_seed
    dataloader_drop_last dataloader_in_order dataloader_multiprocessing_context dataloader_num_workers
    dataloader_persistent_workers dataloader_pin_memory dataloader_prefetch_factor dataset_kwargs dataset_num_proc
    dataset_text_field ddp_backend ddp_broadcast_buffers ddp_find_unused_parameters ddp_static_graph
    ddp_timeout debug disable_tqdm do_eval do_predict do_train enable_jit_checkpoint eos_token eval_accumulation_steps
    eval_delay eval_do_concat_batches eval_on_start eval_packing eval_steps eval_strategy eval_use_gather_object
    evaluation_strategy fp16_full_eval fp16_opt_level full_determinism greater_is_better group_by_length
    hub_always_push hub_model_id hub_private_repo hub_revision hub_strategy hub_token
    ignore_data_skip include_for_metrics include_inputs_for_metrics include_num_input_tokens_seen
    include_tokens_per_second label_names learning_rate length_column_name liger_kernel_config
    load_best_model_at_end local_rank log_level log_level_replica log_on_each_node logging_dir logging_first_step
    logging_nan_inf_filter logging_steps logging_strategy lr_scheduler_kwargs lr_scheduler_type max_grad_norm
    max_prompt_length max_steps metric_for_best_model num_of_sequences num_train_epochs output_dir
    overwrite_output_dir pad_token per_device_eval_batch_size prediction_loss_only project push_to_hub
    remove_unused_columns report_to restore_callback_states_from_checkpoint resume_from_checkpoint run_name
    save_on_each_node save_only_model save_safetensors save_steps save_strategy save_total_limit seed shuffle_dataset
    skip_memory_metrics tf32 trackio_bucket_id trackio_space_id
    trackio_static_space_id train_sampling_strategy truncation_mode trust_remote_code use_cache use_cpu
    fsdp_min_num_params fsdp_transformer_layer_cls_to_wrap
    embedding_learning_rate
    fast_inference float8_kv_cache full_finetuning gpu_memory_utilization max_lora_rank token
    use_legacy_prediction_loop warmup_ratio warmup_steps weight_decay
""")
COMPILING = ("torch_compile_backend", "torch_compile_mode")
"""Training arguments that switch `torch_compile` on (transformers 5 training_args.py `__post_init__`)."""
UNLESS: dict[str, tuple[tuple[str, ...], str]] = {
    "torch_compile_mode": (("default",), "Compilation in another mode, which may record CUDA graphs,"),
    "torch_compile_backend": (("inductor",), "Compilation by another backend"),
    "fp16_backend": (("auto", "amp", "cuda_amp"), "Mixed precision by apex"),
    "half_precision_backend": (("auto", "amp", "cuda_amp"), "Mixed precision by apex"),
}
"""Training arguments that change what is computed -> (values that change nothing, what other values ask for)."""
IGNORED_PEFT = _words("""
    alpha_pattern arrow_config auto_mapping base_model_name_or_path corda_config ensure_weight_tying eva_config
    fan_in_fan_out inference_mode init_lora_weights kasa_config layers_pattern loftq_config
    lora_ga_config megatron_config megatron_core monteclora_config peft_version qalora_group_size revision
    random_state runtime_config task_type temporary_location use_rslora velora_config
    adapter_name alpha asa_importance_beta asa_schedule_exponent asa_target_subspaces asa_uncertainty_beta beta1 beta2
    block_share boft_dropout coft d_initial delora_lambda deltaT encoder_dropout encoder_num_layers
    encoder_reparameterization_type eps final_warmup fourierft_dropout gralora_dropout group_size hira_dropout
    init_theta_d_bound init_logits_std init_vector_bank_bound init_warmup init_weights inv_alpha is_feedforward
    lora_dropout mask_interval mask_type miss_dropout module_dropout num_attention_heads num_cayley_neumann_terms
    num_layers num_transformer_submodules orth_reg_weight parallel_w projection_prng_key proj_seed prompt_tuning_init
    prompt_tuning_init_text rank_dropout rank_dropout_scale randlora_alpha randlora_dropout random_loc_seed random_seed
    save_only_topk_weights save_projection scaling sparse_rate target_r tfinal tinit token_dim token_indices
    tokenizer_kwargs tokenizer_name_or_path total_step unilora_dropout use_cayley_neumann use_effective_conv2d use_idwt
    use_scalar vblora_dropout vera_dropout wavelet_family
""")
IGNORED_DEEPSPEED = _words("""
    aio checkpoint comms_logger csv_monitor dump_state elasticity flops_profiler
    gradient_clipping gradient_predivide_factor memory_breakdown monitor_config comms_config prescale_gradients scheduler
    steps_per_print tensorboard train_batch_size wall_clock_breakdown wandb zero_allow_untested_optimizer
    zero_force_ds_cpu_optimizer
""")
AUTOMATIC = _words("""
    train_batch_size train_micro_batch_size_per_gpu gradient_accumulation_steps gradient_clipping
    zero_allow_untested_optimizer
""")
"""Keys of a DeepSpeed configuration that may be "auto" (transformers 5.17 integrations/deepspeed.py)."""
CHECKPOINT_SETTINGS = ("use_reentrant", "every_n_layers", "offload")
"""Keys of gradient_checkpointing_kwargs that are read."""
CHECKPOINT_DETAILS = _words("preserve_rng_state determinism_check debug early_stop")
"""Arguments of torch.utils.checkpoint, besides use_reentrant, that do not change which tensors are saved."""
HALF_DETAILS = _words("""
    auto_cast loss_scale initial_scale_power loss_scale_window hysteresis consecutive_hysteresis min_loss_scale
    immediate_grad_update check_grad_overflow
""")
"""Keys of DeepSpeed's bf16 and fp16 besides `enabled`: loss scaling, and when gradients are added up."""
ENGINE_OPTIMIZER = _words("""
    lr betas eps weight_decay bias_correction adam_w_mode set_grad_none nesterov dampening muon_lr adam_lr
""")
"""Parameters of DeepSpeed's optimizers that do not change their states."""
ZERO_DETAILS = _words("""
    allgather_partitions contiguous_gradients elastic_checkpoint ignore_unused_parameters log_trace_cache_warnings
    overlap_comm reduce_scatter round_robin_gradients sub_group_size
    reduce_bucket_size allgather_bucket_size stage3_prefetch_bucket_size stage3_param_persistence_threshold
    stage3_max_live_parameters stage3_max_reuse_distance stage3_model_persistence_threshold
    stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save
    stage3_module_granularity_threshold stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential
""")
"""Keys of zero_optimization for which DeepSpeed's defaults are assumed."""
OFFLOAD_DETAILS = _words("""
    device pin_memory ratio super_offload cpuadam_cores_perc nvme_path buffer_count buffer_size max_in_cpu fast_init
    pipeline_read pipeline_write
""")
"""Keys of offload_optimizer and offload_param that are read, or that only affect how fast states move."""
UNSUPPORTED_DEEPSPEED: dict[str, str] = {
    "activation_checkpointing": "DeepSpeed's own activation checkpointing",
    "amp": "apex AMP",
    "communication_data_type": "gradients that are sent in another dtype",
    "compression_training": "compression training",
    "data_types": "gradients that are added up in another dtype",
    "hybrid_engine": "the hybrid engine",
    "pipeline": "DeepSpeed's pipeline engine",
    "sparse_attention": "sparse attention",
    "autotuning": "autotuning",
    "sequence_parallel_size": "Ulysses sequence parallelism",
    "tensor_parallel": "DeepSpeed's tensor parallelism",
}
IGNORED_FSDP = _words("""
    backward_prefetch compute_environment cpu_ram_efficient_loading debug distributed_type downcast_bf16
    enable_cpu_affinity forward_prefetch fsdp_backward_prefetch fsdp_backward_prefetch_policy
    fsdp_cpu_ram_efficient_loading fsdp_forward_prefetch fsdp_limit_all_gathers fsdp_min_num_params
    fsdp_state_dict_type fsdp_sync_module_states fsdp_transformer_layer_cls_to_wrap fsdp_use_orig_params
    limit_all_gathers machine_rank main_process_ip main_process_port main_training_function min_num_params
    num_machines num_processes rdzv_backend same_network state_dict_type sync_module_states tpu_env tpu_use_cluster
    tpu_use_sudo transformer_layer_cls_to_wrap use_cpu use_orig_params xla xla_fsdp_grad_ckpt xla_fsdp_settings
    xla_fsdp_v2
""")
