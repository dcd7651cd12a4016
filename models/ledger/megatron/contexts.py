"""From a job to the context of its Megatron-LM blocks on one rank: sizes after splitting, and what the flags choose."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from peakcast.catalog import Device
from peakcast.core.errors import SpecError
from peakcast.core.units import DTYPE_BYTES, round_up
from peakcast.jobs.conventions import conventions
from peakcast.jobs.spec import TrainingJob
from peakcast.models.ledger.megatron.blocks.context import (
    AdapterContext,
    AttentionContext,
    AttentionCore,
    CrossEntropyContext,
    EndsContext,
    FeedForwardContext,
    LatentContext,
    MambaContext,
    MegatronContext,
    Offloading,
    ParallelGroups,
    WeightGradients,
)
from peakcast.models.ledger.megatron.blocks.expert_context import ExpertContext, RouterContext

ROUTINGS = ("balanced", "worst_case")
USUALLY_ADAPTED = ("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2")
"""The projections that get an adapter if the job names none (Megatron-Bridge 0.3 `peft/lora.py`)."""
ADAPTABLE = (
    *USUALLY_ADAPTED,
    *("linear_q_proj", "linear_q_down_proj", "linear_q_up_proj", "linear_kv_down_proj", "linear_kv_up_proj"),
)
"""The projections that "all-linear" means in ms-swift: also those of latent attention."""
HYBRID_PARTS = frozenset({"mamba", "attention", "mlp", "moe"})
"""What a layer of a hybrid network may consist of."""
FUSED_SOFTMAX_LONGEST = {True: 16384, False: 4096}
"""The longest keys for the fused softmax, by whether it is Transformer Engine's: its `softmax.py`, megatron-core
`fused_softmax.py`."""


def layer_context(job: TrainingJob, device: Device | None, place: int = 0) -> MegatronContext:
    """The context of every block of `job` on one rank, whose position among those that share a sequence is `place`."""
    architecture, layout, convention = job.architecture, job.parallelism, conventions(job)
    float8, offloads = job.precision.compute == "float8", job.offload.activations
    return MegatronContext(
        batch=job.micro_batch_size,
        sequence=job.sequence_length // layout.context_parallel_size,
        hidden=architecture.hidden_size,
        element_bytes=int(DTYPE_BYTES[job.precision.parameters]),
        fp8_recipe=str(convention.get("fp8_recipe", "delayed")) if float8 else "",
        transformer_engine=_uses_engine(convention),
        kernel_temporaries=device is not None,
        groups=_groups(job, place),
        attention=attention_context(job, device),
        feed_forward=_feed_forward(job),
        ends=_ends(job),
        cross_entropy=_cross_entropy(convention),
        weight_gradients=_weight_gradients(convention),
        offloading=Offloading(
            modules=frozenset(str(convention.get("offload_modules", "")).split() if offloads else ()),
            least_elements=int(convention.get("min_offloaded_tensor_size", 0)),
        ),
        adapters=adapter_context(job),
        normalization="rmsnorm" if architecture.normalization == "rmsnorm" else "layernorm",
        recompute_norms=recomputes(job, "layernorm"),
        linear_bias=architecture.mlp_bias,
        hidden_dropout=architecture.hidden_dropout,
        bias_dropout_fusion=bool(convention.get("bias_dropout_fusion", True)),
        experts=expert_context(job) if architecture.moe is not None else None,
        latent=latent_context(job) if architecture.mla is not None else None,
        mamba=mamba_context(job) if architecture.ssm is not None else None,
        padding=architecture.kind not in ("decoder", "hybrid"),
    )


def _cross_entropy(convention: Mapping[str, Any]) -> CrossEntropyContext:
    """How the loss is computed."""
    return CrossEntropyContext(
        fused=bool(convention.get("cross_entropy_loss_fusion")),
        copies_logits=bool(convention.get("cross_entropy_copies_logits")),
        in_place=convention.get("cross_entropy_fusion_impl") == "te",
        wide_gradient=bool(convention.get("te_cross_entropy_wide_gradient")),
    )


def _weight_gradients(convention: Mapping[str, Any]) -> WeightGradients:
    """How the gradients of weights are added up."""
    return WeightGradients(
        fused=bool(convention.get("gradient_accumulation_fusion", True)),
        cached_placeholders=bool(convention.get("cached_weight_gradient_placeholders", True)),
        cached_output_placeholder=bool(convention.get("cached_output_layer_placeholder", True)),
    )


def _uses_engine(convention: Mapping[str, Any]) -> bool:
    """Whether layers are Transformer Engine's."""
    return bool(convention.get("transformer_impl", "transformer_engine") == "transformer_engine")


