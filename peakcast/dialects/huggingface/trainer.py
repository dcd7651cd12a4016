"""Hugging Face runs from their files: TrainingArguments or TRL YAML, config.json, adapter_config.json, DeepSpeed JSON,
accelerate YAML. Any of them may be the main file; the others are given in addition."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from peakcast.core.errors import SpecError
from peakcast.core.fields import FrozenMapping
from peakcast.dialects.common.generation import READ, RLOO_BETA, SAMPLING, Generation, generation_of
from peakcast.dialects.common.pasted import Pasted
from peakcast.dialects.common.translation import AlternativeReading, Notes, Settings, Translation, speller
from peakcast.dialects.huggingface.accelerate import Launcher, launcher_of, refuse_twice
from peakcast.dialects.huggingface.balancing import KEY as BALANCING
from peakcast.dialects.huggingface.batch import IN_BLOCKS, OF_SCRIPTS
from peakcast.dialects.huggingface.command import as_in_a_file
from peakcast.dialects.huggingface.job import from_huggingface
from peakcast.dialects.huggingface.likely_runs import TRL, likely_runs
from peakcast.dialects.huggingface.older_releases import differ, older_releases
from peakcast.dialects.huggingface.post_training import KEYS_OF_METHODS, method_called, method_of, with_method
from peakcast.dialects.huggingface.quantization import STORAGES
from peakcast.dialects.huggingface.trl_adapters import trl_computes_in, with_casts_of_trl
from peakcast.dialects.huggingface.trl_checkpoints import has_stage_3, take_checkpoints
from peakcast.dialects.huggingface.trl_defaults import take_trl_defaults
from peakcast.dialects.huggingface.trl_loss import take_sft_loss, with_sft_loss
from peakcast.dialects.huggingface.vision import take_images
from peakcast.dialects.huggingface.whose_trainer import (
    EXAMPLE_SCRIPT,
    OF_EXAMPLES,
    SCORING_SCRIPTS,
    SEQ2SEQ_SCRIPTS,
    Whose,
    whose_trainer,
)

PARTS = ("training", "hf_config", "peft", "deepspeed", "accelerate")
"""The dialects that are parts of one run."""
SAYS = {
    "training": "Hugging Face training arguments",
    "hf_config": "a Hugging Face config.json",
    "peft": "a PEFT adapter_config.json",
    "deepspeed": "a DeepSpeed configuration",
    "accelerate": "an accelerate configuration",
}
_ADAPTER = {
    "lora_r": "r", "lora_alpha": "lora_alpha", "lora_dropout": "lora_dropout", "lora_target_modules": "target_modules",
    "lora_modules_to_save": "modules_to_save", "lora_task_type": "task_type", "use_rslora": "use_rslora",
    "use_dora": "use_dora", "lora_target_parameters": "target_parameters",
    "lora_rank": "r", "trainable": "target_modules",
}  # fmt: skip
"""trl's ModelConfig (0.13-0.24) -> peft's LoraConfig; the last two are Chinese-LLaMA-Alpaca's and its successors'."""
_ADAPTER_DEFAULTS = {"r": 16, "lora_alpha": 32, "lora_dropout": 0.05}
"""Defaults of trl's ModelConfig that differ from peft's."""
_SWITCHES = ("use_peft", "use_lora", "lora_enable", "use_qlora", "q_lora")
"""Switches for adapters: TRL's, and those of scripts with their own defaults (FastChat, Qwen's finetune.py, LLaVA)."""
_QUANTIZATION = (
    "load_in_4bit", "load_in_8bit", "bnb_4bit_quant_type", "use_bnb_nested_quant", "bnb_4bit_quant_storage",
    "bnb_4bit_compute_dtype",
)  # fmt: skip
_SCRIPT = re.compile(
    r"dataset_.*|datasets?|cache_dir|model_(revision|code_revision|adapter_name)|base_model_revision|chat_template|trust_remote_code"
    r"|ignore_bias_buffers|columns.*|streaming|test_split_size|config|system_prompt|disable_dropout"
    r"|pad_to_multiple_of|pad_token|truncation_mode|tools|max_prompt_length|max_completion_length"
    r"|cpo_alpha|simpo_gamma|alpha|is_encoder_decoder|tpo_(alpha|l_gamma)|label_pad_token_id|padding_value|generate_during_eval|discopop_tau|ld_alpha|loss_weights|f_.*|label_smoothing"
    r"|use_weighting|use_logits_to_keep|precompute_ref_batch_size|ref_.*|base_model_attribute_name|force_use_ref_model"
    r"|data_path|lazy_preprocess|lora_weight_path|lora_bias|benchmarks|callbacks|hub_model_revision|wandb_.*|overwrite_hub_revision|push_to_hub_revision|num_completions_to_print"
)
"""Keys of trl's ScriptArguments, of the rest of ModelConfig and of DPOConfig's loss: data, and other keys without effect on
memory."""
MODEL_KEYS = ("model_name_or_path", "model_name", "model_path", "model_id", "config_name")
"""Keys of the network: of transformers' and TRL's scripts, and those customary in others'."""
TRANSFORMERS = Whose(False, True, "read as transformers' own, as asked")
def from_training(pasted: Pasted) -> Translation:
    """The job of TrainingArguments or a TRL configuration."""
    return from_parts(pasted, "training")


