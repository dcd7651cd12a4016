"""NeMo 1's Megatron GPT configurations (megatron_gpt_config.yaml and similar ones), as Megatron-LM flags.

Source: NVIDIA/NeMo nlp/models/language_modeling/megatron_gpt_model.py, megatron_base_model.py and
examples/nlp/language_modeling/conf/megatron_gpt_config.yaml (1.x); its `model` section has Megatron-LM's arguments under
their names or those below.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from peakcast.dialects.common.pasted import Pasted
from peakcast.dialects.common.translation import Notes, Settings, Translation, note_inner, states_direction, words
from peakcast.dialects.megatron.launch import from_megatron_flags

RENAMED = {
    "encoder_seq_length": "seq_length", "activations_checkpoint_granularity": "recompute_granularity",
    "activations_checkpoint_method": "recompute_method", "activations_checkpoint_num_layers": "recompute_num_layers",
    "expert_model_parallel_size": "expert_model_parallel_size", "num_moe_experts": "num_experts",
    "rotary_percentage": "rotary_percent", "use_flash_attention": "use_flash_attn",
    "virtual_pipeline_model_parallel_size": "num_virtual_stages_per_pipeline_rank",
    "ub_tp_comm_overlap": "tp_comm_overlap",
}  # fmt: skip
"""Key of the `model` section -> the flag that has its value."""
TURNED_OFF = {
    "bias": "disable_bias_linear", "share_embeddings_and_output_weights": "untie_embeddings_and_output_weights",
    "bias_activation_fusion": "no_bias_swiglu_fusion", "bias_dropout_add_fusion": "no_bias_dropout_fusion",
    "masked_softmax_fusion": "no_masked_softmax_fusion", "persist_layer_norm": "no_persist_layer_norm",
    "gradient_accumulation_fusion": "no_gradient_accumulation_fusion", "apply_rope_fusion": "no_rope_fusion",
}  # fmt: skip
"""Key -> the flag that switches it off; some are off by default in NeMo and on in Megatron-LM."""
ON_BY_DEFAULT = (
    "bias", "share_embeddings_and_output_weights", "bias_activation_fusion", "bias_dropout_add_fusion",
    "masked_softmax_fusion", "persist_layer_norm",
)  # fmt: skip
SAME = words("""
    micro_batch_size global_batch_size tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size
    num_layers hidden_size ffn_hidden_size num_attention_heads kv_channels max_position_embeddings hidden_dropout
    attention_dropout make_vocab_size_divisible_by sequence_parallel fp32_residual_connection rampup_batch_size
    fp16_lm_cross_entropy apply_query_key_layer_scaling position_embedding_type qk_layernorm window_size rotary_base
    cross_entropy_loss_fusion expert_tensor_parallel_size moe_router_topk moe_grouped_gemm moe_token_dispatcher_type
    moe_aux_loss_coeff moe_router_load_balancing_type cpu_offloading cpu_offloading_num_layers deterministic_mode vocab_size
    moe_ffn_hidden_size moe_shared_expert_intermediate_size init_method_std rotary_interleaved
""")
"""Keys that are also flags."""
GATED = ("swiglu", "fast-swiglu")
PLAIN = {"gelu": "", "squared-relu": "squared_relu", "openai-gelu": ""}
"""Activations without a gate -> their flag."""
IGNORED = words("""
    activations_checkpoint_layers_per_pipeline apex_transformer_log_level attention_type batch_p2p_comm data
    exp_manager layernorm_epsilon do_layer_norm_weight_decay ffn_dropout fp8_amax_compute_algo fp8_amax_history_len
    fp8_interval fp8_margin fp8_wgrad gc_interval grad_allreduce_chunk_size_mb grad_div_ar_fusion
    gradient_as_bucket_view headscale hysteresis mcore_gpt migrate_layernorm name native_amp_growth_interval
    native_amp_init_scale normalize_attention_scores nsys_profile
    num_micro_batches_with_partial_activation_checkpoints onnx_safe openai_gelu overlap_p2p_comm post_process
    pre_process reduce_amax resume_from_checkpoint scale_positional_embedding seed seq_len_interpolation_factor
    sync_batch_comm transformer_block_type transformer_engine use_cpu_initialization use_emha use_scaled_init_method
    restore_from_path target nemo_version precision tp_comm_atomic_ag tp_comm_atomic_rs ub_tp_comm_overlap_cfg
    memory_profile get_attention_mask_from_fusion defer_embedding_wgrad_compute dist_ckpt_format
    dist_ckpt_load_on_device
