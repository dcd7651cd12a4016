"""torchtitan's TOML, and the values of its newer Python configurations as a mapping with the same sections.

Source: torchtitan (mid-2025 to 2026) torchtitan/config/job_config.py and configs.py, distributed/pipeline_parallel.py,
models/llama3/infra/parallelize.py (sequence parallelism comes with tensor parallelism).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any, Literal

from peakcast.dialects.job_file import resolve_architecture
from peakcast.dialects.pasted import Pasted, flat
from peakcast.dialects.translation import Notes, Settings, Translation
from peakcast.errors import SpecError
from peakcast.fields import FrozenMapping
from peakcast.spec import (
    ActivationCheckpointing,
    Dtype,
    Offload,
    Optimizer,
    OptimizerName,
    Parallelism,
    Precision,
    TrainingJob,
)

FLAVORS: dict[tuple[str, str], str] = {
    ("llama3", "8b"): "llama-3.1-8b", ("llama3", "70b"): "llama-3.1-70b", ("llama3", "405b"): "llama-3.1-405b",
    ("llama3", "1b"): "llama-3.2-1b", ("llama3", "3b"): "llama-3.2-3b",
    ("qwen3", "0.6b"): "qwen3-0.6b", ("qwen3", "1.7b"): "qwen3-1.7b", ("qwen3", "4b"): "qwen3-4b",
    ("qwen3", "8b"): "qwen3-8b", ("qwen3", "14b"): "qwen3-14b", ("qwen3", "32b"): "qwen3-32b",
    ("qwen3", "30b-a3b"): "qwen3-30b-a3b", ("qwen3", "235b-a22b"): "qwen3-235b-a22b",
    ("deepseek_v3", "16b"): "deepseek-v2-lite", ("deepseek_v3", "671b"): "deepseek-v3",
    ("gpt_oss", "20b"): "gpt-oss-20b", ("gpt_oss", "120b"): "gpt-oss-120b",
}  # fmt: skip
"""torchtitan's model and flavor, in lower case, to the catalog's name."""
SCHEDULES: dict[str, tuple[Literal["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble"], int]] = {
    "1f1b": ("1f1b", 1), "gpipe": ("gpipe", 1), "interleaved1f1b": ("interleaved_1f1b", 2),
    "loopedbfs": ("gpipe", 2), "interleavedzerobubble": ("zero_bubble", 2), "zbvzerobubble": ("zero_bubble", 2),
    "dualpipev": ("zero_bubble", 2),
}  # fmt: skip
"""Each schedule here, with the stages per rank that torchtitan gives it."""
OPTIMIZERS: dict[str, OptimizerName] = {"adamw": "adamw", "adam": "adam", "muon": "muon", "distmuon": "muon"}
IMPLEMENTATIONS: dict[str, Literal["fused", "foreach", "loop"]] = {
    "fused": "fused",
    "foreach": "foreach",
    "for-loop": "loop",
}
IGNORED = re.compile(
    r"(job|profiling|metrics|lr_scheduler|lr_schedulers|checkpoint|comm|validation|validator|memory_estimation|dataloader|debug"
    r"|experimental|tokenizer|float8|mx|quantize|fault_tolerance|optimizer_config|hf_assets|dump_folder|loss)(\..*|$)"
    r"|model\.(tokenizer_path|hf_assets_path|print_after_conversion|norm_type|max_seq_len)"
    r"|training\.(steps|max_norm|dataset|dataset_path|gc_freq|gc_debug|seed|deterministic|debug_moe_force_load_balance|warmup_steps"
    r"|data_parallel_degree)"
    r"|optimizer\.(lr|eps|beta1|beta2|weight_decay|moe_expert_lr_ratio|hybrid_order)"
    r"|activation_checkpoint\.(per_op_sac.*|early_stop|preserve_rng_state|determinism_check|debug|visualize.*)"
    r"|parallelism\.(enable_async_tensor_parallel|context_parallel_rotate_method|context_parallel_load_balancer|enable_compiled_autograd"
    r"|expert_parallel_comm_backend|pipeline_parallel_expert_parallel_overlap|module_fqns_per_model_part"
    r"|pipeline_parallel_schedule_csv|expert_tensor_parallel_degree)"
    r"|compile\.(backend|mode)"
)
MIXED = "training.mixed_precision_param"


def from_torchtitan(pasted: Pasted) -> Translation:
    """The job of a torchtitan configuration. Raises: SpecError naming the key, its value, the rule and the way out."""
    notes = Notes()
    settings = Settings(flat(pasted.values), notes, "torchtitan")
    architecture = resolve_architecture(_model(settings, pasted))
    layout = _layout(settings, pasted, architecture.num_hidden_layers)
    local = settings.size(
        "training.local_batch_size",
        settings.integer("training.batch_size", 8, assume=not settings.given("training.local_batch_size")),
    )
    micro, steps = local, 1
    if layout.pipeline_parallel_size > 1:
        micro = settings.size("parallelism.pipeline_parallel_microbatch_size", 1)
        if local % micro:
            raise settings.refuse(
                "parallelism.pipeline_parallel_microbatch_size", f"must divide the local batch size {local}"
            )
        steps = local // micro
    total = settings.integer("training.global_batch_size", -1, least=-1) or -1
    share = local * layout.data_parallel_size
    if total > 0:
        if total % share:
            raise settings.refuse(
                "training.global_batch_size",
                f"must be a multiple of {local} per rank × {layout.data_parallel_size} ranks = {share}",
            )
        steps *= total // share
    _unsupported(settings)
    offloads = settings.switch("training.enable_cpu_offload")
    job = TrainingJob(
        architecture=architecture,
        framework="torch",
        versions=FrozenMapping({"torchtitan": "main"}),
        micro_batch_size=micro,
        sequence_length=settings.size("training.seq_len", 2048, assume=True),
        gradient_accumulation_steps=steps,
        precision=_precision(settings),
        optimizer=_optimizer(settings),
        attention="flex" if settings.switch("model.use_flex_attn") else "sdpa",
        activation_checkpointing=_checkpointing(settings, routed=architecture.moe is not None),
        compile=_compiled(settings),
        parallelism=layout,
        offload=Offload(parameters=offloads, optimizer=offloads),
        framework_options=FrozenMapping(_options(settings)),
    )
    settings.note_left(IGNORED)
    return notes.finish(job)


def _model(settings: Settings, pasted: Pasted) -> str | Mapping[str, Any]:
    name = settings.text("model.name", settings.text("model_spec.name", "llama3")).lower()
    flavor = settings.text("model.flavor", settings.text("model_spec.flavor", settings.text("model_spec"))).lower()
    assets = settings.text("hf_assets_path", settings.text("model.hf_assets_path"))
    if pasted.model is not None:
        return pasted.model
    if (name, flavor) in FLAVORS:
        known = FLAVORS[name, flavor]
        settings.notes.assumptions.append(f"model {name} {flavor.upper()} of torchtitan is taken as {known}.")
        return known
    if not flavor and assets:
        return PurePath(assets).name
    names = ", ".join(sorted({f"{family} {size.upper()}" for family, size in FLAVORS}))
    raise SpecError(
        f"model.flavor={flavor!r} of model.name={name!r} has no known shape here; known: {names}. --model names another.",
        parameter="model.flavor",
        value=flavor,
    )


def _layout(settings: Settings, pasted: Pasted, num_layers: int) -> Parallelism:
    def degree(name: str, default: int = 1) -> int:
        return settings.integer(f"parallelism.{name}", default, least=-1) or default

    tensor = degree("tensor_parallel_degree", settings.integer("training.tensor_parallel_degree", 1) or 1)
    pipeline = degree("pipeline_parallel_degree", settings.integer("experimental.pipeline_parallel_degree", 1) or 1)
    context = degree("context_parallel_degree", settings.integer("experimental.context_parallel_degree", 1) or 1)
    replicate = degree(
        "data_parallel_replicate_degree", settings.integer("training.data_parallel_replicate_degree", 1) or 1
    )
    shard = degree(
        "data_parallel_shard_degree", settings.integer("training.data_parallel_shard_degree", -1, least=-1) or -1
    )
    others = tensor * pipeline * context * replicate
    if shard == -1:
        why = " (data_parallel_shard_degree=-1 takes all there are)"
        num_gpus = pasted.gpus(settings.notes, others, why)
        if num_gpus % others:
            raise SpecError(
                f"num_gpus={num_gpus} is not a multiple of the {others} ranks of the other degrees; use a multiple.",
                parameter="num_gpus",
                value=num_gpus,
            )
        shard = num_gpus // others
    elif pasted.num_gpus is not None and pasted.num_gpus != others * shard:
        raise SpecError(
            f"num_gpus={pasted.num_gpus} is not the product of the degrees, {others * shard}; correct either.",
            parameter="num_gpus",
            value=pasted.num_gpus,
        )
    if context > 1:
        settings.notes.assumptions.append(
            f"FSDP shards over the {shard} × {context} ranks of data and context parallelism."
        )
    schedule, stages = _schedule(settings)
    per_stage = settings.integer("parallelism.pipeline_parallel_layers_per_stage")
    if settings.raw("parallelism.pipeline_parallel_split_points") or per_stage:
        settings.notes.unsupported.append(
            "The given pipeline split points are not modelled; torchtitan's even split is taken."
        )
    first, last = (
        settings.integer(f"parallelism.pipeline_parallel_{end}_stage_less_layers", 1, least=0) or 0
        for end in ("first", "last")
    )
    layers = _stage_layers(num_layers, pipeline * stages, first, last) if pipeline > 1 else ()
    return Parallelism(
        data_parallel_size=replicate * shard,
        sharding="hsdp" if replicate > 1 and shard * context > 1 else "fsdp2" if shard * context > 1 else "none",
        tensor_parallel_size=tensor,
        sequence_parallel=tensor > 1,
        pipeline_parallel_size=pipeline,
        pipeline_schedule=schedule if pipeline > 1 else "1f1b",
        virtual_pipeline_stages=stages if pipeline > 1 else 1,
        pipeline_layers=layers,
        context_parallel_size=context,
        expert_parallel_size=degree("expert_parallel_degree"),
    )


def _schedule(settings: Settings) -> tuple[Literal["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble"], int]:
    key = "parallelism.pipeline_parallel_schedule"
    word = settings.text(key, "1F1B").lower()
    if word not in SCHEDULES:
        raise settings.refuse(key, f"must be one of {', '.join(SCHEDULES)}")
    return SCHEDULES[word]


def _stage_layers(num_layers: int, num_stages: int, first: int, last: int) -> tuple[int, ...]:
    """Layers of each stage: the embedding and the head count as `first` and `last` layers of the even split.

    Source: torchtitan distributed/pipeline_parallel.py, `generate_llm_fqn_per_model_part`.
    """
    each, extra = divmod(num_layers + first + last, num_stages)
    layers = [each + (stage < extra) for stage in range(num_stages)]
    layers[0] -= first
    layers[-1] -= last
    return tuple(layers)


def _precision(settings: Settings) -> Precision:
    """float32 weights, gradients and states; the forward runs in `mixed_precision_param` (FSDP's policy, or autocast)."""
    compute = settings.one_of(MIXED, "bfloat16", ("bfloat16", "float32"))
    settings.one_of("training.mixed_precision_reduce", "float32", ("float32", "bfloat16"))
    weights: Dtype = (
        "bfloat16" if settings.one_of("training.dtype", "float32", ("float32", "bfloat16")) == "bfloat16" else "float32"
    )
    if not settings.given(MIXED):
        settings.notes.assumptions.append(f"{MIXED} is not given; the default of torchtitan, bfloat16, is taken.")
    converters = settings.words("model.converters")
    eight = any("float8" in word or "mx" in word for word in converters) or settings.given("model_converters.converters")
    if eight:
        settings.notes.unsupported.append(f"FP8 training (model.converters={' '.join(converters)}) is not modelled.")
    return Precision(
        parameters=weights,
        compute="float8" if eight else "bfloat16" if compute == "bfloat16" else "float32",
        gradients=weights,
        optimizer_states=weights,
    )


def _optimizer(settings: Settings) -> Optimizer:
    name = settings.text("optimizer.name", "AdamW")
    if name.lower() not in OPTIMIZERS:
        settings.notes.unsupported.append(f"optimizer.name={name} is not modelled; AdamW is taken in its place.")
    if settings.given("optimizer.fused"):  # before `implementation` came, in 2025
        implementation: Literal["fused", "foreach", "loop"] = "fused" if settings.switch("optimizer.fused") else "foreach"
        settings.raw("optimizer.implementation")
    else:
        implementation = IMPLEMENTATIONS[settings.one_of("optimizer.implementation", "fused", IMPLEMENTATIONS)]
        if not settings.given("optimizer.implementation"):
            settings.notes.assumptions.append(
                "optimizer.implementation is not given; the default of torchtitan, fused, is taken."
            )
    return Optimizer(name=OPTIMIZERS.get(name.lower(), "adamw"), implementation=implementation)


def _checkpointing(settings: Settings, *, routed: bool) -> ActivationCheckpointing:
    mode = settings.one_of("activation_checkpoint.mode", "selective", ("none", "full", "selective", "memory_budget"))
    if not settings.given("activation_checkpoint.mode"):
        settings.notes.assumptions.append(
            "activation_checkpoint.mode is not given; the default of torchtitan, selective, is taken."
        )
    option = settings.text("activation_checkpoint.selective_ac_option", "op")
    settings.raw("activation_checkpoint.memory_budget")
    if mode == "none":
        return ActivationCheckpointing()
    if mode == "full":
        return ActivationCheckpointing(mode="full")
    if mode == "selective" and option.isdecimal() and len(option) < 5:
        return ActivationCheckpointing(mode="full", every_n_layers=int(option))
    if mode == "memory_budget":
        settings.notes.unsupported.append(
            "The memory budget of activation_checkpoint (mode=memory_budget) is not modelled; selective is taken."
        )
    elif routed:
        settings.notes.unsupported.append(
            "Which of the experts' products selective checkpointing keeps is not modelled; every second one is taken."
        )
    settings.notes.assumptions.append(
        "selective checkpointing keeps attention, reduce-scatters and every second matrix product, as torchtitan 0.2 does."
    )
    return ActivationCheckpointing(mode="selective")


def _compiled(settings: Settings) -> bool:
    """Whether the network is compiled; the loss alone can be too."""
    enabled = settings.switch("compile.enable") or settings.switch("training.compile")
    components = settings.words("compile.components") or ("model", "loss")
    if enabled and "model" not in components:
        settings.notes.unsupported.append(
            f"A compiled loss (compile.components={' '.join(components)}) is not modelled; it is taken as it runs eagerly."
        )
        return False
    return enabled


def _options(settings: Settings) -> dict[str, Any]:
    """What differs from the conventions of the torch loop."""
    return {"loss_parallel": False} if settings.switch("parallelism.disable_loss_parallel") else {}


def _unsupported(settings: Settings) -> None:
    for key, what in {
        "optimizer.early_step_in_backward": "The optimizer step inside backward",
        "fault_tolerance.enable": "Fault-tolerant replicas",
    }.items():
        if settings.switch(key):
            settings.notes.unsupported.append(f"{what} ({key}) is not modelled.")
    if settings.text("parallelism.fsdp_reshard_after_forward", "default") == "never":
        settings.notes.unsupported.append(
            "Weights kept gathered after forward (fsdp_reshard_after_forward=never) are not modelled."
        )
