"""A job as megatron-core's configuration: the fields of `TransformerConfig`, and the jobs that the stack refuses.

An option of a job that has the name of a field sets that field: `framework_options` and the conventions use the names of
Megatron-LM's flags, which are the names of the fields with a few exceptions (`RENAMED`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F

from peakcast.core.errors import CollectorError
from peakcast.jobs.architecture import Architecture, MixtureOfExperts, MultiLatentAttention
from peakcast.jobs.conventions import conventions
from peakcast.jobs.spec import Offload, TrainingJob

RENAMED = {
    "fp8_param_gather": "fp8_param",
    "microbatch_group_size_per_virtual_pipeline_stage": "microbatch_group_size_per_vp_stage",
    "overlap_p2p_communication_warmup_flush": "overlap_p2p_comm_warmup_flush",
    "te_rng_tracker": "use_te_rng_tracker",
}
"""Flag -> field, for those whose names differ (Megatron-LM `core_transformer_config_from_args`)."""
OWN_RULE = frozenset({
    "attention_backend", "cuda_graph_scope", "gradient_accumulation_fusion", "overlap_p2p_communication",
})  # fmt: skip
"""Options that are set by code below, not copied; no graphs are recorded."""
ACTIVATIONS: dict[str, Callable[..., Any]] = {"gelu": F.gelu, "gelu_new": F.gelu, "silu": F.silu}
TORCH_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


_REFUSED: dict[str, tuple[Callable[[TrainingJob], bool], Callable[[TrainingJob], object], str]] = {
    "task": (lambda j: j.task != "train", lambda j: j.task, "train"),
    "finetuning.method": (lambda j: j.finetuning.method != "full", lambda j: j.finetuning.method, "full"),
    "optimizer.name": (lambda j: j.optimizer.name not in ("adam", "adamw"), lambda j: j.optimizer.name, "adamw"),
    "compile": (lambda j: j.compile, lambda j: j.compile, "false"),
    "framework_options.cuda_graph_impl": (
        lambda j: conventions(j).get("cuda_graph_impl", "none") != "none",
        lambda j: conventions(j)["cuda_graph_impl"],
        "none",
    ),
    "offload": (lambda j: j.offload != Offload(), lambda j: j.offload, "nothing offloaded"),
    "precision.parameters": (
        lambda j: j.precision.parameters not in TORCH_DTYPES,
        lambda j: j.precision.parameters,
        ", ".join(TORCH_DTYPES),
    ),
    "parallelism": (
        lambda j: j.parallelism.sharding != "none" or j.parallelism.zero_stage > 1,
        lambda j: j.parallelism,
        "zero_stage 0 or 1 without sharding",
    ),
    "parallelism.pipeline_schedule": (
        lambda j: j.parallelism.pipeline_schedule not in ("1f1b", "interleaved_1f1b"),
        lambda j: j.parallelism.pipeline_schedule,
        "1f1b or interleaved_1f1b",
    ),
    "architecture": (
        lambda j: _foreign(j.architecture) != "",
        lambda j: _foreign(j.architecture),
        "a pre-norm GPT, BERT or T5 with learned, rotary or no positions",
    ),
}
"""parameter -> (whether the job asks for something that the stack does not do, the value to show, what it does)."""


def _foreign(architecture: Architecture) -> str:
    """Which part of `architecture` Megatron-LM's networks do not have, in words; "" if they have all."""
    features = {
        "kind": architecture.kind not in ("decoder", "encoder", "encoder_decoder"),
        "parallel_block": architecture.parallel_block,
        "norm_placement": architecture.norm_placement != "pre",
        "embedding_norm": architecture.embedding_norm,
        "sliding_window": architecture.sliding_window is not None,
        "attention_sinks": architecture.attention_sinks,
        "lm_head_bias": architecture.lm_head_bias,
        "position_embedding": architecture.position_embedding not in ("learned", "rope", "none"),
        "qk_norm": architecture.qk_norm not in ("none", "head"),
    }
    return ", ".join(f"{name}={getattr(architecture, name)!r}" for name, present in features.items() if present)


def check(job: TrainingJob) -> None:
    """Refuse settings that the stack would silently ignore. Raises: CollectorError naming the parameter and what is
    done."""
    for parameter, (asked, value, done) in _REFUSED.items():
        if asked(job):
            raise CollectorError(
                f"{parameter}={value(job)!r} is not run with framework='megatron'; measure {done}.",
                parameter=parameter,
                value=value(job),
            )


def transformer_config(job: TrainingJob) -> Any:
    """The `TransformerConfig` (or `MLATransformerConfig`) of `job`."""
    from megatron.core.transformer import MLATransformerConfig, TransformerConfig

    kind = MLATransformerConfig if job.architecture.mla is not None else TransformerConfig
    known = {field.name: field.default for field in dataclasses.fields(kind)}
    return kind(**{**_options(conventions(job), known), **_shape(job.architecture), **_layout(job), **_training(job)})


def _options(convention: Mapping[str, Any], known: Mapping[str, Any]) -> dict[str, Any]:
    """Conventions that are fields. If a field's default is None, zero and "" mean "not set"."""
    from megatron.core.transformer.enums import AttnBackend

    fields = {RENAMED.get(name, name): value for name, value in convention.items() if name not in OWN_RULE}
    options = {name: value for name, value in fields.items() if name in known and (value or known[name] is not None)}
    fusions = ("bias_swiglu_fusion", "bias_gelu_fusion")
    return {
        **options,
        "attention_backend": AttnBackend[str(convention["attention_backend"])],
        "gradient_accumulation_fusion": bool(convention["gradient_accumulation_fusion"]),
        "bias_activation_fusion": all(bool(convention[name]) for name in fusions),
    }


