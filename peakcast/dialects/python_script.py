"""Python programs and notebooks that train with transformers, TRL, PEFT or Unsloth. The arguments of the calls that load a
model, add adapters and configure a trainer are read like the configurations of those libraries.

Source: transformers 5.17 TrainingArguments and `from_pretrained`, trl 0.22 to 1.16 configurations, peft 0.21 LoraConfig,
unsloth 2025.11.4 models/loader.py and llama.py (`from_pretrained`, `get_peft_model`), unslothai/notebooks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from peakcast.core.errors import SpecError
from peakcast.core.fields import FrozenMapping
from peakcast.dialects.common.asked_versions import AskedVersions
from peakcast.dialects.common.pasted import Pasted
from peakcast.dialects.common.translation import Notes, Settings, Translation
from peakcast.dialects.huggingface.dtypes import FROM_PRETRAINED
from peakcast.dialects.huggingface.evaluation import note_kept_logits
from peakcast.dialects.huggingface.post_training import with_own_reference
from peakcast.dialects.huggingface.trainer import PARTS, from_parts
from peakcast.dialects.huggingface.trl_adapters import prepared_for_kbit_training, without_cache
from peakcast.dialects.huggingface.unsloth import NEWEST_UNSLOTH
from peakcast.dialects.huggingface.whose_trainer import Whose
from peakcast.dialects.python.calls import FunctionCall, NotGiven, plain_value
from peakcast.jobs.conventions import replaces_linear
from peakcast.jobs.spec import TrainingJob

CONFIGS = {
    "TrainingArguments": "", "Seq2SeqTrainingArguments": "", "UnslothTrainingArguments": "sft", "SFTConfig": "sft",
    "DPOConfig": "dpo", "KTOConfig": "kto", "ORPOConfig": "orpo", "CPOConfig": "cpo", "GRPOConfig": "grpo",
    "RewardConfig": "reward", "RLOOConfig": "rloo", "GKDConfig": "gkd", "PPOConfig": "ppo", "OnlineDPOConfig": "online_dpo",
    "PRMConfig": "prm", "XPOConfig": "xpo", "NashMDConfig": "nash_md", "BCOConfig": "bco", "TPOConfig": "tpo",
    "GOLDConfig": "gold", "DistillationConfig": "distillation", "SDFTConfig": "sdft", "SDPOConfig": "sdpo",
    "IWOPDConfig": "iw_opd", "AsyncGRPOConfig": "async_grpo", "A2POConfig": "a2po", "GMPOConfig": "gmpo",
}  # fmt: skip
"""Classes of training arguments -> the training method; "" if the trainer's class decides it."""
TRAINERS = {
    "SFTTrainer": "sft", "UnslothTrainer": "sft", "DPOTrainer": "dpo", "KTOTrainer": "kto", "ORPOTrainer": "orpo",
    "CPOTrainer": "cpo", "GRPOTrainer": "grpo", "RewardTrainer": "reward", "RLOOTrainer": "rloo", "TPOTrainer": "tpo",
    "BCOTrainer": "bco", "GMPOTrainer": "gmpo", "Trainer": "", "Seq2SeqTrainer": "",
}  # fmt: skip
TRAINERS |= {name.replace("Config", "Trainer"): method for name, method in CONFIGS.items() if name.endswith("Config")}
"""Classes of trainers -> the same; also those whose training is refused, which says what it holds once it has the model."""
LOADERS = re.compile(r"(Auto(Peft)?Model\w*|Fast\w*Model|\w+For[A-Z]\w+)\.from_pretrained")
ADAPTERS = re.compile(r"LoraConfig|(Fast\w*Model\.)get_peft_model")
VERSION = re.compile(r"\b(transformers|trl|peft|accelerate|torch|unsloth|bitsandbytes)\s*==\s*(\d+(?:\.\d+)+)")
OWN_COMPUTE = "float32"
"""BitsAndBytesConfig's default of bnb_4bit_compute_dtype (transformers 5.17 utils/quantization_config.py). Unsloth gives
the dtype of the weights (unsloth 2025.11.4 models/llama.py)."""
ROLE = "trainer_calls"
ON_TRAINERS = ("max_seq_length", "packing", "neftune_noise_alpha", "max_length", "max_prompt_length", "beta")
"""Arguments that older releases pass to the trainer itself instead of its configuration."""
_MODEL = re.compile(
    r"token|trust_remote_code|device_map|cache_dir|revision|low_cpu_mem_usage|use_cache|max_lora_rank|fix_tokenizer"
    r"|rope_scaling|resize_model_vocab|use_exact_model_name|random_state|unsloth_\w+|float8_kv_cache|disable_log_stats"
    r"|use_safetensors|torchscript|num_labels|offload_folder|local_files_only|use_gradient_checkpointing|_target_"
    r"|ignore_mismatched_sizes"
)
"""Arguments of loaders that do not affect a step's memory, or that are read with the adapters."""
_TRAINER = re.compile(
    r"model|tokenizer|processing_class|train_dataset|eval_dataset|dataset_\w+|data_collator|args|peft_config|formatting_func"
    r"|compute_metrics|callbacks|reward_funcs|ref_model|optimizers|preprocess_logits_for_metrics|_target_"
)


