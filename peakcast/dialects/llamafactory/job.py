"""LLaMA-Factory's YAML: a run of the Hugging Face Trainer, with other defaults.

Source: LLaMA-Factory 0.9 src/llamafactory/hparams (model_args, data_args, finetuning_args), model/adapter.py `init_adapter`
(trained parameters in float32), model/model_utils/checkpointing.py, quantization.py, attention.py.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from peakcast.dialects.common.foreign import SERVED
from peakcast.dialects.common.frozen_parts import frozen_parts, with_frozen_parts
from peakcast.dialects.common.mesh import with_shared_sequences
from peakcast.dialects.common.pasted import Pasted
from peakcast.dialects.common.required_releases import as_required
from peakcast.dialects.common.translation import (
    FALSE,
    TRUE,
    Notes,
    Settings,
    Translation,
    note_unsupported,
    renamed,
    speller,
    words,
)
from peakcast.dialects.huggingface.accelerate import launcher_with_engine
from peakcast.dialects.huggingface.balancing import KEY as BALANCING
from peakcast.dialects.huggingface.evaluation import EVALUATION
from peakcast.dialects.huggingface.job import from_huggingface
from peakcast.dialects.huggingface.parallelism import without_second_checkpoints
from peakcast.dialects.huggingface.post_training import with_method, with_own_reference
from peakcast.jobs.images import sees_images
from peakcast.jobs.spec import Optimizer, TrainingJob

TRAINING = {
    "per_device_train_batch_size": "per_device_train_batch_size",
    "gradient_accumulation_steps": "gradient_accumulation_steps",
    "cutoff_len": "max_length",
    "packing": "packing",
    "optim": "optim",
    "torch_compile": "torch_compile",
    "torch_compile_backend": "torch_compile_backend",
    "torch_compile_mode": "torch_compile_mode",
    "fsdp": "fsdp",
    "fsdp_config": "fsdp_config",
    "auto_find_batch_size": "auto_find_batch_size",
    "torch_empty_cache_steps": "torch_empty_cache_steps",
    "neftune_noise_alpha": "neftune_noise_alpha",
    **EVALUATION,
}
ADAPTER = {
    "lora_rank": "r", "lora_alpha": "lora_alpha", "lora_dropout": "lora_dropout", "additional_target": "modules_to_save",
    "use_rslora": "use_rslora", "use_dora": "use_dora",
}  # fmt: skip
ATTENTION = {"auto": "sdpa", "disabled": "eager", "sdpa": "sdpa", "fa2": "flash_attention_2", "fa3": "flash_attention_3"}
OPTIMIZERS = {
    "use_galore": "galore_adamw", "use_apollo": "apollo_adamw", "use_adam_mini": "adamw_torch", "use_muon": "adamw_torch",
}  # fmt: skip
"""Switches for optimizers -> the most similar optimizer of transformers."""
OWN_OPTIMIZERS = {
    "use_muon": Optimizer(name="muon", implementation="loop"),
    "use_adam_mini": Optimizer(name="adam_mini", implementation="loop"),
}
"""Switches for optimizers that transformers does not have (train/trainer_utils.py `create_custom_optimizer`)."""
UNSUPPORTED = {
    "use_unsloth": "Unsloth", "use_unsloth_gc": "Unsloth's checkpointing", "use_llama_pro": "LLaMA Pro",
    "use_v1_kernels": "LLaMA-Factory's own kernels", "mixture_of_depths": "mixture of depths",
    "shift_attn": "LongLoRA's attention",
    "fp8": "FP8 training", "upcast_layernorm": "norms in float32",
    "resize_vocab": "a resized vocabulary", "add_tokens": "added tokens", "loraplus_lr_ratio": "LoRA+",
    "use_cce": "cut cross entropy",
    "tensor_model_parallel_size": "Megatron's tensor parallelism", "sequence_parallel": "Megatron's sequence parallelism",
    "pipeline_model_parallel_size": "Megatron's pipeline parallelism", "recompute_granularity": "Megatron's recomputation",
    "expert_model_parallel_size": "Megatron's expert parallelism", "context_parallel_size": "context parallelism",
    "use_distributed_optimizer": "Megatron's distributed optimizer",
    "use_dft_loss": "the DFT loss", "use_eaft_loss": "EAFT's loss", "use_hyper_parallel": "HyperParallel",
}  # fmt: skip
MORE = {
    "use_asft_loss": "the ASFT loss, which keeps a second network,", "upcast_lmhead_output": "logits in float32",
}  # fmt: skip
"""The same for what needs more than the answer."""
PREFERENCES = ("sigmoid", "hinge", "ipo", "kto_pair", "orpo", "simpo")
"""Values of `pref_loss` (hparams/finetuning_args.py)."""
IGNORED = words("""
    use_ray pissa_init
    apply_rope_fusion bias_activation_fusion eaft_alpha fsdp_transformer_layer_cls_to_wrap moe_grouped_gemm
    moe_token_dispatcher_type overlap_grad_reduce overlap_param_gather
    adam_beta1 adam_beta2 adam_epsilon adapter_folder adapter_name_or_path add_special_tokens apollo_layerwise
    apollo_proj apollo_proj_type apollo_rank apollo_scale apollo_scale_front apollo_scale_type apollo_target
    apollo_update_interval average_tokens_across_devices badam_mask_mode badam_mode badam_start_block
    badam_switch_interval badam_switch_mode badam_update_ratio badam_verbose bf16_full_eval buffer_size cache_dir
    compute_accuracy create_new_adapter crop_to_patches data_seed data_shared_file_system dataloader_drop_last
    dataloader_num_workers dataloader_pin_memory dataset dataset_dir ddp_find_unused_parameters ddp_timeout
    default_system disable_shuffling disable_version_check do_eval do_predict do_train dpo_label_smoothing
    early_stopping_steps enable_thinking eval_dataset eval_num_beams eval_on_each_dataset eval_on_start eval_steps
    export_device export_dir export_legacy_format export_quantization_bit export_quantization_dataset
    export_size fp8_backend fp8_enable_fsdp_float8_all_gather freeze_extra_modules freeze_trainable_layers
    freeze_trainable_modules galore_layerwise
    galore_proj_type galore_rank galore_scale galore_target galore_update_interval group_by_length hf_hub_token
    hub_model_id ignore_pad_token_for_loss image_max_pixels image_min_pixels include_effective_tokens_per_second
    include_num_input_tokens_seen include_tokens_per_second infer_backend infer_dtype init_special_tokens
    interleave_probs kto_chosen_weight kto_rejected_weight ld_alpha learning_rate load_best_model_at_end logging_dir
    logging_steps logging_strategy loraplus_lr_embedding low_cpu_mem_usage lr_scheduler_kwargs lr_scheduler_type
    mask_history max_grad_norm max_samples max_steps media_dir metric_for_best_model mix_strategy model_revision
    module_dropout ms_hub_token new_special_tokens_config
    num_train_epochs offload_folder om_hub_token output_dir overwrite_cache
    overwrite_output_dir pissa_convert pissa_iter placement_strategy plot_loss
    ppo_buffer_size ppo_epochs ppo_score_norm ppo_target ppo_whiten_rewards predict_with_generate pref_bco_weight
    pref_beta pref_ftx pref_loss preprocessing_batch_size preprocessing_num_workers print_param_status push_to_hub
    quantization_device_map ray_num_workers ray_run_name ray_storage_path ref_model
    ref_model_adapters ref_model_quantization_bit remove_unused_columns report_to report_to_none resize_vocab_init
    resources_per_worker resume_from_checkpoint reward_model reward_model_adapters reward_model_quantization_bit
    reward_model_type rope_scaling run_name save_only_model save_steps save_strategy save_total_limit seed simpo_gamma
    skip_memory_metrics split_special_tokens streaming swanlab_api_key swanlab_lark_secret swanlab_lark_webhook_url
    swanlab_logdir swanlab_mode swanlab_project swanlab_run_name swanlab_workspace template tf32 tokenized_path
    tool_format train_from_scratch train_on_prompt trust_remote_code use_cpu use_fast_tokenizer use_kv_cache
    use_swanlab val_size video_max_pixels video_maxlen warmup_ratio warmup_steps weight_decay
