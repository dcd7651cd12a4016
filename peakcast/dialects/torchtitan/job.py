"""torchtitan's TOML, and the values of its newer Python configurations as a mapping with the same sections.

Source: torchtitan (mid-2025 to 2026) torchtitan/config/job_config.py and configs.py, distributed/activation_checkpoint.py,
components/loss.py, models/llama3/infra/parallelize.py (sequence parallelism comes with tensor parallelism).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from peakcast.core.fields import FrozenMapping, flat
from peakcast.dialects.common.pasted import Pasted
from peakcast.dialects.common.translation import Notes, Settings, Translation, states_direction
from peakcast.dialects.torchtitan.layout import torchtitan_layout
from peakcast.dialects.torchtitan.network import described_attention, torchtitan_network
from peakcast.jobs.allocator_settings import Allocator
from peakcast.jobs.conventions import conventions
from peakcast.jobs.spec import (
    ActivationCheckpointing,
    Dtype,
    Loss,
    Offload,
    Optimizer,
    OptimizerName,
    Parallelism,
    Precision,
    TrainingJob,
)

OPTIMIZERS: dict[str, OptimizerName] = {"adamw": "adamw", "adam": "adam", "muon": "muon", "distmuon": "muon"}
IMPLEMENTATIONS: dict[str, Literal["fused", "foreach", "loop"]] = {
    "fused": "fused",
    "foreach": "foreach",
    "for-loop": "loop",
}
IGNORED = re.compile(
    r"(job|profiling|profiler|metrics|lr_scheduler|lr_schedulers|checkpoint|comm|validation|validator|memory_estimation|dataloader|debug"
    r"|experimental|tokenizer|float8|mx|quantize|fault_tolerance|optimizer_config|hf_assets|dump_folder)(\..*|$)"
    r"|model\.(tokenizer_path|hf_assets_path|print_after_conversion|norm_type|max_seq_len)"
    r"|training\.(steps|max_norm|dataset|dataset_path|gc_freq|gc_debug|seed|data\.name|deterministic|debug_moe_force_load_balance|warmup_steps"
    r"|data_parallel_degree)"
    r"|optimizer\.(lr|eps|beta1|beta2|weight_decay|moe_expert_lr_ratio|hybrid_order)"
    r"|activation_checkpoint\.(per_op_sac.*|force_recompute_mm_shapes.*|early_stop|preserve_rng_state|determinism_check|debug|visualize.*)"
    r"|parallelism\.(enable_async_tensor_parallel|context_parallel_rotate_method|context_parallel_load_balancer|enable_compiled_autograd"
    r"|expert_parallel_comm_backend|pipeline_parallel_expert_parallel_overlap|module_fqns_per_model_part"
    r"|pipeline_parallel_schedule_csv)"
    r"|override(\..*|$)|compile\.(backend|mode|enable_async_tensor_parallel)"
    r"|loss\.(global_vocab_size|loss_fn\..*|ignore_index|mtp_scale)"
    r"|optimizer\.optimizer_factory_kwargs.*|parallelism\.(spmd_backend|context_parallel_ptrr_mask_key)"
)
MIXED = "training.mixed_precision_param"
FLOAT8 = ("float8", "quantize.linear.float8", "quantize.dense.float8")
"""Tables of float8 products, by release."""
RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
"""torchao's Float8LinearRecipeName."""


def from_torchtitan(pasted: Pasted) -> Translation:
    """The job of a torchtitan configuration. Raises: SpecError naming the key, its value, the rule and the way out."""
    notes = Notes()
    settings = Settings(flat(pasted.values), notes, "torchtitan")
    architecture = torchtitan_network(settings, pasted)
    layout = torchtitan_layout(settings, pasted, architecture.num_hidden_layers)
    micro, steps = _micro_batches(settings, layout)
    _unsupported(settings)
    chunks = _loss_chunks(settings, layout)
    precision = _precision(settings)
    autocast = _uses_autocast(layout, precision)
    offloads, compiled = settings.switch("training.enable_cpu_offload"), _compiled(settings)
    notes.assumptions.append(
        "expandable segments are assumed, which torchtitan's launcher sets (run_train.sh, PYTORCH_CUDA_ALLOC_CONF)."
    )
    job = TrainingJob(
        architecture=architecture,
        framework="torch",
        versions=FrozenMapping(pasted.versions.of("torch", {"torchtitan": _release(pasted, notes)})),
        micro_batch_size=micro,
        sequence_length=settings.size("training.seq_len", 2048, assume=True),
        gradient_accumulation_steps=steps,
        precision=precision,
        optimizer=_optimizer(settings),
        attention=described_attention(pasted) or _attention(settings),
        activation_checkpointing=_checkpointing(settings, pasted),
        loss=Loss(fused_linear_cross_entropy=chunks > 0),
        compile=bool(compiled),
        parallelism=layout,
        offload=Offload(parameters=offloads, optimizer=offloads),
        allocator=Allocator(expandable_segments=True),
        framework_options=FrozenMapping({**_options(settings, chunks, autocast=autocast), **_regions(compiled)}),
    )
    _note_experts(job, notes)
    settings.note_left(IGNORED)
    return notes.finish(job)


