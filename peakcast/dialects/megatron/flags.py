"""The meaning of each of Megatron-LM's flags, as tables. Names are those of the flags with underscores, without the leading
dashes.

Source of names and defaults: NVIDIA/Megatron-LM megatron/training/arguments.py and
megatron/core/transformer/transformer_config.py (core 0.14 to 0.18). A flag is read by the modules of this package, or is in
one of these tables, or is reported as unknown.
"""

from __future__ import annotations

from peakcast.core.findings import Direction


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


SWITCHES = _words("""
    apply_layernorm_1p apply_query_key_layer_scaling apply_residual_connection_post_layernorm
    attention_softmax_in_fp32 calculate_per_token_loss cross_entropy_loss_fusion ddp_average_in_collective
    ddp_pad_buckets_for_high_nccl_busbw defer_embedding_wgrad_compute delay_wgrad_compute deterministic_mode
    distribute_saved_activations fp16_lm_cross_entropy fp32_residual_connection fp8_param_gather moe_grouped_gemm
    moe_layer_recompute moe_pad_expert_input_to_capacity moe_permute_fusion moe_router_fusion
    moe_router_padding_for_quantization moe_router_pre_softmax moe_shared_expert_overlap moe_use_legacy_grouped_gemm
    overlap_grad_reduce overlap_moe_expert_parallel_comm overlap_p2p_communication_warmup_flush overlap_param_gather
    overlap_param_gather_with_optimizer_step qk_layernorm rotary_interleaved te_rng_tracker tp_comm_overlap
    use_flash_attn use_fused_weighted_squared_relu use_legacy_models use_megatron_fsdp use_precision_aware_optimizer
    use_tp_pp_dp_mapping use_transformer_engine_op_fuser
""")
"""Switches that become a framework option of the same name; off by default."""

NUMBERS: dict[str, float] = {
    "cuda_graph_warmup_steps": 3,
    "ddp_bucket_size": 0,
    "ddp_num_buckets": 0,
    "empty_unused_memory_level": 0,
    "microbatch_group_size_per_virtual_pipeline_stage": 0,
    "min_offloaded_tensor_size": 2**20,
    "moe_expert_capacity_factor": 0,
    "moe_router_group_topk": 0,
    "moe_router_num_groups": 0,
    "moe_z_loss_coeff": 0,
    "num_distributed_optimizer_instances": 1,
    "optimizer_offload_fraction": 1.0,
    "rotary_percent": 1.0,
    "wgrad_deferral_limit": 0,
}
"""Numbers that become a framework option of the same name, with Megatron's default (0 stands for "not set")."""

TEXTS: dict[str, str] = {
    "attention_backend": "auto",
    "cp_comm_type": "p2p",
    "cuda_graph_impl": "none",
    "cross_entropy_fusion_impl": "native",
    "data_parallel_sharding_strategy": "no_shard",
    "exp_avg_dtype": "fp32",
    "exp_avg_sq_dtype": "fp32",
    "hierarchical_context_parallel_sizes": "",
    "main_grads_dtype": "fp32",
    "main_params_dtype": "fp32",
    "moe_flex_dispatcher_backend": "deepep",
    "moe_router_dtype": "",
    "moe_router_score_function": "softmax",
    "moe_routing": "balanced",  # not a flag of Megatron: what the ledger assumes about the router; or worst_case
    "moe_token_dispatcher_type": "allgather",
    "transformer_impl": "transformer_engine",
}
"""Texts that become a framework option of the same name, with Megatron's default ("" stands for "not set")."""

TURNED_OFF: dict[str, str] = {
    "no_bias_dropout_fusion": "bias_dropout_fusion",
    "no_bias_gelu_fusion": "bias_gelu_fusion",
    "no_bias_swiglu_fusion": "bias_swiglu_fusion",
    "no_create_attention_mask_in_dataloader": "create_attention_mask_in_dataloader",
    "no_gradient_accumulation_fusion": "gradient_accumulation_fusion",
    "no_masked_softmax_fusion": "masked_softmax_fusion",
    "no_overlap_p2p_communication": "overlap_p2p_communication",
    "no_persist_layer_norm": "persist_layer_norm",
    "no_rope_fusion": "apply_rope_fusion",
    "no_use_layer_wise_param_layout": "use_layer_wise_param_layout",
}
"""Flags that turn off a framework option which is on by default."""