def values_of(calls: Sequence[FunctionCall], source: str) -> dict[str, Any]:
    """A program's calls as the mapping that `from_python_script` reads; empty if they configure no trainer."""
    configs = [call for call in calls if call.name.rpartition(".")[2] in CONFIGS]
    if not configs:
        return {}
    chosen = configs[-1]
    loaders = [call for call in calls if LOADERS.fullmatch(".".join(call.name.split(".")[-2:]))]
    loader = loaders[0] if loaders else FunctionCall("", (), {})
    adapters = [call for call in calls if ADAPTERS.fullmatch(".".join(call.name.split(".")[-2:]))]
    bits = [call for call in calls if call.name.endswith("BitsAndBytesConfig")]
    trainers = [call for call in calls if call.name.rpartition(".")[2] in TRAINERS]
    trainer = trainers[-1] if trainers else FunctionCall("", (), {})
    parts: dict[str, Mapping[str, Any]] = {
        "model": _named(loader, trainer),
        "adapter": adapters[0].keywords if adapters else {},
        "quantization": bits[0].keywords if bits else {},
        "training": chosen.keywords,
        "trainer": {key: value for key, value in trainer.keywords.items() if not _TRAINER.fullmatch(key)},
    }
    lost = {f"{part}.{key}": v.source for part, each in parts.items() for key, v in each.items() if isinstance(v, NotGiven)}
    names: dict[str, Any] = {
        "config": chosen.name.rpartition(".")[2],
        "trainer": trainer.name.rpartition(".")[2],
        "loader": loader.name,
    }
    names["others"] = sorted({call.name.rpartition(".")[2] for call in configs} - {names["config"]})
    versions = dict(VERSION.findall(source))
    sleeps = "UNSLOTH_VLLM_STANDBY" in source
    plain = {part: plain_value(values) for part, values in parts.items()}
    names["adapter"] = adapters[0].name if adapters else ""
    last = {call.name.rpartition(".")[2]: call for call in calls}
    names["without_cache"] = bool(re.search(r"\buse_cache\s*=\s*False\b", source))
    names["widens"] = "prepare_model_for_kbit_training" in last
    prepared = last.get("prepare_model_for_kbit_training", FunctionCall("", (), {"use_gradient_checkpointing": False}))
    asked = prepared.keywords.get("use_gradient_checkpointing", True) is True
    names["checkpoints"] = asked or "gradient_checkpointing_enable" in last
    names["reference"] = _reference(trainer)
    metrics = trainer.keywords.get("compute_metrics") is not None
    names["keeps_logits"] = metrics and trainer.keywords.get("preprocess_logits_for_metrics") is None
    names["cut_at"], names["targets_cut_at"] = _longest_texts(calls)
    names["loads_first"] = bool(loaders) and calls.index(loader) < calls.index(chosen)
    return {ROLE: {**names, "not_given": lost, "versions": versions, "standby": sleeps}, **plain}


def _reference(trainer: FunctionCall) -> str:
    """The source of the network that the program gives a trainer of preferences as reference, which TRL then keeps even if
    adapters are trained (trl 1.16 trainer/dpo_trainer.py, kto_trainer.py); "" if it is None, or if only running the program
    would tell."""
    second = trainer.arguments[1] if len(trainer.arguments) > 1 else None
    given = trainer.keywords.get("ref_model", second)
    source = given.source if isinstance(given, NotGiven) else given if isinstance(given, str) else ""
    return "" if " if " in source else source[:80]


