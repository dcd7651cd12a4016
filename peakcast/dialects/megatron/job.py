"""Megatron-LM command-line arguments, translated into a `TrainingJob`. The meanings of flags are tables in `flags.py`.

Source: NVIDIA/Megatron-LM megatron/training/arguments.py (`validate_args`, `core_transformer_config_from_args`), core
0.14 to 0.18.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from peakcast.core.errors import SpecError
from peakcast.core.fields import FrozenMapping
from peakcast.core.versions import check_versions
from peakcast.dialects.common.translation import Notes, Settings, Translation, gpu_count, states_direction
from peakcast.dialects.megatron import flags as flags
from peakcast.dialects.megatron.architecture import megatron_architecture, one_of_table
from peakcast.dialects.megatron.layout import virtual_stages
from peakcast.dialects.megatron.legacy import is_legacy, legacy_versions, note_flash_attention
from peakcast.dialects.megatron.precision import megatron_precision
from peakcast.jobs.allocator_settings import Allocator, parse_allocator
from peakcast.jobs.architecture import Architecture
from peakcast.jobs.conventions import check_framework_options
from peakcast.jobs.spec import ActivationCheckpointing, Offload, Optimizer, OptimizerName, Parallelism, TrainingJob

OPTIMIZERS: dict[str, OptimizerName] = {"adam": "adamw", "sgd": "sgd", "muon": "muon", "dist_muon": "muon", "lion": "lion"}
BACKENDS: dict[str, Literal["eager", "sdpa", "flash_attention_2"]] = {
    "auto": "sdpa", "fused": "sdpa", "flash": "flash_attention_2", "unfused": "eager", "local": "eager",
}  # fmt: skip


def from_megatron(
    arguments: Mapping[str, Any],
    num_gpus: int = 1,
    env: Mapping[str, Any] | None = None,
    versions: Mapping[str, Any] | None = None,
    network: Architecture | None = None,
) -> Translation:
    """The job of a Megatron-LM command line on `num_gpus` GPUs in all. `arguments`: flag -> value (with dashes or
    underscores, with or without the leading dashes; values may be texts). `env`: environment variables. `versions`: package
    versions (`megatron_core: "0.14"`, or `ngc_pytorch: "26.04"`), whose defaults are used. `network`: the network, if it
    does not come from the flags, as in other projects that use Megatron's flags.
    Raises: SpecError naming the flag, its value, the rule and the way out.
    """
    settings = Settings(_normalized(arguments), Notes(), "Megatron-LM", lambda key: key.replace("_", "-"))
    layout_sizes = _layout_sizes(settings, num_gpus)
    architecture = network or megatron_architecture(settings, layout_sizes["tensor_parallel_size"])
    parallelism = _parallelism(settings, architecture, layout_sizes)
    micro_batch_size = settings.size("micro_batch_size")
    _note_unsupported(settings)
    options = _options(settings, env or {})
    job = TrainingJob(
        architecture=architecture,
        framework="megatron",
        versions=FrozenMapping(_known_versions(settings, versions or {}, options)),
        micro_batch_size=micro_batch_size,
        sequence_length=_sequence_length(settings, parallelism),
        decoder_sequence_length=settings.integer("decoder_seq_length") if architecture.num_decoder_layers else None,
        gradient_accumulation_steps=_accumulation(settings, micro_batch_size, parallelism.data_parallel_size),
        precision=megatron_precision(settings),
        optimizer=_optimizer(settings),
        attention=_attention(settings, options),
        activation_checkpointing=_recomputation(settings),
        parallelism=parallelism,
        offload=_offload(settings),
        allocator=_allocator(env or {}),
        framework_options=FrozenMapping(options),
    )
    _note_left(settings)
    check_framework_options(job)
    return settings.notes.finish(job)


def _known_versions(settings: Settings, versions: Mapping[str, Any], options: dict[str, Any]) -> Mapping[str, Any]:
    """The versions of packages. What Megatron-LM's legacy models set is added to the `options`."""
    known = check_versions(versions)
    if is_legacy(settings, known):
        options |= {"use_legacy_models": True, "transformer_impl": settings.text("transformer_impl", "local")}
        return legacy_versions(settings, known)
    note_flash_attention(settings)
    _note_adam(settings)
    return known


