"""What the Megatron-LM ledger covers: GPT models, dense or routed, BERT and T5, trained with Adam, SGD or Muon. Everything
else gives a finding."""

from __future__ import annotations

from typing import get_args

from peakcast.core.findings import FAILS, LESS, MORE, NEARLY_MORE, UNKNOWN, Check, Finding, first, sentences
from peakcast.jobs.architecture import Architecture
from peakcast.jobs.conventions import conventions
from peakcast.jobs.spec import TrainingJob
from peakcast.models.ledger.megatron.blocks.context import Exchange
from peakcast.models.ledger.megatron.context import PARTS
from peakcast.models.ledger.megatron.optimizer_scope import optimizer_checks

RECOMPUTABLE_MODULES = frozenset({"core_attn", "layernorm", "mla_up_proj", "mlp", "moe", "moe_act", "shared_experts"})
FP8_BLOCK = 128
"""Elements along a row that share a scale (Transformer Engine 2.8 `Float8BlockQuantizer`)."""
EXCHANGES = frozenset(get_args(Exchange))


def megatron_findings(job: TrainingJob) -> tuple[Finding, ...]:
    """Why the Megatron-LM ledger does not cover `job`; empty when it does."""
    reasons = (_architecture_reason(job), _training_reason(job), _option_reason(job), _expert_reason(job))
    return tuple(reason for reason in reasons if reason)


def megatron_out_of_scope(job: TrainingJob) -> str:
    """The first sentence of `megatron_findings`; "" when there is none."""
    return next(iter(sentences(megatron_findings(job))), "")


def _architecture_reason(job: TrainingJob) -> Finding | None:
    """What of the network is out of scope; None if nothing is."""
    architecture = job.architecture
    checks: list[Check] = [
        (
            architecture.kind not in ("decoder", "encoder", "encoder_decoder") and not _is_known_hybrid(architecture),
            f"{architecture.name!r} is neither a GPT nor a BERT or T5, nor a hybrid of Mamba-2, attention and feed-forward "
            f"layers (kind={architecture.kind!r}).",
        ),
        (
            architecture.kind == "hybrid"
            and (
                job.parallelism.context_parallel_size > 1
                or job.activation_checkpointing.mode == "full"
                or job.precision.compute == "float8"
                or conventions(job).get("transformer_impl", "transformer_engine") != "transformer_engine"
            ),
            "A hybrid (Mamba) model is modelled with Transformer Engine in 16 bits, without context parallelism and full "
            "recomputation only.",
        ),
        (
            architecture.kind == "encoder_decoder"
            and (
                job.parallelism.pipeline_parallel_size * job.parallelism.context_parallel_size > 1
                or job.activation_checkpointing.mode != "none"
            ),
            "A T5 is modelled without pipeline and context parallelism and without recomputation only.",
        ),
        (
            architecture.mla is None and architecture.num_key_value_heads < job.parallelism.tensor_parallel_size,
            f"tensor_parallel_size={job.parallelism.tensor_parallel_size} above the {architecture.num_key_value_heads} key "
            "and value heads is not modelled: megatron-core then gathers the whole projection.",
            MORE,
            "parallelism.tensor_parallel_size",
        ),
        (architecture.parallel_block, "Parallel attention and feed-forward blocks are not Megatron-LM's."),
    ]
    return first(checks, "architecture")


def _is_known_hybrid(architecture: Architecture) -> bool:
    mixer, parts = architecture.ssm, set(architecture.layer_types)
    return architecture.kind == "hybrid" and mixer is not None and mixer.version == 2 and bool(parts) and parts <= PARTS