def _longest_texts(calls: Sequence[FunctionCall]) -> tuple[int | None, int | None]:
    """(most tokens of a text, most tokens of a target), each None if no call gives it. Both come from calls with
    `truncation` and `max_length`, such as a tokenizer's, of which the largest number counts. Calls with `text_target` limit
    targets; if there are none and calls give two numbers, the lower one is that of targets."""
    cuts = [call.keywords for call in calls if call.keywords.get("truncation")]
    sizes = {size for cut in cuts if isinstance(size := cut.get("max_length"), int) and size > 0}
    targets = {size for cut in cuts if "text_target" in cut and isinstance(size := cut.get("max_length"), int)}
    targets = targets or ({min(sizes)} if len(sizes) == 2 else set())
    return max(sizes - targets or sizes, default=None), max(targets, default=None)


def _named(loader: FunctionCall, trainer: FunctionCall) -> dict[str, Any]:
    """The arguments with which the model is loaded, its name under `model_name`: from the call that loads it, else from the
    trainer's."""
    first = loader.arguments[0] if loader.arguments else trainer.keywords.get("model")
    values = {"model_name": first} if isinstance(first, (str, NotGiven)) else {}
    if "pretrained_model_name_or_path" in loader.keywords:
        values["model_name"] = loader.keywords["pretrained_model_name_or_path"]
    return {**values, **{key: value for key, value in loader.keywords.items() if key != "pretrained_model_name_or_path"}}


def _versions(about: Mapping[str, Any], asked: AskedVersions, *, unsloth: bool) -> AskedVersions:
    """The versions that were asked for, then those that the program names."""
    named = {str(name): str(version) for name, version in _mapping(about.get("versions")).items()}
    usual = {"unsloth": NEWEST_UNSLOTH} if unsloth else {}
    return replace(asked, given=FrozenMapping({**usual, **named, **asked.given}))


PARTS_READ = ("model", "adapter", "quantization", "training", "trainer", ROLE)
"""The parts of a program's settings that are read."""


def from_python_script(pasted: Pasted) -> Translation:
    """The job of a Python program. Raises: SpecError naming the argument, its value, the rule and the way out."""
    notes = Notes()
    about = _mapping(pasted.values.get(ROLE))
    if not about:
        raise SpecError(
            f"{pasted.where} is no Python program; give the program itself, or its settings with another --dialect.",
            parameter="dialect",
        )
    parts = {key: dict(value) for key, value in pasted.values.items() if isinstance(value, Mapping) and key != ROLE}
    notes.unknown += [key for key in pasted.values if key not in PARTS_READ]
    settings = Settings(parts.get("model", {}), notes, "from_pretrained")
    unsloth = str(about.get("loader", "")).rpartition(".from")[0].rpartition(".")[2].startswith("Fast")
    training = {key: value for key, value in parts.get("training", {}).items() if key != "_target_"}
    training |= {key: value for key, value in parts.get("trainer", {}).items() if key in ON_TRAINERS and value is not None}
    notes.unknown += [f"trainer.{key}" for key in parts.get("trainer", {}) if key not in ON_TRAINERS]
    _model(settings, training, about, unsloth=unsloth)
    _prepared(about, training, notes)
    companions = {key: value for key, value in pasted.companions.items() if key not in ("training", "peft")}
    pasted.used.update(companions.keys() & set(PARTS))
    if adapter := _adapter(parts, about, settings, unsloth=unsloth):
        companions["peft"] = adapter
    _quantization(parts, training, notes)
    _say_what_is_left_out(about, notes)
    config = about.get("config")
    method = CONFIGS.get(str(config), "") or TRAINERS.get(str(about.get("trainer")), "")
    whose = Whose(bool(method), True, f"TRL's by {config}" if method else f"transformers' own by {config}")
    if not method:
        _length_of_texts(about, training, notes)
    program = f"{method}.py" if method else ""
    versions = _versions(about, pasted.versions, unsloth=unsloth)
    inner = replace(pasted, values=training, companions=companions, versions=versions, program=program)
    job = notes.include(from_parts(inner, "training", whose))
    if (reference := about.get("reference")) and job.reference == "adapter_off":
        job = with_own_reference(job, notes, f"the trainer gets ref_model={reference}")
    if about.get("widens"):
        job = _widened(job, notes)
    if about.get("without_cache"):
        job = without_cache(job)
    if about.get("keeps_logits"):
        note_kept_logits(job, training, notes)
    if about.get("loads_first"):
        job = _partitioned_later(job, notes)
    settings.note_left(_MODEL)
    return notes.finish(job)