def _own_legacy_layers(convention: Mapping[str, Any]) -> bool:
    """Whether layers are Megatron-LM's own from before megatron-core. Legacy models can consist of Transformer Engine's
    TransformerLayer too, whose modules are those of which megatron-core builds its layers (megatron/legacy/model/
    transformer.py)."""
    return bool(convention.get("use_legacy_models")) and not _uses_engine(convention)


def adapter_context(job: TrainingJob) -> AdapterContext | None:
    """The adapters of `job`; None if all parameters train."""
    tuning = job.finetuning
    if tuning.method == "full":
        return None
    return AdapterContext(
        rank=tuning.rank or 0,
        targets=frozenset(ADAPTABLE if "all-linear" in tuning.targets else tuning.targets or USUALLY_ADAPTED),
        dropout=tuning.dropout > 0,
        library=conventions(job)["adapter_library"],
    )


def _groups(job: TrainingJob, place: int) -> ParallelGroups:
    """The ranks that share a sequence and a layer."""
    layout, convention = job.parallelism, conventions(job)
    exchange = str(convention.get("cp_comm_type", "p2p")).split()[0]
    sizes = str(convention.get("hierarchical_context_parallel_sizes", "")).split() or ["1"]
    return ParallelGroups(
        tensor_parallel_size=layout.tensor_parallel_size,
        context_parallel_size=layout.context_parallel_size,
        sequence_parallel=layout.sequence_parallel and layout.tensor_parallel_size > 1,
        context_parallel_rank=place,
        exchange=exchange,  # type: ignore[arg-type]
        ranks_exchanging_heads=int(sizes[0]) if exchange == "a2a+p2p" else 1,
    )


