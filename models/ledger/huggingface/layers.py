"""The blocks of a Hugging Face network: which template each layer has, and how layers run forward and backward."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from peakcast.core.units import DTYPE_BYTES
from peakcast.jobs.architecture import Architecture
from peakcast.jobs.conventions import DRIVEN_BY, adapter_dtype, conventions, makes_whole_logits, mixes_precision
from peakcast.jobs.spec import TrainingJob
from peakcast.models.ledger.huggingface.blocks.context import HFContext, Kernels
from peakcast.models.ledger.huggingface.blocks.ends import embedding
from peakcast.models.ledger.huggingface.blocks.hybrid import layer_template
from peakcast.models.ledger.huggingface.blocks.ring_attention import ring_of
from peakcast.models.ledger.huggingface.blocks.tensor_parallel import tensor_parallel
from peakcast.models.ledger.huggingface.blocks.traits import rotates, slides
from peakcast.models.ledger.huggingface.checkpoint import recompute
from peakcast.models.ledger.layouts import (
    adapters_are_units,
    adapters_are_whole,
    expert_ranks,
    finds_final_norm,
    gathered_dtype,
    reduced_bytes,
)
from peakcast.models.ledger.parameters.adapter_methods import ON_NETWORK, virtual_tokens
from peakcast.models.ledger.tape.step import Run, Step
from peakcast.models.ledger.tape.template import Template
from peakcast.networks.families import family_of

FP32 = 4
COMPILED: dict[tuple[str, str], frozenset[str]] = {
    ("network", "huggingface"): frozenset({"layers", "ends", "loss", "mask"}),
    ("network", "torch"): frozenset({"layers", "ends", "loss", "mask"}),
    ("layers", "huggingface"): frozenset({"layers", "ends"}),
    ("layers", "torch"): frozenset({"layers", "loss"}),
    ("loss", "torch"): frozenset({"loss"}),
}
"""(regions, stack) -> the parts that are compiled: "layers"; "ends", the embedding and the final norm; "loss"; "mask", the
computation of the mask (`collectors/stacks/parts/compiled.py`)."""


class Blocks:
    """The templates of one job's network. Equal layers share one context object, whose template is made once."""

    def __init__(self, job: TrainingJob, context: HFContext) -> None:
        checkpointing = job.activation_checkpointing
        self.job = job
        self.context = context
        self.contexts = _layer_contexts(context, job)
        recomputed = [
            checkpointing.mode != "none" and layer % checkpointing.every_n_layers == 0
            for layer in range(job.architecture.num_hidden_layers)
        ]
        self.recomputed = recomputed
        self.compiled = _compiled_alone(job, self.contexts)
        # accelerate's FSDP2 compiles layers in place: their hooks break the graph, inside the checkpoint
        around = job.framework == "huggingface" and job.parallelism.world_size > 1
        around = around or bool(conventions(job).get("checkpoints_around_compiled"))
        self.checkpointed = [
            again and (around or not compiled) for again, compiled in zip(recomputed, self.compiled, strict=True)
        ]
        """Which layers are recomputed before their backward. What other compiled layers recompute is part of their
        backward."""
        self._made: dict[tuple[int, bool, bool], Template] = {}

    def network(self) -> Template | None:
        """One template for the whole network if it is compiled as a whole; else None."""
        alone = self.job.parallelism.world_size == 1 and not self.job.offload.activations
        if not (self.job.compile and alone):
            return None
        from peakcast.models.ledger.compiled.network import compiled_network, is_compiled_whole

        if not is_compiled_whole(self.context):
            return None
        cached = _cached_matmuls(self.job)
        contexts = [replace(one, cached_matmuls=cached) for one in dict.fromkeys(self.contexts)]
        kinds = {kind: index for index, kind in enumerate(dict.fromkeys(self.contexts))}
        return compiled_network(tuple(contexts), tuple(kinds[one] for one in self.contexts), tuple(self.recomputed))

    def embedding(self) -> Template:
        """The template of the embedding, whose output requires a gradient if the first layer needs it."""
        return embedding(replace(self.context, input_requires_grad=self.contexts[0].input_requires_grad))

    def layer(self, index: int, *, input_held: bool = False) -> Template:
        """The template of layer `index`. `input_held`: something outside the layer keeps its input alive."""
        one = self.contexts[index]
        key = id(one), self.recomputed[index], input_held
        if key not in self._made:
            if self.recomputed[index]:
                one = replace(found_again(self.job, one), cached_matmuls=_cached_matmuls(self.job))
            if input_held or self.checkpointed[index]:
                one = replace(one, checkpointed=True, reentrant=self.job.activation_checkpointing.use_reentrant)
            inside = self.recomputed[index] and not self.checkpointed[index]
            self._made[key] = _compiled(one, inside) if self.compiled[index] else layer_template(one)
        return self._made[key]

    def forward(
        self, step: Step, layers: Iterable[int], *, keeps_gradients: bool = True, input_held: bool = False
    ) -> dict[int, Run]:
        """Run `layers` forward and return their runs by index. `input_held`: something keeps the first one's input
        alive."""
        runs: dict[int, Run] = {}
        for index in layers:
            template, module = self.layer(index, input_held=input_held and not runs), f"layers.{index}"
            if self.checkpointed[index]:
                runs[index] = step.run_without_graph(template, module)
            else:
                runs[index] = step.run_forward(template, module, keeps_gradients=keeps_gradients)
        return runs

    def backward(
        self,
        step: Step,
        runs: Mapping[int, Run],
        *,
        keeps_gradients: bool = True,
        input_held: bool = False,
        gradient_held: bool = False,
    ) -> None:
        """Run the backward of the runs that `forward` returned. `gradient_held`: something outside the last layer keeps the
        gradient that comes into it alive."""
        first, last = min(runs, default=0), max(runs, default=0)
        for index, run in reversed(list(runs.items())):
            if self.checkpointed[index]:
                held = {"input_held": input_held and index == first, "gradient_held": gradient_held and index == last}
                recompute(step, run, self.job, keeps_gradients, **held)
            else:
                run.keeps_gradients = keeps_gradients
                step.run_backward(run)