def _micro_batches(settings: Settings, layout: Parallelism) -> tuple[int, int]:
    """(samples of a micro-batch, micro-batches of a step and rank). A pipeline divides the local batch into micro-batches;
    the global batch says how many local batches a step has."""
    local = settings.size(
        "training.local_batch_size",
        settings.integer("training.batch_size", 8, assume=not settings.given("training.local_batch_size")),
    )
    micro, in_pipeline = local, settings.size("parallelism.pipeline_parallel_microbatch_size", 1)
    if layout.pipeline_parallel_size > 1:
        micro = in_pipeline
        if local % micro:
            raise settings.refuse(
                "parallelism.pipeline_parallel_microbatch_size", f"must divide the local batch size {local}"
            )
    total, share = settings.integer("training.global_batch_size", -1, least=-1) or -1, local * layout.data_parallel_size
    if total > 0 and total % share:
        raise settings.refuse(
            "training.global_batch_size",
            f"must be a multiple of {local} per rank × {layout.data_parallel_size} ranks = {share}",
        )
    return micro, local // micro * (total // share if total > 0 else 1)


def _uses_autocast(layout: Parallelism, precision: Precision) -> bool:
    """Whether `mixed_precision_param` means autocast: where neither FSDP nor another layout casts the weights."""
    alone = layout.sharding == "none" and layout.tensor_parallel_size * layout.pipeline_parallel_size == 1
    return alone and (precision.parameters, precision.wide_compute) == ("float32", "bfloat16")


def _attention(settings: Settings) -> Literal["sdpa", "flex", "flash_attention_2"]:
    if settings.text("model.attn_backend") == "varlen":
        return "flash_attention_2"
    return "flex" if settings.switch("model.use_flex_attn") else "sdpa"


def _release(pasted: Pasted, notes: Notes) -> str:
    """The release that has these keys: 0.3 has Python configurations instead of TOML; 0.2 moved `training.compile` to a
    separate section; 0.1 moved the degrees of parallelism to one, and renamed `training.batch_size` to local_batch_size."""
    sections = {key: value for key, value in pasted.values.items() if isinstance(value, Mapping)}
    training = sections.get("training", {})
    if "model_spec" in sections:
        return "main"
    if "batch_size" in training or "tensor_parallel_degree" in training:
        found = "0.0.2"
    elif "compile" in training:
        found = "0.1.0"
    else:
        found = "0.2.2"
    notes.assumptions.append(f"torchtitan {found} is assumed, the last release with the keys of this file.")
    return found


def _note_experts(job: TrainingJob, notes: Notes) -> None:
    if job.architecture.moe is None:
        return
    if conventions(job)["experts_implementation"] == "torchtitan":
        notes.assumptions.append("the experts are torchtitan 0.3's module; 0.2 weighs and adds up their results otherwise.")
    else:
        kind = job.architecture.model_type
        notes.unsupported.append(f"torchtitan's experts of {kind} are not modelled; those of transformers are assumed.")


def _converts(settings: Settings) -> bool:
    """Whether products are converted to eight bits."""
    converters = settings.words("model.converters")
    return any("float8" in word or "mx" in word for word in converters) or settings.given("model_converters.converters")