""")


def from_llamafactory(pasted: Pasted) -> Translation:
    """The job of a LLaMA-Factory configuration. Raises: SpecError naming the key, its value, the rule and the way out."""
    notes = Notes()
    settings = Settings(pasted.values, notes, "LLaMA-Factory")
    _refuse_what_trains_nothing(settings)
    training = renamed(settings, TRAINING)
    _batch(settings, training)
    training[BALANCING] = bool(settings.number("moe_aux_loss_coef"))  # model/model_utils/moe.py `configure_moe`
    model = settings.model(pasted.model, "model_name_or_path")
    kind = _finetuning_type(settings)
    launcher = launcher_with_engine(pasted, settings)
    deepspeed = launcher.deepspeed
    adapters = {"lora": _lora, "oft": _oft}
    adapter = _adapter(settings, training, adapters[kind](settings)) if kind in adapters else None
    _precision(settings, training, upcast=adapter is None and deepspeed is None)
    _memory(settings, training, under_fsdp2=str((launcher.fsdp or {}).get("fsdp_version")) == "2")
    without_second_checkpoints(training, launcher.fsdp, training.get("fsdp_config"))
    num_gpus = launcher.gpus(pasted, notes)
    if launcher.mesh:
        training["parallelism_config"] = launcher.mesh
    stage, frozen = _stage(settings), frozen_parts(settings, FREEZING)
    _rest(settings)
    translation = from_huggingface(
        model,
        training,
        adapter,
        deepspeed,
        launcher.fsdp,
        num_gpus,
        versions=pasted.versions.of("huggingface"),
        spell=speller(TRAINING, ADAPTER, {"moe_aux_loss_coef": BALANCING}),
    )
    asks = settings.given("image_max_pixels") or sees_images(translation.job.architecture)
    limits = {"image_max_pixels": settings.integer("image_max_pixels", DEFAULT_PIXELS)} if asks else {}
    for key, optimizer in OWN_OPTIMIZERS.items():
        if settings.switch(key):
            translation = translation.changed(partial(TrainingJob.replace, optimizer=optimizer))
    who = f"LLaMA-Factory (train/{stage}/trainer.py)"
    job = as_required(notes.include(translation), "LLaMA-Factory", pasted.versions, notes)
    job = with_shared_sequences(job, settings, "sequence_parallel_size", "cp_size")
    job = with_method(job, stage, "stage", notes, whole_logits=who, log_softmax=True)
    job = with_frozen_parts(job, frozen, settings, FREEZING, limits)
    return notes.finish(_with_reference(job, settings, kind))


def _with_reference(job: TrainingJob, settings: Settings, kind: str) -> TrainingJob:
    """`job` with the frozen network that LLaMA-Factory keeps unless it trains by LoRA alone (0.9.5 train/trainer_utils.py
    `create_ref_model`): another one, or the one that is trained, in the dtype in which it computes."""
    named = settings.raw("ref_model")
    if job.reference not in ("model", "adapter_off") or (kind == "lora" and not named):
        return job
    note = settings.notes.unsupported.append
    if settings.raw("ref_model_quantization_bit"):
        note("The reference's quantised weights are counted whole.", "ref_model_quantization_bit", "less")
    if job.precision.parameters != job.precision.compute:
        note("The reference is counted in the dtype of what is trained; LLaMA-Factory halves it.", "bf16", "less")
    if named:
        note(f"The reference (ref_model={named}) is counted as large as the network that is trained.", "ref_model")
    return with_own_reference(job, settings.notes, f"ref_model={named}" if named else f"finetuning_type={kind}")


def _refuse_what_trains_nothing(settings: Settings) -> None:
    """Raises: SpecError for a file of `llamafactory-cli export`, `chat` or `api`, or one that only predicts."""
    trains = settings.switch("do_train") or settings.given("dataset")
    for key in ("export_dir", "do_predict", "infer_backend"):
        if settings.raw(key) and not (trains and key != "export_dir"):
            raise settings.refuse(key, f"trains nothing; {SERVED}")
    if settings.switch("use_kt"):
        raise settings.refuse(
            "use_kt",
            "computes the experts on the CPU, from weights in host memory (KTransformers), which is not modelled; leave it "
            "out to ask about the whole network on the GPU",
        )


def _batch(settings: Settings, training: dict[str, Any]) -> None:
    blocks = settings.integer("block_size")  # of scripts with the same keys of adapters, such as run_clm_pt_with_peft.py
    training["max_length"] = blocks or settings.integer("cutoff_len", 2048, assume=True)
    training["neat_packing"] = settings.switch("neat_packing")
    packs = settings.text("stage", "sft") == "pt"  # hparams/parser.py `get_train_args`
    training["packing"] = settings.switch("packing", packs) or training["neat_packing"]


def _finetuning_type(settings: Settings) -> str:
    """lora, full or oft. Raises: SpecError for what trains other parts of the network."""
    kind = settings.one_of("finetuning_type", "lora", ("lora", "full", "freeze", "oft"))
    if kind == "freeze":
        raise settings.refuse(
            "finetuning_type",
            "is not read: its trained layers are float32 and the others are not; full needs more than it, "
            "and with all in one dtype a job names the frozen layers: --set finetuning.frozen=[layers.0,layers.1]",
        )
    if settings.switch("use_badam"):
        raise settings.refuse(
            "use_badam",
            "trains one block of layers at a time, which is not modelled, and far less than full training needs; leave it "
            "out, or ask with finetuning_type: lora",
        )
    return kind


FREEZING = {
    "vision": "freeze_vision_tower",
    "projector": "freeze_multi_modal_projector",
    "language": "freeze_language_model",
}
"""Part of a vision-language model -> the key that freezes it (hparams/finetuning_args.py)."""
DEFAULT_PIXELS = 768 * 768
"""Of an image, unless `image_max_pixels` says otherwise (0.9.5 hparams/model_args.py)."""


def _stage(settings: Settings) -> str:
    """What kind of training it is. ORPO and SimPO are losses of the stage dpo."""
    stage = settings.text("stage", "sft")
    preference = settings.one_of("pref_loss", "sigmoid", PREFERENCES)
    if stage == "rm":  # train/rm/trainer.py: adds a value head; keeps every layer's hidden states
        raise settings.refuse(
            "stage", "is not modelled: LLaMA-Factory's value head computes logits too; TRL's reward modelling is"
        )
    return preference if stage == "dpo" and preference in ("orpo", "simpo") else stage


def _precision(settings: Settings, training: dict[str, Any], *, upcast: bool) -> None:
    """Set the dtypes. Trained parameters are cast to float32, except with pure_bf16 and ZeRO-3 (0.9.5 model/adapter.py,
    `init_adapter`; before 0.9.4 except with FSDP, for which accelerate widens them)."""
    pure = settings.switch("pure_bf16")
    bf16, fp16 = settings.switch("bf16"), settings.switch("fp16")
    half = "bfloat16" if bf16 or pure else "float16" if fp16 else None
    if bf16:
        training["bf16"] = True
    if fp16:
        training["fp16"] = True
    if half is not None:
        training["torch_dtype"] = half
    if upcast and not pure:
        training["torch_dtype"] = "float32"
        settings.notes.assumptions.append("LLaMA-Factory casts trained parameters to float32 (pure_bf16: true keeps them).")


def _lora(settings: Settings) -> dict[str, Any]:
    """LoRA's part of peft's settings."""
    rank = settings.size("lora_rank", 8, assume=True)
    if not settings.given("lora_alpha"):
        settings.notes.assumptions.append(f"lora_alpha is not given; the default of LLaMA-Factory is {2 * rank}.")
    alpha = settings.integer("lora_alpha", 2 * rank)
    return {"r": rank, "lora_alpha": alpha, "target_modules": _targets(settings, "lora_target")}


def _oft(settings: Settings) -> dict[str, Any]:
    """OFT's part of peft's settings (hparams/finetuning_args.py OFTArguments, model/adapter.py)."""
    rank = settings.integer("oft_rank", 0, least=0)
    block = settings.integer("oft_block_size", 32, least=0)
    if not (rank or block):
        raise settings.refuse("oft_block_size", "must be at least 1 without an oft_rank", 0)
    return {"peft_type": "OFT", "r": rank, "oft_block_size": block, "target_modules": _targets(settings, "oft_target")}


def _targets(settings: Settings, key: str) -> str | list[str]:
    target = settings.words(key)
    if not target:
        settings.notes.assumptions.append(f"{key} is not given; the default of LLaMA-Factory is all.")
    return list(target) if target and target != ("all",) else "all-linear"


def _adapter(settings: Settings, training: dict[str, Any], own: dict[str, Any]) -> dict[str, Any]:
    """The adapters as peft's settings: the method's `own`, and what all methods share. Quantisation goes to `training`."""
    adapter = renamed(settings, ADAPTER) | own
    bits = settings.integer("quantization_bit")
    double = settings.switch("double_quantization", True)
    if settings.text("quantization_type", "nf4") != "nf4":
        settings.notes.unsupported.append(
            "quantization_type=fp4 is not modelled; nf4 is assumed, of the same size.", "quantization_type"
        )
    method = settings.text("quantization_method", "bnb").lower()
    if bits is not None and method not in ("bnb", "bitsandbytes"):
        settings.notes.unsupported.append(
            f"quantization_method={method} is not modelled; bitsandbytes is assumed.", "quantization_method"
        )
    if bits == 4:
        four = {"load_in_4bit": True, "bnb_4bit_use_double_quant": double, "bnb_4bit_quant_storage": "bfloat16"}
        training["quantization_config"] = four  # 0.9.5 model_utils/quantization.py: quant_storage=compute_dtype
        if not settings.given("double_quantization"):
            settings.notes.assumptions.append("double_quantization is not given; the default of LLaMA-Factory is true.")
    elif bits == 8:
        training["quantization_config"] = {"load_in_8bit": True}
    elif bits is not None:
        settings.notes.unsupported.append(
            f"quantization_bit={bits} is not modelled; 4 and 8 are.", "quantization_bit", "less"
        )
    return adapter


def _memory(settings: Settings, training: dict[str, Any], *, under_fsdp2: bool) -> None:
    """Attention, checkpointing, the loss, and the optimizer."""
    given = settings.text("flash_attn", "auto").lower()  # a switch before LLaMA-Factory 0.7
    word = "fa2" if given in TRUE else "auto" if given in FALSE else settings.one_of("flash_attn", "auto", ATTENTION)
    training["attn_implementation"] = ATTENTION[word]
    if word == "auto":
        settings.notes.assumptions.append("flash_attn=auto is treated as PyTorch's sdpa.")
    if not settings.switch("disable_gradient_checkpointing"):
        training["gradient_checkpointing"] = True
        asked = settings.switch("use_reentrant_gc", True)
        reentrant = asked and not under_fsdp2  # 0.9.5 model/model_utils/checkpointing.py prepare_model_for_training
        training["gradient_checkpointing_kwargs"] = {"use_reentrant": reentrant}
        settings.notes.assumptions.append(
            f"gradient checkpointing is on (LLaMA-Factory's default), with use_reentrant={reentrant}."
        )
    if settings.switch("enable_liger_kernel"):
        training["use_liger_kernel"] = True
    for key, name in OPTIMIZERS.items():
        if settings.switch(key):
            training["optim"] = name
            _note_optimizer(settings, training, key)


def _note_optimizer(settings: Settings, training: dict[str, Any], key: str) -> None:
    """Note what is not modelled of the optimizer that `key` switches on, and keep the rank to which its gradients are
    projected."""
    project = key.removeprefix("use_")
    if project in ("galore", "apollo"):
        training["optim_args"] = f"rank={settings.size(f'{project}_rank', 16, assume=True)}"
        training["optim_target_modules"] = settings.raw(f"{project}_target", "all-linear")
        if training["optim_target_modules"] == "all":
            training["optim_target_modules"] = "all-linear"
        if settings.switch(f"{project}_layerwise"):
            settings.notes.unsupported.append(
                f"{project}_layerwise updates each layer in backward, which is not modelled.",
                f"{project}_layerwise",
                "less",
            )
    if project == "muon":
        settings.notes.unsupported.append("LLaMA-Factory's own Muon is not modelled; torch's is assumed.", key)


def _rest(settings: Settings) -> None:
    note_unsupported(settings, UNSUPPORTED)
    note_unsupported(settings, MORE, "more")
    for key in ("gradient_checkpointing", "lora_target", "sequence_parallel_size", "cp_size"):
        settings.given(key)
    settings.note_left(IGNORED)