def _compiled_alone(job: TrainingJob, contexts: Sequence[HFContext]) -> list[bool]:
    """Which layers are compiled one by one. (Modules about compiled graphs are imported only if something is compiled.)"""
    if not job.compile or job.offload.activations:
        return [False] * len(contexts)
    from peakcast.models.ledger.compiled.layer import is_compiled_alone

    return [is_compiled_alone(one) for one in contexts]


def _compiled(context: HFContext, recomputes: bool) -> Template:
    """The template of a compiled layer; `recomputes`: its backward recomputes what checkpointing does not keep."""
    from peakcast.models.ledger.compiled.layer import compiled_layer

    return compiled_layer(context, recomputes)


def block_context(job: TrainingJob, gpu: tuple[int, int] | None, rank: int = 0) -> HFContext:
    """What every block of `job` depends on, on global `rank`. `gpu`: (multiprocessors, threads of each), to include what
    kernels allocate for themselves."""
    convention, stack = conventions(job), DRIVEN_BY.get(job.framework, job.framework)
    compiled = COMPILED[convention["compiled_regions"], stack] if job.compile else frozenset()
    if not convention.get("compiles_loss", True):
        compiled -= {"loss"}
    weight = int(DTYPE_BYTES[gathered_dtype(job)])
    autocast = bool(convention.get("autocast"))
    gathered = mixes_precision(job) and not adapters_are_whole(job)
    adapter = gathered_dtype(job) if gathered else adapter_dtype(job)
    group = tensor_parallel(job)
    joined = job.batch.form == "padding_free"
    kernels = _kernels(convention)
    return HFContext(
        architecture=group.layer(job.architecture),
        group=group,
        ring=ring_of(job, rank),
        batch=1 if joined else job.micro_batch_size,
        sequence=job.num_tokens
        if joined
        else job.sequence_length // job.parallelism.context_parallel_size + virtual_tokens(job.finetuning),
        mask_of_batch=job.batch.form != "rows",
        valid_rows=job.num_tokens if job.batch.form == "masked" else 0,
        num_sequences=job.micro_batch_size if joined else 0,
        weight_bytes=weight,
        compute_bytes=int(DTYPE_BYTES[job.precision.wide_compute]) if autocast else weight,
        autocast=autocast,
        float16=(job.precision.wide_compute if autocast else gathered_dtype(job)) == "float16",
        end_weight_bytes=FP32 if convention.get("ends_in_float32") else weight,
        norm_weight_bytes=FP32 if convention.get("norms_in_float32") else weight,
        attention=str(convention.get("sdpa", "sdpa")) if job.attention == "sdpa" else job.attention,
        repeats_key_value=bool(convention.get("flash_attention_repeats_key_value")),
        sdpa_repeats_key_value=bool(convention.get("sdpa_repeats_key_value")),
        mask_is_additive=bool(convention.get("sdpa_mask_is_additive")),
        sdpa_copies=bool(convention.get("sdpa_copies")),
        cudnn_attention=bool(convention.get("cudnn_attention")) and job.attention == "sdpa",
        finetuning=job.finetuning,
        unpacks_in_place=bool(convention.get("gptq_kernel")),
        adapter_bytes=int(DTYPE_BYTES[adapter]),
        adapter_input_bytes=_adapter_input_bytes(job),
        logits_upcast=str(convention.get("logits_upcast", "loss")),
        slices_whole_dimensions=bool(convention.get("slices_whole_dimensions")),
        expert_ranks=expert_ranks(job),
        experts=str(convention.get("experts_implementation", "grouped_mm")),
        fullest_expert_load=int(convention.get("fullest_expert_load", 1)),
        kernels=kernels.layer_compiled() if "ends" in compiled else kernels,
        compiled=compiled,
        compiles_adapters=_compiles_adapters(job),
        reduced_bytes=reduced_bytes(job) or 0 if convention.get("loss_chunks") else 0,
        latent_cache=bool(convention.get("latent_cache", True)),
        logits_chunks_apart=bool(convention.get("logits_chunks_apart")),
        logits_chunks=max(1, int(convention.get("logits_chunks", 1))),
        loss_chunks=int(convention.get("loss_chunks", 0)),
        loss="cross_entropy" if makes_whole_logits(job) else job.loss.kind,
        fused_loss_temporary_bytes=int(convention.get("fused_loss_temporary_bytes", 0)),
        quantized_linears_keep_input=bool(convention.get("quantized_linears_keep_input")),
        linears_keep_input=job.parallelism.zero_stage == 3,
        saves_on_cpu=job.offload.activations and job.activation_checkpointing.mode == "none",
        narrows_final_norm=_narrows_final_norm(job),
        gpu=gpu,
        in_stages=job.parallelism.pipeline_parallel_size > 1,
        neftune=bool(convention.get("neftune")),
        cached_kinds=frozenset(convention["selective_checkpointing_keeps"]),
        float8=job.precision.compute == "float8" and not job.compile,
    )