def _precision(settings: Settings) -> Precision:
    """float32 weights, gradients and states; the forward runs in `mixed_precision_param` (by FSDP's policy, or by
    autocast)."""
    compute = settings.one_of(MIXED, "bfloat16", ("bfloat16", "float32"))
    weights: Dtype = (
        "bfloat16" if settings.one_of("training.dtype", "float32", ("float32", "bfloat16")) == "bfloat16" else "float32"
    )
    if not settings.given(MIXED):
        settings.notes.assumptions.append(f"{MIXED} is not given; the default of torchtitan is bfloat16.")
    converters, eight = settings.words("model.converters"), _converts(settings)
    if eight and not all("float8" in word for word in converters or ("",)):  # the scope reports what is covered
        settings.notes.unsupported.append(
            f"FP8 training (model.converters={' '.join(converters)}) is not modelled.", "model.converters"
        )
    return Precision(
        parameters=weights,
        compute="float8" if eight else "bfloat16" if compute == "bfloat16" else "float32",
        gradients=weights,
        optimizer_states=weights,
    )


def _optimizer(settings: Settings) -> Optimizer:
    groups = settings.raw("optimizer.param_groups")  # torchtitan 0.3: one optimizer per pattern of names
    groups = [group for group in groups if isinstance(group, Mapping)] if isinstance(groups, list) else []
    named = [str(group["optimizer_name"]) for group in groups if group.get("optimizer_name")]
    names = list(dict.fromkeys(named)) or [settings.text("optimizer.name", "AdamW")]
    name = next((name for name in names if "muon" in name.lower()), names[0])  # torch's Muon; AdamW updates the rest
    for other in names:
        if other.lower() not in OPTIMIZERS:
            settings.notes.unsupported.append(
                f"optimizer.name={other} is not modelled; AdamW is assumed instead.",
                "optimizer.name",
                states_direction(other),
            )
        elif other not in (name, "AdamW"):
            settings.notes.unsupported.append(
                f"{other} for some of the weights is not modelled; {name} is assumed for all.", "optimizer"
            )
    if settings.given("optimizer.fused"):  # the key before `implementation` was added in 2025
        implementation: Literal["fused", "foreach", "loop"] = "fused" if settings.switch("optimizer.fused") else "foreach"
        settings.raw("optimizer.implementation")
    else:
        implementation = IMPLEMENTATIONS[settings.one_of("optimizer.implementation", "fused", IMPLEMENTATIONS)]
        if not settings.given("optimizer.implementation"):
            settings.notes.assumptions.append("optimizer.implementation is not given; the default of torchtitan is fused.")
    return Optimizer(name=OPTIMIZERS.get(name.lower(), "adamw"), implementation=implementation)


def _loss_chunks(settings: Settings, layout: Parallelism) -> int:
    """Number of chunks of the sequence for which lm_head and loss are computed (torchtitan 0.3 `ChunkedLossWrapper`); 0 for
    whole logits."""
    chunks = settings.integer("loss.num_chunks", 1) or 1
    if chunks == 1:
        return 0
    asked = f"A loss in chunks of the sequence (loss.num_chunks={chunks})"
    if layout.tensor_parallel_size * layout.pipeline_parallel_size * layout.context_parallel_size > 1:
        settings.notes.unsupported.append(
            f"{asked} with tensor, pipeline or context parallelism is not modelled: whole logits are counted, too much.",
            "loss",
            "less",
        )
        return 0
    return chunks  # the scope reports that no trace has confirmed it


def _checkpointing_mode(settings: Settings, pasted: Pasted) -> str:
    """The value of `mode`, or the mode of torchtitan 0.3's configuration class, which is recognised by its keys."""
    section = "activation_checkpoint"
    if section in pasted.values and pasted.values[section] is None:
        return "none"
    key = f"{section}.mode"
    if settings.given(key):
        return settings.one_of(key, "", ("none", "full", "selective", "memory_budget"))
    chosen = settings.given(f"{section}.force_recompute_mm_shapes_by_fqns")
    budget = settings.given(f"{section}.memory_budget")
    if settings.given(f"{section}.determinism_check") and not settings.given(f"{section}.selective_ac_option"):
        mode, name = ("memory_budget", "MemoryBudgetAC") if budget else ("full", "FullAC")
        mode, name = ("selective", "SelectiveAC") if chosen else (mode, name)
        settings.notes.assumptions.append(f"{section} has the keys of torchtitan's {name}, which is assumed.")
        return mode
    settings.notes.assumptions.append(f"{key} is not given; the default of torchtitan is selective.")
    return "selective"


