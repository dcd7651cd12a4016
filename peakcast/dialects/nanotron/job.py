"""nanotron's YAML.

Source: nanotron (2024-2025) src/nanotron/config/config.py, parallelism_config.py, models/llama.py (FlashAttention 2, padded
vocabulary), optim/gradient_accumulator.py (FP32GradientAccumulator: float32 copies of weights and gradients).
"""

from __future__ import annotations

import re
from typing import Literal

from peakcast.core.errors import SpecError
from peakcast.core.fields import FrozenMapping, flat
from peakcast.dialects.common.job_file import resolve_architecture
from peakcast.dialects.common.pasted import Pasted
from peakcast.dialects.common.translation import Notes, Settings, Translation, states_direction
from peakcast.dialects.nanotron.architecture import PREFIX, nanotron_architecture
from peakcast.jobs.spec import (
    ActivationCheckpointing,
    Dtype,
    Optimizer,
    OptimizerName,
    Parallelism,
    Precision,
    TrainingJob,
)

ATTENTION: dict[str, Literal["sdpa", "flash_attention_2", "flex"]] = {
    "flash_attention_2": "flash_attention_2", "sdpa": "sdpa", "flex_attention": "flex",
    "ring_flash_triton": "flash_attention_2",
    "llama3_ring_attention": "flash_attention_2", "ring": "flash_attention_2",
}  # fmt: skip
OPTIMIZERS: dict[str, OptimizerName] = {"adamw": "adamw", "sgd": "sgd"}
IGNORED = re.compile(
    r"benchmark_csv_path|(checkpoints|data_stages|data|general|lighteval|logging|profiler|tokenizer|s3_upload|metrics_logging|tokens_)(\..*|$)"
    r"|model\.(init_method\..*|ddp_bucket_cap_mb)"
    r"|optimizer\.(clip_grad|weight_decay.*|adam_(beta[12]|eps)|learning_rate_scheduler\..*"
    r"|optimizer_factory\.(adam_.*|lr|weight_decay))"
    r"|parallelism\.(tp_linear_async_communication|tp_recompute_allgather)"
    r"|tokens\.(limit_.*|train_steps|val_check_interval)"
)


def from_nanotron(pasted: Pasted) -> Translation:
    """The job of a nanotron configuration. Raises: SpecError naming the key, its value, the rule and the way out."""
    notes = Notes()
    settings = Settings(flat(pasted.values), notes, "nanotron")
    layout = _layout(settings, pasted)
    if pasted.model is None:
        architecture = nanotron_architecture(settings, layout.tensor_parallel_size)
    else:
        architecture = resolve_architecture(pasted.model)
        notes.ignored += [key for key in settings.left() if key.startswith(PREFIX) and settings.given(key)]
    attention = ATTENTION[settings.one_of("model.model_config._attn_implementation", "flash_attention_2", ATTENTION)]
    if not settings.given("model.model_config._attn_implementation"):
        notes.assumptions.append("nanotron's attention is FlashAttention 2 where its configuration names no other.")
    recompute = settings.switch("parallelism.recompute_layer") or _granularity(settings) == "full"
    if settings.switch("parallelism.moe_layer_recompute"):
        notes.unsupported.append(
            "Recomputing experts alone (parallelism.moe_layer_recompute) is not modelled: what they keep is counted.",
            "parallelism.moe_layer_recompute",
            "less",
        )
    job = TrainingJob(
        architecture=architecture,
        framework="torch",
        versions=FrozenMapping(pasted.versions.of("torch", {"nanotron": "main"})),
        micro_batch_size=settings.size("tokens.micro_batch_size"),
        sequence_length=settings.size("tokens.sequence_length"),
        gradient_accumulation_steps=settings.size("tokens.batch_accumulation_per_replica", 1, assume=True),
        precision=_precision(settings),
        optimizer=_optimizer(settings),
        attention=attention,
        activation_checkpointing=ActivationCheckpointing(mode="full") if recompute else ActivationCheckpointing(),
        parallelism=layout,
    )
    settings.note_left(IGNORED)
    return notes.finish(job)


