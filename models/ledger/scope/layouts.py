"""What the ledger does not cover of layouts under any framework but Megatron: DDP, FSDP, tensor, expert, context and
pipeline parallelism, as `peakcast verify agreement` has traced them; DeepSpeed's ZeRO (`agreement-deepspeed`)."""

from __future__ import annotations

from peakcast.models.ledger.scope import facts as job
from peakcast.models.ledger.scope.fact import above, differs, option, setting, trait
from peakcast.models.ledger.scope.table import Section, fails, less, more, nearly_less, nearly_more, unknown

# fmt: off
_DDP = Section("DDP", when=job.asks_ddp, rows=(
    nearly_less("framework_options.ddp_gradient_as_bucket_view",
                job.accumulates & option("accumulates_without_sync") & option("ddp_gradient_as_bucket_view"),
                "ddp_gradient_as_bucket_view together with gradient accumulation without synchronisation is counted up to "
                "0.8 % too high: gradients leave for their buckets one by one.", share=0.008),
))

_FSDP2 = Section("FSDP2", when=job.asks_fsdp2, rows=(
    fails("finetuning.quantization", setting("finetuning.quantization", "int8"),
          "8-bit weights of bitsandbytes fail under FSDP2: what it divides is no Int8Params any more and has lost its "
          "scales (bitsandbytes 0.50); use quantization=nf4, or ddp."),
    more("versions.torch", job.early_fsdp2,
         "torchtitan's runs of mid-2024 (nightly torch 2.4 and 2.5, FSDP2 over 8 GPUs, no expandable segments) reserved 8 "
         "to 10 GiB more than the simulated allocator, for a reason that was not found; those of 2025 did not."),
    fails("loss.fused_linear_cross_entropy", job.adapts & job.ends_apart & ~job.ties_embeddings & job.fused_loss,
          "a fused loss with adapters fails where fsdp2_units=ends: the lm_head is a group by itself (accelerate finds no "
          "norm inside peft's wrapper) and is never called, so its weight is not gathered; use fsdp2_units=root."),
    fails("finetuning.modules_to_save", job.adapts & job.copies_ends & job.ends_apart & job.ties_embeddings,
          "copies of the token table or the lm_head (finetuning.modules_to_save) fail where both share a weight and "
          "fsdp2_units=ends: the frozen weight is in two groups, which FSDP2 refuses; use ddp or fsdp1."),
))

_FSDP1 = Section("FSDP1", when=job.asks_fsdp1, rows=(
    fails("finetuning.quantization", setting("finetuning.quantization", "int8"),
          "8-bit weights of bitsandbytes fail under FSDP1, which flattens no integers (torch 2.13 fsdp/_flat_param.py); "
          "use quantization=nf4, or ddp."),
    fails("framework_options.quantized_storage",
          setting("finetuning.quantization", "nf4") & option("quantized_storage", "uint8"),
          "4-bit weights stored as uint8 (BitsAndBytesConfig's default) fail under FSDP1, which flattens no integers "
          "(torch 2.13 fsdp/_flat_param.py); set bnb_4bit_quant_storage to the dtype of the other weights."),
    fails("precision.parameters", setting("finetuning.quantization", "nf4") & job.changes_dtype,
          "4-bit weights fail under FSDP1 beside others of {precision.parameters}: all weights of a unit have one dtype, "
          "and a cast to {precision.compute} would change packed ones; load the network in {precision.compute}."),
    fails("finetuning.adapter_dtype", job.adapts & job.adapters_gathered_otherwise & ~job.autocast,
          "adapters of {adapter_dtype} that FSDP1 gathers in {gathered_dtype} fail without autocast: peft casts "
          "their inputs to the first, and torch cannot multiply two dtypes; set autocast, as accelerate does."),
    fails("activation_checkpointing.mode", job.adapts & job.selective,
          "selective checkpointing with adapters under FSDP1 fails in torch 2.13: when a layer is recomputed, the units "
          "inside it run other operations than the first time; use mode=full, or fsdp2."),
    unknown("framework_options.fsdp_reshard_after_forward",
            option("fsdp_reshard_after_forward", False) & option("fsdp1_use_orig_params"),
            "FSDP1 that keeps weights gathered after forward (fsdp_reshard_after_forward=false) is modelled with "
            "fsdp1_use_orig_params=false; with true torch 2.13 cannot be traced."),
    fails("framework_options.fsdp1_units",
          job.adapts & option("fsdp1_units", "layers_with_adapters") & option("fsdp1_use_orig_params", False),
          "FSDP1 refuses a unit with frozen and trained weights (fsdp1_units=layers_with_adapters) unless "
          "fsdp1_use_orig_params is true."),
    unknown("framework_options.fsdp1_forward_prefetch",
            option("fsdp1_forward_prefetch") & (job.adapts | option("fsdp1_units", "modules")),
            "FSDP1 that gathers units ahead in forward (fsdp1_forward_prefetch) is modelled for units of whole layers, "
            "without adapters."),
    unknown("framework_options.fsdp1_units",
            option("fsdp1_units", "modules") & (~job.like_llama | job.ties_embeddings | job.adapts | job.experts),
            "FSDP1 with every module as a unit is modelled for layers like Llama's without shared table, adapters and "
            "experts."),
    nearly_more("framework_options.fsdp1_units", option("fsdp1_units", "modules"),
                "FSDP1 with every module as a unit is counted without the copy that joins a gradient's parts: in a step "
                "of so few tokens that the peak is there, one matrix more is needed."),
    fails("offload.activations", job.checkpoints_around_units & job.offloads_activations,
          "activations cannot be offloaded where FSDP1's units are checkpointed from outside (checkpoints_around_units; "
          "transformers < 4.53): only layers that checkpoint themselves offload (gradient_checkpointing_enable)."),
))

