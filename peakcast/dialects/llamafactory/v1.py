"""LLaMA-Factory's v1 configurations: its own training loop around networks of transformers, with plug-ins for sharding.

Source: LLaMA-Factory 0.9.5 src/llamafactory/v1 (config/training_args.py, config/model_args.py, core/base_trainer.py
`compute_log_probs`, core/model_engine.py dtype="auto", plugins/trainer_plugins/distributed/fsdp2.py), examples/v1.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from peakcast.dialects.common.pasted import Pasted
from peakcast.dialects.common.translation import Notes, Settings, Translation, note_inner, states_direction
from peakcast.dialects.huggingface.job import from_huggingface
from peakcast.dialects.huggingface.post_training import with_method
from peakcast.jobs.spec import Optimizer

OPTIMIZERS = ("muon",)
"""Names of `optim_config` that a job can express; without a name it is torch's AdamW."""
IGNORED = re.compile(
    r"model_class|template|trust_remote_code|init_config|train_dataset|eval_dataset|output_dir|learning_rate|num_train_epochs"
    r"|max_steps|max_grad_norm|batching_workers|lr_scheduler_config|seed|full_determinism|resume_from_checkpoint|save_\w+"
    r"|logging_steps|sample_backend|max_new_tokens|global_batch_size|report_to|run_name|eval_\w+"
)
ADAPTER_KEYS = (
    "name", "r", "lora_alpha", "lora_dropout", "target_modules", "use_dora", "use_rslora", "modules_to_save",
)  # fmt: skip
ADAPTER_DETAILS = (
    "export_dir", "adapter_name_or_path", "create_new_adapter", "export_size", "infer_dtype", "export_hub_model_id",
)  # fmt: skip
DIST_DETAILS = ("dcp_path", "pin_memory", "name", "mixed_precision")


def from_llamafactory_v1(pasted: Pasted) -> Translation:
    """The job of a v1 configuration. Raises: SpecError naming the key, its value, the rule and the way out."""
    notes = Notes()
    settings = Settings(pasted.values, notes, "LLaMA-Factory v1")
    model = settings.model(pasted.model, "model", "model_name_or_path")
    num_gpus = pasted.gpus(notes)
    training = _training(settings, num_gpus)
    adapter = _adapter(settings, training)
    fsdp, deepspeed = _distribution(settings, pasted)
    optimizer = _optimizer(settings, sharded=fsdp is not None and num_gpus > 1)
    _kernels(settings)
    versions = pasted.versions.of("huggingface")
    job = notes.include(from_huggingface(model, training, adapter, deepspeed, fsdp, num_gpus, versions=versions))
    if optimizer is not None:
        job = job.replace(optimizer=optimizer)
    method = _method(settings, pasted.program)
    if method == "sft":
        notes.unsupported.append(
            "LLaMA-Factory v1 copies the shifted logits in float32 for its loss (core/base_trainer.py), which is not "
            "modelled.",
            "cutoff_len",
            "more",
        )
    who = "" if method == "sft" else "LLaMA-Factory v1 (core/base_trainer.py)"
    settings.note_left(IGNORED)
    return notes.finish(with_method(job, method, "the command", notes, whole_logits=who, log_softmax=True))


def _method(settings: Settings, program: str) -> str:
    """The training method, from the command: sft, dpo or rm. The configuration file does not contain it."""
    verb = program.rpartition(" ")[2]
    if verb in ("sft", "dpo", "rm"):
        return verb
    settings.notes.warnings.append(
        "The command says which training runs (llamafactory-cli sft, dpo or rm), and the file does not; sft is assumed, "
        "which "
        "needs the least.",
        "train_dataset",
        "more",
    )
    return "sft"


def _training(settings: Settings, num_gpus: int) -> dict[str, Any]:
    """The training settings under the names of transformers' TrainingArguments."""
    micro = settings.size("micro_batch_size", 1, assume=True)
    total = settings.integer("global_batch_size")
    strategy = settings.text("batching_strategy", "normal")
    if strategy.startswith("dynamic"):
        settings.notes.unsupported.append(
            f"batching_strategy={strategy} fills batches by tokens, which is not modelled; micro_batch_size full rows "
            f"are assumed.",
            "batching_strategy",
        )
    if not settings.switch("bf16", True):
        settings.notes.unsupported.append("FSDP without bf16 is not modelled; bfloat16 is assumed.", "bf16", "more")
    checkpoints = settings.switch("enable_activation_checkpointing", True)
    if not settings.given("enable_activation_checkpointing"):
        settings.notes.assumptions.append(
            "enable_activation_checkpointing is not given; the default of LLaMA-Factory v1 is True."
        )
    attention = settings.text("flash_attn", "sdpa")
    return {
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": max(1, (total or 0) // (micro * num_gpus)),
        "max_length": settings.size("cutoff_len", 2048, assume=True),
        "padding_free": "padding_free" in strategy,
        "attn_implementation": attention,
        "gradient_checkpointing": checkpoints,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
        "optim": "adamw_torch",
    }


