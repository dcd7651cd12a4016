"""The contexts of a job's blocks: what its versions, conventions and layout say about each block's tensors.

One context holds for the whole network (`block_context`); each layer has its own, equal for layers that are alike.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from peakcast.core.units import DTYPE_BYTES, FP32
from peakcast.jobs.architecture import Architecture
from peakcast.jobs.conventions import (
    DRIVEN_BY,
    adapter_dtype,
    conventions,
    makes_whole_logits,
    mixes_precision,
    replaces_linear,
    scores_tokens,
    token_scores,
)
from peakcast.jobs.spec import TrainingJob
from peakcast.models.ledger.huggingface.blocks.context import (
    ALL,
    Adapters,
    Attention,
    BackwardRules,
    Experts,
    FusedKernels,
    HFContext,
    LayerRules,
    Linears,
    LossRules,
    Packing,
)
from peakcast.models.ledger.huggingface.blocks.dtypes import ElementBytes, QuantizedLinears
from peakcast.models.ledger.huggingface.blocks.kv_cache import cache_in_training
from peakcast.models.ledger.huggingface.blocks.ring_attention import ring_of
from peakcast.models.ledger.huggingface.blocks.tensor_parallel import tensor_parallel
from peakcast.models.ledger.huggingface.blocks.traits import rotates, slides
from peakcast.models.ledger.huggingface.stored_parameters import left_whole
from peakcast.models.ledger.layouts import (
    adapters_are_units,
    adapters_are_whole,
    expert_ranks,
    finds_final_norm,
    frozen_get_gradients,
    gathered_dtype,
    reduced_bytes,
)
from peakcast.models.ledger.layouts.module_tree import LORA_B, ModulePath, path_of
from peakcast.models.ledger.parameters.adapter_methods import ON_NETWORK, virtual_tokens
from peakcast.models.ledger.parameters.quantization import NF4_BLOCK
from peakcast.networks.families import family_of
from peakcast.networks.trained_parts import copies_head, copies_table

COMPILED: dict[tuple[str, str], frozenset[str]] = {
    ("network", "huggingface"): frozenset({"layers", "embedding", "final_norm", "loss", "mask", "network"}),
    ("network", "torch"): frozenset({"layers", "embedding", "final_norm", "loss", "mask", "network"}),
    ("network_in_parts", "huggingface"): frozenset({"layers", "final_norm", "loss", "mask"}),
    ("network_in_parts", "torch"): frozenset({"layers", "embedding", "final_norm"}),
    ("layers", "huggingface"): frozenset({"layers", "embedding", "final_norm"}),
    ("layers", "torch"): frozenset({"layers", "loss"}),
    ("loss", "torch"): frozenset({"loss"}),
}
"""(regions, stack) -> the parts that are compiled: "layers", "embedding", "final_norm", "loss"; "mask", the computation of
the mask, so that there is one; "network", all of these as one graph (`collectors/stacks/parts/compiled.py`). Where hooks of
FSDP2 break the graph of a Hugging Face network, torch's own modules (embedding, lm_head) are not compiled."""


def block_context(job: TrainingJob, gpu: tuple[int, int] | None, rank: int = 0) -> HFContext:
    """What every block of `job` depends on, on global `rank`. `gpu`: (multiprocessors, threads of each), to include what
    kernels allocate for themselves."""
    convention = conventions(job)
    compiled, kernels = _compiled(job, convention), _kernels(convention)
    group = tensor_parallel(job)
    joined = job.batch.form == "padding_free"
    divided = job.sequence_length // job.parallelism.context_parallel_size
    return HFContext(
        architecture=group.layer(_as_of_release(job.architecture, convention)),
        batch=1 if joined else job.micro_batch_size,
        sequence=job.num_tokens if joined else divided + virtual_tokens(job.finetuning),
        precision=_precision(job, convention),
        attention=_attention(job, convention),
        finetuning=job.finetuning,
        adapters=_adapters(job),
        copies=frozenset(end for end, copied in (("embedding", copies_table), ("head", copies_head)) if copied(job)),
        linears=_linears(job, convention),
        experts=_experts(job, convention),
        loss=_loss(job, convention),
        kernels=kernels.layer_compiled() if "final_norm" in compiled else kernels,
        compiled=compiled,
        compiles_adapters=_compiles_adapters(job),
        backward=_backward(job, convention),
        packing=_packing(job),
        cache=cache_in_training(job, convention),
        group=group,
        ring=ring_of(job, rank),
        neftune=bool(convention.get("neftune")),
        gpu=gpu,
    )


