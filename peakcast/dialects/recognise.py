"""Recognises every kind of configuration by its content, and calls its reader."""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NamedTuple

from peakcast.core.bounded import is_folder
from peakcast.core.errors import PeakcastError, SpecError, near_misses
from peakcast.core.fields import flat
from peakcast.dialects.common.asked_versions import NO_VERSIONS, AskedVersions, with_versions
from peakcast.dialects.common.foreign import foreign
from peakcast.dialects.common.pasted import Document, Pasted, mapping_of_file, mapping_of_text
from peakcast.dialects.common.translation import AlternativeReading, Notes, Translation
from peakcast.jobs.allocator_settings import Allocator
from peakcast.jobs.spec import TrainingJob


class Dialect(NamedTuple):
    """A kind of configuration: its name in sentences, the keys that identify it, and its reader."""

    title: str
    signs: tuple[str, ...]
    """Each is a set of keys (dots lead into mappings, `|` separates alternatives); all keys of one set must be there."""
    reader: str
    """Module and function in `peakcast.dialects`."""
    weak: tuple[str, ...] = ()
    """Further sets of keys that other projects have too: with these, the dialect is likely but not certain."""


DIALECTS: dict[str, Dialect] = {
    "job": Dialect("a peakcast job", ("architecture",), "common.job_file:from_job"),
    "python_script": Dialect(
        "a Python program around transformers' trainers", ("trainer_calls",), "python_script:from_python_script"
    ),
    "axolotl": Dialect(
        "an Axolotl configuration",
        ("base_model micro_batch_size|sequence_len|adapter|datasets|sample_packing",),
        "axolotl.job:from_axolotl",
    ),
    "lmflow": Dialect(
        "an LMFlow command",
        (
            "model_name_or_path conversation_template|disable_group_texts|group_texts_batch_size|save_aggregated_lora"
            "|lora_model_path|use_lisa|lisa_activated_layers|use_customized_optim",
        ),
        "lmflow:from_lmflow",
        ("model_name_or_path dataset_path block_size",),
    ),
    "open_instruct": Dialect(
        "an open-instruct configuration",
        (
            "model_name_or_path dataset_mixer_list|use_slow_tokenizer|with_tracking|reduce_loss",
            "model_name_or_path use_qlora",
        ),
        "open_instruct:from_open_instruct",
    ),
    "llamafactory_megatron": Dialect(
        "a LLaMA-Factory configuration for Megatron",
        (
            "model_name_or_path stage|finetuning_type|cutoff_len|template "
            "tensor_model_parallel_size|pipeline_model_parallel_size|expert_model_parallel_size|use_distributed_optimizer",
        ),
        "llamafactory.megatron:from_llamafactory_megatron",
    ),
    "llamafactory_v1": Dialect(
        "a LLaMA-Factory v1 configuration",
        ("model_class train_dataset|peft_config|dist_config",),
        "llamafactory.v1:from_llamafactory_v1",
    ),
    "llamafactory": Dialect(
        "a LLaMA-Factory configuration",
        ("model_name_or_path stage|finetuning_type|cutoff_len|template|lora_target",),
        "llamafactory.job:from_llamafactory",
        ("model_name_or_path lora_rank",),
    ),
    "swift_megatron": Dialect(
        "an ms-swift configuration for Megatron",
        (
            "model micro_batch_size|global_batch_size|recompute_granularity|tensor_model_parallel_size"
            "|pipeline_model_parallel_size|expert_model_parallel_size "
            "train_type|tuner_type|max_length|finetune|load_safetensors",
        ),
        "swift.megatron:from_swift_megatron",
    ),
    "swift": Dialect(
        "an ms-swift configuration",
        (
            "model train_type|tuner_type|sft_type|rlhf_type|attn_impl|quant_bits|loss_scale",
            "model model_author|split_dataset_ratio|dataset_num_proc per_device_train_batch_size|deepspeed|max_length",
        ),
        "swift.job:from_swift",
    ),
    "openrlhf": Dialect(
        "an OpenRLHF command",
        ("pretrain micro_train_batch_size|generate_max_len|max_len|zero_stage",),
        "openrlhf:from_openrlhf",
    ),
    "verl": Dialect(
        "a verl configuration",
        (
            "actor_rollout_ref.model|actor_rollout_ref.actor",
            "model.partial_pretrain",
            "data.train_files model|model.path trainer",
        ),
        "verl:from_verl",
    ),
    "automodel": Dialect(
        "a NeMo AutoModel recipe", ("step_scheduler model|model.pretrained_model_name_or_path",), "automodel:from_automodel"
    ),
    "gpt_neox": Dialect("a GPT-NeoX configuration", ("pipe_parallel_size|pipe-parallel-size",), "gpt_neox:from_gpt_neox"),
    "megatron_bridge": Dialect(
        "a Megatron-Bridge configuration",
        (
            "model|model.tensor_model_parallel_size train.micro_batch_size|train.global_batch_size|mixed_precision "
            "ddp|checkpoint|rng",
        ),
        "megatron_bridge:from_megatron_bridge",
    ),
    "nemo_2": Dialect(
        "a NeMo 2 recipe",
        ("trainer.strategy data.micro_batch_size|data.seq_length|data.global_batch_size",),
        "nemo_2:from_nemo_2",
    ),
    "nanotron": Dialect(
        "a nanotron configuration", ("model.model_config parallelism|tokens",), "nanotron.job:from_nanotron"
    ),
    "torchtune": Dialect("a torchtune recipe", ("model._component_",), "torchtune:from_torchtune"),
    "torchtitan": Dialect(
        "a torchtitan configuration",
        (
            "model.flavor training|parallelism",
            "model_spec training",
            "training.seq_len|training.local_batch_size parallelism|model|activation_checkpoint|hf_assets_path",
        ),
        "torchtitan.job:from_torchtitan",
    ),
    "litgpt": Dialect(
        "a LitGPT configuration",
        ("checkpoint_dir|model_name|model_config.n_layer|model.n_layer train.micro_batch_size|train.global_batch_size",),
        "litgpt.job:from_litgpt",
        ("checkpoint_dir lora_r|precision",),
    ),
    "nemo": Dialect(
        "a NeMo 1 GPT configuration",
        ("model.num_layers model.micro_batch_size model.encoder_seq_length",),
        "nemo:from_nemo",
    ),
    "slime": Dialect(
        "a slime command", ("actor-num-nodes|actor-num-gpus-per-node rollout-batch-size|num-rollout",), "slime:from_slime"
    ),
    "megatron_yaml": Dialect(
        "a Megatron-LM --yaml-cfg file", ("language_model model_parallel",), "megatron.launch:from_megatron_yaml"
    ),
    "megatron": Dialect(
        "Megatron-LM arguments",
        (
            "num_layers|num-layers|yaml_cfg|yaml-cfg hidden_size|hidden-size|yaml_cfg|yaml-cfg "
            "seq_length|seq-length|micro_batch_size|micro-batch-size|yaml_cfg|yaml-cfg|encoder_seq_length|encoder-seq-length",
            "num-layers|hidden-size|seq-length|micro-batch-size tensor-model-parallel-size|num-layers|hidden-size",
        ),
        "megatron.launch:from_megatron_flags",
    ),
    "accelerate": Dialect(
        "an accelerate configuration",
        ("distributed_type", "compute_environment", "fsdp_config mixed_precision"),
        "huggingface.trainer:from_accelerate",
    ),
    "deepspeed": Dialect(
        "a DeepSpeed configuration",
        ("zero_optimization", "train_micro_batch_size_per_gpu", "bf16.enabled", "fp16.enabled"),
        "huggingface.trainer:from_deepspeed",
        ("train_batch_size",),
    ),
    "peft": Dialect("a PEFT adapter_config.json", ("peft_type",), "huggingface.trainer:from_peft"),
    "deepspeed_script": Dialect(
        "arguments of a script around DeepSpeed's engine",
        ("deepspeed_config model_name batch_size",),
        "huggingface.deepspeed_script:from_deepspeed_script",
    ),
    "training": Dialect(
        "Hugging Face training arguments",
        (
            "per_device_train_batch_size",
            "model_name_or_path dataset_name|train_file|learning_rate|max_length|max_seq_length|use_peft|bf16"
            "|num_train_epochs",
            "output_dir learning_rate|num_train_epochs|gradient_checkpointing|gradient_accumulation_steps|bf16",
        ),
        "huggingface.trainer:from_training",
    ),
    "trl": Dialect("arguments of TRL's trainers", (), "huggingface.trainer:from_trl"),
    "transformers": Dialect("arguments of transformers' own Trainer", (), "huggingface.trainer:from_transformers"),
    "fsdp": Dialect(
        "an FSDP configuration of transformers' Trainer",
        ("transformer_layer_cls_to_wrap", "fsdp_transformer_layer_cls_to_wrap", "fsdp_version", "fsdp_sharding_strategy"),
        "huggingface.trainer:from_fsdp",
    ),
    "hf_config": Dialect(
        "a Hugging Face config.json",
        ("model_type hidden_size|n_embd|d_model|text_config|num_hidden_layers", "architectures"),
        "huggingface.trainer:from_config",
    ),
}
"""Every dialect; those with more specific keys come first."""
HUGGING_FACE_PARTS = ("hf_config", "peft", "deepspeed", "accelerate", "training")
"""Files that may accompany another one as parts of one Hugging Face run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadOptions:
    """What the question gives with a configuration: other files, number of GPUs, another model, the dialect, versions."""

    files: tuple[str | Path | Document, ...] = ()
    num_gpus: int | None = None
    model: str | None = None
    dialect: str | None = None
    versions: AskedVersions = NO_VERSIONS

    def __bool__(self) -> bool:
        """Whether anything is given that only makes sense with a configuration; versions can be given for any job."""
        return bool(self.files or self.num_gpus is not None or self.model is not None or self.dialect is not None)


NOTHING = ReadOptions()


PROGRAMS = {
    "llamafactory-cli": ("llamafactory_v1", "llamafactory_megatron", "llamafactory"), "axolotl": ("axolotl",),
    "axolotl.cli.train": ("axolotl",), "tune": ("torchtune",), "litgpt": ("litgpt",),
    "openrlhf": ("openrlhf",), "verl": ("verl",), "automodel": ("automodel",), "run_recipe.py": ("megatron_bridge",),
    "swift": ("swift",), "megatron": ("swift_megatron",), "torchtitan.train": ("torchtitan",),
    "run_train.sh": ("torchtitan",),
}  # fmt: skip
"""Programs that only read one project's configurations -> its dialects; the last is used if no key identifies another."""