def from_trl(pasted: Pasted) -> Translation:
    """The job of training arguments that are known to be TRL's."""
    return from_parts(pasted, "training", TRL)


def from_transformers(pasted: Pasted) -> Translation:
    """The job of training arguments that are known to be for transformers' own Trainer."""
    return from_parts(pasted, "training", TRANSFORMERS)


def from_config(pasted: Pasted) -> Translation:
    """The job of a config.json and its accompanying files."""
    return from_parts(pasted, "hf_config")


def from_peft(pasted: Pasted) -> Translation:
    """The job of an adapter_config.json and its accompanying files."""
    return from_parts(pasted, "peft")


def from_deepspeed(pasted: Pasted) -> Translation:
    """The job of a DeepSpeed configuration and its accompanying files."""
    return from_parts(pasted, "deepspeed")


def from_accelerate(pasted: Pasted) -> Translation:
    """The job of an accelerate configuration and its accompanying files."""
    return from_parts(pasted, "accelerate")


def from_fsdp(pasted: Pasted) -> Translation:
    """Refuse: the Trainer's FSDP configuration does not say what is trained. Raises: SpecError with the way out."""
    raise SpecError(
        f"{pasted.where} is an FSDP configuration of transformers' Trainer, which does not say what is trained; give the "
        f"training arguments that name it (fsdp_config), and this file {pasted.beside()}.",
        parameter="fsdp_config",
    )


def from_parts(pasted: Pasted, role: str, whose: Whose | None = None) -> Translation:
    """The job of a Hugging Face run. `pasted` is its part `role`. `whose`: which program the arguments are for, if that is
    known; if nothing decides it, the translation also has the other possible job. Raises: SpecError saying which part is
    missing."""
    parts = {name: values for name, values in pasted.companions.items() if name in PARTS}
    if role in parts:
        raise SpecError(f"{SAYS[role]} is given twice, in {pasted.where} and in another file; keep one.")
    parts[role] = as_in_a_file(pasted.values) if pasted.program else pasted.values
    given = {key: value for key, value in parts.get("training", {}).items() if value is not None}
    whose = whose or whose_trainer(pasted.program, given)
    read = _of_parts(pasted, parts, whose)
    others = []
    for run in likely_runs(pasted, parts, given, whose, read.unknown):
        with contextlib.suppress(SpecError):
            if (job := _of_parts(run.pasted, run.parts, run.whose).job) != read.job:
                others.append(AlternativeReading(run.name, job, run.way_out))
    for release in older_releases(given, whose, pasted.versions.of("huggingface")):
        versions = FrozenMapping({**pasted.versions.given, release.package: release.version})
        older = replace(pasted, versions=replace(pasted.versions, given=versions))
        with contextlib.suppress(SpecError):
            if differ(read.job, job := _of_parts(older, parts, whose).job):
                others.append(AlternativeReading(release.name, job, release.way_out))
    return replace(read, others=tuple(others))


