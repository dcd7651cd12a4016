"""From a job to what its Megatron-LM blocks depend on on one rank: sizes after splitting, and choices made by the flags."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from peakcast.catalog import Device
from peakcast.conventions import conventions
from peakcast.models.analytical.blocks.megatron_context import AttentionCore, MegatronContext
from peakcast.spec import TrainingJob
from peakcast.units import DTYPE_BYTES, round_up

FUSED_SOFTMAX_LONGEST = {True: 16384, False: 4096}
"""Longest keys of the fused softmax, by "is Transformer Engine": its `softmax.py`, megatron-core `fused_softmax.py`."""


def layer_context(job: TrainingJob, device: Device | None) -> MegatronContext:
    """The context of every block of `job` on one rank."""
    architecture, layout, convention = job.architecture, job.parallelism, conventions(job)
    tensor = layout.tensor_parallel_size
    engine = convention.get("transformer_impl", "transformer_engine") == "transformer_engine"
    core = attention_core(job, device)
    sequence = job.sequence_length // layout.context_parallel_size
    activation = {"gelu": "gelu", "gelu_new": "gelu", "relu2": "squared_relu"}.get(architecture.hidden_act, "other")
    fusion = convention.get("bias_swiglu_fusion" if architecture.gated_mlp else "bias_gelu_fusion", True)
    rotary = architecture.position_embedding == "rope"
    return MegatronContext(
        batch=job.micro_batch_size,
        sequence=sequence,
        hidden=architecture.hidden_size,
        heads=architecture.num_attention_heads // tensor,
        key_value_heads=max(1, architecture.num_key_value_heads // tensor),
        head_dim=architecture.head_dim,
        ffn=architecture.intermediate_size // tensor,
        vocabulary=round_up(architecture.vocab_size, tensor) // tensor,
        positions=architecture.max_position_embeddings if architecture.position_embedding == "learned" else 0,
        tensor_parallel_size=tensor,
        context_parallel_size=layout.context_parallel_size,
        sequence_parallel=layout.sequence_parallel and tensor > 1,
        element_bytes=int(DTYPE_BYTES[job.precision.parameters]),
        normalization="rmsnorm" if architecture.normalization == "rmsnorm" else "layernorm",
        activation=activation,  # type: ignore[arg-type]
        gated=architecture.gated_mlp,
        linear_bias=architecture.mlp_bias,
        qkv_bias=architecture.attention_bias,
        qk_norm=architecture.qk_norm != "none",
        rotary_dim=int(architecture.head_dim * float(convention.get("rotary_percent", 1.0))) if rotary else 0,
        rotary_fused=bool(convention.get("apply_rope_fusion", True)),
        attention_dropout=architecture.attention_dropout,
        hidden_dropout=architecture.hidden_dropout,
        transformer_engine=engine,
        attention=core,
        fused_softmax=_fused_softmax(engine, convention, sequence, job),
        bias_activation_fusion=bool(fusion)
        and (architecture.gated_mlp or (activation == "gelu" and architecture.mlp_bias)),
        bias_dropout_fusion=bool(convention.get("bias_dropout_fusion", True)),
        gradient_accumulation_fusion=bool(convention.get("gradient_accumulation_fusion", True)),
        cached_placeholders=bool(convention.get("cached_weight_gradient_placeholders", True)),
        cached_output_placeholder=bool(convention.get("cached_output_layer_placeholder", True)) and engine,
        fused_cross_entropy=bool(convention.get("cross_entropy_loss_fusion")),
        recompute_attention=job.activation_checkpointing.mode == "selective"
        and (not job.activation_checkpointing.modules or "core_attn" in job.activation_checkpointing.modules),
        checkpointed=False,
        kernel_temporaries=device is not None,
    )


def attention_core(job: TrainingJob, device: Device | None) -> AttentionCore:
    """Which attention runs. `auto` is Transformer Engine's choice, by the GPU and by whether it must be deterministic."""
    convention = conventions(job)
    if convention.get("transformer_impl", "transformer_engine") == "local":
        return "local"
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
    return str(convention.get("nvte_allow_nondeterministic_algo", "")) == "0"


def _fused_softmax(engine: bool, convention: Mapping[str, Any], sequence: int, job: TrainingJob) -> bool:
    """Whether the softmax kernel without an fp32 copy applies to unfused attention (`is_kernel_available`)."""
    heads = job.architecture.num_attention_heads // job.parallelism.tensor_parallel_size
    return (
        bool(convention.get("masked_softmax_fusion", True))
        and job.precision.parameters != "float32"
        and 16 < sequence <= FUSED_SOFTMAX_LONGEST[engine] - int(engine)
        and sequence % 8 == 0
        and job.micro_batch_size * heads % 4 == 0
    )
