"""Hugging Face training configurations, translated into a `TrainingJob`: config.json, TrainingArguments and TRL's
SFTConfig, peft LoraConfig, DeepSpeed JSON and FSDP settings. The meanings of keys are tables in `keys.py`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from peakcast.core.errors import SpecError
from peakcast.core.fields import FrozenMapping
from peakcast.core.versions import check_versions, release, resolved
from peakcast.dialects.common.job_file import network_config, note_network, resolve_architecture
from peakcast.dialects.common.mesh import of_training
from peakcast.dialects.common.translation import (
    Notes,
    Settings,
    Translation,
    gpu_count,
    note_inner,
    refuse_teacher,
)
from peakcast.dialects.huggingface import keys
from peakcast.dialects.huggingface.balancing import note_balancing
from peakcast.dialects.huggingface.batch import batch_form, sequence_length, target_length
from peakcast.dialects.huggingface.deepspeed import check_agreement, note_engine_optimizer
from peakcast.dialects.huggingface.dtypes import (
    finetuning_of,
    half_dtype,
    note_release_of_accelerate,
    precision_of,
    quantized_compute,
    weights_dtype,
    widened_adapters,
    widened_under_fsdp,
    with_auto_dtype,
)
from peakcast.dialects.huggingface.evaluation import note_evaluation
from peakcast.dialects.huggingface.optimizers import engines_optimizer, optimizer_of
from peakcast.dialects.huggingface.parallelism import (
    fsdp_settings,
    fsdp_version,
    has_checkpoints,
    layout_and_offload,
    started_with,
)
from peakcast.dialects.huggingface.post_training import with_head
from peakcast.dialects.huggingface.quantization import quantization_of, storage_under_fsdp
from peakcast.dialects.huggingface.unsloth import ALLOCATOR, NEWEST_UNSLOTH, in_words_of_the_trainer, is_unsloths, offloads
from peakcast.jobs.architecture import Architecture
from peakcast.jobs.conventions import check_framework_options, conventions
from peakcast.jobs.spec import (
    ActivationCheckpointing,
    Finetuning,
    Framework,
    Loss,
    Precision,
    TrainingJob,
)

ATTENTIONS: dict[str, Literal["eager", "sdpa", "flash_attention_2", "flex"]] = {
    "eager": "eager", "sdpa": "sdpa", "flash_attention_2": "flash_attention_2", "flash_attention_3": "flash_attention_2",
    "flex_attention": "flex", "flex": "flex",
}  # fmt: skip


FIRST_WITH_SDPA = (4, 36)
"""The release of transformers from which sdpa is the default of networks that have it (modeling_utils.py
_autoset_attn_implementation); the default was eager before."""


@dataclass(frozen=True, slots=True)
class _Run:
    """One run: its network, and the settings of each library. Settings that are None mean that the run does not use that
    library."""

    config: Mapping[str, Any] | str | Architecture
    model: Mapping[str, Any]
    """The keys of its config.json; {} for a network of the catalog."""
    architecture: Architecture
    training: Settings
    adapter: Settings | None
    engine: Settings | None
    """DeepSpeed's."""
    shards: Settings | None
    """FSDP's."""
    num_gpus: int
    versions: Mapping[str, Any]
    notes: Notes
    widens_for_fsdp: tuple[int, ...]
    """The versions of FSDP that accelerate prepares with its own code, which casts what it shards to float32 under mixed
    precision."""

    @property
    def is_modern(self) -> bool:
        """Whether the defaults are those of transformers 5."""
        return (release(resolved(self.versions).get("transformers", "")) or (5,)) >= (5,)