def _kernels(convention: Mapping[str, Any]) -> Kernels:
    """Which fused kernels the convention replaces modules by."""
    return Kernels(
        norm=convention.get("norm_kernel") == "fused",
        rotary=convention.get("rotary_kernel") == "fused",
        gated_activation=convention.get("gated_activation_kernel") == "fused",
        loss=str(convention.get("loss_kernel", "eager")),
        lora=str(convention.get("lora_kernel", "eager")),
    )


def _compiles_adapters(job: TrainingJob) -> bool:
    """Whether a layer that is compiled by itself with its adapters was traced: plain ones, on one GPU."""
    tuning, architecture = job.finetuning, job.architecture
    plain = tuning.method == "lora" and not (tuning.quantization or tuning.dropout)
    alone = job.parallelism.world_size == 1 and not conventions(job).get("autocast")
    return plain and alone and not (architecture.fused_qkv or architecture.fused_gate_up)


def _narrows_final_norm(job: TrainingJob) -> bool:
    """Whether accelerate puts the last norm into one FSDP2 group with the lm_head, so that FSDP2 casts the norm's output
    (accelerate 1.15 `fsdp2_prepare_model`, `set_mixed_precision`; torch 2.13 `_register_group_forward_hooks`)."""
    sharded = job.parallelism.sharding in ("fsdp2", "hsdp") and mixes_precision(job) and job.framework == "huggingface"
    return sharded and finds_final_norm(job) and conventions(job)["fsdp2_units"] == "ends"