def _compiled(job: TrainingJob, convention: Mapping[str, Any]) -> frozenset[str]:
    """The parts of the network that are compiled: names from COMPILED."""
    if not job.compile:
        return frozenset()
    parts = COMPILED[convention["compiled_regions"], DRIVEN_BY.get(job.framework, job.framework)]
    in_place = convention.get("loss_kernel") == "chunked_logits"  # torchtune compiles the function of its chunks
    return parts if in_place or convention.get("compiles_loss", True) else parts - {"loss"}


def _compiles_adapters(job: TrainingJob) -> bool:
    """Whether traces cover the adapters of a layer that is compiled alone: plain LoRA without autocast, on one GPU."""
    tuning, architecture = job.finetuning, job.architecture
    plain = tuning.method == "lora" and not (tuning.quantization or tuning.dropout)
    alone = job.parallelism.world_size == 1 and not conventions(job).get("autocast")
    return plain and alone and not (architecture.fused_qkv or architecture.fused_gate_up)


def _precision(job: TrainingJob, convention: Mapping[str, Any]) -> ElementBytes:
    weight = int(DTYPE_BYTES[gathered_dtype(job)])
    autocast = bool(convention.get("autocast"))
    return ElementBytes(
        weight_bytes=weight,
        compute_bytes=int(DTYPE_BYTES[job.precision.wide_compute]) if autocast else weight,
        end_weight_bytes=FP32 if convention.get("ends_in_float32") else weight,
        norm_weight_bytes=FP32 if convention.get("norms_in_float32") else weight,
        autocast=autocast,
        float16=(job.precision.wide_compute if autocast else gathered_dtype(job)) == "float16",
        narrows_final_norm=_narrows_final_norm(job),
    )


def _attention(job: TrainingJob, convention: Mapping[str, Any]) -> Attention:
    implementation = str(convention.get("sdpa", "sdpa")) if job.attention == "sdpa" else job.attention
    sdpa = implementation == "sdpa"
    wide = job.architecture.head_dim > 256  # transformers 5.17 `integrations/sdpa_attention.py` use_gqa_in_sdpa
    return Attention(
        implementation=implementation,
        # of generation no trace was compared, and published reserved peaks of it agree only without
        drops_weights=job.task == "train" and bool(convention.get("attention_weights_dropped")),
        repeats_key_value=bool(convention.get("flash_attention_repeats_key_value")),
        sdpa_repeats_key_value=sdpa and (bool(convention.get("sdpa_repeats_key_value")) or wide),
        sdpa_copies=sdpa and bool(convention.get("sdpa_copies")),
        cudnn=sdpa and bool(convention.get("cudnn_attention")),
        mask_is_additive=bool(convention.get("sdpa_mask_is_additive")),
    )


def _adapters(job: TrainingJob) -> Adapters:
    gathered = mixes_precision(job) and not adapters_are_whole(job)
    width = gathered_dtype(job) if gathered else adapter_dtype(job)
    chosen = conventions(job)
    joined = bool(chosen.get("networks_fuse_qkv")) and job.finetuning.method in ("lora", "qlora")
    return Adapters(
        weight_bytes=int(DTYPE_BYTES[width]),
        input_bytes=_adapter_input_bytes(job),
        joined_parts=chosen["adapted_of_qkv"] if joined else "",
    )