_DATA_PARALLEL = Section("data parallelism", when=job.replicated, rows=(
    _DDP,
    unknown("parallelism.sharding", ~job.asks_ddp & job.encoder,
            "{architecture.name!r} under FSDP is not modelled: its embeddings are one unit and its head is in another, but "
            "the two share a table, which FSDP1 stores twice and FSDP2 refuses (torch 2.13); use DDP or ZeRO."),
    _FSDP2,
    _FSDP1,
))

_SIZE = "parallelism.tensor_parallel_size"
_TENSOR_PARALLEL = Section("tensor parallelism", when=job.tensor_parallel, rows=(
    unknown(_SIZE, ~(job.like_llama | (job.huggingface & trait("traces.tensor_parallel"))),
            "tensor parallelism of {architecture.model_type!r} under framework={framework!r} is not modelled: that of "
            "layers like Llama's is, and with framework='huggingface' that of {tensor_parallel_families}."),
    unknown(_SIZE, ~(job.huggingface | job.plain_torch), "tensor parallelism is not modelled for framework={framework!r}."),
    unknown(_SIZE, job.huggingface & trait("traces.tensor_parallel") & (job.loops_over_experts | job.adapts_experts),
            "tensor parallelism of experts was compared with traces of grouped products whose matrices have no adapters, "
            "of transformers 5.17, only."),
    unknown(_SIZE, ~job.huggingface & ~job.trains, "tensor parallelism under torch is modelled in training only."),
    Section(
        "tensor parallelism", when=job.adapts & job.plain_torch,
        start="finetuning.method={finetuning.method!r} under torch's tensor parallelism is compared with traces ", rows=(
        unknown(_SIZE, job.context_parallel, "without context parallelism only."),
        unknown(_SIZE, job.replicated & job.asks_ddp,
                "alone and under fsdp2 and hsdp only: DDP would make every frozen weight trainable."),
        unknown(_SIZE, ~job.optimizer("adamw"), "with AdamW only, not optimizer.name={optimizer.name!r}."),
        unknown(_SIZE, job.reentrant, "without reentrant checkpointing only."),
    )),
    more("finetuning.modules_to_save", job.copies_ends,
         "copies of the token table or the lm_head (finetuning.modules_to_save) under tensor parallelism have not been "
         "traced: each is counted as divided like what it copies."),
    unknown("finetuning.quantization", job.quantized,
            "finetuning.quantization={finetuning.quantization!r} under tensor parallelism is not modelled; lora is."),
    fails("finetuning.targets", job.adapts_gathered_outputs,
          "adapters of {architecture.model_type!r} under tensor parallelism fail in peft 0.21, which does not support "
          "matrices whose output is gathered (in {whole_parts}); name other targets."),
    unknown(_SIZE, job.parts_of_heads,
            "tensor_parallel_size={parallelism.tensor_parallel_size} does not divide {architecture.num_key_value_heads} "
            "key heads and intermediate_size={architecture.intermediate_size}, and parts of heads are not modelled."),
    fails(_SIZE, job.huggingface & job.vocabulary_in_uneven_parts,
          "tensor_parallel_size={parallelism.tensor_parallel_size} does not divide vocab_size={architecture.vocab_size}: "
          "transformers refuses it."),
    unknown(_SIZE, job.huggingface & job.replicated,
            "tensor with data parallelism was compared with no trace of transformers' own plan: accelerate 1.15 asks "
            "transformers 5.17 for a class that it no longer has (ReplicateParallel). With framework='torch' it is "
            "modelled, for programs that split the network by torch's plan, as NeMo AutoModel does."),
    unknown(_SIZE, job.huggingface & job.sequence_parallel,
            "sequence_parallel is not part of transformers' tensor-parallel plan for this architecture."),
    fails("optimizer.name", job.huggingface & job.trains & ~job.optimizer("adamw"),
          "optimizer.name={optimizer.name!r} cannot update plain tensors and DTensors together, which tensor parallelism "
          "under the Trainer requires; adamw can."),
    unknown(_SIZE, job.replicated & ~(job.asks_ddp | job.asks_fsdp2),
            "tensor parallelism with sharding={parallelism.sharding!r} is not modelled; with none (DDP), fsdp2 and hsdp it "
            "is."),
    unknown("parallelism.sharding", job.replicated & job.asks_ddp & job.ties_embeddings,
            "{architecture.name!r} shares its token table with the head. torch's DDP over tensor parallelism makes it a "
            "plain tensor at one end only: torch 2.13 fails, and other releases are not modelled; fsdp2 is."),
    unknown("loss.fused_linear_cross_entropy", job.trains & job.fused_loss,
            "a fused loss under tensor parallelism is not modelled."),
    fails("framework_options.liger_kernels", job.plain_torch & job.liger,
          "Liger's kernels under torch's tensor parallelism fail: they return whole tensors where the plan "
          "expects a rank's part."),
    fails("attention", job.sequence_parallel & job.eager,
          "attention='eager' under sequence_parallel fails: transformers makes the mask for a rank's part; use sdpa."),
    fails("precision.compute", job.huggingface & job.trains & job.autocast & job.computes_float16,
          "fp16 under transformers' tensor parallelism fails: GradScaler cannot unscale plain tensors and DTensors "
          "together; use bf16."),
    unknown("attention", job.flex & (job.plain_torch | job.sequence_parallel | job.adapts),
            "flex attention under tensor parallelism was compared with traces of transformers' own plan only, without "
            "sequence_parallel and where all weights train."),
    unknown("precision.compute", job.float8 & (job.plain_torch | job.sequence_parallel | job.adapts),
            "float8 under tensor parallelism was compared with traces of transformers' own plan only, without "
            "sequence_parallel and where all weights train."),
    unknown("offload.activations", job.offloads_activations,
            "offloaded activations under tensor parallelism are not modelled."),
))

