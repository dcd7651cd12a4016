"""ms-swift's command lines and YAML for Megatron (`megatron pt`, `megatron sft`): Megatron-LM's flags for a network of the
hub, with ms-swift's own defaults.

Source: modelscope/ms-swift 3.9 docs/source_en/Megatron-SWIFT/Command-line-parameters.md.
"""

from __future__ import annotations

import math
import re
from typing import Any

from peakcast.core.errors import SpecError
from peakcast.core.findings import Direction
from peakcast.dialects.common.job_file import note_network, resolve_architecture
from peakcast.dialects.common.pasted import Pasted
from peakcast.dialects.common.translation import FALSE, TRUE, Notes, Settings, Translation, note_unsupported
from peakcast.dialects.megatron.adapters import AdapterKeys, with_adapters
from peakcast.dialects.megatron.job import from_megatron
from peakcast.dialects.megatron.launch import flags_of_yaml

DEFAULTS: dict[str, Any] = {
    "micro_batch_size": 1, "recompute_granularity": "selective", "use_distributed_optimizer": True,
    "attention_backend": "flash",
    "expert_tensor_parallel_size": 1, "moe_token_dispatcher_type": "alltoall", "moe_router_dtype": "fp32",
    "calculate_per_token_loss": True,
}  # fmt: skip
"""ms-swift's defaults that differ from Megatron-LM's."""
SINCE_4 = {"cross_entropy_loss_fusion": True, "moe_grouped_gemm": True, "apply_rope_fusion": False}
"""Defaults of ms-swift 4 that differ from those of ms-swift 3. Version 4 is recognised by the key `tuner_type`, which was
`train_type` before."""
ADAPTERS = AdapterKeys("lora_rank", "lora_alpha", "lora_dropout", "target_modules", 8, 0.05, ("all-linear",))
UNSUPPORTED = {
    "freeze_parameters": "frozen weights", "freeze_parameters_regex": "frozen weights",
    "freeze_parameters_ratio": "frozen weights",
    "enable_dft_loss": "the DFT loss", "extra_megatron_kwargs": "further flags of Megatron's",
    "rpo_alpha": "RPO's likelihood term",
    "use_ray": "Ray's groups of GPUs", "mtp_num_layers": "multi-token prediction", "teacher_model": "a teacher",
    "teacher_model_server": "a teacher", "optimizer_cuda_graph": "CUDA graphs", "engram_tokenizer_map": "Engram's tables",
    "sequence_packing_scheduler": "changing sizes of context parallelism",
    "megatron_extra_kwargs": "further flags of Megatron's",
    "use_fused_mhc": "hyper-connections", "apply_dsa_kernel_fusion": "fused sparse attention",
}  # fmt: skip
OWN = re.compile(
    r"model|model_(type|author|name|revision|kwargs)|(dataset|val_dataset|cached_\w*dataset|split_dataset_ratio|dataset_\w+)"
    r"|load_from_cache_file|load_safetensors|save_\w+|no_(save|load)_\w+|save|load|finetune|merge_lora|add_version|max_epochs"
    r"|num_train_epochs|train_iters|lr|lr_\w+|min_lr|weight_decay|clip_grad|adam_\w+|warmup_\w+|seed|data_seed|num_workers"
    r"|dataloader_\w+|log_interval|logging_\w+|tensorboard_\w+|wandb_\w+|report_to|swanlab_\w+|eval_\w+|output_dir|streaming"
    r"|lazy_tokenize|packing|padding_free|packing_\w+|mlp_padding_free|truncation_strategy|system|template\w*|agent_template"
    r"|loss_scale|add_non_thinking_prefix|use_hf|hub_\w+|custom_\w+|external_plugins|columns|strict|shuffle\w*|torch_dtype"
    r"|adapter_load|adapters|ref_\w+|beta|loss_type|label_smoothing|f_divergence_type|reference_free|train_type|tuner_type"
    r"|lora_(rank|alpha|dropout|bias|dtype)|use_rslora|target_modules|target_regex|modules_to_save|freeze_(llm|vit|aligner)"
    r"|trainable_parameters\w*|vit_\w+|aligner_lr|gradient_checkpointing_kwargs|task_type|num_labels|problem_type|max_length"
    r"|attn_impl|max_pixels|norm_bbox|ddp_(timeout|backend|find_unused_parameters|broadcast_buffers|static_graph)|initialize_embedding|new_special_tokens|rope_scaling|ENV|manual_gc\w*|mcore_(model|adapter)"
    r"|train_dataloader_shuffle|data_sharding|group_by_length|data_parallel_random_init|(start|end)_weight_decay|local_rank"
    r"|metric_for_best_model|greater_is_better|distrib_optim_\w+|strict_fsdp_dtensor_load|nccl_comm_warmup|max_shard_size"
    r"|check_model|apply_wd_to_qk_layernorm|enable_channel_loss|mrl_dims|callbacks|skip_megatron_init|use_chat_template"
    r"|create_checkpoint_symlink|load_args|language_model_only|dsa_\w+|csa_\w+|model_author|perform_initialization"
    r"|deterministic_mode|bridge_\w+|ckpt_format|async_save|use_flash_ckpt|ignore_args_error|local_repo_path|init_strategy"
)
"""Keys that are not flags of Megatron, and that do not affect a step's memory or are read here."""


