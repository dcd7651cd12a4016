"""Axolotl's YAML: a run of the Hugging Face Trainer, with other names for its settings.

Source: axolotl 0.4-0.13 src/axolotl/utils/schemas/config.py, core/builders/base.py and causal.py, loaders/model.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from peakcast.core.errors import SpecError
from peakcast.core.fields import FrozenMapping
from peakcast.dialects.axolotl import keys as keys
from peakcast.dialects.common.generation import READ, SAMPLING, Generation, generation_of
from peakcast.dialects.common.mesh import meshed, ranks_of
from peakcast.dialects.common.pasted import Pasted
from peakcast.dialects.common.required_releases import as_required
from peakcast.dialects.common.translation import (
    Notes,
    Settings,
    Translation,
    note_unsupported,
    refuse_teacher,
    renamed,
    speller,
    states_direction,
)
from peakcast.dialects.huggingface.accelerate import launcher_with_engine, refuse_twice
from peakcast.dialects.huggingface.balancing import KEY as BALANCING
from peakcast.dialects.huggingface.evaluation import strategy_of
from peakcast.dialects.huggingface.job import from_huggingface
from peakcast.dialects.huggingface.keys import COMPILING
from peakcast.dialects.huggingface.post_training import with_method
from peakcast.dialects.huggingface.quantization import STORAGES
from peakcast.dialects.huggingface.trl_checkpoints import has_stage_3, take_checkpoints
from peakcast.jobs.conventions import conventions
from peakcast.jobs.spec import TrainingJob

TRL = "1.9"
"""The release of trl that axolotl 0.19 requires."""


def from_axolotl(pasted: Pasted) -> Translation:
    """The job of an Axolotl configuration. Raises: SpecError naming the key, its value, the rule and the way out."""
    notes = Notes()
    settings = Settings(pasted.values, notes, "axolotl")
    training = renamed(settings, keys.TRAINING)
    own = settings.raw("optim_args")  # core/builders/base.py joins a mapping to transformers' text
    training["optim_args"] = ",".join(f"{key}={value}" for key, value in own.items()) if isinstance(own, Mapping) else own
    _batch(settings, training)
    method = settings.text("rl", "reward" if settings.switch("reward_model") else "sft").lower()
    generation = _generation(settings) if method == "grpo" else None
    if generation is not None:
        training["max_length"] = generation.sequence_length
    model = settings.model(pasted.model, "base_model")
    refuse_teacher(settings, "gkd_teacher")
    _precision(settings, training)
    _memory(settings, training)
    for name in keys.OVERRIDING:
        given = settings.raw(name)
        training[BALANCING] = training.get(BALANCING, False) or bool(isinstance(given, Mapping) and given.get(BALANCING))
    adapter = _adapter(settings, training)
    if settings.switch("sample_packing"):
        _packing(settings, training)
    strategy = _strategy(settings, training, pasted)
    if method != "sft":  # then a trainer of TRL's
        adapts_in_stage_3 = adapter is not None and has_stage_3(strategy["deepspeed"])
        take_checkpoints(training, method, adapts_in_stage_3, {"trl": TRL, **pasted.versions.given}, notes)
    gptq = settings.switch("gptq")
    _rest(settings)
    translation = from_huggingface(
        model,
        training,
        adapter,
        **strategy,
        versions=pasted.versions.of("huggingface"),
        spell=speller(keys.TRAINING, keys.ADAPTER),
        widens_for_fsdp=(1,),  # axolotl 0.21 monkeypatch/accelerate/fsdp2.py replaces accelerate's function
    )
    ligers = bool(training.get("liger_loss"))
    job = as_required(notes.include(translation), "axolotl", pasted.versions, notes, ligers_loss=ligers)
    if gptq and job.finetuning.quantization != "gptq":
        notes.unsupported.append("GPTQ weights (gptq) are not modelled where the network names none.", "gptq", "less")
    job = meshed(_units(_experts(job, settings)), settings, _mesh(settings), fills="shard")
    made, who = settings.switch("precompute_ref_log_probs"), f"trl {TRL}, which axolotl 0.19 requires,"
    job = with_method(job, method, "rl", notes, generation=generation, precomputed=made, whole_logits=who)
    return notes.finish(job)


def _batch(settings: Settings, training: dict[str, Any]) -> None:
    """Set the micro-batch, which may be given as the total of all accumulation steps, and the sequence length."""
    if "per_device_train_batch_size" not in training:
        steps, total = settings.integer("gradient_accumulation_steps"), settings.integer("batch_size")
        training["per_device_train_batch_size"] = total // steps if steps and total else settings.size("micro_batch_size")
    settings.size("sequence_len", 512, assume=True)
    training.setdefault("max_length", 512)
    training |= _evaluation(settings, training["per_device_train_batch_size"])


def _evaluation(settings: Settings, micro_batch_size: object) -> dict[str, Any]:
    """Whether and with how many sequences at once it evaluates (axolotl 0.19 core/builders/base.py
    `_configure_save_and_eval_strategy`, utils/config `normalize_config`: by default as many as training passes)."""
    steps = any([settings.number("eval_steps"), settings.number("evals_per_epoch")])
    given = strategy_of(settings, "eval_strategy")
    held_out = any([settings.number("val_set_size", 0.0), settings.raw("test_datasets")])
    sequences = settings.integer("eval_batch_size") or micro_batch_size
    strategy = "steps" if steps else given
    return {"eval_strategy": strategy if held_out else "no", "per_device_eval_batch_size": sequences}


def _strategy(settings: Settings, training: dict[str, Any], pasted: Pasted) -> dict[str, Any]:
    """How the run is divided over GPUs: the arguments `deepspeed`, `fsdp` and `num_gpus` of `from_huggingface`, from this
    file or from the launcher's beside it."""
    training["fsdp"] = list(settings.words("fsdp")) or None
    fsdp = settings.raw("fsdp_config")
    if fsdp and not isinstance(fsdp, Mapping):
        raise settings.refuse("fsdp_config", "must be a mapping of FSDP's settings")
    version = settings.integer("fsdp_version")
    if fsdp and version:
        fsdp = {"fsdp_version": version, **fsdp}
    launcher = launcher_with_engine(pasted, settings)
    refuse_twice(fsdp or None, launcher.fsdp, "fsdp_config", pasted.where)
    if launcher.mesh:
        training["parallelism_config"] = launcher.mesh
    return {
        "deepspeed": launcher.deepspeed,
        "fsdp": fsdp or launcher.fsdp,
        "num_gpus": launcher.gpus(pasted, settings.notes, ranks_of(settings, _mesh(settings))),
    }