def _of_parts(pasted: Pasted, parts: Mapping[str, Mapping[str, Any]], whose: Whose) -> Translation:
    notes = Notes()
    training = {key: value for key, value in parts.get("training", {}).items() if value is not None}
    _take_defaults(pasted, parts, training, whose, notes)
    model = _model(pasted, parts, training)
    if isinstance(training.get("fsdp_config"), str):
        training["fsdp_config"] = pasted.file(training["fsdp_config"], "fsdp", "fsdp_config")
    launcher = launcher_of(parts["accelerate"], pasted, notes) if "accelerate" in parts else Launcher()
    deepspeed = _deepspeed(pasted, parts, training, launcher)
    adapter, quantization = _adapter(parts, training, notes, pasted.program, trl=whose.trl)
    if quantization:
        training["quantization_config"] = quantization
    adapts_in_stage_3 = adapter is not None and has_stage_3(deepspeed)
    if whose.trl and adapter is not None and adapts_in_stage_3 and not quantization:
        adapter = {**adapter, "autocast_adapter_dtype": False}  # trl 1.16.0 sft_trainer.py, `get_peft_model_kwargs`; see
        # also `conventions.adapter_dtype`: before these releases of trl DeepSpeed's engine narrowed adapters
    method = method_of(pasted.program, training)
    generation = _generation(training, notes, method) if method_called(method).kind == "grpo" else None
    _note_loss(training, method, notes)
    versions = pasted.versions.of("huggingface")
    loss_options = take_sft_loss(training, method, versions, notes) if whose.trl else {}
    if whose.trl:
        take_checkpoints(training, method, adapts_in_stage_3, versions, notes)
    with_parts = take_images(training, notes)
    training[BALANCING] = bool(Settings(training, notes, "trl").number("router_aux_loss_coef"))  # SFTTrainer.__init__
    training.pop("router_aux_loss_coef", None)
    num_gpus = _take_from_launcher(launcher, pasted, training, notes)
    _drop(training, notes, lambda key: bool(_SCRIPT.fullmatch(key)))
    _drop(training, notes, lambda key: bool(OF_EXAMPLES.fullmatch(key)) and key not in ("block_size", "config_overrides"))
    precomputed = Settings(training, notes, "trl").switch("precompute_ref_log_probs")
    of_methods = {key for keys in KEYS_OF_METHODS.values() for key in keys}
    _drop(training, notes, of_methods.__contains__)
    if training.get("packing") is True and whose.trl:
        training.setdefault("packing_strategy", "bfd")  # since trl 0.18
    given = (model, training, adapter, deepspeed, launcher.fsdp, num_gpus)
    spell = speller({"router_aux_loss_coef": BALANCING})
    job = notes.include(from_huggingface(*given, versions=versions, spell=spell))
    job = with_sft_loss(job, loss_options, notes)
    job = with_casts_of_trl(job, versions, notes) if whose.trl else job
    job = with_method(job, method, "training method", notes, precomputed=precomputed, generation=generation)
    return notes.finish(with_parts(job))


def _take_defaults(
    pasted: Pasted, parts: Mapping[str, Mapping[str, Any]], training: dict[str, Any], whose: Whose, notes: Notes
) -> None:
    """Put into `training` the defaults of the program that the arguments are for, with notes."""
    if whose.rests_on:
        notes.assumptions.append(f"the training arguments are {whose.rests_on}.")
    if whose.trl:
        take_trl_defaults(training, pasted.versions.of("huggingface"), notes)
    else:
        _take_examples_defaults(pasted, training, notes)
    if whose.trl and not {"dtype", "torch_dtype"} & set(training):
        training["torch_dtype"] = "float32"  # trl 1.16 trainer/utils.py create_model_from_path, trainer/model_config.py
        notes.assumptions.append("dtype is not given; trl loads weights in float32 (dtype: bfloat16 halves them).")


def _take_from_launcher(launcher: Launcher, pasted: Pasted, training: dict[str, Any], notes: Notes) -> int:
    """Put the launcher's precision and mesh into `training`. Returns the number of GPUs."""
    if launcher.mixed_precision == "fp8" and launcher.fsdp is None:
        notes.unsupported.append("FP8 training (mixed_precision=fp8) is not modelled.", "mixed_precision")
    if launcher.mixed_precision in ("bf16", "fp16") and not {"bf16", "fp16"} & set(training):
        training[launcher.mixed_precision] = True
    if launcher.mesh:
        training.setdefault("parallelism_config", launcher.mesh)
    processes = Settings({"num_processes": training.pop("num_processes", None)}, notes, "trl").integer("num_processes")
    if launcher.num_gpus is None and processes:  # trl's recipes have `num_processes` in the same file
        launcher = replace(launcher, num_gpus=processes)
    return launcher.gpus(pasted, notes)


