"""Axolotl's keys as tables: the equivalent names, keys that a job cannot express, and keys without effect on memory.

Source: axolotl 0.4-0.13 src/axolotl/utils/schemas/config.py.
"""

from __future__ import annotations

from peakcast.dialects.common.translation import words

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
    "ddp_bucket_cap_mb": "ddp_bucket_cap_mb",
    "torch_compile_backend": "torch_compile_backend",
    "torch_compile_mode": "torch_compile_mode",
    "eval_batch_size": "per_device_eval_batch_size",
}
ADAPTER = {
    "lora_r": "r", "lora_alpha": "lora_alpha", "lora_dropout": "lora_dropout", "lora_target_modules": "target_modules",
    "lora_modules_to_save": "modules_to_save", "peft_use_dora": "use_dora", "peft_use_rslora": "use_rslora",
    "peft_layers_to_transform": "layers_to_transform", "lora_target_parameters": "target_parameters",
    "lora_fan_in_fan_out": "fan_in_fan_out", "peft_autocast_adapter_dtype": "autocast_adapter_dtype",
    "peft_trainable_token_indices": "trainable_token_indices",
}  # fmt: skip
NOT_LINEAR = ("lm_head", "embed_tokens", "wte", "embed_out")
"""Projections that peft's all-linear leaves out."""
PLUGINS = (
    "LigerPlugin", "CutCrossEntropyPlugin", "ExpertParallelPlugin", "GrokfastPlugin", "LMEvalPlugin", "KernelsPlugin",
)  # fmt: skip
"""Plugins whose settings are separate keys (axolotl 0.13 integrations/); these keys are read, or listed here."""
OPTIMIZERS = {
    "muon": "adamw_torch", "optimi_adamw": "adamw_hf", "ao_adamw_4bit": "adamw_torch_4bit",
    "ao_adamw_8bit": "adamw_torch_8bit", "adopt_adamw": "adamw_torch", "came_pytorch": "adafactor",
    "ao_adamw_fp8": "adamw_torch_8bit",
}  # fmt: skip
"""Axolotl's own optimizers -> the most similar one of transformers."""
SAME = ("ao_adamw_4bit", "ao_adamw_8bit")
ATTENTION = {
    "flash_attention": "flash_attention_2", "sdp_attention": "sdpa", "eager_attention": "eager",
    "flex_attention": "flex_attention", "xformers_attention": "xformers", "sage_attention": "sage",
}  # fmt: skip
OFFLOADED = ("legacy", "disk", "hidden_states")
"""Values of `activation_offloading` that offload like true, but to another place or in another way."""
SHORT = {"flash": "flash_attention_2", "flex": "flex_attention"}
"""Values of the newer key `attention` -> transformers' name."""
KERNELS = {
    "lora_mlp_kernel": "what LoRA's fused kernels keep", "lora_qkv_kernel": "what LoRA's fused kernels keep",
    "lora_o_kernel": "what LoRA's fused kernels keep",
    "liger_rope": "Liger's rotary embedding", "liger_rms_norm": "Liger's RMSNorm",
    "liger_glu_activation": "Liger's SwiGLU", "liger_swiglu": "Liger's SwiGLU",
    "liger_cross_entropy": "Liger's cross entropy", "flash_attn_cross_entropy": "FlashAttention's cross entropy",
    "flash_attn_rms_norm": "FlashAttention's RMSNorm", "flash_attn_fuse_mlp": "FlashAttention's MLP",
    "unsloth_lora_mlp": "Unsloth's kernels", "unsloth_lora_qkv": "Unsloth's kernels", "unsloth_lora_o": "Unsloth's kernels",
    "unsloth_cross_entropy_loss": "Unsloth's kernels", "unsloth_rms_norm": "Unsloth's kernels",
    "chunked_cross_entropy": "the chunked cross entropy", "selective_checkpointing": "selective checkpointing",
    "recompute_layer_types": "checkpoints of some layers only", "dpo_use_liger_kernel": "Liger's loss of preferences",
    "deepcompile": "DeepCompile", "lora_embedding_kernel": "what LoRA's fused kernels keep",
    "fp32_norms": "norms in float32", "fp8": "FP8 training",
    "relora": "ReLoRA", "relora_steps": "ReLoRA",
    "lisa_n_layers": "LISA",
    "loraplus_lr_ratio": "LoRA+", "mora": "MoRA",
    "use_sonicmoe": "SonicMoE",
    "use_scattermoe": "ScatterMoE", "llama4_linearized_experts": "linearized experts",
    "tensor_parallel_size": "the Trainer's tensor parallelism together with sharding",
    "context_parallel_size": "what ring-flash-attn keeps and passes on",
    "sequence_parallel_degree": "what ring-flash-attn keeps and passes on",
    "s2_attention": "LongLoRA's attention", "flash_optimum": "optimum's BetterTransformer",
    "device_map": "a network spread over GPUs by accelerate",
    "process_reward_model": "process reward modelling", "resize_token_embeddings_to_32x": "a padded vocabulary",
    "gradient_checkpointing_offload": "activation offloading",
    "shrink_embeddings": "a shrunk vocabulary", "unsloth_rope": "Unsloth's kernels",
    "use_kernels": "the use of the hub's kernels",
    "fused_attn_kernel": "the fused attention kernel", "diffusion": "diffusion training", "use_eaft": "EAFT's loss",
    "quantize_moe_experts": "dequantizing experts that were quantized at load",
}  # fmt: skip
"""Keys that a job cannot express -> the name of the feature that they switch on."""
MORE = {"qat": "quantization-aware training", "kd_trainer": "distillation"}
"""The same for what needs more than the answer."""
LESS = {
    "tiled_mlp": "The MLP in tiles (tiled_mlp)",
    "layer_offloading": "Layers in host memory (layer_offloading)",
    "ple_cpu_offload": "A table in host memory (ple_cpu_offload)",
    "freeze_mm_modules": "A frozen vision tower (freeze_mm_modules)",
    "spectrum_top_fraction": "Training some layers only (spectrum_top_fraction)",
    "unfrozen_parameters": "Training some parameters only (unfrozen_parameters)",
}
"""Keys that a job cannot express and that reduce memory; the job is predicted without them."""
READ_LATER = ("batch_size", "rl", "trl", "revision_of_model", "bnb_config_kwargs", "experts_implementation")
"""Keys that are read by other functions."""
EXPERTS = {"eager": "loop", "grouped_mm": "grouped_mm"}
"""Values of `experts_implementation` (transformers 5 integrations/moe.py) -> the framework option of that name."""
LIGER = ("liger_rope", "liger_rms_norm", "liger_glu_activation")
"""The kernels that `use_liger_kernel` of transformers patches together in a decoder."""
MESH = {
    "replicate": "dp_replicate_size", "shard": "dp_shard_size", "tensor": "tensor_parallel_size",
    "expert": "expert_parallel_size",
}  # fmt: skip
"""Axis -> the key for its size; the axis of ranks that share a sequence has two keys (ring-flash-attn)."""
OVERRIDING = ("overrides_of_model_config", "model_config")
"""Keys with keys of a network's configuration."""
OVERRIDES = words("output_router_logits rope_theta rope_scaling rope_parameters use_cache max_position_embeddings")
"""Keys of a network's configuration that may be overridden without changing a shape."""
IGNORED = words("""
    is_llama_derived_model chunked_cross_entropy_num_chunks comet_api_key comet_experiment_config comet_experiment_key
    comet_online comet_workspace dpo_label_smoothing dpo_loss_type dpo_loss_weights drop_system_message embedding_lr
    embedding_lr_scale image_resize_algorithm image_size lm_eval_batch_size lm_eval_tasks lora_on_cpu merge_lora
    processor_type profiler_steps_start spectrum_model_name trackio_project_name trackio_run_name trackio_space_id
    train_on_eos train_on_eot use_comet use_trackio
    accelerator_config center_rewards_coefficient
    adam_beta1 adam_beta2 adam_beta3 adam_epsilon adam_epsilon2 added_tokens_overrides
    auto_resume_from_checkpoints axolotl_config_path base_model_config base_model_ignore_patterns batch_flattening
    bench_dataset bench_split chat_template chat_template_jinja comet_mode comet_project_name cosine_constant_lr_ratio
    cosine_min_lr_ratio cpo_alpha curriculum_sampling dataloader_drop_last dataloader_num_workers
    dataloader_pin_memory dataloader_prefetch_factor dataset_exact_deduplication dataset_keep_in_memory
    dataset_num_proc dataset_prepared_path dataset_processes dataset_shard_idx dataset_shard_num dataset_shuffle
    datasets ddp ddp_broadcast_buffers ddp_find_unused_parameters ddp_timeout debug
    default_system_message device do_bench_eval do_causal_lm_eval dpo_beta dpo_use_logits_to_keep
    dpo_use_weighting early_stopping_patience embeddings_skip_upcast eot_tokens eval_causal_lm_metrics
    eval_max_new_tokens eval_sample_packing eval_table_size
    evaluation_strategy excess_length_strategy fix_untrained_tokens flash_attn_fuse_qkv
    flex_attn_compile_kwargs float32 fp8_enable_fsdp_float8_all_gather
    fsdp_final_state_dict_type gc_collect_steps gc_steps gpu_memory_limit
    greater_is_better group_by_length heads_k_stride hf_use_auth_token hub_model_id hub_strategy include_tkps
    include_tokens_per_second is_falcon_derived_model is_mistral_derived_model is_preprocess is_qwen_derived_model
    kto_desirable_weight kto_undesirable_weight learning_rate load_best_model_at_end local_rank logging_steps
    lora_model_dir loraplus_lr_embedding loss_watchdog_patience loss_watchdog_threshold low_cpu_mem_usage lr_groups
    lr_quadratic_warmup lr_scheduler lr_scheduler_kwargs max_grad_norm max_memory max_packed_sequence_len
    max_prompt_len max_steps mean_resizing_embeddings metric_for_best_model min_sample_len mlflow_experiment_name
    mlflow_tracking_uri model_type multipack_real_batches num_epochs
    num_labels orpo_alpha output_dir pad_to_sequence_len
    pose_max_context_len pose_num_chunks pose_split_on_token_ids preprocess_iterable pretrain_multipack_attn
    pretrain_multipack_buffer_size pretraining_dataset pretraining_sample_concatenation profiler_steps
    push_dataset_to_hub quantization remove_unused_columns resume_from_checkpoint revision_of_model ring_attn_func
    rl_beta rpo_alpha sample_packing_bin_size sample_packing_eff_est sample_packing_group_size
    sample_packing_sequentially save_first_step save_only_model save_safetensors save_steps save_strategy
    save_total_limit saves_per_epoch seed shuffle_before_merging_datasets shuffle_merged_datasets simpo_gamma
    skip_prepare_dataset special_tokens streaming strict test_value tf32 tokenizer_config
    tokenizer_legacy tokenizer_type tokenizer_use_fast tokens
    total_num_tokens total_supervised_tokens train_on_inputs trl.beta trust_remote_code trust_remote_code_revision
    type_of_model use_mlflow use_pose use_tensorboard use_wandb vllm wandb_log_model
    wandb_mode wandb_name wandb_project wandb_run_id wandb_watch warmup_ratio warmup_steps weight_decay world_size
    adam_eps cls_model_config eaft_alpha eaft_k eta_min experimental_skip_move_to_device gptq_disable_exllama
    jagged_restart_anneal_steps jagged_restart_steps jagged_restart_warmup_steps liger_layer_norm lisa_layers_attribute
    lisa_step_interval model_quantization_config_kwargs otel_metrics_host otel_metrics_port reinit_weights
    relora_cpu_offload relora_prune_ratio streaming_multipack_buffer_size swanlab_completion_log_interval
    swanlab_completion_max_buffer swanlab_completion_max_buffer_size swanlab_description
    swanlab_experiment_name swanlab_log_completions swanlab_log_model swanlab_mode swanlab_project
    swanlab_workspace tiled_mlp_num_shards
    tiled_mlp_use_original_mlp use_otel_metrics use_swanlab
""")