def _mesh(settings: Settings) -> dict[str, str]:
    """Axis of the layout -> the key for its size."""
    context = "context_parallel_size" if settings.given("context_parallel_size") else "sequence_parallel_degree"
    return {**keys.MESH, "context": context}


def _experts(job: TrainingJob, settings: Settings) -> TrainingJob:
    """`job` with framework options for how a mixture's experts are computed and stored; unchanged for a dense network."""
    word, options = settings.text("experts_implementation"), dict(job.framework_options)
    if job.architecture.moe is None:
        return job
    if word and word not in keys.EXPERTS:
        settings.notes.unsupported.append(
            f"experts_implementation={word} is not modelled; grouped_mm is assumed.", "experts_implementation"
        )
    if keys.EXPERTS.get(word, "grouped_mm") != "grouped_mm":
        options["experts_implementation"] = keys.EXPERTS[word]
    if settings.switch("quantize_moe_experts") and job.finetuning.quantization:
        options["quantized_experts"] = True
    return job.replace(framework_options=FrozenMapping(options))


def _units(job: TrainingJob) -> TrainingJob:
    """`job` with the units that axolotl's own `fsdp2_prepare_model` makes: layers and the root, which has both ends
    (axolotl 0.21 monkeypatch/accelerate/fsdp2.py)."""
    if job.parallelism.sharding not in ("fsdp2", "hsdp") or conventions(job).get("fsdp2_units") == "root":
        return job
    return job.replace(framework_options=FrozenMapping({**job.framework_options, "fsdp2_units": "root"}))