def from_huggingface(
    config: Mapping[str, Any] | str | Architecture,
    training_arguments: Mapping[str, Any] | None = None,
    peft: Mapping[str, Any] | None = None,
    deepspeed: Mapping[str, Any] | None = None,
    fsdp: Mapping[str, Any] | str | None = None,
    num_gpus: int = 1,
    *,
    versions: Mapping[str, Any] | None = None,
    spell: Callable[[str], str] = str,
    widens_for_fsdp: tuple[int, ...] = (1, 2),
) -> Translation:
    """The job of a Trainer (or SFTTrainer) run on `num_gpus` GPUs.

    `config` is the mapping of a config.json, its path or a catalog name; `training_arguments` has the keys of
    TrainingArguments and SFTConfig, and how the model is loaded (`torch_dtype`, `attn_implementation`,
    `quantization_config`); the others have the keys of their libraries. `versions`: package versions (`transformers:
    "4.48.1"`), whose defaults are used. `spell` turns a key into the one that the user wrote, for messages.
    `widens_for_fsdp`: the versions of FSDP that accelerate's own functions prepare, which widens weights to float32.

    Raises: SpecError or CatalogError naming the key, its value, the rule and the way out.
    """
    num_gpus = gpu_count(num_gpus)
    notes = Notes()
    versions = check_versions(versions or {})
    unsloths = is_unsloths(versions, training_arguments, peft)
    if unsloths and isinstance(training_arguments or {}, Mapping) and isinstance(peft or {}, Mapping):
        training_arguments, peft = in_words_of_the_trainer(training_arguments, peft, notes)
        versions = {"unsloth": NEWEST_UNSLOTH, **versions}
    architecture = resolve_architecture(config)
    note_network(config, notes)
    training = _settings("training_arguments", with_auto_dtype(training_arguments), notes, spell)
    adapter = _settings("peft", peft, notes, spell) if peft is not None else None
    engine, shards = _strategy(deepspeed, fsdp, training, notes)
    shards = started_with(shards, num_gpus, notes)
    refuse_teacher(training, "teacher_model_name_or_path")
    model, widens = network_config(config), widens_for_fsdp
    run = _Run(config, model, architecture, training, adapter, engine, shards, num_gpus, versions, notes, widens)
    options: dict[str, Any] = {}
    job = _job(run, options)
    if unsloths:
        job = job.replace(allocator=ALLOCATOR)
        notes.assumptions.append("importing Unsloth sets the allocator: expandable_segments and roundup_power2_divisions.")
    if unsloths and not offloads(training, job.num_tokens, architecture.hidden_size):
        job = job.replace(offload=replace(job.offload, activations=False))
    job = _with_options(job, options, notes)
    named = model.get("architectures")
    model_class = training.text("model_class", str(named[0]) if isinstance(named, list) and named else "")
    job = with_head(job, model_class, notes)
    mesh = training.raw("parallelism_config") or {}
    job = of_training(job, mesh, notes) if isinstance(mesh, Mapping) else job
    note_evaluation(job, training, notes)
    note_balancing(job, training, notes, on=model.get("output_router_logits") is True)
    _account_for_the_rest(run)
    return notes.finish(job)


def _job(run: _Run, options: dict[str, Any]) -> TrainingJob:
    """The job that the settings describe. Framework options that they set are added to `options`."""
    training, engine, notes = run.training, run.engine, run.notes
    precision, finetuning = _precision_and_finetuning(run, options)
    if training.given("ddp_bucket_cap_mb"):
        options["ddp_bucket_cap_mib"] = training.integer("ddp_bucket_cap_mb")
    if training.number("neftune_noise_alpha", None) is not None:
        options["neftune"] = True
    options["smooths_labels"] = bool(training.number("label_smoothing_factor", 0.0))
    framework: Framework = "deepspeed" if engine is not None else "huggingface"
    parallelism, offload = layout_and_offload(
        engine, run.shards, training, run.num_gpus, run.architecture, notes, options
    )
    if engine is not None:
        check_agreement(engine, training, run.num_gpus)
    attention = _attention(run.model, training, run.versions, notes)
    return TrainingJob(
        architecture=run.architecture,
        framework=framework,
        versions=FrozenMapping(run.versions),
        micro_batch_size=_batch(training, engine, "per_device_train_batch_size", "train_micro_batch_size_per_gpu", 8),
        sequence_length=sequence_length(run.architecture, training, notes),
        decoder_sequence_length=target_length(run.architecture, training, notes),
        batch=batch_form(training, attention, run.versions, notes),
        gradient_accumulation_steps=_batch(
            training, engine, "gradient_accumulation_steps", "gradient_accumulation_steps", 1
        ),
        precision=precision,
        optimizer=engines_optimizer(engine, training, notes) or optimizer_of(training, run.versions, notes, options),
        finetuning=finetuning,
        attention=attention,
        activation_checkpointing=_checkpointing(training, run.shards, run.is_modern),
        loss=Loss(fused_linear_cross_entropy=_liger(training, options)),
        compile=training.switch("torch_compile") or any(training.text(key) for key in keys.COMPILING),
        parallelism=parallelism,
        offload=offload,
    )