OPTIONS_OF_OTHER_FLAGS: dict[str, object] = {
    "decoupled_lr": False,
    "container": "",
    "adam_library": "transformer_engine",
    "cuda_graph_scope": "",
    "fp8_recipe": "delayed",
    "moe_aux_loss_coeff": 0.0,
    "moe_router_load_balancing_type": "aux_loss",
    "offload_modules": "",
}
"""Options with a rule of their own: `decoupled_lr` (set or not), `container` (the software image, which importers set),
`adam_library` (what is installed), `cuda_graph_scope` and `offload_modules` (words), `fp8_recipe` (one of
`FP8_RECIPES`), and the router's balancing losses."""

FP8_FORMATS = ("hybrid", "e4m3")
"""Values of `fp8_format`; both have one byte per element."""
FP8_RECIPES = ("delayed", "tensorwise", "blockwise", "mxfp8")
"""Values of `fp8_recipe` that the ledger knows; Megatron's other one is "custom"."""
FP8_GATHERED_RECIPES = ("delayed", "tensorwise", "blockwise")
"""Recipes whose FP8 parameters lie in a buffer of their own by rows; the ledger follows traces of them."""
GRAPH_SCOPES = ("attn", "mlp", "moe", "moe_router", "moe_preprocess", "mamba", "full_iteration", "full_iteration_inference")
"""Words of `cuda_graph_scope` (megatron-core 0.17.1 `transformer/enums.py`)."""
FP8_UNSUPPORTED: dict[str, str] = {
    "first_last_layers_bf16": "first and last layers in bf16 among FP8 ones",
    "fp8_dot_product_attention": "FP8 attention",
    "fp8_multi_head_attention": "FP8 attention",
    "no_fp8_wgrad": "bf16 weight gradients with FP8 products",
}
"""What a flag switches on if `fp8_format` is set; otherwise it has no effect."""

ENVIRONMENT: dict[str, str] = {
    "CUBLAS_WORKSPACE_CONFIG": "cublas_workspace_config",
    "CUDA_DEVICE_MAX_CONNECTIONS": "cuda_device_max_connections",
    "NCCL_ALGO": "nccl_algo",
    "NCCL_NVLS_ENABLE": "nccl_nvls_enable",
    "NVTE_ALLOW_NONDETERMINISTIC_ALGO": "nvte_allow_nondeterministic_algo",
    "NVTE_FLASH_ATTN": "nvte_flash_attn",
    "NVTE_FUSED_ATTN": "nvte_fused_attn",
    "NVTE_NORM_BWD_USE_CUDNN": "nvte_norm_bwd_use_cudnn",
    "NVTE_NORM_FWD_USE_CUDNN": "nvte_norm_fwd_use_cudnn",
    "TORCH_NCCL_AVOID_RECORD_STREAMS": "torch_nccl_avoid_record_streams",
    "NVTE_CUTEDSL_FUSED_GROUPED_MLP": "nvte_cutedsl_fused_grouped_mlp",
    "USE_MNNVL": "use_mnnvl",
}
"""Environment variables that become a framework option (a text, "" when not set)."""

ALLOCATOR_ENVIRONMENT = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Settings of PyTorch's allocator, in the order in which torch 2.13 looks for them (`CUDAAllocatorConfig::instance`)."""