def _note_loss(training: dict[str, Any], method: str | None, notes: Notes) -> None:
    """Remove the settings of TRL's losses other than the kind, and note those that are not modelled."""
    if method != "sft":  # the trainer of another method makes the head that it needs
        training.pop("model_class", None)
    if Settings({"use_liger_loss": training.pop("use_liger_loss", False)}, notes, "trl").switch("use_liger_loss"):
        notes.unsupported.append("Liger's preference loss (use_liger_loss) is not modelled.", "use_liger_loss", "less")
    if method == "kto" and training.get("loss_type") == "apo_zero_unpaired":
        notes.assumptions.append("loss_type=apo_zero_unpaired has no forward for the KL term; KTO's is counted.")
    if method != "sft" and training.pop("loss_type", None) is not None:
        notes.ignored.append("loss_type")


def _drop(training: dict[str, Any], notes: Notes, chosen: Callable[[str], bool]) -> None:
    """Remove the `chosen` keys from `training`, as keys that do not affect memory."""
    for key in [key for key in training if chosen(key)]:
        notes.ignored.append(key)
        del training[key]


def _generation(training: dict[str, Any], notes: Notes, method: str) -> Generation:
    """The generation of a run of GRPO or a similar method. Removes the settings of generation from `training`, and sets its
    sequence length."""
    if Settings(training, notes, "trl").switch("cast_lm_head_to_fp32"):
        notes.unsupported.append(
            "The head's weight in float32 (cast_lm_head_to_fp32) is not modelled.", "cast_lm_head_to_fp32", "more"
        )
    training.pop("cast_lm_head_to_fp32", None)
    if method == "rloo":
        training.setdefault("beta", RLOO_BETA)
    given = {key: training[key] for key in READ if key in training}
    generation = generation_of(Settings(given, notes, "trl"), "per_device_train_batch_size")
    for key in [key for key in training if SAMPLING.fullmatch(key)]:
        del training[key]
        notes.ignored.append(key)
    training["max_length"] = generation.sequence_length
    return generation


def _model(pasted: Pasted, parts: Mapping[str, Mapping[str, Any]], training: dict[str, Any]) -> Any:
    names = [training.pop(key, None) for key in MODEL_KEYS]
    named = next(filter(None, names), None)
    if pasted.model is not None:
        return pasted.model
    if "hf_config" in parts:
        return parts["hf_config"]
    unset = named is True  # a flag whose value is a variable that nothing sets
    base = (named if not unset else None) or parts.get("peft", {}).get("base_model_name_or_path")
    if base:
        return str(base)
    given = " and ".join(SAYS[name] for name in PARTS if name in parts)
    missing = "the training arguments and " if "training" not in parts else ""
    raise SpecError(
        f"{pasted.where} is {given}, which does not say what is trained: {missing}the model {'are' if missing else 'is'} "
        f"missing; add the model's config.json {pasted.beside()}, or its name by --model"
        f"{f', and the arguments {pasted.beside()}' if missing else ''}.",
        parameter="model_name_or_path" if unset else "model",
    )


def _deepspeed(
    pasted: Pasted, parts: Mapping[str, Mapping[str, Any]], training: dict[str, Any], launcher: Launcher
) -> Mapping[str, Any] | None:
    named = training.pop("deepspeed", None)
    named = training.pop("deepspeed_config", None) or named
    beside = parts.get("deepspeed") if named is None or isinstance(named, str) else None
    given = pasted.file(named, "deepspeed", "deepspeed") if named else beside
    if given is not beside or launcher.deepspeed is not beside:
        refuse_twice(given, launcher.deepspeed, "deepspeed", pasted.where)
    return given if given is not None else launcher.deepspeed