def _precision_and_finetuning(run: _Run, options: dict[str, Any]) -> tuple[Precision, Finetuning]:
    """What is trained, and in which dtypes: they depend on each other, as adapters get their dtype from the weights."""
    training, engine, shards, notes = run.training, run.engine, run.shards, run.notes
    quantization = quantization_of(run.model, training, run.config)
    weights = weights_dtype(
        run.model, run.architecture.name, training, notes, is_modern=run.is_modern, quantized=bool(quantization)
    )
    half = half_dtype(training, engine, shards, notes)
    loaded = half if engine is not None and half is not None else weights
    widens = release(run.versions.get("peft", "0.12")) >= (0, 12)
    finetuning = finetuning_of(run.adapter, loaded, quantization, notes, options, widens)
    widened = widened_under_fsdp(shards, run.versions, run.widens_for_fsdp)
    finetuning = widened_adapters(finetuning, half, shards, widened, notes)
    if half is not None and shards is not None and 2 in run.widens_for_fsdp and not run.is_modern:
        note_release_of_accelerate(shards, run.versions, weights, finetuning, notes)
    if finetuning.quantization == "nf4" and quantized_compute(quantization, training) not in (None, half or weights):
        options["quantized_compute_dtype"] = quantized_compute(quantization, training)
    if finetuning.quantization and shards is not None:
        options |= storage_under_fsdp(quantization, fsdp_version(shards), notes)
    return precision_of(weights, half, engine, widened, finetuning, notes, options), finetuning


def _with_options(job: TrainingJob, options: dict[str, Any], notes: Notes) -> TrainingJob:
    """`job` with those of `options` that its framework has and that differ from the framework's defaults."""
    known = conventions(job)
    for name in [name for name in options if name not in known]:
        notes.assumptions.append(f"{name}={options[name]!r} is left to the default of framework={job.framework!r}.")
    differ = {name: value for name, value in options.items() if name in known and known[name] != value}
    job = job.replace(framework_options=FrozenMapping(differ))
    check_framework_options(job)
    return job


def _strategy(
    deepspeed: Mapping[str, Any] | None, fsdp: Mapping[str, Any] | str | None, training: Settings, notes: Notes
) -> tuple[Settings | None, Settings | None]:
    """The settings of DeepSpeed and of FSDP, of which a run has at most one."""
    strategy = training.raw("deepspeed") if deepspeed is None else deepspeed
    engine = _settings("deepspeed", strategy, notes) if isinstance(strategy, Mapping) else None
    if isinstance(strategy, str):
        raise training.refuse("deepspeed", "is a path; give the mapping in that file as `deepspeed`")
    shards = fsdp_settings(fsdp, training, notes)
    if engine is not None and shards is not None:
        raise SpecError(
            "fsdp and deepspeed are both given, and both shard the run; keep one of them.", parameter="fsdp", value=fsdp
        )
    return engine, shards


def _settings(name: str, mapping: object, notes: Notes, spell: Callable[[str], str] = str) -> Settings:
    if mapping is not None and not isinstance(mapping, Mapping):
        raise SpecError(
            f"huggingface.{name}={mapping!r} must be a mapping of keys to values.", parameter=name, value=mapping
        )
    given = {key: value for key, value in (mapping or {}).items() if value is not None}
    values = {key: value for key, value in given.items() if value != "auto"}
    if name == "deepspeed":
        notes.unknown += sorted(set(given) - set(values) - keys.AUTOMATIC)
    return Settings(values, notes, {"peft": "peft", "deepspeed": "DeepSpeed"}.get(name, "transformers"), spell)


def _batch(training: Settings, engine: Settings | None, key: str, engine_key: str, default: int) -> int:
    if engine is not None and engine.given(engine_key) and not training.given(key):
        return engine.size(engine_key)
    return training.size(key, default, assume=key == "per_device_train_batch_size")


def _attention(
    model: Mapping[str, Any], training: Settings, versions: Mapping[str, Any], notes: Notes
) -> Literal["eager", "sdpa", "flash_attention_2", "flex"]:
    before_sdpa = (release(resolved(versions).get("transformers", "")) or FIRST_WITH_SDPA) < FIRST_WITH_SDPA
    own = "eager" if before_sdpa else "sdpa"
    default = str(model.get("_attn_implementation") or model.get("attn_implementation") or own)
    if training.switch("use_flash_attn") or training.switch("use_flash_attention_2"):
        default = "flash_attention_2"
    value = training.text("attn_implementation", default)
    if value not in ATTENTIONS:
        notes.unsupported.append(
            f"attn_implementation={value!r} is not modelled; flash_attention_2 is assumed instead.",
            "attn_implementation",
        )
        return "flash_attention_2"
    if value == "flash_attention_3":
        notes.unsupported.append(
            "FlashAttention 3's workspaces are not modelled; those of FlashAttention 2 are assumed.", "attn_implementation"
        )
    return ATTENTIONS[value]