def attention_context(job: TrainingJob, device: Device | None) -> AttentionContext:
    """The attention of `job` on one rank."""
    architecture, layout, convention = job.architecture, job.parallelism, conventions(job)
    tensor, engine, recompute = layout.tensor_parallel_size, _uses_engine(convention), job.activation_checkpointing
    rotary = architecture.position_embedding == "rope" and architecture.mla is None
    grouped = architecture.num_key_value_heads != architecture.num_attention_heads
    return AttentionContext(
        heads=architecture.num_attention_heads // tensor,
        key_value_heads=max(1, architecture.num_key_value_heads // tensor),
        head_dim=architecture.head_dim,
        qkv_bias=architecture.attention_bias,
        qk_norm=architecture.qk_norm != "none",
        qk_norm_copies=_qk_norm_copies(job),
        rotary_dim=int(architecture.head_dim * float(convention.get("rotary_percent", 1.0))) if rotary else 0,
        rotary_fused=bool(convention.get("apply_rope_fusion", True)),
        dropout=architecture.attention_dropout,
        core=attention_core(job, device),
        expands_groups=_own_legacy_layers(convention) and grouped,
        fused_softmax=_fused_softmax(engine, convention, job.sequence_length // layout.context_parallel_size, job),
        wide_softmax=engine or job.precision.parameters == "float32" or _softmax_in_fp32(convention),
        recompute=recompute.mode == "selective" and (not recompute.modules or "core_attn" in recompute.modules),
    )


def _qk_norm_copies(job: TrainingJob) -> Literal["none", "passing", "saved"]:
    """What norms of queries and keys copy: torch's RMS norm saves the views, its layer norm copies; Transformer Engine's
    kernels read copies, and newer releases save these too."""
    convention = conventions(job)
    if not _uses_engine(convention):
        return "none" if job.architecture.normalization == "rmsnorm" else "saved"
    return "saved" if convention.get("norms_save_copies", True) else "passing"


def _feed_forward(job: TrainingJob) -> FeedForwardContext:
    """The dense feed-forward of `job` on one rank."""
    architecture, convention = job.architecture, conventions(job)
    activation = {"gelu": "gelu", "gelu_new": "gelu", "relu2": "squared_relu"}.get(architecture.hidden_act, "other")
    legacy = _own_legacy_layers(convention)
    fusion = convention.get("bias_swiglu_fusion" if architecture.gated_mlp else "bias_gelu_fusion", True)
    if legacy and architecture.gated_mlp:  # `ParallelMLP` has only bias_gelu_impl
        fusion = False
    return FeedForwardContext(
        width=architecture.intermediate_size // job.parallelism.tensor_parallel_size,
        activation=activation,  # type: ignore[arg-type]
        gated=architecture.gated_mlp,
        fused_activation=bool(fusion) and (architecture.gated_mlp or (activation == "gelu" and architecture.mlp_bias)),
        glu_adds_offset=bool(convention.get("glu_adds_offset", True)) and not legacy,
        recompute=recomputes(job, "mlp"),
    )


def _ends(job: TrainingJob) -> EndsContext:
    """What `job` has before and after its layers."""
    architecture, tensor = job.architecture, job.parallelism.tensor_parallel_size
    encoder, two_stacks = architecture.kind == "encoder", architecture.kind == "encoder_decoder"
    return EndsContext(
        vocabulary=round_up(architecture.vocab_size, tensor) // tensor,
        positions=architecture.max_position_embeddings if architecture.position_embedding == "learned" else 0,
        token_types=architecture.type_vocab_size,
        predicted_logits_outlive_loss=bool(conventions(job).get("predicted_logits_outlive_loss")),
        masked_tokens=encoder,
        output_bias=encoder or (two_stacks and architecture.tie_word_embeddings),
        # T5 has Transformer Engine's norms or none (megatron-core 0.16.1 `t5_spec.py`, TENorm)
        final_norms=not two_stacks or conventions(job).get("adam_library") != "torch",
    )


def target_context(job: TrainingJob, context: MegatronContext) -> MegatronContext:
    """The context of a decoder layer that reads an encoder with `context`, and of everything after it."""
    length = (job.decoder_sequence_length or job.sequence_length) // job.parallelism.context_parallel_size
    return replace(context, sequence=length, source_sequence=context.sequence, padding=False)


def expert_context(job: TrainingJob) -> ExpertContext:
    """The routed feed-forward of `job` on one rank. Raises: SpecError for an unknown `moe_routing`."""
    moe, layout, convention = job.architecture.moe, job.parallelism, conventions(job)
    assert moe is not None
    expert_tensor = layout.expert_tensor_parallel_size or layout.tensor_parallel_size
    routing = str(convention.get("moe_routing", "balanced"))
    if routing not in ROUTINGS:
        raise SpecError(
            f"framework_options.moe_routing={routing!r} must be one of {', '.join(ROUTINGS)}.",
            parameter="framework_options.moe_routing",
            value=routing,
        )
    grouped, permute_fusion = bool(convention.get("moe_grouped_gemm")), bool(convention.get("moe_permute_fusion"))
    adds_by_index = bool(convention.get("deterministic_mode")) and bool(convention.get("moe_deterministic_index_add", True))
    return ExpertContext(
        num_experts=moe.num_experts,
        local_experts=moe.num_experts // layout.expert_parallel_size,
        top_k=moe.num_experts_per_tok,
        ffn=moe.moe_intermediate_size // expert_tensor,
        shared_ffn=moe.shared_expert_intermediate_size // layout.tensor_parallel_size,
        shared_gate=moe.shared_expert_gate,
        expert_parallel_size=layout.expert_parallel_size,
        expert_tensor_parallel_size=expert_tensor,
        dispatcher=_dispatcher(convention),  # type: ignore[arg-type]
        grouped=grouped,
        joined_weights=grouped and bool(convention.get("moe_use_legacy_grouped_gemm")),
        placeholders_anew=grouped and not bool(convention.get("cached_grouped_placeholders", True)),
        permute_fusion=permute_fusion,
        keeps_expert_output=adds_by_index and not permute_fusion,
        router=_router(job),
        capacity_factor=max(0.0, float(convention.get("moe_expert_capacity_factor") or 0)),
        pad_to_capacity=bool(convention.get("moe_pad_expert_input_to_capacity")),
        fused_weighted_activation=_fused_weighted_activation(job),
        worst_case=routing == "worst_case",
        recompute_layer=bool(convention.get("moe_layer_recompute")) or recomputes(job, "moe"),
        recompute_activation=recomputes(job, "moe_act"),
        recompute_shared=recomputes(job, "shared_experts"),
        overlap_shared=bool(convention.get("moe_shared_expert_overlap")),
    )


def _router(job: TrainingJob) -> RouterContext:
    """The router of `job`'s experts."""
    moe, convention = job.architecture.moe, conventions(job)
    assert moe is not None
    dtype = str(convention.get("moe_router_dtype") or "")
    balancing = str(convention.get("moe_router_load_balancing_type", "aux_loss"))
    groups, chosen = (int(convention.get(f"moe_router_{name}") or 0) for name in ("num_groups", "group_topk"))
    if not groups or not chosen or chosen * (moe.num_experts // groups) < moe.num_experts_per_tok:
        groups = chosen = 1
    return RouterContext(
        element_bytes={"fp32": 4, "fp64": 8}.get(dtype, int(DTYPE_BYTES[job.precision.parameters])),
        sinkhorn=balancing == "sinkhorn",
        aux_loss="aux_loss" in balancing and float(convention.get("moe_aux_loss_coeff") or 0) > 0,
        z_loss=bool(convention.get("moe_z_loss_coeff")),
        score_function=str(convention.get("moe_router_score_function", "softmax")),  # type: ignore[arg-type]
        pre_softmax=bool(convention.get("moe_router_pre_softmax")),
        expert_bias=moe.router_correction_bias,
        fusion=bool(convention.get("moe_router_fusion")),
        groups=groups,
        chosen_groups=chosen,
    )


def _dispatcher(convention: Mapping[str, Any]) -> str:
    """Who sends tokens to experts: with moe-token-dispatcher-type=flex its backend."""
    chosen = str(convention.get("moe_token_dispatcher_type", "allgather"))
    if chosen == "flex":
        return str(convention.get("moe_flex_dispatcher_backend", "deepep"))
    return chosen.removesuffix("_seq")  # an older exchange, which has a finding


def _fused_weighted_activation(job: TrainingJob) -> bool:
    """Whether one kernel applies activation and probability: SwiGLU and quick GEGLU with their fusion; squared ReLU if
    asked for."""
    architecture, convention = job.architecture, conventions(job)
    if architecture.gated_mlp:
        return bool(convention.get("bias_swiglu_fusion", True))
    return architecture.hidden_act == "relu2" and bool(convention.get("use_fused_weighted_squared_relu"))


def latent_context(job: TrainingJob) -> LatentContext:
    """The multi-latent attention of `job`."""
    mla, convention = job.architecture.mla, conventions(job)
    assert mla is not None
    return LatentContext(
        q_lora_rank=mla.q_lora_rank or 0,
        kv_lora_rank=mla.kv_lora_rank,
        nope_dim=mla.qk_nope_head_dim,
        rope_dim=mla.qk_rope_head_dim,
        rotary_dim=int(mla.qk_rope_head_dim * float(convention.get("rotary_percent", 1.0))),
        v_dim=mla.v_head_dim,
        qk_norm=bool(convention.get("qk_layernorm")),
        rotary_fused=bool(convention.get("apply_rope_fusion", True)),
        recompute_up_projection=recomputes(job, "mla_up_proj"),
    )


def mamba_context(job: TrainingJob) -> MambaContext:
    """The Mamba-2 mixer of `job` on one rank."""
    ssm, tensor = job.architecture.ssm, job.parallelism.tensor_parallel_size
    assert ssm is not None
    return MambaContext(
        inner=ssm.inner_size // tensor,
        heads=ssm.num_heads // tensor,
        groups=ssm.num_groups // tensor,
        state=ssm.state_size,
        kernel=ssm.conv_kernel,
    )


def part_context(context: MegatronContext, part: str) -> MegatronContext:
    """The context of a hybrid's layer that consists of `part`, one of `HYBRID_PARTS`; for any other, the whole layer's."""
    if part == "moe":
        return replace(context, part="mlp")
    if part not in HYBRID_PARTS:
        return context
    return replace(context, part=part, experts=None)  # type: ignore[arg-type]


def recomputes(job: TrainingJob, module: str) -> bool:
    """Whether selective recomputation includes `module`."""
    recompute = job.activation_checkpointing
    return recompute.mode == "selective" and module in recompute.modules


def attention_core(job: TrainingJob, device: Device | None) -> AttentionCore:
    """Which attention kernel runs. `auto` is Transformer Engine's choice, by the GPU and by whether it must be
    deterministic."""
    convention = conventions(job)
    if convention.get("transformer_impl", "transformer_engine") == "local":
        return "flash" if _own_legacy_layers(convention) and convention.get("use_flash_attn") else "local"
    backend = str(convention.get("attention_backend", "auto"))
    if backend != "auto":
        choices: Mapping[str, AttentionCore] = {
            "unfused": "unfused", "flash": "flash", "fused": "fused", "local": "local",
        }  # fmt: skip
        return choices[backend]
    generation = device.compute_capability[0] if device is not None else 9
    table: Mapping[str, Any] = convention[
        "auto_attention_deterministic" if _deterministic(convention) else "auto_attention"
    ]
    known = [int(key) for key in table]
    return table[str(max(key for key in known if key <= max(generation, min(known))))]  # type: ignore[no-any-return]


def _deterministic(convention: Mapping[str, Any]) -> bool:
    """Whether attention must be deterministic."""
    return str(convention.get("nvte_allow_nondeterministic_algo", "")) == "0"


def _softmax_in_fp32(convention: Mapping[str, Any]) -> bool:
    """Whether megatron-core's own attention widens scores: if asked for, or if they are scaled by layer
    (`transformer_config.py`)."""
    return bool(convention.get("attention_softmax_in_fp32") or convention.get("apply_query_key_layer_scaling"))


def _fused_softmax(engine: bool, convention: Mapping[str, Any], sequence: int, job: TrainingJob) -> bool:
    """Whether unfused attention can use the softmax kernel without an fp32 copy (`is_kernel_available`). Transformer Engine
    ignores `masked_softmax_fusion` (2.8 `softmax.py` reads NVTE_MASKED_SOFTMAX_FUSION)."""
    heads = job.architecture.num_attention_heads // job.parallelism.tensor_parallel_size
    return (
        (engine or bool(convention.get("masked_softmax_fusion", True)))
        and job.precision.parameters != "float32"
        and 16 < sequence <= FUSED_SOFTMAX_LONGEST[engine] - int(engine)
        and sequence % 8 == 0
        and job.micro_batch_size * heads % 4 == 0
    )