def _offload(settings: Settings) -> Offload:
    return Offload(
        optimizer=settings.switch("optimizer_cpu_offload"),
        activations=settings.switch("fine_grained_activation_offloading"),
    )


def _note_left(settings: Settings) -> None:
    """Note the flags that nothing has read: those that are known to cost no memory, and unknown ones."""
    notes = settings.notes
    for key in settings.left():
        known = key in flags.IGNORED or key.startswith((*flags.DETAILS, *flags.BESIDE_THE_STEP))
        (notes.ignored if known else notes.unknown).append(settings.spell(key))


def _allocator(env: Mapping[str, Any]) -> Allocator:
    return parse_allocator(next((str(env[name]) for name in flags.ALLOCATOR_ENVIRONMENT if env.get(name)), ""))


def _normalized(arguments: Mapping[str, Any]) -> dict[str, Any]:
    if not isinstance(arguments, Mapping):
        raise SpecError(f"megatron.arguments={arguments!r} must be a mapping of flags to values.", parameter="arguments")
    values: dict[str, Any] = {}
    for flag, value in arguments.items():
        key = str(flag).lstrip("-").replace("-", "_")
        if key in values and values[key] != value:
            raise SpecError(
                f"{flag}={value!r} is given twice, also as {values[key]!r}; keep one.", parameter=str(flag), value=value
            )
        values[key] = value
    return values