def _checkpointing(training: Settings, shards: Settings | None, modern: bool) -> ActivationCheckpointing:
    given = training.raw("gradient_checkpointing_kwargs") or {}
    if not isinstance(given, Mapping):
        raise training.refuse("gradient_checkpointing_kwargs", "must be a mapping, such as {use_reentrant: false}")
    settings = Settings(given, training.notes, "transformers", lambda key: f"gradient_checkpointing_kwargs.{key}")
    if has_checkpoints(shards, training):  # accelerate 1.15 utils/fsdp_utils.py: CheckpointImpl.NO_REENTRANT
        return ActivationCheckpointing(mode="full", use_reentrant=False)
    if not training.switch("gradient_checkpointing"):
        return ActivationCheckpointing()
    reentrant = settings.switch("use_reentrant", not modern)
    if not settings.given("use_reentrant"):
        training.notes.assumptions.append(f"use_reentrant is not given: {reentrant} in transformers {5 if modern else 4}.")
    each = settings.integer("every_n_layers", 1) or 1
    return ActivationCheckpointing(mode="full", use_reentrant=reentrant, every_n_layers=each)


def _liger(training: Settings, options: dict[str, Any]) -> bool:
    if training.switch("liger_kernels"):  # from other projects, which can ask for the kernels alone or the loss alone
        options["liger_kernels"] = True
    if training.switch("fused_linear_cross_entropy"):
        return True
    if not (training.switch("use_liger_kernel") or training.switch("use_liger")):
        return False
    options["liger_kernels"] = True
    return True


def _account_for_the_rest(run: _Run) -> None:
    """Note settings that are not modelled; and of those that no function has read, which are known to cost no memory."""
    training, engine, notes = run.training, run.engine, run.notes
    if training.switch("auto_find_batch_size"):
        notes.warnings.append(
            "auto_find_batch_size lowers the batch when memory runs out; the one given is assumed.",
            "auto_find_batch_size",
            "less",
        )
    for key, (usual, what) in keys.UNLESS.items():
        if training.given(key) and training.text(key).lower() not in usual:
            name = training.spell(key)
            notes.unsupported.append(f"{what} ({name}={training.text(key)}) is not modelled.", name)
    if training.given("torch_empty_cache_steps"):
        notes.assumptions.append("torch_empty_cache_steps lowers reserved memory between steps only; it is left out.")
    _account_for_offloading(run)
    if not isinstance(training.raw("parallelism_config", {}), Mapping):
        raise training.refuse("parallelism_config", "must be a mapping of sizes, such as dp_shard_size: 8")
    note_inner(training, "gradient_checkpointing_kwargs", keys.CHECKPOINT_SETTINGS, keys.CHECKPOINT_DETAILS)
    if engine is not None:
        _account_for_the_engine(notes, engine)
    for settings, ignored in (
        (training, keys.IGNORED_TRAINING),
        (run.adapter, keys.IGNORED_PEFT),
        (engine, keys.IGNORED_DEEPSPEED),
        (run.shards, keys.IGNORED_FSDP),
    ):
        if settings is not None:
            settings.note_left(ignored)


def _account_for_offloading(run: _Run) -> None:
    """Note which activations stay on the GPU although they are offloaded: tensors that more than one operation saves, and
    the last five saved (trl 1.16 models/activation_offloading.py). Bytes are those of traces with 2 and 16 layers of
    Llama."""
    training = run.training
    bare = _checkpointing(training, run.shards, run.is_modern).mode == "none"
    if bare and training.switch("activation_offloading"):
        run.notes.unsupported.append(
            "TRL's activation_offloading without gradient_checkpointing leaves tensors that several operations save on "
            "the GPU: of each layer of Llama about 15 bytes for every element of its hidden states, 8 with LoRA. They "
            "are counted as on the host; with gradient_checkpointing=true nearly all of them are.",
            training.spell("activation_offloading"),
            "more",
        )


def _account_for_the_engine(notes: Notes, engine: Settings) -> None:
    for key in ("bf16", "fp16"):
        note_inner(engine, key, ("enabled",), keys.HALF_DETAILS)
    note_engine_optimizer(engine)
    for key, what in keys.UNSUPPORTED_DEEPSPEED.items():
        if engine.raw(key) not in (None, False, {}, 1):
            notes.unsupported.append(f"{what[0].upper()}{what[1:]} ({key}) is not modelled.", key)