def _generation(settings: Settings) -> Generation:
    """GRPO's settings: section `trl` has them under trl's names, and section `vllm` has those of a server (`axolotl
    vllm-serve`)."""
    given, server = (value if isinstance(value := settings.raw(key), Mapping) else {} for key in ("trl", "vllm"))
    values = {str(key): value for key, value in given.items() if value is not None}
    if values.get("vllm_mode") == "colocate":  # axolotl 0.19 core/trainers/grpo/__init__.py
        for key in ("gpu_memory_utilization", "tensor_parallel_size"):
            values.setdefault(f"vllm_{key}", server.get(key))
    if values.pop("use_liger_loss", None):
        what = "Liger's loss of GRPO (trl.use_liger_loss), which makes no whole logits, is not modelled."
        settings.notes.unsupported.append(what, "trl.use_liger_loss", "less")
    settings.notes.unknown += [f"trl.{key}" for key in values if key not in READ and not SAMPLING.fullmatch(key)]
    values.setdefault("beta", settings.number("rl_beta", 0.0))
    values.setdefault("max_prompt_length", settings.integer("max_prompt_len"))
    read = {key: values[key] for key in READ if values.get(key) is not None}
    return generation_of(Settings(read, settings.notes, "axolotl"), "micro_batch_size")


def _packing(settings: Settings, training: dict[str, Any]) -> None:
    """Join the micro-batch into one row if flash attention is used; otherwise each sequence has its own row
    (`multipack_real_batches`)."""
    flash = training.get("attn_implementation") == "flash_attention_2"
    if not flash or settings.switch("multipack_real_batches"):
        return
    training["packing_strategy"] = "bfd"
    settings.notes.assumptions.append("sample_packing joins the micro-batch in one full row without padding.")


def _precision(settings: Settings, training: dict[str, Any]) -> None:
    """The weights' dtype from bf16 and fp16 (loaders/model.py); float32 without either."""
    word = settings.text("bf16", "false" if any(map(settings.given, ("fp16", "float16", "float32"))) else "auto").lower()
    bf16 = word in ("auto", "full") or settings.switch("bfloat16") or (word != "auto" and settings.switch("bf16"))
    if word == "auto":
        given = "bf16=auto" if settings.given("bf16") else "bf16 is not given; axolotl's default, auto,"
        settings.notes.assumptions.append(f"{given} is bfloat16 on every GPU since Ampere.")
    named = settings.text("fp16", "false").lower() == "full" or settings.switch("fp16") or settings.switch("float16")
    fp16 = named and not bf16
    if named and bf16:
        settings.notes.warnings.append("fp16 and bf16 are both set; bf16 is used.", "fp16")
    if bf16:
        training["bf16"] = True
    elif fp16:
        training["fp16"] = True
    half = "bfloat16" if bf16 else "float16" if fp16 or settings.switch("load_in_8bit") else "float32"
    training["torch_dtype"] = half
    if not bf16 and not fp16:
        settings.notes.assumptions.append(f"neither bf16 nor fp16 is set: the weights are {half}.")