def _linears(job: TrainingJob, convention: Mapping[str, Any]) -> Linears:
    # GPT-2's Conv1D is no nn.Linear and is not converted; where the weights' gradients alone stay in bf16, compiled layers
    # keep the inputs of products as in bf16
    as_bfloat16 = family_of(job.architecture).linear.conv1d
    as_bfloat16 |= job.compile and convention.get("float8_recipe") == "rowwise_with_gw_hp"
    return Linears(
        float8=job.precision.compute == "float8" and not as_bfloat16,
        float8_kept=str(convention.get("float8_weights_kept", "gathered")),
        gathered_in_float8=bool(convention.get("fsdp_float8_all_gather")) and job.parallelism.num_replicas > 1,
        keep_input=replaces_linear(job),
        quantized_keep_input=bool(convention.get("quantized_linears_keep_input")),
        quantized_head=bool(convention.get("quantized_lm_head")),
        quantized=_quantized(job, convention),
        unpack_in_place=bool(convention.get("gptq_kernel")),
    )


def _quantized(job: TrainingJob, convention: Mapping[str, Any]) -> QuantizedLinears:
    weights = gathered_dtype(job)
    narrow = job.precision.wide_compute if convention.get("autocast") else weights
    if job.finetuning.quantization != "nf4":
        return QuantizedLinears(narrow=narrow, weights=narrow, multiplies=narrow)
    scales = job.finetuning.double_quantization and not convention.get("quantized_casts_in_forward")
    return QuantizedLinears(
        narrow=narrow,
        elements_per_scale=NF4_BLOCK if scales else 0,
        weights="float16" if convention.get("quantized_from_float16") else weights,
        multiplies=str(convention.get("quantized_compute_dtype") or job.precision.wide_compute),
        input_decides=bool(convention.get("quantized_compute_from_input")),
        casts_in_forward=bool(convention.get("quantized_casts_in_forward")),
    )


def _as_of_release(architecture: Architecture, convention: Mapping[str, Any]) -> Architecture:
    """The network with code that its family had in an older release."""
    return replace(architecture, rotary_in_parts=False) if convention.get("rotates_whole_heads") else architecture


def _experts(job: TrainingJob, convention: Mapping[str, Any]) -> Experts:
    return Experts(
        implementation=str(convention.get("experts_implementation", "grouped_mm")),
        ranks=expert_ranks(job),
        fullest_load=float(convention.get("fullest_expert_load", 1)),
    )


def _loss(job: TrainingJob, convention: Mapping[str, Any]) -> LossRules:
    return LossRules(
        kind="cross_entropy" if makes_whole_logits(job) else job.loss.kind,
        logits_upcast=str(convention.get("logits_upcast", "loss")),
        token_scores=token_scores(job) if makes_whole_logits(job) else "",
        slices_whole_dimensions=bool(convention.get("slices_whole_dimensions")),
        in_stages=job.parallelism.pipeline_parallel_size > 1,
        logits_chunks=max(1, int(convention.get("logits_chunks", 1))),
        logits_chunks_apart=bool(convention.get("logits_chunks_apart")) or _multiplies_chunks(job, convention),
        fused_chunks=int(convention.get("loss_chunks", 0)),
        fused_temporary_bytes=int(convention.get("fused_loss_temporary_bytes", 0)),
        reduced_bytes=reduced_bytes(job) or 0 if convention.get("loss_chunks") else 0,
        completion=job.loss.completion_length or 0,
        smooths_labels=bool(convention.get("smooths_labels")),
        widens_outputs=bool(convention.get("trainer")),
        metrics=str(convention.get("sft_metrics", "")) if job.loss.kind == "cross_entropy" else "",
    )


def _multiplies_chunks(job: TrainingJob, convention: Mapping[str, Any]) -> bool:
    """Whether LitGPT multiplies 128 positions at a time, as it does where adapters train (litgpt 0.5.13 finetune/lora.py,
    `lm_head_chunk_size`)."""
    return convention.get("logits_upcast") == "wrapper" and job.finetuning.method != "full"


def _kernels(convention: Mapping[str, Any]) -> FusedKernels:
    """Which fused kernels the convention replaces modules by."""
    return FusedKernels(
        norm=convention.get("norm_kernel") == "fused",
        wide_norm=convention.get("norm_kernel") == "wide",
        rotary=convention.get("rotary_kernel") == "fused",
        gated_activation=convention.get("gated_activation_kernel") == "fused",
        gelu=bool(convention.get("networks_fuse_gelu")),
        loss=str(convention.get("loss_kernel", "eager")),
        lora=str(convention.get("lora_kernel", "eager")),
    )