def _training_reason(job: TrainingJob) -> Finding | None:
    """What of task, precision, layout and recomputation is out of scope; None if nothing is."""
    layout, recompute = job.parallelism, job.activation_checkpointing
    others = set(recompute.modules) - RECOMPUTABLE_MODULES if recompute.mode != "none" else set()
    checks: list[Check] = [
        (job.task != "train", f"task={job.task!r} is not modelled; only training is.", UNKNOWN, "task"),
        (
            job.finetuning.method != "full",
            f"finetuning.method={job.finetuning.method!r} is not modelled; full is.",
            UNKNOWN,
            "finetuning.method",
        ),
        (
            job.optimizer.name not in ("adam", "adamw", "muon", "sgd"),
            f"optimizer.name={job.optimizer.name!r} is not modelled with Megatron-LM; adam, muon and sgd are.",
            LESS,
            "optimizer.name",
        ),
        *optimizer_checks(job),
        *_fully_sharded_checks(job),
        *_float8_checks(job),
        (
            layout.zero_stage > 1 or layout.sharding != "none",
            f"zero_stage={layout.zero_stage} with sharding={layout.sharding!r} is not modelled with Megatron-LM; the "
            "distributed optimizer (zero_stage 1) is.",
        ),
        (
            layout.pipeline_schedule not in ("1f1b", "interleaved_1f1b"),
            f"pipeline_schedule={layout.pipeline_schedule!r} is not modelled; 1f1b and interleaved_1f1b are.",
            UNKNOWN,
            "parallelism.pipeline_schedule",
        ),
        (
            job.offload.parameters or (job.offload.activations and not conventions(job).get("offload_modules")),
            "Offloaded parameters are not modelled with Megatron-LM, nor activations without offload_modules.",
            LESS,
            "offload",
        ),
        (
            recompute.mode == "selective" and "mlp" in recompute.modules and job.architecture.mlp_bias,
            "Recomputing a feed-forward with biases was seen in no trace: its checkpoint returns the bias, a parameter, "
            "whose backward then leads into checkpoints of earlier steps (megatron-core 0.16.1); without biases it is "
            "modelled.",
        ),
        (
            bool(others),
            f"Recomputing {', '.join(sorted(others))} is not modelled; {', '.join(sorted(RECOMPUTABLE_MODULES))} are.",
        ),
    ]
    return first(checks, "framework")


def _fully_sharded_checks(job: TrainingJob) -> list[Check]:
    """What of Megatron-FSDP is not covered."""
    convention, layout = conventions(job), job.parallelism
    asked = bool(convention.get("use_megatron_fsdp"))
    strategy = convention.get("data_parallel_sharding_strategy")
    eight = job.precision.compute == "float8"
    rest = "is not modelled with Megatron-FSDP"
    return [
        (
            asked and strategy != "optim_grads_params",
            f"data-parallel-sharding-strategy={strategy} {rest}; optim_grads_params is.",
            MORE,
            "framework_options.data_parallel_sharding_strategy",
        ),
        (
            asked and not convention.get("fsdp_reduces_each_gradient"),
            "Megatron-FSDP before megatron-core 0.16, which handles the gradients of a layer at its end, is not modelled.",
            LESS,
            "framework_options.use_megatron_fsdp",
        ),
        (
            asked and (layout.pipeline_parallel_size > 1 or job.architecture.num_nextn_predict_layers > 0),
            f"Pipeline parallelism or multi-token prediction {rest}.",
        ),
        (asked and eight, f"Float8 compute {rest}.", UNKNOWN, "precision.compute"),
        (
            asked and job.optimizer.name not in ("adam", "adamw"),
            f"{job.optimizer.name.capitalize()} {rest}.",
            UNKNOWN,
            "optimizer.name",
        ),
        (
            asked and (job.offload.optimizer or bool(convention.get("use_precision_aware_optimizer"))),
            f"An offloaded or precision-aware optimizer {rest}.",
            LESS,
            "optimizer.name",
        ),
        (asked and job.architecture.kind not in ("decoder",), f"A {job.architecture.kind} {rest}."),
        (
            asked and int(convention.get("num_distributed_optimizer_instances", 1) or 1) > 1,
            f"Sharding within several groups (num-distributed-optimizer-instances) {rest}.",
            MORE,
            "framework_options.num_distributed_optimizer_instances",
        ),
    ]