def _memory(settings: Settings, training: dict[str, Any]) -> None:
    """Attention, checkpointing, offloading, the loss, and the optimizer."""
    if (where := str(training.get("activation_offloading")).lower()) in keys.OFFLOADED:
        training["activation_offloading"] = True
        settings.notes.assumptions.append(
            f"activation_offloading={where!r} is treated as true: activations move to host memory."
        )
    _optimizer_and_loss(settings, training)
    used = [name for key, name in keys.ATTENTION.items() if settings.switch(key)]
    named = settings.text("attn_implementation", settings.text("attention", used[0] if used else ""))
    if named:
        training["attn_implementation"] = keys.SHORT.get(named, named)
    word = settings.text("gradient_checkpointing", "false").lower()
    if word in ("offload", "offload_disk", "unsloth"):
        settings.notes.unsupported.append(
            f"gradient_checkpointing={word} is treated as checkpoints that go to host memory.", "gradient_checkpointing"
        )
        training["activation_offloading"] = True
    if word in ("offload", "offload_disk", "unsloth") or settings.switch("gradient_checkpointing"):
        training["gradient_checkpointing"] = True
        given = settings.raw("gradient_checkpointing_kwargs")
        # axolotl 0.19 utils/config/__init__.py normalize_config; core/builders/base.py `_configure_gradient_checkpointing`
        reentrant = settings.raw("rl") is None and not settings.raw("unfrozen_parameters")
        training["gradient_checkpointing_kwargs"] = given or {"use_reentrant": reentrant}
        if not given:
            settings.notes.assumptions.append(f"use_reentrant is not given; the default of axolotl is {reentrant} here.")
    if settings.text("torch_compile").lower() == "auto":
        training["torch_compile"] = False
        settings.notes.assumptions.append("torch_compile=auto is treated as off.")
    elif not settings.switch("torch_compile"):  # core/builders/base.py passes the mode and the backend with it alone
        for key in COMPILING:
            training.pop(key, None)


def _optimizer_and_loss(settings: Settings, training: dict[str, Any]) -> None:
    optimizer = settings.text("optimizer", "adamw_torch_fused")
    if not settings.given("optimizer"):
        settings.notes.assumptions.append(f"optimizer is not given; the default of axolotl is {optimizer}.")
    if optimizer in keys.OPTIMIZERS and optimizer not in keys.SAME:
        settings.notes.unsupported.append(
            f"optimizer={optimizer} is not modelled; {keys.OPTIMIZERS[optimizer]} is assumed instead.",
            "optimizer",
            states_direction(optimizer),
        )
    training["optim"] = keys.OPTIMIZERS.get(optimizer, optimizer)
    if all(settings.switch(key) for key in keys.LIGER):
        training["liger_kernels"] = True
    if settings.switch("liger_fused_linear_cross_entropy"):
        training |= {"fused_linear_cross_entropy": True, "liger_loss": True}
    plugged = any("CutCrossEntropyPlugin" in name for name in settings.words("plugins"))
    if settings.switch("cut_cross_entropy", plugged):  # integrations/cut_cross_entropy/args.py
        training["fused_linear_cross_entropy"] = True
        settings.notes.unsupported.append(
            "Cut cross entropy is treated as Liger's fused linear cross entropy.", "cut_cross_entropy", "less"
        )


def _adapter(settings: Settings, training: dict[str, Any]) -> dict[str, Any] | None:
    kind = settings.text("adapter").lower()
    adapter = renamed(settings, keys.ADAPTER)
    linear = settings.switch("lora_target_linear")
    four, eight = settings.switch("load_in_4bit"), settings.switch("load_in_8bit")
    if not kind or kind in ("none", "false"):
        if four or eight:
            raise SpecError(
                "load_in_4bit or load_in_8bit without an adapter cannot train; set adapter: qlora or lora, or neither.",
                parameter="adapter",
            )
        settings.notes.ignored += [key for key in keys.ADAPTER if settings.given(key)]
        return None
    if kind not in ("lora", "qlora"):
        settings.notes.unsupported.append(f"adapter={kind} is not modelled; LoRA is assumed instead.", "adapter")
    if linear:
        if others := sorted(set(settings.words("lora_target_modules")) & set(keys.NOT_LINEAR)):
            settings.notes.unsupported.append(
                f"lora_target_modules={others} with lora_target_linear is not modelled; every linear layer but the "
                "head is assumed.",
                "lora_target_modules",
                "more",
            )
        elif settings.given("lora_target_modules"):
            settings.notes.assumptions.append("lora_target_linear is true, so lora_target_modules adds nothing to it.")
        adapter["target_modules"] = "all-linear"
    if "r" not in adapter:
        settings.size("lora_r")
    if four:
        training["quantization_config"] = _four_bits(settings, kind)
    elif eight:
        training["quantization_config"] = {"load_in_8bit": True}
    return adapter