def _checkpointing(settings: Settings, pasted: Pasted) -> ActivationCheckpointing:
    mode = _checkpointing_mode(settings, pasted)
    option = settings.text("activation_checkpoint.selective_ac_option", "op")
    if option != "op" and not option.isdecimal():
        raise settings.refuse("activation_checkpoint.selective_ac_option", "must be op, or every how many layers")
    settings.raw("activation_checkpoint.memory_budget")
    if mode == "none":
        return ActivationCheckpointing()
    if mode == "full":
        return ActivationCheckpointing(mode="full")
    if mode == "selective" and option.isdecimal() and len(option) < 5:
        return ActivationCheckpointing(mode="full", every_n_layers=int(option))
    if mode == "memory_budget":
        settings.notes.unsupported.append(
            "The memory budget of activation_checkpoint (mode=memory_budget) is not modelled; selective is assumed.",
            "activation_checkpoint.mode",
        )
    settings.notes.assumptions.append(
        "selective checkpointing keeps attention, reduce-scatters and every second matrix product, as torchtitan 0.2 does."
    )
    return ActivationCheckpointing(mode="selective")


def _compiled(settings: Settings) -> frozenset[str]:
    """Which of "model" and "loss" are compiled: both, unless `compile.components` (torchtitan 0.2) names one."""
    if not (settings.switch("compile.enable") or settings.switch("training.compile")):
        settings.words("compile.components")
        return frozenset()
    return frozenset(settings.words("compile.components") or ("model", "loss")) & {"model", "loss"}


def _regions(compiled: frozenset[str]) -> dict[str, Any]:
    """Options that differ from the conventions because layers are compiled one by one, and the loss separately."""
    alone: dict[frozenset[str], dict[str, Any]] = {
        frozenset({"model"}): {"compiles_loss": False},
        frozenset({"loss"}): {"compiled_regions": "loss"},
    }
    return alone.get(compiled, {})


def _options(settings: Settings, chunks: int, *, autocast: bool) -> dict[str, Any]:
    """Options that differ from the conventions of the torch loop. `mixed_precision_param` means autocast if nothing is
    sharded (distributed/utils.py maybe_enable_amp)."""
    options: dict[str, Any] = {"loss_chunks": chunks} if chunks else {}
    if autocast:
        options["autocast"] = True
    reduced = settings.one_of("training.mixed_precision_reduce", "float32", ("float32", "bfloat16"))
    if reduced == "bfloat16" or settings.raw("training.dtype") == "bfloat16":  # narrow weights do not say it by themselves
        options["fsdp_reduce_dtype"] = reduced
    reshards = settings.one_of("parallelism.fsdp_reshard_after_forward", "default", ("default", "always", "never"))
    if reshards == "never":
        options["fsdp_reshard_after_forward"] = False
    if _converts(settings) and any(settings.switch(f"{table}.enable_fsdp_float8_all_gather") for table in FLOAT8):
        options["fsdp_float8_all_gather"] = True
    for table in FLOAT8 if _converts(settings) else ():
        key = f"{table}.recipe_name"
        if settings.text(key, "") and (recipe := settings.one_of(key, "tensorwise", RECIPES)) != "tensorwise":
            options["float8_recipe"] = recipe
    if _converts(settings) and settings.switch("float8.force_recompute_fp8_weight_in_bwd"):
        options["float8_weights_kept"] = "none"
    if settings.switch("optimizer.early_step_in_backward"):
        options["optimizer_in_backward"] = True
    return {"loss_parallel": False, **options} if settings.switch("parallelism.disable_loss_parallel") else options


def _unsupported(settings: Settings) -> None:
    for key, what in {
        "fault_tolerance.enable": "Fault-tolerant replicas",
        "parallelism.enable_fsdp_symm_mem": "FSDP's collectives in symmetric memory",
    }.items():
        if settings.switch(key):
            settings.notes.unsupported.append(f"{what} ({key}) is not modelled.", key)
    for module in settings.words("override.imports"):
        settings.notes.unsupported.append(
            f"{module} (override.imports) is not modelled; torchtitan's own module is assumed.", "override.imports"
        )
    graphs = settings.given("training.disable_cuda_graphs") and not settings.switch("training.disable_cuda_graphs")
    if graphs:
        settings.notes.unsupported.append(
            "CUDA graphs (training.disable_cuda_graphs=false) are not modelled: a graph's memory is kept between steps.",
            "training.disable_cuda_graphs",
            "more",
        )