def _adapter(
    parts: Mapping[str, Mapping[str, Any]], training: dict[str, Any], notes: Notes, program: str, *, trl: bool
) -> tuple[Mapping[str, Any] | None, dict[str, Any]]:
    """(the LoRA settings, or None for full fine-tuning; the quantization of the base model)."""
    settings = Settings(training, notes, "trl")
    asked = _asked_for_adapters(settings, set(training), program)
    wanted = bool(asked)
    mapping = {name: training[key] for key, name in _ADAPTER.items() if training.get(key) is not None}
    quantization = _quantization(settings, training, asked, trl=trl)
    for key in (*_SWITCHES, *_ADAPTER, *_QUANTIZATION):
        training.pop(key, None)
    if "peft" in parts:
        return parts["peft"], quantization
    if not wanted:
        if mapping:
            whose = "" if trl else ", unless the script takes them otherwise"
            sentence = f"use_peft is not true, so the lora_ settings have no effect{whose}: full fine-tuning."
            notes.assumptions.append(sentence)
        return None, quantization
    if asked[0] != "use_peft" and not {"r", "target_modules"} <= set(mapping):
        notes.unsupported.append(
            f"The script trains adapters ({asked[0]}) whose rank and targets it may set itself; those not given are "
            "assumed to be trl's defaults. Give its adapter_config.json by --with, or say it: --lora-rank, "
            "--set finetuning.targets=[q_proj].",
            asked[0],
        )
    for name, value in _ADAPTER_DEFAULTS.items():
        if name not in mapping:
            mapping[name] = value
            notes.assumptions.append(f"{name} of the adapter is not given; the default of trl is {value}.")
    return mapping, quantization


def _quantization(settings: Settings, training: Mapping[str, Any], asked: list[str], *, trl: bool) -> dict[str, Any]:
    """The quantization of the base model, by TRL's keys, by switches of other scripts, or by the program's name, which is
    the last of what `asked` for adapters."""
    notes, twice = settings.notes, {"load_in_4bit": True, "bnb_4bit_use_double_quant": True}
    if settings.switch("load_in_4bit"):
        computed = training.get("bnb_4bit_compute_dtype", trl_computes_in(training) if trl else None)
        if settings.text("bnb_4bit_quant_type", "nf4") != "nf4":
            notes.unsupported.append(
                "bnb_4bit_quant_type=fp4 is not modelled; nf4 is assumed, of the same size.", "bnb_4bit_quant_type"
            )
        return {
            "load_in_4bit": True,
            "bnb_4bit_use_double_quant": settings.switch("use_bnb_nested_quant"),
            "bnb_4bit_compute_dtype": computed,
            "bnb_4bit_quant_storage": settings.one_of("bnb_4bit_quant_storage", STORAGES[0], STORAGES),
        }
    if settings.switch("load_in_8bit"):
        return {"load_in_8bit": True}
    if {"use_qlora", "q_lora"} & set(asked):
        return twice
    if asked and "qlora" in asked[-1]:
        what = "weights are assumed in 4 bits by its name, stored as bfloat16 as FSDP needs them"
        notes.assumptions.append(f"{asked[-1]}: {what} (--method lora for whole ones).")
        return {**twice, "bnb_4bit_quant_storage": "bfloat16"}
    return {}


def _asked_for_adapters(settings: Settings, given: set[str], program: str) -> list[str]:
    """The switches that ask for adapters, or the program, if its name does and no switch is given."""
    asked = [key for key in _SWITCHES if settings.switch(key)]
    named = re.search("lora|peft", program) and not {"use_peft", "use_lora", "lora_enable"} & given
    return [*asked, program] if named else asked


def _take_examples_defaults(pasted: Pasted, training: dict[str, Any], notes: Notes) -> None:
    """Fill in the defaults of transformers' example scripts, with a note."""
    program = pasted.program.rsplit("/", 1)[-1]
    if not EXAMPLE_SCRIPT.fullmatch(program):
        return
    name = program.removeprefix("run_").removesuffix(".py").removesuffix("_no_trainer")
    if name in SEQ2SEQ_SCRIPTS:
        source, tokens, target, targets = SEQ2SEQ_SCRIPTS[name]
        training.setdefault(source, tokens)
        training.setdefault("max_target_length", training.pop(target, targets))
        return
    training["model_class"], length = SCORING_SCRIPTS.get(name, ("", 1024))
    if length != 1024 and length:
        training.setdefault("max_seq_length", length)
    elif not {"block_size", "max_seq_length", "max_length", *OF_SCRIPTS} & set(training):
        training[IN_BLOCKS] = "speech" not in name  # min(1024, tokenizer.model_max_length) tokens each