_EXPERT_PARALLEL = Section(
    "expert parallelism", when=job.expert_parallel,
    start="expert_parallel_size={parallelism.expert_parallel_size} is modelled for Megatron and torchtitan's experts",
    rows=(
    less("parallelism.expert_parallel_size", job.experts_on_every_rank,
         "; with ZeRO or FSDP1 every rank is assumed to have all experts."),
    more("parallelism.expert_parallel_size", ~(job.plain_torch & job.torchtitans_experts),
         "; for others experts are divided, and what the exchange of tokens allocates is left out."),
    Section("expert parallelism", start=": compared with its trace ", rows=(
        unknown("parallelism.expert_parallel_size", ~setting("parallelism.sharding", "fsdp2") | job.parallel_otherwise,
                "under FSDP2 without other parallelism only."),
        unknown("parallelism.expert_parallel_size", ~job.trains | job.adapts, "where all weights train only."),
        unknown("parallelism.expert_parallel_size", ~job.optimizer("adamw"),
                "with AdamW only, not optimizer.name={optimizer.name!r}."),
        unknown("parallelism.expert_parallel_size", job.offloads, "without offload only."),
        unknown("parallelism.expert_parallel_size", ~job.full_rows, "with full rows only."),
        unknown("parallelism.expert_parallel_size", ~job.computes_bfloat16, "computed in bfloat16 only."),
        unknown("parallelism.expert_parallel_size", job.reentrant, "without reentrant checkpointing only."),
        unknown("parallelism.expert_parallel_size", job.fused_loss, "without a fused loss only."),
    )),
))