def _inside(settings: Settings, key: str) -> Settings:
    """The settings of the plug-in at `key`; empty if there is none. Raises: SpecError."""
    value = settings.raw(key)
    if value is not None and not isinstance(value, Mapping):
        raise settings.refuse(key, "must be a mapping with the plug-in's name")
    return Settings(value or {}, settings.notes, "LLaMA-Factory v1", lambda name: f"{key}.{name}")


def _adapter(settings: Settings, training: dict[str, Any]) -> dict[str, Any] | None:
    peft, quantization = _inside(settings, "peft_config"), _inside(settings, "quant_config")
    bits = quantization.integer("quantization_bit")
    quantization.one_of("name", "bnb", ("bnb", "auto"))
    known = ("name", "quantization_bit", "double_quantization", "quantization_type", "compute_dtype")
    note_inner(settings, "quant_config", known)
    name = peft.text("name", "full")
    if name not in ("lora", "full"):
        raise peft.refuse("name", "is not modelled; lora is, and full training without peft_config")
    note_inner(settings, "peft_config", ADAPTER_KEYS, ADAPTER_DETAILS)
    if name == "full":
        if bits:
            raise quantization.refuse("quantization_bit", "needs adapters; add peft_config with name: lora")
        return None
    if bits == 4:
        double = quantization.switch("double_quantization", True)
        training["quantization_config"] = {"load_in_4bit": True, "bnb_4bit_use_double_quant": double}
    elif bits == 8:
        training["quantization_config"] = {"load_in_8bit": True}
    targets = peft.words("target_modules")
    adapter = {key: peft.raw(key) for key in ("use_dora", "use_rslora", "modules_to_save") if peft.raw(key)}
    return adapter | {
        "r": peft.size("r", 8, assume=True),
        "lora_alpha": peft.number("lora_alpha", 16),
        "lora_dropout": peft.number("lora_dropout", 0.05),
        "target_modules": "all-linear" if targets in ((), ("all",)) else list(targets),
    }


def _distribution(settings: Settings, pasted: Pasted) -> tuple[Mapping[str, Any] | None, Mapping[str, Any] | None]:
    """(FSDP's settings or None, DeepSpeed's settings or None); both None: plain data parallelism."""
    dist = _inside(settings, "dist_config")
    name = dist.text("name", "ddp")
    for key in ("cp_size", "ep_size", "tp_size"):
        if (dist.integer(key, 1) or 1) > 1:
            settings.notes.unsupported.append(
                f"Sequences or weights shared by GPUs (dist_config.{key}) are not modelled.", key
            )
    known = ("name", "cp_size", "ep_size", "tp_size", "cp_mode", "config_file", "offload_params", "reshard_after_forward")
    note_inner(settings, "dist_config", known, DIST_DETAILS)
    if name == "deepspeed":
        return None, pasted.file(dist.raw("config_file"), "deepspeed", "dist_config.config_file")
    if name == "fsdp2":
        return {
            "fsdp_version": 2,
            "fsdp_reshard_after_forward": dist.switch("reshard_after_forward", True),
            "fsdp_offload_params": dist.switch("offload_params"),
        }, None
    if name != "ddp":
        raise dist.refuse("name", "is not modelled; fsdp2 and deepspeed are", name)
    return None, None


def _optimizer(settings: Settings, *, sharded: bool) -> Optimizer | None:
    """The plug-in's optimizer; None for torch's AdamW."""
    chosen = _inside(settings, "optim_config")
    name = chosen.text("name").lower()
    if not name or name.startswith("adam"):
        return None
    if name not in OPTIMIZERS:
        settings.notes.unsupported.append(
            f"optim_config.name={name} is not modelled; AdamW is assumed instead.",
            "optim_config",
            states_direction(name),
        )
        return None
    if sharded:
        settings.notes.unsupported.append(
            "LLaMA-Factory's Muon keeps whole momenta on every GPU under FSDP2, which is not modelled: they are counted as "
            "shards.",
            "optim_config",
            "more",
        )
    return Optimizer(name="muon", implementation="loop")


def _kernels(settings: Settings) -> None:
    kernels = _inside(settings, "kernel_config")
    if kernels.raw("include_kernels") or kernels.text("name", "auto") != "auto":
        settings.notes.unsupported.append(
            "LLaMA-Factory's own kernels (kernel_config) are not modelled.", "kernel_config", "less"
        )
    note_inner(settings, "kernel_config", ("name", "include_kernels"))