def _model(settings: Settings, training: dict[str, Any], about: Mapping[str, Any], *, unsloth: bool) -> None:
    """Put into `training` how the model is loaded, under the names of training arguments."""
    name = settings.text("model_name")
    if not name and "model_name" not in _mapping(about.get("not_given")):
        settings.given("model_name")
    training |= {"model_name_or_path": _base_name(name)} if name else {}
    dtype = settings.raw("dtype") or settings.raw("torch_dtype")
    if dtype and dtype != "auto":
        training["torch_dtype"] = dtype
    elif about.get("loader"):  # otherwise the trainer loads it
        training["torch_dtype"] = "auto" if dtype or unsloth else FROM_PRETRAINED
    training["model_class"] = str(about.get("loader", "")).rpartition(".")[0].rpartition(".")[2]
    if attention := settings.text("attn_implementation"):
        training["attn_implementation"] = attention
    eight = settings.switch("load_in_8bit")
    whole = settings.switch("full_finetuning")
    four = settings.switch("load_in_4bit", unsloth and not eight and not whole and not name.endswith("-bnb-4bit"))
    if unsloth and not settings.given("load_in_4bit") and four:
        settings.notes.assumptions.append("load_in_4bit is not given; the default of Unsloth is True.")
    if (four or name.endswith("-bnb-4bit")) and not whole:
        training |= {"load_in_4bit": True, "use_bnb_nested_quant": unsloth}
        training["bnb_4bit_compute_dtype"] = "" if unsloth else OWN_COMPUTE
    elif eight:
        training["load_in_8bit"] = True
    length = settings.integer("max_seq_length", 2048 if unsloth else None)
    if length and not {"max_length", "max_seq_length"} & set(training):
        training["max_length"] = length
    if settings.switch("load_in_fp8") or settings.switch("load_in_16bit"):
        settings.notes.ignored.append("load_in_16bit")
    _generation(settings, training, about)
    settings.given("quantization_config")


def _length_of_texts(about: Mapping[str, Any], training: dict[str, Any], notes: Notes) -> None:
    """Put into `training` the length at which the program's tokenizer cuts texts, as transformers' Trainer has none."""
    if "ForImageClassification" in str(about.get("loader", "")):  # it reads none
        return
    if {"max_length", "max_seq_length", "model_max_length", "block_size"} & set(training):
        return
    if target := about.get("targets_cut_at"):
        training["max_target_length"] = target
    if cut := about.get("cut_at"):
        training["max_length"] = cut
        notes.assumptions.append(f"texts are as long as the program's tokenizer leaves them: max_length={cut}.")
    else:
        notes.warnings.append(
            "The program does not say how many tokens a sequence has (no call with truncation and max_length); 1,024 "
            "are assumed, and the peak grows with them. Give yours: --sequence-length.",
            "max_length",
        )


def _prepared(about: Mapping[str, Any], training: dict[str, Any], notes: Notes) -> None:
    """Apply calls that change the loaded network before training."""
    if about.get("checkpoints") and not training.get("gradient_checkpointing"):
        training["gradient_checkpointing"] = True
        notes.assumptions.append("gradient checkpointing is on, by a call on the network.")


def _widened(job: TrainingJob, notes: Notes) -> TrainingJob:
    """`job` after peft's prepare_model_for_kbit_training, which casts all 16-bit weights that bitsandbytes has not
    quantised to float32, but none of a network that GPTQ has quantised (peft 0.21 utils/other.py)."""
    if job.finetuning.quantization == "gptq":
        return job
    if job.finetuning.quantization and job.parallelism.world_size == 1:
        notes.assumptions.append("peft's prepare_model_for_kbit_training widens norms, embedding and head to float32.")
        return prepared_for_kbit_training(job)
    notes.unsupported.append(
        "peft's prepare_model_for_kbit_training widens weights that are not quantised, such as the embedding and the head, "
        "to float32, which is modelled for quantised networks on one GPU only: 2 bytes more for each of their parameters.",
        "prepare_model_for_kbit_training",
        "more",
    )
    return job