IGNORED_ENVIRONMENT = _words("""
    CUDA_VISIBLE_DEVICES MASTER_ADDR MASTER_PORT NCCL_DEBUG NCCL_GRAPH_REGISTER NCCL_IB_SL NCCL_IB_TIMEOUT
    NCCL_P2P_NET_CHUNKSIZE NON_DETERMINISTIC_RESULTS NON_DETERMINSTIC_RESULTS NUM_OF_HYBRID_EP_RANKS_PER_NVLINK_DOMAIN
    NUM_OF_TOKENS_PER_CHUNK_COMBINE_API NVLINK_DOMAIN_SIZE NVSHMEM_IB_ENABLE_IBGDA NVTE_BWD_LAYERNORM_SM_MARGIN
    NVTE_CPU_OFFLOAD_V1 NVTE_FWD_LAYERNORM_SM_MARGIN N_REPEAT N_REPEATS OMP_NUM_THREADS PYTHONWARNINGS
    QUANTIZATION_TYPE_DEBUG SKIP_PYTEST THROUGHPUT_START_STEP TOKENIZERS_PARALLELISM TORCHDYNAMO_DISABLE
    TORCHINDUCTOR_WORKER_START TORCH_COMPILE_DISABLE TORCH_INDUCTOR_DISABLE TORCH_NCCL_HIGH_PRIORITY
""")

UNSUPPORTED: dict[str, tuple[str, Direction]] = {
    "activation_func_clamp_value": ("clamped gates", "more"),
    "attention_output_gate": ("a gate on the output of attention", "more"),
    "cpu_offloading": ("layer offloading to the host", "less"),
    "cpu_offloading_num_layers": ("layer offloading to the host", "less"),
    "ddp_reduce_scatter_with_fp32_accumulation": ("a reduce-scatter by way of an all-to-all", "more"),
    "deepspeed": ("DeepSpeed's engine in the place of Megatron-LM's optimizer (Megatron-DeepSpeed)", "either"),
    "disable_mamba_mem_eff_path": ("Mamba without its fused path", "more"),
    "enable_full_sharding_in_hsdp": ("Megatron-FSDP over all replicas", "less"),
    "experimental_attention_variant": ("another attention", "either"),
    "export_kd_teacher_load": ("distillation from a teacher", "more"),
    "export_te_mcore_model": ("a ModelOpt model (quantization, pruning, distillation)", "either"),
    "flextron": ("FlexTron elastic training", "either"),
    "fp4_format": ("FP4 training", "either"),
    "fsdp_double_buffer": ("Megatron-FSDP's double buffers", "more"),
    "heterogeneous_layers_config_encoded_json": ("layers of unequal shape", "either"),
    "heterogeneous_layers_config_path": ("layers of unequal shape", "either"),
    "hybrid_context_parallel": ("context parallelism by the length of a sequence", "either"),
    "img_h": ("a multimodal model", "more"),
    "keep_fp8_transpose_cache": ("the FP8 transposes that Megatron-FSDP keeps", "more"),
    "kitchen_config_file": ("quantization by Kitchen", "either"),
    "kitchen_recipe_number": ("quantization by Kitchen", "either"),
    "linear_attention_freq": ("linear attention", "either"),
    "moe_apply_probs_on_input": ("probabilities applied to experts' inputs", "either"),
    "moe_extended_tp": ("extended tensor parallelism of experts", "either"),
    "moe_input_jitter_eps": ("noise on the router's input", "more"),
    "moe_latent_size": ("latent mixture-of-experts layers", "either"),
    "mtp_use_repeated_layer": ("one repeated multi-token-prediction layer", "less"),
    "no_clone_scatter_output_in_embedding": ("embeddings of which a part keeps the whole", "more"),
    "perform_rl_step": ("reinforcement learning (GRPO)", "more"),
    "retro_add_retriever": ("a RETRO model", "more"),
    "retro_project_dir": ("a RETRO model", "more"),
    "skip_train": ("evaluation alone", "less"),
    "te_precision_config_file": ("a precision for each layer", "either"),
    "use_nccl_ub": ("buffers registered with NCCL", "more"),
    "use_te_activation_func": ("Transformer Engine's activation functions", "either"),
    "use_torch_fsdp2": ("PyTorch FSDP2 inside Megatron", "less"),
    "vision_pretraining": ("a vision model", "either"),
    "yaml_cfg": ("further arguments in a file", "either"),
}
"""Flags for something that a TrainingJob or the ledgers cannot express -> (its name, how it changes the peak)."""