def _float8_checks(job: TrainingJob) -> list[Check]:
    """What of float8 compute is not covered: traces show the rest (docs/decisions/2026-11-fp8-of-transformer-engine.md)."""
    architecture, eight, recompute = job.architecture, job.precision.compute == "float8", job.activation_checkpointing
    own = conventions(job).get("transformer_impl", "transformer_engine") == "local"
    recipe = conventions(job).get("fp8_recipe", "delayed")
    rest = "is not modelled in float8"
    routed, latent = architecture.moe is not None, architecture.mla
    again = set(recompute.modules) if recompute.mode == "selective" else set()
    blocks = 0 if latent is None else (latent.q_lora_rank or 0) % FP8_BLOCK + latent.kv_lora_rank % FP8_BLOCK
    return [
        (
            eight and own,
            "transformer-impl=local has no float8 compute; transformer_engine has.",
            FAILS,
            "precision.compute",
        ),
        (eight and architecture.kind == "encoder_decoder", f"A T5 {rest}"),
        (eight and architecture.num_nextn_predict_layers > 0, f"Multi-token prediction {rest}"),
        (
            eight and routed and (recompute.mode == "full" or not again <= {"core_attn", "shared_experts"}),
            f"Recomputing a mixture of experts, or parts of it but the shared one, {rest}.",
        ),
        (
            eight and latent is not None and not again <= {"core_attn", "shared_experts"},
            f"Recomputing parts of latent attention but its core {rest}.",
        ),
        (
            eight and (routed or latent is not None) and bool(conventions(job).get("fp8_param_gather")),
            "FP8 parameters (fp8-param-gather) of experts and latent attention are not modelled; of dense layers they are.",
            UNKNOWN,
            "framework_options.fp8_param_gather",
        ),
        (
            eight and recipe == "blockwise" and job.parallelism.sequence_parallel and blocks > 0,
            f"Ranks of latent attention that are no multiples of {FP8_BLOCK} fail with fp8-recipe=blockwise and "
            "sequence-parallel: Transformer Engine 2.8 cannot gather them.",
            FAILS,
            "framework_options.fp8_recipe",
        ),
        (
            eight and recompute.mode == "full" and recipe == "tensorwise",
            "Full recomputation in float8 fails with fp8-recipe=tensorwise (the attention of Transformer Engine 2.8 looks "
            "for delayed scales that were never kept); delayed and blockwise are modelled.",
            FAILS,
            "framework_options.fp8_recipe",
        ),
        (
            eight and recompute.mode == "selective" and job.attention == "eager",
            "Recomputing unfused attention is not modelled in float8; fused attention is.",
        ),
    ]


def _option_reason(job: TrainingJob) -> Finding | None:
    """Which of the framework options is out of scope; None if none is."""
    convention = conventions(job)
    names = (
        "fp32_residual_connection",
        "delay_wgrad_compute",
        "use_transformer_engine_op_fuser",
        "apply_residual_connection_post_layernorm",
    )
    checks: list[Check] = [
        (bool(convention.get(name)), f"framework_options.{name} is not modelled.", UNKNOWN, f"framework_options.{name}")
        for name in names
    ]
    checks.append(
        (
            bool(convention.get("distribute_saved_activations"))
            and job.parallelism.pipeline_parallel_size > 1
            and job.activation_checkpointing.mode == "full",
            "framework_options.distribute_saved_activations is not modelled with pipeline parallelism, where it cuts what "
            "a stage received too.",
            LESS,
            "framework_options.distribute_saved_activations",
        )
    )
    kinds = set(str(convention.get("cp_comm_type") or "p2p").split())
    checks.append(
        (
            job.parallelism.context_parallel_size > 1 and (len(kinds) > 1 or not kinds <= EXCHANGES),
            f"cp-comm-type={' '.join(sorted(kinds))} is not modelled; {', '.join(sorted(EXCHANGES))} in every layer is.",
        )
    )
    checks.append(
        (
            job.offload.activations and bool(convention.get("offload_modules")),
            "Offloaded activations are counted as if copies took no time. They live until their copy has ended and come "
            "back before they are read; two published runs, which run two micro-batches at once as well, have 13 % more "
            "after their first step.",
            NEARLY_MORE,
            "offload.activations",
        )
    )
    return first(checks, "framework_options")