def _partitioned_later(job: TrainingJob, notes: Notes) -> TrainingJob:
    """`job` of a program that loads the network before it makes its training arguments: transformers does not know of
    ZeRO-3 yet, so the network is not created under `zero.Init` (4.40, 5.17 integrations/deepspeed.py)."""
    if job.parallelism.zero_stage < 3:
        return job
    job = job.replace(framework_options=FrozenMapping({**job.framework_options, "partitions_as_made": False}))
    if not replaces_linear(job):
        notes.warnings.append(
            "The network is loaded before the training arguments are made, so DeepSpeed before 0.19.4 does not replace its "
            "linear layers, and weights that ZeRO-3 has gathered stay on the GPU from forward to backward; make the "
            "arguments first.",
            "deepspeed",
        )
    return job


def _generation(settings: Settings, training: dict[str, Any], about: Mapping[str, Any]) -> None:
    """Read the settings of vLLM inside Unsloth: with `fast_inference`, vLLM gets the fraction `gpu_memory_utilization` of
    the GPU."""
    share = settings.number("gpu_memory_utilization", 0.5)
    if settings.switch("fast_inference"):
        training |= {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": share}
        if about.get("standby"):
            training["vllm_enable_sleep_mode"] = True


def _adapter(
    parts: Mapping[str, Any], about: Mapping[str, Any], settings: Settings, *, unsloth: bool
) -> dict[str, Any] | None:
    """The adapter settings under the names of adapter_config.json."""
    given = {key: value for key, value in parts.get("adapter", {}).items() if key != "_target_"}
    if not about.get("adapter"):
        return None
    checkpoints = settings.raw("use_gradient_checkpointing")
    if unsloth:
        usual = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
        given = {"r": 16, "lora_alpha": 16, "target_modules": usual, **given}
        given = {key: value for key, value in given.items() if not re.fullmatch(r"finetune_\w+|max_seq_length", key)}
        if checkpoints is not None:
            given.setdefault("use_gradient_checkpointing", checkpoints)
    return {"peft_type": "LORA", **given}


def _quantization(parts: Mapping[str, Any], training: dict[str, Any], notes: Notes) -> None:
    """Put bitsandbytes' configuration into `training`, under the names of training arguments."""
    bits = Settings(parts.get("quantization", {}), notes, "bitsandbytes")
    if bits.switch("load_in_4bit"):
        training |= {"load_in_4bit": True, "use_bnb_nested_quant": bits.switch("bnb_4bit_use_double_quant")}
        training["bnb_4bit_quant_type"] = bits.text("bnb_4bit_quant_type", "nf4")
        training["bnb_4bit_compute_dtype"] = bits.text("bnb_4bit_compute_dtype", OWN_COMPUTE)
        training["bnb_4bit_quant_storage"] = bits.text("bnb_4bit_quant_storage", "uint8")
    elif bits.switch("load_in_8bit"):
        training["load_in_8bit"] = True
    known = r"bnb_4bit_(compute_dtype|quant_storage|quant_type|use_double_quant)|load_in_8bit|llm_int8_\w+|_target_"
    bits.note_left(re.compile(known))


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _base_name(name: str) -> str:
    """The name of the original network, without the suffix of Unsloth's 4-bit uploads."""
    return re.sub(r"(-unsloth)?-bnb-4bit$", "", name)


def _say_what_is_left_out(about: Mapping[str, Any], notes: Notes) -> None:
    for key, source in _mapping(about.get("not_given")).items():
        if key in ("model.model_name", "trainer.model"):
            raise SpecError(
                f"the model's name is {source}, which only running the program would give; name it by --model.",
                parameter="model",
                value=source,
            )
        if not re.search(r"token|dataset|seed|output_dir|run_name|report_to|steps|model_init|reward|rope|device_map", key):
            notes.warnings.append(f"{key} is {source}, which only running the program would give; it is left out.", key)
    others = about.get("others")
    for other in others if isinstance(others, list) else ():
        notes.warnings.append(
            f"The program also makes a {other}, of another training; {about.get('config')} is read.", other
        )
    notes.ignored += [ROLE]