def _four_bits(settings: Settings, kind: str) -> dict[str, Any]:
    """BitsAndBytesConfig of an adapter of this `kind` (axolotl 0.19 loaders/model.py `_set_quantization_config`: storage in
    bfloat16, which only FSDP sees; `bnb_config_kwargs` say otherwise). Raises: SpecError."""
    if kind == "lora":
        raise settings.refuse(
            "load_in_4bit",
            "has no effect with adapter: lora in axolotl 0.19, which then trains over whole weights, and made 4-bit "
            "weights of another kind in older ones; ask with adapter: qlora, or with load_in_4bit: false",
        )
    four = {"load_in_4bit": True, "bnb_4bit_use_double_quant": True, "bnb_4bit_quant_storage": "bfloat16"}
    given = settings.raw("bnb_config_kwargs") or {}
    if not isinstance(given, Mapping):
        raise settings.refuse("bnb_config_kwargs", "must be a mapping of BitsAndBytesConfig's arguments")
    if "bnb_4bit_use_double_quant" not in given:
        settings.notes.assumptions.append("4-bit weights are NF4 with double quantization, axolotl's default.")
    own = Settings(given, settings.notes, "axolotl", lambda key: f"bnb_config_kwargs.{key}")
    four["bnb_4bit_use_double_quant"] = own.switch("bnb_4bit_use_double_quant", True)
    four["bnb_4bit_quant_storage"] = own.one_of("bnb_4bit_quant_storage", "bfloat16", STORAGES)
    four["bnb_4bit_compute_dtype"] = own.raw("bnb_4bit_compute_dtype")
    own.note_left(("bnb_4bit_quant_type", "llm_int8_threshold", "llm_int8_has_fp16_weight"))
    return four


def _rest(settings: Settings) -> None:
    for name in settings.words("plugins"):
        if name.rpartition(".")[2] not in keys.PLUGINS:
            settings.notes.unsupported.append(f"What the plugin {name} changes is not modelled.", "plugins")
    together = all(settings.switch(key) for key in keys.LIGER)
    note_unsupported(settings, {key: what for key, what in keys.KERNELS.items() if not (together and key in keys.LIGER)})
    note_unsupported(settings, keys.MORE, "more")
    for key, what in keys.LESS.items():
        if settings.raw(key):
            settings.notes.unsupported.append(
                f"{what} needs less than the answer, which is for all of it at once.", key, "less"
            )
    own = settings.raw("model_quantization_config_kwargs")
    widened = isinstance(own, Mapping) and str(own.get("dequantize")).lower() == "true"
    if settings.raw("model_quantization_config") and not widened:
        sentence = "A checkpoint that is loaded quantized (model_quantization_config) is not modelled; bfloat16 is counted."
        settings.notes.unsupported.append(sentence, "model_quantization_config", "less")
    for name in keys.OVERRIDING:
        given = settings.raw(name)
        others = sorted(set(given) - keys.OVERRIDES) if isinstance(given, Mapping) else []
        if others:
            settings.notes.unsupported.append(
                f"Another shape of the network ({name}: {', '.join(map(str, others))}) is not read; give it by --model.",
                name,
            )
    for key in (*keys.READ_LATER, *keys.MESH.values()):
        settings.given(key)
    settings.note_left(keys.IGNORED)