_RING = "parallelism.context_parallel_size"
_CONTEXT_PARALLEL = Section("context parallelism (ring attention)", when=job.context_parallel, rows=(
    unknown(_RING, ~(job.huggingface | job.plain_torch),
            "context parallelism is not modelled for framework={framework!r}; for megatron, huggingface, torch it is."),
    unknown(_RING, ~job.like_llama & ~(job.huggingface & job.decoder & ~job.latent_attention),
            "context parallelism of {architecture.model_type!r} is not modelled; that of layers like Llama's is, and with "
            "framework='huggingface' that of decoders without latent attention."),
    unknown(_RING, ~job.trains, "context parallelism is modelled in training only."),
    unknown(_RING, ~(job.sdpa & job.half_precision) | above("architecture.head_dim", 256),
            "context parallelism is modelled as a ring of flash attention: with sdpa in half precision and heads of at "
            "most 256 elements."),
    fails(_RING, setting("architecture.sliding_window"),
          "{architecture.name!r} has a sliding window, which torch's context parallelism does not support; use one rank."),
    unknown(_RING, job.uneven_chunks,
            "sequence_length={sequence_length} is no multiple of 2 × "
            "context_parallel_size={parallelism.context_parallel_size}: ranks then have unequal work, which is not "
            "modelled; use a multiple."),
    unknown("batch.form", ~job.full_rows, "batch.form={batch.form!r} under context parallelism is not modelled; use rows."),
    unknown(_RING, ~job.asks_fsdp2 & (job.huggingface | ~job.asks_ddp),
            "context parallelism with sharding={parallelism.sharding!r} is not modelled; with fsdp2 and hsdp it is, and "
            "in a plain loop also without sharding."),
    unknown("loss.fused_linear_cross_entropy", job.fused_loss & job.plain_torch,
            "a fused loss under context parallelism is modelled with framework='huggingface' only."),
    unknown("precision.compute", job.float8 & (job.plain_torch | job.adapts),
            "float8 under context parallelism was compared with traces of framework='huggingface' only, where all weights "
            "train."),
    unknown("offload.activations", job.offloads_activations,
            "offloaded activations under context parallelism are not modelled."),
))

_STAGES = "parallelism.pipeline_parallel_size"
_PIPELINES = Section("pipeline parallelism", when=job.pipeline_parallel, rows=(
    unknown(_STAGES, ~job.plain_torch,
            "pipeline parallelism is modelled for framework='megatron' and 'torch', not {framework!r}."),
    # SmolLM3's every fourth layer has no rotation: a stage with only such layers frees the tables
    unknown(_STAGES, ~job.like_llama | trait("rotary.skipped_every"),
            "pipeline parallelism of {architecture.model_type!r} is not modelled: that of layers like Llama's is."),
    unknown(_STAGES, ~job.trains, "pipeline parallelism is modelled in training only."),
    unknown("finetuning.method", job.adapts,
            "finetuning.method={finetuning.method!r} in pipeline stages is not modelled: all weights train."),
    unknown(_STAGES, job.ties_embeddings,
            "{architecture.name!r} shares its token table with the head, and the two are on different stages: torch's "
            "pipelining does not keep their copies equal."),
    unknown(_STAGES, ~job.known_schedule,
            "pipeline_schedule={parallelism.pipeline_schedule!r} with "
            "virtual_pipeline_stages={parallelism.virtual_pipeline_stages} is not modelled; gpipe, 1f1b and zero_bubble "
            "with 1, gpipe, interleaved_1f1b and zero_bubble with more, zero_bubble_v and dualpipe_v with 2 are."),
    unknown(_STAGES, job.splits_backward & ~job.none_or_plain_full,
            "{activation_checkpointing} under zero_bubble is not modelled: every weight's backward computes its layer "
            "anew; use activation_checkpointing.mode=none, or full for every layer and not reentrant, or trace it."),
    nearly_more("precision.compute", job.splits_backward & job.computes_float32,
                "zero_bubble computed in float32 is not modelled: traced stages need up to 1.4 % more; use bfloat16, or "
                "another schedule.", share=0.014),
    unknown("parallelism.pipeline_layers", job.empty_stages,
            "parallelism.pipeline_layers={stages_of_layers} leaves a stage without layers: not modelled."),
    unknown(_STAGES, job.replicated & (~(job.asks_ddp | job.asks_fsdp2) | job.zero),
            "pipeline parallelism with sharding={parallelism.sharding!r} and zero_stage={parallelism.zero_stage} is not "
            "modelled; with none (DDP), fsdp2 and hsdp it is."),
    unknown(_STAGES, job.replicated & job.splits_backward & job.asks_ddp,
            "zero_bubble under DDP is not modelled: torch computes the weights' gradients by torch.autograd.grad, which "
            "runs no hooks of DDP, so they would not be reduced; use fsdp2, or another schedule."),
    unknown(_STAGES, job.replicated & ~job.asks_ddp & ~job.ends_apart,
            "pipeline stages with embedding and head in FSDP2's root unit are not modelled; use fsdp2_units=ends."),
    fails("gradient_accumulation_steps", job.uneven_rounds,
          "gradient_accumulation_steps={gradient_accumulation_steps} is not a multiple of the {rounds} rounds "
          "of torch's interleaved schedules, which refuse that."),
    fails("gradient_accumulation_steps", setting("parallelism.pipeline_schedule", "1f1b") & job.fewer_micro_batches(than=1),
          "gradient_accumulation_steps={gradient_accumulation_steps} is fewer than "
          "pipeline_parallel_size={parallelism.pipeline_parallel_size}: torch's Schedule1F1B refuses that; gpipe takes "
          "it."),
    fails("gradient_accumulation_steps",
          setting("parallelism.pipeline_schedule", "dualpipe_v") & job.fewer_micro_batches(than=2),
          "gradient_accumulation_steps={gradient_accumulation_steps} is fewer than the stages, of which dualpipe_v has 2 × "
          "pipeline_parallel_size={parallelism.pipeline_parallel_size}: torch refuses that."),
    unknown("framework_options.autocast", job.autocast, "autocast in pipeline stages is not modelled."),
    unknown("precision.compute", job.float8, "float8 in pipeline stages is not modelled."),
    unknown("loss.fused_linear_cross_entropy", job.fused_loss, "a fused loss in pipeline stages is not modelled."),
    unknown("offload", job.offloads, "offload in pipeline stages is not modelled."),
    unknown("framework_options.liger_kernels", job.liger, "Liger's kernels in pipeline stages are not modelled."),
))