class Recognised(NamedTuple):
    """The dialect that was assumed for a mapping, and why."""

    name: str
    rests_on: str
    """The program or the keys by which it was recognised, in words."""
    sure: bool


def recognised(values: Mapping[str, Any], program: str = "") -> list[Recognised]:
    """The dialects in which a mapping may be written, the most likely first; after a certain one, no others are listed."""
    word = program.split(" ")[0].rsplit("/", 1)[-1]
    word = word if word in PROGRAMS else word.split(".")[0]  # openrlhf.cli.train_sft
    keys = _keys(values)
    found: list[Recognised] = []
    for name, dialect in DIALECTS.items():
        if word in PROGRAMS and name not in PROGRAMS[word]:
            continue
        for sign, sure in (*((sign, True) for sign in dialect.signs), *((sign, False) for sign in dialect.weak)):
            told = [next((option for option in word.split("|") if option in keys), "") for word in sign.split()]
            if all(told):
                found.append(Recognised(name, " and ".join(told), sure))
                break
        if found and found[-1].sure:
            break
    if word in PROGRAMS:
        name = found[0].name if found else PROGRAMS[word][-1]
        return [Recognised(name, f"the program {word}", True)]
    return found


def dialect_of(values: Mapping[str, Any]) -> str | None:
    """The dialect in which a mapping is written; None if it cannot be recognised."""
    found = recognised(values)
    return found[0].name if found else None