def _granularity(settings: Settings) -> str:
    """What `recompute_granularity`, the key before `recompute_layer`, recomputes: "full" (layers), "selective" (attention),
    or "none"."""
    asked = settings.text("parallelism.recompute_granularity", "none").lower()
    if asked not in ("none", "null", "selective", "full"):
        raise settings.refuse("parallelism.recompute_granularity", "must be selective, full or null")
    if asked == "selective":
        settings.notes.assumptions.append(
            "recompute_granularity=selective recomputes attention alone, as FlashAttention does: no layer is recomputed."
        )
    return asked


def _layout(settings: Settings, pasted: Pasted) -> Parallelism:
    data, pipeline, tensor = (settings.size(f"parallelism.{name}") for name in ("dp", "pp", "tp"))
    context = settings.size("parallelism.context_parallel_size", 1)
    experts = settings.size("parallelism.expert_parallel_size", 1)
    world = data * pipeline * tensor * context * experts
    if pasted.num_gpus is not None and pasted.num_gpus != world:
        raise SpecError(
            f"num_gpus={pasted.num_gpus} is not dp × pp × tp × context_parallel_size × expert_parallel_size = {world}; "
            "correct either.",
            parameter="num_gpus",
            value=pasted.num_gpus,
        )
    mode = settings.one_of(
        "parallelism.tp_mode", "ALL_REDUCE", ("ALL_REDUCE", "REDUCE_SCATTER", "all_reduce", "reduce_scatter")
    )
    engine = settings.one_of("parallelism.pp_engine", "afab", ("1f1b", "afab"))
    if pipeline > 1:
        settings.notes.assumptions.append(
            "nanotron balances pipeline stages by cost; an even split of the layers is assumed."
        )
    schedule: Literal["1f1b", "gpipe"] = "1f1b" if engine == "1f1b" else "gpipe"
    if experts > 1:
        settings.notes.assumptions.append(
            f"nanotron's expert_parallel_size={experts} multiplies its ranks (parallel/context.py): {data} × {experts} "
            "replicas."
        )
    stage = settings.integer("optimizer.zero_stage", 0, least=0) or 0
    if stage > 1:
        raise settings.refuse("optimizer.zero_stage", "must be 0 or 1")
    return Parallelism(
        data_parallel_size=data * experts,
        tensor_parallel_size=tensor,
        sequence_parallel=mode.upper() == "REDUCE_SCATTER" and tensor > 1,
        pipeline_parallel_size=pipeline,
        pipeline_schedule=schedule if pipeline > 1 else "1f1b",
        context_parallel_size=context,
        expert_parallel_size=experts,
        zero_stage=stage,
    )


def _precision(settings: Settings) -> Precision:
    dtype = settings.one_of("model.dtype", "bfloat16", ("bfloat16", "float16", "float32", "double"))
    if dtype == "double":
        raise settings.refuse("model.dtype", "is not modelled; bfloat16, float16 and float32 are")
    half: Dtype = "bfloat16" if dtype == "bfloat16" else "float16" if dtype == "float16" else "float32"
    if half != "float32" and settings.switch("optimizer.accumulate_grad_in_fp32"):
        return Precision(
            parameters=half, compute=half, gradients="float32", optimizer_states="float32", main_parameters="float32"
        )
    return Precision(parameters=half, compute=half, gradients=half, optimizer_states=half)


def _optimizer(settings: Settings) -> Optimizer:
    name = settings.text("optimizer.optimizer_factory.name", "adamW").lower()
    if name not in OPTIMIZERS:
        settings.notes.unsupported.append(
            f"optimizer_factory.name={name} is not modelled; AdamW is assumed instead.",
            "optimizer_factory.name",
            states_direction(name),
        )
    fused = settings.switch("optimizer.optimizer_factory.torch_adam_is_fused")
    fused |= settings.switch("optimizer.torch_adam_is_fused")  # its place until 2024
    return Optimizer(name=OPTIMIZERS.get(name, "adamw"), implementation="fused" if fused else "foreach")