def first_context(job: TrainingJob, context: HFContext) -> HFContext:
    """`context` for a training's first forward. Without `use_orig_params`, parameters of FSDP1's units become views of the
    gathered tensor only when a unit has been gathered once; until then they are views of the tensor it was built from
    (torch 2.13 `_flat_param.py`, `_use_unsharded_views`). Recomputed layers use the later views (`found_again`)."""
    layout = job.parallelism
    sharded = layout.sharding == "fsdp1" and layout.num_replicas > 1 and job.finetuning.method != "full"
    return replace(context, adapter_input_bytes=int(DTYPE_BYTES[adapter_dtype(job)])) if sharded else context


def found_again(job: TrainingJob, context: HFContext) -> HFContext:
    """`context` for any later forward, or for a recomputation."""
    return replace(context, adapter_input_bytes=_adapter_input_bytes(job))


def _adapter_input_bytes(job: TrainingJob) -> int:
    """Bytes of one element of an adapter's input."""
    narrowed = mixes_precision(job) and not adapters_are_units(job)
    return int(DTYPE_BYTES[gathered_dtype(job) if narrowed else adapter_dtype(job)])


def target_context(context: HFContext, job: TrainingJob) -> HFContext:
    """The context of the tokens that are predicted: for an encoder-decoder, as many as the decoder reads."""
    return replace(context, sequence=job.decoder_sequence_length) if job.decoder_sequence_length else context


def _cached_matmuls(job: TrainingJob) -> int:
    """n if selective checkpointing keeps the first of every n matrix products; 0 without selective checkpointing."""
    selective = job.activation_checkpointing.mode == "selective"
    return int(conventions(job).get("selective_checkpointing_matmuls", 1)) if selective else 0


def _layer_contexts(context: HFContext, job: TrainingJob) -> list[HFContext]:
    """The context of every decoder layer; equal layers have the same object."""
    kinds: dict[tuple[bool, bool, bool, bool, str], HFContext] = {}
    parts = job.architecture.layer_types
    found = []
    for index in range(job.architecture.num_hidden_layers):
        slid, named = slides(job.architecture, index, context.sequence), parts[index] if parts else ""
        kind = index == 0, job.architecture.is_moe_layer(index), slid, rotates(job.architecture, index), named
        if kind not in kinds:
            kinds[kind] = _layer_context(context, job, index)
        found.append(kinds[kind])
    return found


def _layer_context(context: HFContext, job: TrainingJob, index: int) -> HFContext:
    """The context of decoder layer `index`."""
    adapters_alone = job.finetuning.method != "full" and job.activation_checkpointing.mode == "none"
    skips = context.float8_skips
    if context.float8 and index == 0:
        # accelerate 1.15 utils/ao.py filter_first_and_last_linear_layers: q_proj (or the fused one) of layer 0, and lm_head
        skips |= {f"self_attn.{_first_linear(context.architecture)}"}
    return replace(
        context,
        first_layer=index == 0 and context.stream_bytes != context.end_weight_bytes,
        # peft's enable_input_require_grads comes with checkpointing only
        input_requires_grad=index > 0 or not adapters_alone or job.finetuning.method in ON_NETWORK,
        routed=context.architecture.is_moe_layer(index),
        rotates=rotates(context.architecture, index),
        parts=context.architecture.layer_types[index] if context.architecture.layer_types else "",
        kernels=context.kernels.layer_compiled() if "layers" in context.compiled else context.kernels,
        masked=context.mask_of_batch
        or "mask" in context.compiled
        or family_of(context.architecture).masks.always
        or slides(context.architecture, index, context.sequence),
        float8_skips=skips,
    )


def _first_linear(architecture: Architecture) -> str:
    """The name of the first projection of attention."""
    names = family_of(architecture).names
    return names.qkv if architecture.fused_qkv else names.q