MUON: dict[str, str] = {"muon_tp_mode": "blockwise", "muon_scalar_optimizer": "adam"}
"""Flags of Muon that affect memory, with Megatron's default, which is the only value that the ledger knows: whether ranks
gather whole matrices to orthogonalize them, and which optimizer updates parameters that are not matrices."""

DETAILS = (
    "fp4_", "cuda_graph_use_", "cuda_graph_retain_", "rl_", "grpo_", "mamba_", "inference_", "mtp_", "muon_",
    "megatron_fsdp_", "export_",
    "outer_dp_", "retro_", "num_layers_at_", "offload_", "heterogeneous_", "dsa_", "linear_", "hybrid_", "kitchen_",
)  # fmt: skip
"""Prefixes of flags that only refine something in `UNSUPPORTED`."""

BESIDE_THE_STEP = (
    "async_", "ckpt_", "dist_ckpt_", "eval_", "exit_", "ict_", "inprocess_", "log_", "lr_", "non_persistent_",
    "one_logger_", "profile_", "save_", "sft_", "tensorboard_", "tiktoken_", "tokenizer_", "wandb_",
)  # fmt: skip
"""Prefixes of flags about checkpoints, logs, evaluation, the tokenizer's files and the learning rate."""

IGNORED = _words("""
    adam_beta1 adam_beta2 adam_eps adlr_autoresume adlr_autoresume_interval allow_ambiguous_pad_tokens
    app_tag_run_name app_tag_run_version apply_wd_to_qk_layernorm auto_detect_ckpt_format bert_embedder_type
    binary_mask budget_list budget_probs budget_type calc_ft_timeouts check_for_large_grads check_for_spiky_loss
    check_weight_hash_across_dp_replicas_interval clip_grad config_logger_dir data_args_path data_cache_path
    data_parallel_random_init data_path dataloader_seq_length dataloader_type decoder_seq_length decoupled_min_lr
    decrease_batch_size_if_needed disable_bf16_reduced_precision_matmul disable_gloo_process_groups disable_msc
    disable_straggler_on_startup disable_symmetric_registration disable_tp_comm_bulk_dgrad
    disable_tp_comm_bulk_wgrad disable_tp_comm_overlap_ag disable_tp_comm_overlap_rs disable_tp_comm_split_ag
    disable_tp_comm_split_rs disable_vision_class_token distrib_optim_fully_reshardable_mem_efficient
    distributed_backend distributed_timeout_minutes distributed_timeout_seconds_after_init dsa_indexer_loss_coeff
    dump_param_to_param_group_map emb_int_list embedding_init_method_std enable_experimental enable_ft_package
    enable_gloo_process_groups enable_one_logger enable_router end_weight_decay eod_mask_loss error_injection_rate
    error_injection_type filter_warnings finetune fp8_amax_compute_algo fp8_amax_history_len fp8_interval
    fp8_margin full_validation glu_linear_offset gpu_sniff_test_interval hard_sample_th
    high_priority_stream_groups hysteresis img_w init_method_std init_method_xavier_uniform
    init_model_with_meta_device initial_loss_scale is_hybrid_model iterations_to_skip langrl_inference_server_type
    lazy_mpu_init legacy_tokenizer linear_scaler_end linear_scaler_start load load_main_params_from_ckpt
    local_rank logging_level loss_alpha loss_scale loss_scale_window lr manual_gc manual_gc_interval mask_prob
    memory_snapshot_path merge_file mid_level_dataset_surplus min_loss_scale min_lr mlp_int_list mmap_bin_files
    mock_data modules_to_filter moe_deepep_num_sms moe_enable_deepep moe_expert_int_list
    moe_flex_dispatcher_num_sms moe_hybridep_num_sms moe_pad_experts_for_cuda_graph_inference
    moe_per_layer_logging moe_router_bias_update_rate moe_router_force_load_balancing
    moe_router_topk_scaling_factor moe_token_drop_policy moe_upcycling_granularity moe_use_upcycling mrope_section
    max_seqlen_per_dp_cp_rank mscale mscale_all_dim multiple_validation_sets nccl_communicator_config_path
    no_align_grad_reduce
    no_align_param_gather no_async_tensor_model_parallel_allreduce no_barrier_with_level_1_timing
    no_check_for_nan_in_loss_and_grad no_ckpt_fully_parallel_save no_ckpt_load_validate_sharding_integrity
    no_gradient_reduce_div_fusion no_initialization no_load_optim no_load_rng no_manual_gc_eval no_mmap_bin_files
    no_one_logger no_pin_cpu_grads no_pin_cpu_params no_position_embedding no_rope_freq no_save_optim no_save_rng
    no_scatter_gather_tensors_in_pipeline no_strict_fsdp_dtensor_load no_use_tokenizer_model_from_checkpoint_args
    no_weight_decay_cond_type norm_epsilon num_dataset_builder_threads num_workers object_storage_cache_path
    original_model_sample_prob overlap_cpu_optimizer_d2h_h2d override_opt_param_scheduler patch_dim
    per_split_data_args_path pipeline_model_parallel_comm_backend pretrained_checkpoint profile qk_l2_norm
    record_memory_history replication replication_factor replication_jump rerun_mode reset_attention_mask
    reset_position_ids result_rejected_tracker_filename reuse_grad_buf_for_mxfp8_param_ag rope_scaling_factor
    rope_type rotary_base rotary_scaling_factor router_beta router_gbs router_inter_dim router_std
    run_workload_inspector_server sample_rate save seed set_level_for_all_loggers sharp_enabled_group
    short_seq_prob slice soft_mask split start_eval_at_iter start_weight_decay straggler_ctrlr_port
    straggler_minmax_count tau_decay tau_init test_data_path test_mode timing_log_level timing_log_option
    tp_comm_bootstrap_backend tp_comm_overlap_cfg tp_comm_overlap_rs_dgrad train_data_path train_iters
    train_samples train_sync_interval trust_remote_code use_checkpoint_args use_checkpoint_opt_param_scheduler
    use_cpu_initialization use_dist_ckpt use_mp_args_from_checkpoint_args use_one_sent_docs use_packed_sequence
    use_persistent_ckpt_worker use_pytorch_profiler use_ring_exchange_p2p use_rope_scaling use_sharp
    no_query_key_layer_scaling data_impl deepspeed_activation_checkpointing deepspeed_config zero_stage
    use_torch_optimizer_for_cpu_offload valid_data_path verify_integrity vocab_file weight_decay
    weight_decay_incr_style window_attn_skip_freq
""")
"""Known flags that do not change a training step's memory, or that only refine something in `UNSUPPORTED`. Sliding windows
are among them: Transformer Engine saves the same tensors with and without (2.8 `dot_product_attention/`)."""