def _backward(job: TrainingJob, convention: Mapping[str, Any]) -> BackwardRules:
    return BackwardRules(
        cached_kinds=frozenset(convention["selective_checkpointing_keeps"]),
        saves_on_cpu=job.offload.activations and job.activation_checkpointing.mode == "none",
    )


def _packing(job: TrainingJob) -> Packing:
    return Packing(
        mask_of_batch=job.batch.form != "rows",
        comes_with_mask=job.loss.kind != "cross_entropy" or scores_tokens(job) or bool(conventions(job).get("trainer")),
        valid_rows=job.num_tokens if job.batch.form == "masked" else 0,
        num_sequences=job.micro_batch_size if job.batch.form == "padding_free" else 0,
    )


def _narrows_final_norm(job: TrainingJob) -> bool:
    """Whether accelerate puts the last norm into one FSDP2 group with the lm_head, so that FSDP2 casts the norm's output
    (accelerate 1.15 `fsdp2_prepare_model`, `set_mixed_precision`; torch 2.13 `_register_group_forward_hooks`)."""
    sharded = job.parallelism.sharding in ("fsdp2", "hsdp") and mixes_precision(job) and job.framework == "huggingface"
    return sharded and finds_final_norm(job) and conventions(job)["fsdp2_units"] == "ends"


def first_context(job: TrainingJob, context: HFContext) -> HFContext:
    """`context` for a training's first forward. Without `use_orig_params`, parameters of FSDP1's units become views of the
    gathered tensor only when a unit has been gathered once; until then they are views of the tensor it was built from
    (torch 2.13 `_flat_param.py`, `_use_unsharded_views`). Recomputed layers use the later views (`later_context`)."""
    layout = job.parallelism
    sharded = layout.sharding == "fsdp1" and layout.num_replicas > 1 and job.finetuning.method != "full"
    return _with_adapter_inputs(context, int(DTYPE_BYTES[adapter_dtype(job)])) if sharded else context


def later_context(job: TrainingJob, context: HFContext) -> HFContext:
    """`context` for any later forward."""
    return _with_adapter_inputs(context, _adapter_input_bytes(job))


def context_again(job: TrainingJob, context: HFContext, reads_saved_first: str) -> HFContext:
    """`context` of a layer that a checkpoint runs again, where adapters that FSDP1 has gathered in a narrower dtype by then
    have narrow inputs. `reads_saved_first`: the operation whose backward asks for the recomputation. A reentrant
    checkpoint's graph is of the recomputation."""
    later = later_context(job, context)
    if job.activation_checkpointing.use_reentrant:
        return later
    narrow = ALL if later != context else _gathered_ahead(job, path_of(reads_saved_first))
    return replace(context, adapters=replace(context.adapters, narrow_again=narrow))


def _gathered_ahead(job: TrainingJob, reads_saved_first: ModulePath) -> str:
    """With `use_orig_params`: the matrix whose lora_A is already gathered when its layer is recomputed; "" if there is
    none. The recomputation begins in the backward of an operation, before which the hook of the operation's unit runs; that
    hook also gathers the unit before (torch 2.13 `_runtime_utils.py` _pre_backward_hook, _prefetch_handle)."""
    ahead = adapters_are_units(job) and conventions(job)["fsdp1_backward_prefetch"] == "BACKWARD_PRE"
    return str(reads_saved_first.parent) if ahead and reads_saved_first.name == LORA_B else ""


def _with_adapter_inputs(context: HFContext, input_bytes: int) -> HFContext:
    return replace(context, adapters=replace(context.adapters, input_bytes=input_bytes))


def keeping_matmuls(job: TrainingJob, context: HFContext) -> HFContext:
    """`context` of a recomputed layer, with the matrix products that selective checkpointing keeps."""
    selective = job.activation_checkpointing.mode == "selective"
    every = int(conventions(job).get("selective_checkpointing_matmuls", 1)) if selective else 0
    return replace(context, backward=replace(context.backward, cached_matmuls=every))