""")
SECTIONS = words("name restore_from_path defaults hydra run exp_manager inference target")
"""Sections besides `model` and `trainer`: how the run is launched, logged and restored."""
TRAINER = words("""
    accelerator logger enable_checkpointing use_distributed_sampler replace_sampler_ddp max_epochs max_steps max_time
    log_every_n_steps val_check_interval limit_val_batches limit_test_batches limit_train_batches gradient_clip_val
    benchmark enable_model_summary enable_progress_bar num_sanity_val_steps check_val_every_n_epoch
""")
"""Keys of `trainer` besides devices, num_nodes, precision and accumulate_grad_batches: length of the run, and logging."""
TOKENIZER = words("model vocab_file merge_file delimiter sentencepiece_legacy use_fast additional_special_tokens")
LIBRARIES = ("megatron", "huggingface", "sentencepiece", "tiktoken", "yttm", "byte-level", "regex", "tabular", "null")
LIBRARY_TOKENIZERS = {"huggingface": "HuggingFaceTokenizer", "sentencepiece": "GPTSentencePieceTokenizer"}
"""`tokenizer.library` -> Megatron's type; with other libraries, `type` has it."""
OPTIMIZER = words("""
    lr weight_decay betas eps sched bucket_cap_mb contiguous_grad_buffer contiguous_param_buffer
""")
"""Keys of `optim` besides name and the two overlap_ keys; the buffers are those of Megatron's optimizer."""
_NAMED = re.compile(r"\$\{(?:training\.)?(?:model)?\.(\w+)\}")


def from_nemo(pasted: Pasted) -> Translation:
    """The job of a NeMo 1 GPT configuration. Raises: SpecError naming the key, its value, the rule and the way out."""
    notes = Notes()
    inside = pasted.values.get("model")
    model = {key: _resolved(value, inside) for key, value in inside.items()} if isinstance(inside, Mapping) else {}
    settings = Settings(model, notes, "NeMo", lambda key: f"model.{key}")
    flags: dict[str, Any] = {key: settings.raw(key) for key in SAME if settings.given(key)}
    flags |= {flag: settings.raw(key) for key, flag in RENAMED.items() if settings.given(key)}
    flags |= {flag: True for key, flag in TURNED_OFF.items() if not settings.switch(key, key in ON_BY_DEFAULT)}
    if settings.given("num_query_groups"):
        flags |= {"group_query_attention": True, "num_query_groups": settings.raw("num_query_groups")}
    flags |= {"no_bias_gelu_fusion": True} if "no_bias_swiglu_fusion" in flags else {}
    flags |= _network(settings)
    flags |= _training(settings, pasted)
    settings.note_left(IGNORED)
    note_inner(settings, "tokenizer", ("library", "type", "vocab_size"), TOKENIZER)
    note_inner(settings, "optim", ("name", "overlap_grad_sync", "overlap_param_sync"), OPTIMIZER)
    top = Settings({key: value for key, value in pasted.values.items() if key != "model"}, notes, "NeMo")
    num_gpus = _num_gpus(top, pasted.num_gpus)
    top.note_left(SECTIONS)
    named = {key: value for key, value in flags.items() if value is not None and value is not False}
    return notes.finish(notes.include(from_megatron_flags(replace(pasted, values=named, num_gpus=num_gpus))))


def _num_gpus(top: Settings, asked: int | None) -> int | None:
    """The number of GPUs that the question gives, else the trainer's; None if neither gives one."""
    trainer = top.raw("trainer")
    note_inner(top, "trainer", ("devices", "num_nodes", "precision", "accumulate_grad_batches"), TRAINER)
    run = Settings(trainer if isinstance(trainer, Mapping) else {}, top.notes, "NeMo", lambda key: f"trainer.{key}")
    if run.integer("accumulate_grad_batches", 1) != 1:
        raise run.refuse("accumulate_grad_batches", "must be 1: model.global_batch_size says how many there are")
    if asked is not None or run.raw("devices", "auto") in ("auto", -1):
        return asked
    return run.size("devices") * run.size("num_nodes", 1)