TOKENIZERS: dict[str, int] = {
    "GPT2BPETokenizer": 50257,
    "BertWordPieceLowerCase": 30522 + 2,
    "BertWordPieceCase": 28996 + 2,
    "Llama2Tokenizer": 32000,
    "TikTokenizer": 2**17,
}
"""Tokenizer types that determine the vocabulary size -> the size; BERT's includes the two tokens that Megatron adds.
TikTokenizer's is used unless vocab-size says otherwise (megatron/training/tokenizer/tokenizer.py `CustomTikTokenizer`)."""

COUNT_ONE_MORE = ("NullTokenizer", "NullMultimodalTokenizer")
"""Tokenizers with one token more than vocab-size."""

LIKELY_TOKENIZERS: dict[str, int] = {
    "": 50257, "GPTSentencePieceTokenizer": 32000, "HuggingFaceTokenizer": 128256, "Qwen2Tokenizer": 151643,
}  # fmt: skip
"""Vocabulary sizes assumed (with a warning) for types whose size is in a model file; "" means GPT-2's, Megatron's usual
one."""


def option_defaults() -> dict[str, object]:
    """Every framework option of Megatron with its default, for Megatron's section of `catalog/frameworks.toml`."""
    return {
        **dict.fromkeys(sorted(SWITCHES), False),
        **NUMBERS,
        **TEXTS,
        **dict.fromkeys(TURNED_OFF.values(), True),
        **OPTIONS_OF_OTHER_FLAGS,
        **dict.fromkeys(ENVIRONMENT.values(), ""),
    }