def _expert_reason(job: TrainingJob) -> Finding | None:
    """What of latent attention, multi-token prediction and experts is out of scope; None if nothing is."""
    architecture, convention, layout = job.architecture, conventions(job), job.parallelism
    local = convention.get("transformer_impl", "transformer_engine") == "local"
    full = job.activation_checkpointing.mode == "full"
    routed = architecture.moe is not None
    flex = routed and convention.get("moe_token_dispatcher_type") == "flex"
    checks: list[Check] = [
        (local and architecture.mla is not None, "Multi-latent attention with transformer-impl=local is not modelled."),
        (
            architecture.mla is not None and layout.context_parallel_size > 1,
            "Multi-latent attention with context parallelism is not modelled.",
        ),
        (
            layout.pipeline_layers[-1:] == (0,) and architecture.num_nextn_predict_layers > 0,
            "Multi-token prediction on a last stage without layers is not modelled.",
        ),
        (
            bool(convention.get("defer_embedding_wgrad_compute")) and architecture.num_nextn_predict_layers > 0,
            "framework_options.defer_embedding_wgrad_compute is not modelled with multi-token prediction, whose output "
            "layer runs more than once for a micro-batch.",
            UNKNOWN,
            "framework_options.defer_embedding_wgrad_compute",
        ),
        (
            full and architecture.num_nextn_predict_layers > 0,
            "Full recomputation together with multi-token prediction is not modelled.",
        ),
        (
            flex and convention.get("moe_flex_dispatcher_backend") == "hybridep",
            "HybridEP is counted as its source has it; two published runs have 1 % more.",
            NEARLY_MORE,
            "framework_options.moe_flex_dispatcher_backend",
        ),
        (
            routed and convention.get("moe_token_dispatcher_type") == "alltoall_seq",
            "moe-token-dispatcher-type=alltoall_seq is counted as alltoall, which newer releases have in its place.",
            UNKNOWN,
            "framework_options.moe_token_dispatcher_type",
        ),
        (
            flex and bool(convention.get("moe_expert_capacity_factor")),
            "framework_options.moe_expert_capacity_factor is not modelled with the flex token dispatcher.",
            UNKNOWN,
            "framework_options.moe_expert_capacity_factor",
        ),
        (
            flex and layout.expert_parallel_size == 1,
            "The flex token dispatcher is not modelled without expert parallelism.",
            UNKNOWN,
            "framework_options.moe_token_dispatcher_type",
        ),
        (
            flex and (layout.expert_tensor_parallel_size or layout.tensor_parallel_size) > 1,
            "The flex token dispatcher is not modelled with expert tensor parallelism.",
            UNKNOWN,
            "parallelism.expert_tensor_parallel_size",
        ),
        (
            routed and bool(convention.get("overlap_moe_expert_parallel_comm")),
            "framework_options.overlap_moe_expert_parallel_comm is not modelled: it runs two micro-batches at once.",
            MORE,
            "framework_options.overlap_moe_expert_parallel_comm",
        ),
        (
            routed and bool(convention.get("moe_router_padding_for_quantization")),
            "framework_options.moe_router_padding_for_quantization is not modelled.",
            MORE,
            "framework_options.moe_router_padding_for_quantization",
        ),
        (
            architecture.moe is not None and architecture.moe.expert_bias and bool(convention.get("moe_grouped_gemm")),
            "Grouped experts with biases are not modelled.",
        ),
    ]
    return first(checks, "framework_options")