CHECKPOINTS = ("mcore_model", "load")
"""Keys for a checkpoint of Megatron's, whose args.json names the network (ms-swift 4 and 3)."""


def from_swift_megatron(pasted: Pasted) -> Translation:
    """The job of an ms-swift command or file for Megatron. Raises: SpecError naming the key, its value, the rule and the
    way out."""
    notes = Notes()
    values = {str(key).replace("-", "_"): _plain(value) for key, value in pasted.values.items()}
    given = values.get("ENV")
    environment: dict[str, Any] = given if isinstance(given, dict) else {}
    settings = Settings(values, notes, "ms-swift")
    if pasted.model is None and settings.raw("model") is None and (key := next(filter(settings.raw, CHECKPOINTS), "")):
        raise settings.refuse(key, "is a checkpoint of Megatron's, which is not read; name its network by --model")
    named = settings.model(pasted.model, "model", what="the model's id, its folder, or its config.json")
    if "rlhf_type" in values or pasted.program.endswith("rlhf"):
        raise _no_rlhf(settings)
    network = resolve_architecture(named)
    note_network(named, notes)
    note_unsupported(settings, UNSUPPORTED)
    tuner = settings.one_of("train_type", settings.text("tuner_type", "full"), ("full", "lora", "lora_llm"))
    for key in ("target_regex", "modules_to_save", "trainable_parameters") if tuner != "full" else ():
        if settings.given(key) and settings.raw(key):
            way: Direction = "either" if key == "target_regex" else "more"
            notes.unsupported.append(f"{key} is not read: adapters are on target_modules alone.", key, way)
    flags = _flags(settings, values, routed=network.moe is not None)
    asked = Settings(flags, notes, "ms-swift")
    sizes = [asked.size(f"{kind}_parallel_size", 1) for kind in ("tensor_model", "context", "pipeline_model")]
    experts = asked.size("expert_model_parallel_size", 1) * asked.size("expert_tensor_parallel_size", 1)
    least = sizes[2] * math.lcm(sizes[0] * sizes[1], experts)
    num_gpus = _gpus(pasted, environment) or pasted.gpus(notes, least, ", the least for this layout")
    flags["sequence_parallel"] = flags.get("sequence_parallel") in (True, "true") and sizes[0] > 1
    env = {
        name: value
        for name, value in {**pasted.env, **environment}.items()
        if name.startswith(("PYTORCH_", "NVTE_", "NCCL_"))
    }
    notes.ignored += [key for key in values if OWN.fullmatch(key)]
    flags = flags_of_yaml(flags, notes)
    job = notes.include(from_megatron(flags, num_gpus, env, pasted.versions.of("megatron"), network))
    return notes.finish(job if tuner == "full" else with_adapters(job, settings, ADAPTERS, "mcore_bridge"))


def _no_rlhf(settings: Settings) -> SpecError:
    """The error for a run of reinforcement learning or of preferences."""
    return SpecError(
        f"megatron rlhf (rlhf_type={settings.text('rlhf_type', 'dpo')}) is not modelled; megatron sft and pt are. The "
        "same command as megatron sft gives a lower bound of its update: with micro_batch_size doubled for methods on "
        "pairs (dpo, rm), with max_length for prompts and completions; a reference model and a rollout engine on the "
        "same GPUs come on top.",
        parameter="rlhf_type",
        value=settings.raw("rlhf_type"),
    )


def _flags(settings: Settings, values: dict[str, Any], *, routed: bool) -> dict[str, Any]:
    """Megatron-LM's flags: ms-swift's defaults, replaced by what `values` give. `routed`: the network has experts."""
    flags = {key: value for key, value in values.items() if not OWN.fullmatch(key) and key not in UNSUPPORTED}
    recent = SINCE_4 if "tuner_type" in values else {}
    settings.notes.assumptions.append(
        f"the defaults of ms-swift {'4' if recent else '3'} hold, by the keys of this configuration."
    )
    flags = {**DEFAULTS, **recent, **flags, "seq_length": settings.size("max_length", 2048, assume=True)}
    flags.pop("rlhf_type", None)
    if not routed:
        flags = {key: value for key, value in flags.items() if not key.startswith(("moe_", "expert_"))}
    for key in ("bf16", "fp16"):
        flags.setdefault(key, settings.text("torch_dtype", "bfloat16") == {"bf16": "bfloat16", "fp16": "float16"}[key])
    return flags


def _gpus(pasted: Pasted, environment: dict[str, Any]) -> int | None:
    """Number of processes that the launcher starts: `NPROC_PER_NODE` × `NNODES`; None if it is not given."""
    env = {**pasted.env, **{key: str(value) for key, value in environment.items()}}
    each, nodes = env.get("NPROC_PER_NODE", ""), env.get("NNODES", "1")
    if pasted.num_gpus is not None or not each.isdecimal():
        return pasted.num_gpus
    return int(each) * (int(nodes) if nodes.isdecimal() else 1)


def _plain(value: Any) -> Any:
    """The texts "true" and "false" as booleans, as in `--sequence_parallel true`; other values unchanged."""
    word = str(value).lower()
    return word == "true" if word in (TRUE | FALSE) - {"0", "1", ""} and isinstance(value, str) else value