def _layout_sizes(settings: Settings, num_gpus: int) -> dict[str, int]:
    num_gpus = gpu_count(num_gpus)
    sizes = {
        "tensor_parallel_size": settings.size("tensor_model_parallel_size", 1),
        "pipeline_parallel_size": settings.size("pipeline_model_parallel_size", 1),
        "context_parallel_size": settings.size("context_parallel_size", 1),
    }
    tensor, pipeline, context = sizes.values()
    if num_gpus % (tensor * pipeline * context):
        raise SpecError(
            f"tensor-model-parallel-size={tensor} × pipeline-model-parallel-size={pipeline} × "
            f"context-parallel-size={context} does not divide num_gpus={num_gpus}; use a multiple of "
            f"{tensor * pipeline * context} GPUs.",
            parameter="num_gpus",
            value=num_gpus,
        )
    return {**sizes, "data_parallel_size": num_gpus // (tensor * pipeline * context)}


def _parallelism(settings: Settings, architecture: Architecture, sizes: dict[str, int]) -> Parallelism:
    tensor, pipeline, context = (
        sizes["tensor_parallel_size"],
        sizes["pipeline_parallel_size"],
        sizes["context_parallel_size"],
    )
    experts, expert_tensor = settings.size("expert_model_parallel_size", 1), settings.integer("expert_tensor_parallel_size")
    if experts > 1 and (architecture.moe is None or architecture.moe.num_experts % experts):
        raise settings.refuse("expert_model_parallel_size", "needs num-experts that it divides")
    group = experts * (expert_tensor or tensor)
    if architecture.moe and sizes["data_parallel_size"] * tensor * context % group:
        raise settings.refuse(
            "expert_model_parallel_size",
            f"times expert-tensor-parallel-size={expert_tensor or tensor} must divide the "
            f"{sizes['data_parallel_size'] * tensor * context} GPUs of a pipeline stage; use more GPUs or a smaller size",
            1,
        )
    virtual, layers = virtual_stages(settings, architecture.num_hidden_layers, pipeline)
    sequence_parallel = settings.switch("sequence_parallel")
    if sequence_parallel and tensor == 1:
        settings.notes.assumptions.append("sequence-parallel has no effect with tensor-model-parallel-size=1.")
    return Parallelism(
        data_parallel_size=sizes["data_parallel_size"],
        tensor_parallel_size=tensor,
        pipeline_parallel_size=pipeline,
        context_parallel_size=context,
        sequence_parallel=sequence_parallel and tensor > 1,
        pipeline_schedule="interleaved_1f1b" if virtual > 1 else "1f1b",
        virtual_pipeline_stages=virtual,
        pipeline_layers=layers,
        expert_parallel_size=experts,
        expert_tensor_parallel_size=expert_tensor,
        zero_stage=int(settings.switch("use_distributed_optimizer") or settings.text("optimizer") == "dist_muon"),
    )


def _sequence_length(settings: Settings, layout: Parallelism) -> int:
    length = settings.size("seq_length", settings.integer("encoder_seq_length"))
    context = layout.context_parallel_size
    shared = (2 * context if context > 1 else 1) * (layout.tensor_parallel_size if layout.sequence_parallel else 1)
    if length % shared:
        raise settings.refuse(
            "seq_length", f"must be a multiple of {shared} (the ranks that share it, twice with context parallelism)"
        )
    return length


def _accumulation(settings: Settings, micro_batch_size: int, data_parallel: int) -> int:
    share = micro_batch_size * data_parallel
    total = settings.integer("global_batch_size")
    ramp = settings.words("rampup_batch_size")
    if ramp:
        settings.notes.assumptions.append(
            f"rampup-batch-size={' '.join(ramp)}: the steps after the ramp are counted, which have the most micro-batches."
        )
    schedule = settings.text("step_batch_size_schedule")
    if total is None and schedule:
        first = schedule.split()[0].rpartition(":")[2]
        total = int(first) if first.isdecimal() and len(first) < 9 else None
        settings.notes.assumptions.append(
            f"global-batch-size is the first of step-batch-size-schedule={schedule!r}: {total}."
        )
    if total is None:
        settings.notes.assumptions.append(f"global-batch-size is not given; one micro-batch per rank is assumed: {share}.")
        return 1
    if total % share or not total:
        raise settings.refuse(
            "global_batch_size",
            f"must be a multiple of micro-batch-size={micro_batch_size} × data-parallel size {data_parallel} = {share}",
            total,
        )
    return total // share


def _note_adam(settings: Settings) -> None:
    """Note which Adam is assumed where Transformer Engine may be missing (core 0.16.1 `optimizer/__init__.py`)."""
    if settings.text("transformer_impl") == "local" and settings.text("optimizer", "adam") == "adam":
        settings.notes.assumptions.append(
            "Adam is assumed to be Transformer Engine's or Apex's. Without both, Megatron-LM takes torch's, whose step "
            "needs up to 4 bytes more for each parameter that a rank owns: framework_options.adam_library: torch in a "
            "job file."
        )


def _optimizer(settings: Settings) -> Optimizer:
    name = one_of_table(settings, "optimizer", "adam", OPTIMIZERS)
    momentum = settings.number("sgd_momentum", 0.9) or 0.0
    if name not in ("adamw", "sgd", "muon"):
        settings.notes.unsupported.append(
            f"optimizer={name} is not modelled in Megatron; adam, muon and sgd are.", "optimizer", states_direction(name)
        )
    for key, known in flags.MUON.items() if name == "muon" else ():
        if (value := settings.text(key, known)) != known:
            settings.notes.unsupported.append(
                f"{settings.spell(key)}={value} is not modelled; {known} is.", settings.spell(key)
            )
    return Optimizer(name=name, implementation="fused", momentum=momentum if name == "sgd" else 0.0)


def _attention(settings: Settings, options: Mapping[str, Any]) -> Literal["eager", "sdpa", "flash_attention_2"]:
    if options.get("transformer_impl") == "local":
        flash = options.get("use_legacy_models") and options.get("use_flash_attn")
        return "flash_attention_2" if flash else "eager"
    return BACKENDS[_backend(settings)]


def _backend(settings: Settings) -> str:
    return settings.one_of("attention_backend", "auto", BACKENDS)


def _recomputation(settings: Settings) -> ActivationCheckpointing:
    shorthand = settings.switch("recompute_activations")
    granularity = settings.text("recompute_granularity") or ("selective" if shorthand else "none")
    modules = settings.words("recompute_modules")
    method = settings.one_of("recompute_method", "", ("", "uniform", "block"))
    num_layers = settings.integer("recompute_num_layers", least=0)
    if settings.switch("checkpoint_activations"):  # Megatron-LM's flag until 2022, and still Megatron-DeepSpeed's
        return _full_recomputation(settings, "uniform", settings.size("checkpoint_num_layers", 1))
    if granularity == "none":
        return ActivationCheckpointing()
    if granularity == "selective":
        return ActivationCheckpointing(mode="selective", modules=tuple(m for m in modules if modules != ("core_attn",)))
    if granularity != "full":
        raise settings.refuse("recompute_granularity", "must be full or selective")
    return _full_recomputation(settings, method, num_layers)


def _full_recomputation(settings: Settings, method: str, num_layers: int | None) -> ActivationCheckpointing:
    """Recomputation of whole layers. Source: megatron-core 0.16.1 `transformer/transformer_config.py` refuses it without a
    method or a number of layers; `transformer_block.py` `_checkpointed_forward`: method block recomputes the first
    `num_layers`."""
    if not method:
        raise settings.refuse("recompute_method", "must be uniform or block with recompute-granularity=full")
    if num_layers is None:
        raise settings.refuse(
            "recompute_num_layers",
            f"must be given with recompute-method={method}, as Megatron-LM requires; 1 with uniform recomputes every layer",
        )
    if num_layers == 0 and method == "uniform":
        raise settings.refuse("recompute_num_layers", "must be at least 1 with recompute-method=uniform")
    if num_layers == 0:
        settings.notes.assumptions.append("recompute-num-layers=0 with recompute-method=block recomputes nothing.")
        return ActivationCheckpointing()
    return ActivationCheckpointing(
        mode="full", use_reentrant=True, method="block" if method == "block" else "uniform", num_layers=num_layers
    )


def _options(settings: Settings, env: Mapping[str, Any]) -> dict[str, Any]:
    """The framework options that differ from Megatron's defaults."""
    values: dict[str, Any] = {name: settings.switch(name) for name in flags.SWITCHES}
    for name, default in flags.NUMBERS.items():
        number = settings.number(name, default)
        values[name] = (
            number if isinstance(default, float) or number is None else int(number) if number == int(number) else number
        )
    values |= {name: settings.text(name, default) for name, default in flags.TEXTS.items()}
    values["hierarchical_context_parallel_sizes"] = " ".join(settings.words("hierarchical_context_parallel_sizes"))
    values |= _router_losses(settings)
    values["offload_modules"] = " ".join(sorted(settings.words("offload_modules")))
    values |= _graphs(settings)
    values["moe_router_padding_for_quantization"] |= settings.switch("moe_router_padding_for_fp8")  # its name until 0.16
    if settings.text("spec") == "local":
        values["transformer_impl"] = "local"
    values["cp_comm_type"] = values["cp_comm_type"].replace("allgather", "all_gather")  # as the flag's help spells it
    values |= {option: not settings.switch(flag) for flag, option in flags.TURNED_OFF.items()}
    values["decoupled_lr"] = settings.number("decoupled_lr") is not None
    recipe = settings.text("fp8_recipe")
    if recipe in flags.FP8_RECIPES:
        values["fp8_recipe"] = recipe
    settings.one_of("transformer_impl", "transformer_engine", ("transformer_engine", "local", "inference_optimized"))
    for name, value in env.items():
        if name in flags.ENVIRONMENT:
            values[flags.ENVIRONMENT[name]] = str(value)
        elif name == "DISTILL_CONFIG":
            settings.notes.unsupported.append(
                "Distillation from a teacher (DISTILL_CONFIG) is not modelled.", "DISTILL_CONFIG", "more"
            )
        elif name in flags.ALLOCATOR_ENVIRONMENT:
            pass  # read with the allocator's settings
        else:
            (settings.notes.ignored if name in flags.IGNORED_ENVIRONMENT else settings.notes.unknown).append(name)
    defaults = flags.option_defaults()
    return {name: value for name, value in values.items() if value != defaults[name]}


def _graphs(settings: Settings) -> dict[str, Any]:
    """Which CUDA graphs are recorded, and of what; "" stands for whole layers. Source: Megatron-LM (core 0.17.1)
    `arguments.py`, where `enable-cuda-graph` and `external-cuda-graph` are the older names of two implementations, and
    `full` that of whole layers (later releases say `cuda-graph-modules` for the scope); `megatron/rl/rl_utils.py`, which
    switches graphs off to train unless told otherwise."""
    older = {"enable_cuda_graph": "local", "external_cuda_graph": "transformer_engine"}
    asked = [kind for flag, kind in older.items() if settings.switch(flag)]
    kinds = ("none", "local", "transformer_engine")
    kind = settings.one_of("cuda_graph_impl", asked[0] if asked else "none", kinds)
    if settings.switch("perform_rl_step") and not settings.switch("rl_training_cuda_graphs"):
        kind = "none"
    scope = [word for word in settings.words("cuda_graph_scope") + settings.words("cuda_graph_modules") if word != "full"]
    if unknown := next((word for word in scope if word not in flags.GRAPH_SCOPES), None):
        rule = f"must be of {', '.join(flags.GRAPH_SCOPES)}, or full; {unknown!r} is not"
        raise settings.refuse("cuda_graph_scope", rule)
    return {"cuda_graph_impl": kind, "cuda_graph_scope": " ".join(sorted(scope)) if kind != "none" else ""}


def _router_losses(settings: Settings) -> dict[str, Any]:
    """The kinds of the router's balancing losses whose coefficient is not 0, and the largest coefficient. There may be
    several losses, each with its own coefficient (megatron-core 0.16.1 `transformer/moe/router.py`
    `get_aux_loss_coeff`)."""
    types = settings.words("moe_router_load_balancing_type") or ("aux_loss",)
    texts = settings.words("moe_aux_loss_coeff") or ("0",)
    try:
        coefficients = [float(text) for text in texts]
    except ValueError:
        raise settings.refuse("moe_aux_loss_coeff", "must be a number, or one for each balancing loss") from None
    if len(texts) not in (1, len(types)):
        raise settings.refuse("moe_aux_loss_coeff", f"must be a number for each of {' '.join(types)}")
    pairs = zip(types, coefficients * (len(types) if len(texts) == 1 else 1), strict=True)
    counted = [name for name, coefficient in pairs if coefficient or len(types) == 1]
    return {
        "moe_router_load_balancing_type": " ".join(counted) or "none",
        "moe_aux_loss_coeff": max(coefficients),
    }


def _note_unsupported(settings: Settings) -> None:
    for key, (what, direction) in flags.UNSUPPORTED.items():
        value = settings.raw(key)
        if value is not None and str(value).lower() not in ("false", "0", "none", "", "[]"):
            shown = "" if value is True or str(value).lower() == "true" else f"={value}"
            name = settings.spell(key)
            settings.notes.unsupported.append(
                f"{what[0].upper()}{what[1:]} ({name}{shown}) is not modelled.", name, direction
            )
    if settings.given("window_size") and settings.text("transformer_impl") == "local":
        settings.notes.unsupported.append(
            "Sliding windows of megatron-core's own attention (window-size with transformer-impl=local) are not modelled: "
            "each layer makes a mask.",
            "window-size",
            "more",
        )
    if settings.text("softmax_type", "vanilla") != "vanilla":
        settings.notes.unsupported.append(
            f"Attention sinks (softmax-type={settings.text('softmax_type')}) are not modelled.", "softmax-type", "more"
        )
    spec = settings.text("spec").lower()
    if spec not in ("", "local") and not ("mamba" in spec or "hybrid" in spec):
        settings.notes.unsupported.append(
            f"A custom layer specification (spec={settings.text('spec')}) is not modelled.", "spec"
        )