def _adapter_input_bytes(job: TrainingJob) -> int:
    """Bytes of one element of an adapter's input."""
    narrowed = mixes_precision(job) and not adapters_are_units(job)
    return int(DTYPE_BYTES[gathered_dtype(job) if narrowed else adapter_dtype(job)])


def target_context(context: HFContext, job: TrainingJob) -> HFContext:
    """The context of the tokens that are predicted: for an encoder-decoder, as many as the decoder reads."""
    return replace(context, sequence=job.decoder_sequence_length) if job.decoder_sequence_length else context


class _LayerKind(NamedTuple):
    """In what the layers of a network may differ; layers of one kind have the same context."""

    is_first: bool
    has_experts: bool
    slides: bool
    """Whether its attention has a window."""
    rotates: bool
    """Whether its queries and keys have rotary positions."""
    part: str
    """Its entry in the architecture's `layer_types`."""
    has_whole_matrix: bool
    """Whether one of its frozen matrices is not quantised."""


def layer_contexts(context: HFContext, job: TrainingJob) -> list[HFContext]:
    """The context of every decoder layer; equal layers have the same object."""
    kinds: dict[_LayerKind, HFContext] = {}
    parts, (last, matrix) = job.architecture.layer_types, left_whole(job)
    with_matrix = replace(context, linears=replace(context.linears, left_whole=matrix.removesuffix(".weight")))
    found = []
    for index in range(job.architecture.num_hidden_layers):
        whole = last == f"layers.{index}"
        kind = _LayerKind(
            is_first=index == 0,
            has_experts=job.architecture.is_moe_layer(index),
            slides=slides(job.architecture, index, context.sequence),
            rotates=rotates(job.architecture, index),
            part=parts[index] if parts else "",
            has_whole_matrix=whole,
        )
        if kind not in kinds:
            kinds[kind] = _layer_context(with_matrix if whole else context, job, index)
        found.append(kinds[kind])
    return found


def _layer_context(context: HFContext, job: TrainingJob, index: int) -> HFContext:
    """The context of decoder layer `index`."""
    architecture, linears = context.architecture, context.linears
    adapters_alone = job.finetuning.method != "full" and job.activation_checkpointing.mode == "none"
    if linears.float8 and index == 0 and job.framework == "huggingface":
        # accelerate 1.15 utils/ao.py filter_first_and_last_linear_layers: q_proj (or the fused one) of layer 0, and lm_head
        skips = linears.float8_skips | {f"self_attn.{_first_linear(architecture)}"}
        linears = replace(linears, float8_skips=skips)
    layer = LayerRules(
        reads_embedding=index == 0
        and not architecture.embedding_norm
        and context.stream_bytes != context.precision.end_weight_bytes,
        # peft's enable_input_require_grads comes with checkpointing only
        input_requires_grad=index > 0 or not adapters_alone or job.finetuning.method in ON_NETWORK or context.table_trains,
        rotates=rotates(architecture, index),
        masked=context.packing.mask_of_batch
        or "mask" in context.compiled
        or family_of(architecture).masks.always
        or slides(architecture, index, context.sequence),
        routed=architecture.is_moe_layer(index),
        parts=architecture.layer_types[index] if architecture.layer_types else "",
        frozen_get_gradients=frozen_get_gradients(job),
    )
    compiled, kernels = context.compiled, _kernels(conventions(job))
    if context.divided_by_hooks and job.activation_checkpointing.recomputes(index):
        compiled -= {"layers"}  # torch.utils.checkpoint switches Dynamo off, unless a graph has it
    kernels = kernels.layer_compiled() if "layers" in compiled else kernels
    return replace(context, layer=layer, linears=linears, kernels=kernels, compiled=compiled)


def _first_linear(architecture: Architecture) -> str:
    """The name of attention's first projection, in the order in which its class makes them."""
    names = family_of(architecture).names
    if family_of(architecture).modules.output_first:
        return names.out
    return names.qkv if architecture.fused_qkv else names.q