_PARTS_OF_MATRICES = job.fsdp2 | (job.tensor_parallel & job.plain_torch)
_MATRIX_OPTIMIZERS = Section("optimizers that need whole matrices", (
    fails("optimizer.name", job.of_bitsandbytes & _PARTS_OF_MATRICES,
          "optimizer.name={optimizer.name!r} of bitsandbytes cannot step over DTensors (torch 2.13: its operator has no "
          "sharding strategy, or gets plain tensors too); use fsdp1, or an optimizer of torch or torchao."),
    fails("optimizer.name", job.optimizer("adafactor") & _PARTS_OF_MATRICES,
          "optimizer.name='adafactor' cannot step over DTensors (torch 2.13 optim/_adafactor.py, transformers 5.17): the "
          "norms of their rows are parts of sums; use fsdp1, whose parts are vectors."),
    more("optimizer.name", job.optimizer("muon") & _PARTS_OF_MATRICES,
         "optimizer.name='muon' over matrices that ranks have divided is not modelled: what DTensor gathers to multiply "
         "them takes up to 9 % of the step's peak."),
    fails("optimizer.name", job.optimizer("muon") & job.asks_fsdp1 & job.replicated,
          "optimizer.name='muon' finds no matrix under fsdp1, whose parts are vectors, and torch refuses an empty list."),
))

LAYOUTS = Section("layouts", (
    _DATA_PARALLEL,
    _TENSOR_PARALLEL,
    unknown("batch.form", job.divides_weights & ~job.full_rows,
            "batch.form={batch.form!r} under tensor or pipeline parallelism is not modelled."),
    _EXPERT_PARALLEL,
    _CONTEXT_PARALLEL,
    _PIPELINES,
    _MATRIX_OPTIMIZERS,
))