def _shape(architecture: Architecture) -> dict[str, Any]:
    """Fields with the network's sizes."""
    shape: dict[str, Any] = {
        "num_layers": architecture.num_hidden_layers,
        "hidden_size": architecture.hidden_size,
        "num_attention_heads": architecture.num_attention_heads,
        "num_query_groups": architecture.num_key_value_heads,
        "ffn_hidden_size": architecture.intermediate_size,
        "kv_channels": architecture.head_dim,
        "hidden_dropout": architecture.hidden_dropout,
        "attention_dropout": architecture.attention_dropout,
        "normalization": "RMSNorm" if architecture.normalization == "rmsnorm" else "LayerNorm",
        "add_bias_linear": architecture.mlp_bias,
        "add_qkv_bias": architecture.attention_bias,
        "gated_linear_unit": architecture.gated_mlp,
        "activation_func": _activation(architecture),
        "mtp_num_layers": architecture.num_nextn_predict_layers or None,
    }
    if architecture.mla is None:
        shape["qk_layernorm"] = architecture.qk_norm != "none"
    else:
        shape |= _latent_attention(architecture.mla)
    if architecture.moe is not None:
        routed = [int(architecture.is_moe_layer(i)) for i in range(architecture.num_hidden_layers)]
        shape |= {**_experts(architecture.moe), "moe_layer_freq": 1 if all(routed) else routed}
    return shape


def _latent_attention(mla: MultiLatentAttention) -> dict[str, Any]:
    """Fields of multi-head latent attention."""
    return {
        "multi_latent_attention": True,
        "q_lora_rank": mla.q_lora_rank,
        "kv_lora_rank": mla.kv_lora_rank,
        "qk_head_dim": mla.qk_nope_head_dim,
        "qk_pos_emb_head_dim": mla.qk_rope_head_dim,
        "v_head_dim": mla.v_head_dim,
        "rope_type": "rope",
    }


def _experts(moe: MixtureOfExperts) -> dict[str, Any]:
    """Fields of a mixture of experts."""
    return {
        "num_moe_experts": moe.num_experts,
        "moe_router_topk": moe.num_experts_per_tok,
        "moe_ffn_hidden_size": moe.moe_intermediate_size,
        "moe_shared_expert_intermediate_size": moe.shared_expert_intermediate_size or None,
        "moe_shared_expert_gate": moe.shared_expert_gate,
        "moe_router_enable_expert_bias": moe.router_correction_bias,
    }


def _activation(architecture: Architecture) -> Any:
    from megatron.core.activations import quick_gelu, squared_relu

    functions = {**ACTIVATIONS, "quick_gelu": quick_gelu, "relu2": squared_relu}
    if architecture.hidden_act not in functions:
        raise CollectorError(
            f"hidden_act={architecture.hidden_act!r} is not Megatron-LM's; use one of {', '.join(functions)}.",
            parameter="hidden_act",
            value=architecture.hidden_act,
        )
    return functions[architecture.hidden_act]


def _layout(job: TrainingJob) -> dict[str, Any]:
    layout = job.parallelism
    virtual = layout.virtual_pipeline_stages
    return {
        "tensor_model_parallel_size": layout.tensor_parallel_size,
        "pipeline_model_parallel_size": layout.pipeline_parallel_size,
        "virtual_pipeline_model_parallel_size": virtual if virtual > 1 else None,
        "context_parallel_size": layout.context_parallel_size,
        "expert_model_parallel_size": layout.expert_parallel_size,
        "expert_tensor_parallel_size": layout.expert_tensor_parallel_size,
        "sequence_parallel": layout.sequence_parallel and layout.tensor_parallel_size > 1,
        # as Megatron-LM's arguments.py: overlapped with interleaving only, and then not batched
        "pipeline_model_parallel_layout": _stages(job),
        "overlap_p2p_comm": virtual > 1 and bool(conventions(job)["overlap_p2p_communication"]),
        "batch_p2p_comm": not (virtual > 1 and bool(conventions(job)["overlap_p2p_communication"])),
    }


def _stages(job: TrainingJob) -> list[list[str]] | None:
    """The parts of each virtual stage, if the layers are not split evenly (`--pipeline-model-parallel-layout`); else
    None."""
    counts = job.parallelism.pipeline_layers
    if not counts or job.parallelism.pipeline_parallel_size == 1:
        return None
    stages = [["decoder"] * count for count in counts]
    stages[0].insert(0, "embedding")
    stages[-1] += ["mtp"] * job.architecture.num_nextn_predict_layers + ["loss"]
    return stages


def _training(job: TrainingJob) -> dict[str, Any]:
    recompute, dtype = job.activation_checkpointing, TORCH_DTYPES[job.precision.parameters]
    training: dict[str, Any] = {
        "bf16": dtype is torch.bfloat16,
        "fp16": dtype is torch.float16,
        "params_dtype": dtype,
        "pipeline_dtype": dtype,
        "deallocate_pipeline_outputs": True,  # core_transformer_config_from_args
        "fp8": "hybrid" if job.precision.compute == "float8" else None,
    }
    if recompute.mode == "full":
        training |= {
            "recompute_granularity": "full",
            "recompute_method": recompute.method or "uniform",
            "recompute_num_layers": recompute.num_layers or 1,
        }
    elif recompute.mode == "selective":
        training |= {"recompute_granularity": "selective", "recompute_modules": list(recompute.modules) or ["core_attn"]}
    return training