def _resolved(value: Any, model: Mapping[str, Any]) -> Any:
    """`value`, with `${.key}` and `${model.key}` replaced by what they refer to."""
    named = _NAMED.fullmatch(value) if isinstance(value, str) else None
    return model.get(named[1]) if named else value


def _network(settings: Settings) -> dict[str, Any]:
    flags: dict[str, Any] = {}
    norm = settings.one_of("normalization", "layernorm", ("layernorm", "layernorm1p", "rmsnorm", "low_precision_layernorm"))
    flags |= {"normalization": "RMSNorm"} if norm == "rmsnorm" else {}
    flags |= {"apply_layernorm_1p": True} if norm == "layernorm1p" else {}
    activation = settings.text("activation", "gelu")
    if activation in GATED:
        flags["swiglu"] = True
    elif activation not in PLAIN:
        settings.notes.unsupported.append(
            f"model.activation={activation} is not modelled; swiglu is assumed instead.", "model.activation"
        )
        flags["swiglu"] = True
    elif PLAIN[activation]:
        flags[PLAIN[activation]] = True
    position = settings.text("position_embedding_type", "learned_absolute")
    if position not in ("learned_absolute", "rope"):
        settings.notes.unsupported.append(
            f"model.position_embedding_type={position} is not modelled; none is assumed.",
            "model.position_embedding_type",
            "more",
        )
    flags["position_embedding_type"] = "rope" if position == "rope" else "learned_absolute"
    tokenizer = settings.raw("tokenizer")
    if isinstance(tokenizer, Mapping):
        inside = Settings(tokenizer, settings.notes, "NeMo", lambda key: f"model.tokenizer.{key}")
        library, kind = inside.one_of("library", "megatron", LIBRARIES), str(tokenizer.get("type"))
        if library in LIBRARY_TOKENIZERS:
            settings.notes.ignored.append(inside.spell("type"))
        if tokenizer.get("vocab_size") is not None:
            flags["vocab_size"] = tokenizer["vocab_size"]
        flags["tokenizer_type"] = LIBRARY_TOKENIZERS.get(library, kind)
    return flags


def _training(settings: Settings, pasted: Pasted) -> dict[str, Any]:
    """Precision, optimizer and FP8 as Megatron-LM flags."""
    flags: dict[str, Any] = {"transformer_impl": "transformer_engine" if settings.switch("transformer_engine") else "local"}
    trainer = pasted.values.get("trainer")
    precision = str(trainer.get("precision", 32) if isinstance(trainer, Mapping) else settings.raw("precision", 32))
    half = next((flag for sign, flag in (("bf16", "bf16"), ("16", "fp16")) if precision.startswith(sign)), "")
    if half:
        flags[half] = True
        if not settings.switch("megatron_amp_O2"):
            settings.notes.unsupported.append(
                "Weights in float32 under autocast (model.megatron_amp_O2=False) are not modelled; 16-bit weights with "
                "float32 main copies are assumed, as of megatron_amp_O2=True.",
                "model.megatron_amp_O2",
                "more",
            )
    formats = [word for word in ("hybrid", "e4m3") if settings.switch(f"fp8_{word}")]
    if settings.switch("fp8") and formats:
        flags["fp8_format"] = formats[0]
    optim = settings.raw("optim")
    name = str(optim.get("name", "fused_adam") if isinstance(optim, Mapping) else "fused_adam")
    if "distributed" in name:
        flags["use_distributed_optimizer"] = True
        given = optim if isinstance(optim, Mapping) else {}
        inside = Settings(given, settings.notes, "NeMo", lambda key: f"model.optim.{key}")
        flags["overlap_grad_reduce"] = inside.switch("overlap_grad_sync")
        flags["overlap_param_gather"] = inside.switch("overlap_param_sync")
    elif "adam" not in name:
        settings.notes.unsupported.append(
            f"model.optim.name={name} is not modelled; Adam is assumed instead.",
            "model.optim.name",
            states_direction(name),
        )
    return flags