_STAGE = "parallelism.zero_stage"
_OVER_PARTITIONS = (
    "adam", "adamw", "adamw_8bit", "paged_adamw_32bit", "paged_adamw_8bit", "ademamix", "ademamix_8bit",
    "paged_ademamix_32bit", "paged_ademamix_8bit", "lion", "lion_8bit", "paged_lion_32bit", "paged_lion_8bit", "adafactor",
    "rmsprop", "sgd",
)
"""Optimizers that were traced as they update DeepSpeed's flat partitions. Paged states are outside the allocator, and what
else those optimizers have is as without paging (bitsandbytes 0.50 optim/optimizer.py `get_state_buffer`)."""
_TRACED_PLAIN = job.offloads | job.preference | job.quantized | job.experts
ZERO = Section(
    "ZeRO", when=job.zero, start="zero_stage={parallelism.zero_stage} is compared with DeepSpeed's trace ", rows=(
    unknown("offload.activations", job.offloads_activations, "without offloaded activations only."),
    unknown("task", ~job.trains, "in training only."),
    fails("finetuning.adapter_dtype", job.zero3 & job.copies_ends & job.adapters_of_another_dtype,
          "with one dtype of all that trains: adapters of {adapter_dtype} beside copies of the token table or the lm_head "
          "in {precision.parameters!r} are refused by stage 3 (`defragment`); make adapters in the dtype of the weights "
          "(autocast_adapter_dtype=False)."),
    unknown(_STAGE, job.quantized & ~setting("finetuning.quantization", "nf4"),
            "with nf4 or whole weights only, not finetuning.quantization={finetuning.quantization!r}."),
    unknown(_STAGE, job.quantized & job.offloads, "offloading with whole weights only, not quantised ones."),
    nearly_more(_STAGE, job.offloads_parameters & ~job.replicated,
                "on one rank with its weights on the GPU only: from the host, first steps are counted up to 0.5 % too "
                "low.", share=0.005),
    unknown(_STAGE, job.zero1 & job.overlaps_reduction & job.accumulates & job.ties_embeddings,
            "with overlap_comm and several micro-batches only without a shared table."),
    unknown(_STAGE, job.zero1 & job.overlaps_reduction & (job.preference | job.quantized | job.experts),
            "with overlap_comm only without quantised weights, experts and preferences."),
    unknown(_STAGE, option("contiguous_gradients", False) & (~job.zero3 & job.overlaps_reduction | _TRACED_PLAIN),
            "with contiguous_gradients=true only with offloading, quantised weights, experts, preferences, "
            "overlap_comm."),
    unknown(_STAGE, job.changes_dtype,
            "computed in the dtype of the weights only, not {precision.parameters!r} in {precision.compute!r}; where its "
            "configuration enables bf16 or fp16, weights are narrow and precision.main_parameters is 'float32'."),
    fails("activation_checkpointing.use_reentrant",
          job.zero3 & job.adapts & job.checkpoints & ~job.reentrant & above("parallelism.data_parallel_size", 1)
          & option("reassigns_recomputed_weights", False),
          "of adapters, before DeepSpeed 0.19.3, with reentrant checkpointing only: without it torch finds frozen weights "
          "partitioned again when it recomputes and raises CheckpointError (DeepSpeed pull request 8148); set "
          "use_reentrant=true, or take DeepSpeed 0.19.3."),
    more("finetuning.method", job.zero3 & differs("adapters under ZeRO-3") & job.adapts,
         "without adapters on GPT-Neo only, whose frozen weights stay gathered longer in backward."),
    more(_STAGE, job.zero3 & job.keeps_torchs_linear & job.ties_embeddings & above("parallelism.data_parallel_size", 1),
         "with torch's own Linear only where the lm_head is no token table, which then stays gathered from its product to "
         "its backward."),
    unknown("framework_options", job.zero3 & job.adapts & job.keeps_torchs_linear,
            "with adapters only where DeepSpeed has replaced torch's Linear: make training arguments before "
            "from_pretrained, or take DeepSpeed 0.19.4."),
    unknown(_STAGE, job.zero3 & job.experts & job.some_layers,
            "with experts only where every layer is checkpointed, or none."),
    unknown(_STAGE, job.experts & ~setting("precision.parameters", "bfloat16"),
            "with experts in bfloat16 only: grouped products of other dtypes cannot be traced."),
    unknown(_STAGE, job.experts & job.quantized, "with whole experts only, not quantised ones."),
    unknown(_STAGE, job.experts & job.zero3 & ~trait("libraries.deepspeed_leaf"),
            "with experts of {families_of_leaves} only, whose feed-forwards are modules without parts."),
    unknown("optimizer.name", job.offloads_optimizer & ~job.optimizer("adamw", "adam"),
            "with an optimizer on the host with AdamW only, not optimizer.name={optimizer.name!r}."),
    unknown("optimizer.name",
            ~job.optimizer(*_OVER_PARTITIONS) | (job.optimizer("adamw_8bit") & option("adamw_8bit_library", "torchao")),
            "with torch's AdamW, RMSprop and SGD, Adafactor, and bitsandbytes' AdamW, AdEMAMix and Lion only, not "
            "optimizer.name={optimizer.name!r}."),
    unknown("activation_checkpointing.mode", job.selective, "without selective checkpointing only."),
    unknown(_STAGE, job.parallel_otherwise, "without other parallelism."),
))