def _keys(values: Mapping[str, Any]) -> set[str]:
    """The keys of a mapping and of mappings inside it, with their paths."""
    keys = {str(key) for key in flat(values)} | {str(key) for key in values}
    return keys | {key.rpartition(".")[0] for key in keys} | {".".join(key.split(".")[:2]) for key in keys}


def translated(pasted: Pasted, options: ReadOptions = NOTHING) -> Translation:
    """The job of an `opened` configuration and `options`. Raises: SpecError or CatalogError naming the file or the key."""
    notes = Notes()
    notes.assumptions += pasted.remarks
    pasted = replace(
        pasted,
        companions={**companions(options.files), **pasted.companions},
        num_gpus=pasted.num_gpus if options.num_gpus is None else options.num_gpus,
        model=options.model or pasted.model,
        versions=options.versions,
    )
    if options.dialect is None and (sentence := foreign(_keys(pasted.values), pasted.values, pasted.program)):
        raise SpecError(f"{pasted.where} {sentence}", parameter="job")
    forced = _named(options.dialect)
    found = [Recognised(forced, "", True)] if forced else recognised(pasted.values, pasted.program)
    name = found[0].name if found else None
    if name not in HUGGING_FACE_PARTS and pasted.model is None and "hf_config" in pasted.companions:
        pasted = replace(pasted, model=pasted.companions["hf_config"], used={"hf_config"})
    of_a_job = {field.name for field in fields(TrainingJob)}.intersection(pasted.values)
    if name is None and not pasted.program and of_a_job and 2 * len(of_a_job) >= len(pasted.values):
        name = "job"
    if name is None:
        raise SpecError(
            f"{pasted.where} is no configuration that is known here (its keys: {_some(pasted.values)}). "
            + (f"Run it on fake tensors: peakcast dryrun -- {pasted.program} ... " if pasted.program else "")
            + f"{'Or give' if pasted.program else 'Give'} the model and the step as a job (--model, --micro-batch-size, "
            "--sequence-length, --sharding and the like); if peakcast reads such files, say what it is by --dialect.",
            parameter="job",
        )
    if name != "job":
        notes.assumptions.insert(0, _read_as(pasted, name, found))
    try:
        job = notes.include(_reader(name)(pasted))
    except SpecError as error:
        raise pasted.explained(error) from None
    for other in found[1:]:
        with contextlib.suppress(PeakcastError):
            read = _reader(other.name)(pasted)
            way_out = f"Say which by --dialect {name} or --dialect {other.name}."
            notes.others += [AlternativeReading(DIALECTS[other.name].title, read.job, way_out)] * (read.job != job)
    used = [pasted.companions[name] for name in pasted.used]
    for given in map(_read, options.files if name not in HUGGING_FACE_PARTS else ()):
        if given.values not in used:
            notes.warnings.append(
                f"{given.where} is given with {pasted.where}, which does not use it; it is left out.", given.where
            )
    allocator = "".join(pasted.env.get(name, "") for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"))
    read = notes.finish(job)
    if "expandable_segments:true" in allocator.lower().replace(" ", ""):
        read = read.changed(lambda job: job.replace(allocator=Allocator(expandable_segments=True)))
    return with_versions(read, options.versions)


def _read_as(pasted: Pasted, name: str, found: Sequence[Recognised]) -> str:
    """The sentence that says which dialect was assumed, from what, and how certain that is."""
    title = f"{pasted.where} is read as {DIALECTS[name].title}"
    if not found or not found[0].rests_on:
        return f"{title}, as asked." if found else f"{title}."
    if found[0].sure:
        return f"{title}, by {found[0].rests_on}."
    return f"{title}, by {found[0].rests_on} alone, which other projects have too; --dialect says what it is."


def _reader(name: str) -> Callable[[Pasted], Translation]:
    module, _, function = DIALECTS[name].reader.partition(":")
    reader: Callable[[Pasted], Translation] = getattr(importlib.import_module(f"peakcast.dialects.{module}"), function)
    return reader


def _named(dialect: str | None) -> str | None:
    if dialect is not None and dialect not in DIALECTS:
        raise SpecError(
            f"dialect={dialect!r} must be one of {', '.join(DIALECTS)}{near_misses(dialect, DIALECTS)}".rstrip("?") + ".",
            parameter="dialect",
            value=dialect,
        )
    return dialect


class Companion(NamedTuple):
    """Another file of the same run."""

    where: str
    """Its name in messages."""
    name: str
    """The name by which a configuration may refer to it."""
    values: Mapping[str, Any]


def companions(files: Sequence[str | Path | Document]) -> dict[str, Mapping[str, Any]]:
    """Other files by their dialect and by their names. Raises: SpecError if one is not recognised or comes twice."""
    found: dict[str, Mapping[str, Any]] = {}
    for where, file_name, values in map(_read, files):
        name = dialect_of(values)
        if name in found and name in HUGGING_FACE_PARTS:
            title = DIALECTS[name].title
            raise SpecError(f"{where} is {title}, and another was given already; keep one.", parameter="with")
        if name is None:
            keys = _some(values)
            raise SpecError(f"{where} is no configuration that is known here (its keys: {keys}).", parameter="with")
        found[name] = values
        found[file_name] = values
    return found


def _read(file: str | Path | Document) -> Companion:
    if isinstance(file, Document):
        where = file.name or "the text after ---"
        return Companion(where, file.name, mapping_of_text(file.text, where, Path(file.name).suffix))
    path = Path(file)
    path = path / "config.json" if is_folder(path) else path
    return Companion(str(path), path.name, mapping_of_file(path))


def _some(values: Mapping[str, Any]) -> str:
    keys = [str(key)[:40] for key in values]
    return ", ".join(keys[:8]) + (", ..." if len(keys) > 8 else "") if keys else "none"
