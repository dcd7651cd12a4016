"""What the Megatron-LM ledger does not cover: it has GPT models, dense or routed, BERT and T5, trained with Adam, SGD or
Muon."""

from __future__ import annotations

from peakcast.models.ledger.scope import facts as job
from peakcast.models.ledger.scope import megatron_facts as megatron
from peakcast.models.ledger.scope.fact import above, option, setting
from peakcast.models.ledger.scope.table import ScopeLimit, Section, fails, less, more, nearly, nearly_more, unknown


def _unmodelled(name: str) -> ScopeLimit:
    """The row of a framework option that changes what is allocated."""
    return unknown(f"framework_options.{name}", option(name), f"framework_options.{name} is not modelled.")


# fmt: off
_NETWORKS = Section("networks", (
    unknown("architecture",
            ~(setting("architecture.kind", "decoder", "encoder", "encoder_decoder") | megatron.known_hybrid),
            "{architecture.name!r} is neither a GPT nor a BERT or T5, nor a hybrid of Mamba-2, attention and feed-forward "
            "layers (kind={architecture.kind!r})."),
    unknown("architecture",
            job.hybrid & (job.context_parallel | job.full_checkpointing | job.float8 | ~megatron.transformer_engine),
            "A hybrid (Mamba) model is modelled only with Transformer Engine in 16 bits, and without context parallelism "
            "and full recomputation."),
    unknown("architecture", job.encoder_decoder & (job.pipeline_parallel | job.context_parallel | job.checkpoints),
            "A T5 is modelled only without pipeline parallelism, context parallelism and recomputation."),
    more("parallelism.tensor_parallel_size", ~job.latent_attention & megatron.more_ranks_than_key_heads,
         "tensor_parallel_size={parallelism.tensor_parallel_size} above the {architecture.num_key_value_heads} key and "
         "value heads is not modelled: megatron-core then gathers the whole projection."),
    unknown("architecture", setting("architecture.parallel_block"),
            "Megatron-LM has no layers whose attention and feed-forward read the same input."),
))

# megatron-core 0.16.1 `optimizer/muon.py`; main's `optimizer/layer_wise_optimizer.py`
_MUON = Section("Muon", when=megatron.muon, rows=(
    fails("precision.parameters", setting("precision.parameters", "float16"),
          "Megatron-LM refuses Muon with fp16; use bf16."),
    fails("framework_options.num_distributed_optimizer_instances", job.zero & megatron.several_instances,
          "Megatron-LM refuses Muon over several instances of the distributed optimizer; use one."),
    more("framework_options.overlap_param_gather",
         job.zero & option("overlap_param_gather") & ~option("use_layer_wise_param_layout"),
         "Muon's overlapped all-gather of tensors that are dealt out (overlap-param-gather before megatron-core 0.18 or "
         "with no-use-layer-wise-param-layout) is not modelled: it gathers a bucket in addition to the parameters."),
    unknown("framework_options.fp8_param_gather", option("fp8_param_gather"), "Muon over FP8 parameters is not modelled."),
))

# megatron-core 0.16.1 `optimizer/optimizer_config.py` `__post_init__`
_PRECISION_AWARE = Section("optimizers in narrow dtypes, and on the host", (
    fails("framework_options.main_grads_dtype", megatron.narrow_gradients & ~megatron.precision_aware,
          "Megatron-LM refuses {narrow_dtypes} other than fp32 without use_precision_aware_optimizer."),
    fails("framework_options.main_params_dtype", megatron.narrow_parameters & ~megatron.precision_aware,
          "Megatron-LM refuses {narrow_dtypes} other than fp32 without use_precision_aware_optimizer."),
    fails("framework_options.use_precision_aware_optimizer", megatron.precision_aware & ~(megatron.adam & job.zero),
          "Megatron-LM refuses use_precision_aware_optimizer without Adam and the distributed optimizer."),
    more("framework_options.optimizer_offload_fraction", megatron.precision_aware & megatron.offloads_a_part,
         "A precision-aware optimizer of which a part is on the host is not modelled; all of it on the host is."),
    unknown("offload.optimizer", job.offloads_optimizer & megatron.muon, "Muon on the host is not modelled."),
))

_FSDP = Section("Megatron-FSDP", when=megatron.asks_fsdp, rows=(
    more("framework_options.data_parallel_sharding_strategy",
         ~option("data_parallel_sharding_strategy", "optim_grads_params"),
         "data-parallel-sharding-strategy={sharding_strategy} is not modelled with Megatron-FSDP; optim_grads_params is."),
    less("framework_options.use_megatron_fsdp", ~option("fsdp_reduces_each_gradient"),
         "Megatron-FSDP before megatron-core 0.16, which handles the gradients of a layer at its end, is not modelled."),
    unknown("framework", job.pipeline_parallel | job.predicts_further_tokens,
            "Pipeline parallelism or multi-token prediction is not modelled with Megatron-FSDP."),
    nearly_more("framework_options.fp8_param_gather",
                job.float8 & option("fp8_param_gather") & option("fp8_recipe", "mxfp8"),
                "MXFP8 parameters with Megatron-FSDP follow the source of Transformer Engine 2.20: 2.8 fails to make their "
                "copies by columns, so no trace was compared. Full recomputation may have one layer more in both layouts."),
    unknown("optimizer.name", ~megatron.adam, "{optimizer_capitalised} is not modelled with Megatron-FSDP."),
    less("optimizer.name", job.offloads_optimizer | megatron.precision_aware,
         "An offloaded or precision-aware optimizer is not modelled with Megatron-FSDP."),
    unknown("framework", ~job.decoder, "A {architecture.kind} is not modelled with Megatron-FSDP."),
    more("framework_options.num_distributed_optimizer_instances", megatron.several_instances,
         "Sharding within several groups (num-distributed-optimizer-instances) is not modelled with Megatron-FSDP."),
))

# traces show the rest: docs/decisions/2026-11-fp8-of-transformer-engine.md
_FLOAT8 = Section("float8", when=job.float8, rows=(
    fails("precision.compute", megatron.own_modules,
          "transformer-impl=local has no float8 compute; transformer_engine has."),
    unknown("framework", job.encoder_decoder, "A T5 is not modelled in float8."),
    unknown("framework", job.predicts_further_tokens, "Multi-token prediction is not modelled in float8."),
    unknown("framework", job.experts & (job.full_checkpointing | megatron.recomputes_more_in_float8),
            "Recomputing a mixture of experts, or parts of it but the shared one, is not modelled in float8."),
    unknown("framework", job.latent_attention & megatron.recomputes_more_in_float8,
            "Recomputing parts of latent attention other than its core is not modelled in float8."),
    fails("framework_options.fp8_recipe",
          option("fp8_recipe", "blockwise") & job.sequence_parallel & megatron.ragged_latent_ranks,
          "Ranks of latent attention that are no multiples of 128 fail with fp8-recipe=blockwise and sequence-parallel: "
          "Transformer Engine 2.8 cannot gather them."),
    fails("framework_options.fp8_recipe", job.full_checkpointing & option("fp8_recipe", "tensorwise"),
          "Full recomputation in float8 fails with fp8-recipe=tensorwise (the attention of Transformer Engine 2.8 looks "
          "for delayed scales that were never kept); delayed and blockwise are modelled."),
    unknown("framework", job.selective & job.eager,
            "Recomputing unfused attention is not modelled in float8; fused attention is."),
))

_ADAPTERS = Section("adapters", when=job.adapts, rows=(
    unknown("finetuning.method", ~setting("finetuning.method", "lora") | job.quantized,
            "finetuning.method={finetuning.method!r} is not modelled over Megatron's layers, nor are quantised weights; "
            "lora over bf16 is."),
    unknown("finetuning.targets", megatron.adapts_other_modules,
            "finetuning.targets={other_targets} is not modelled; {adaptable} are, and all-linear for all of them."),
    more("finetuning.modules_to_save", setting("finetuning.modules_to_save"),
         "finetuning.modules_to_save is not modelled over Megatron's layers: these copies are not counted."),
    unknown("framework", megatron.asks_fsdp | job.float8 | ~job.decoder,
            "Adapters are modelled over a GPT's layers in 16 bits, without Megatron-FSDP."),
    unknown("finetuning.targets", job.experts & option("adapter_library", "megatron_bridge"),
            "Megatron-Bridge has one adapter for all experts of a rank, which was compared with no trace; mcore-bridge's "
            "adapters were."),
))

_TRAINING = Section("training", (
    nearly_more("framework_options.use_legacy_models",
                option("use_legacy_models") & megatron.own_modules & (job.tensor_parallel | job.pipeline_parallel),
                "Megatron-LM's layers of before megatron-core under tensor or pipeline parallelism: published logs of July "
                "2023 have up to 2.4 % more allocated, and up to 5 % more reserved, than is counted (stages before the "
                "last, and tensor parallelism alone); what holds it is not known. Data parallelism agrees exactly.",
                share=0.05),
    unknown("task", job.generates, "task={task!r} is not modelled; only training is."),
    fails("attention", job.flex, "Megatron-LM has no flex attention; use flash_attention_2 or eager."),
    less("optimizer.name", ~(megatron.adam | megatron.muon | job.optimizer("sgd")),
         "optimizer.name={optimizer.name!r} is not modelled with Megatron-LM; adam, muon and sgd are."),
    _MUON,
    _PRECISION_AWARE,
    _FSDP,
    _FLOAT8,
    unknown("framework", above("parallelism.zero_stage", 1) | ~setting("parallelism.sharding", "none"),
            "zero_stage={parallelism.zero_stage} with sharding={parallelism.sharding!r} is not modelled with Megatron-LM; "
            "the distributed optimizer (zero_stage 1) is."),
    unknown("parallelism.pipeline_schedule", ~setting("parallelism.pipeline_schedule", "1f1b", "interleaved_1f1b"),
            "pipeline_schedule={parallelism.pipeline_schedule!r} is not modelled; 1f1b and interleaved_1f1b are."),
    less("offload", job.offloads_parameters | (job.offloads_activations & ~option("offload_modules")),
         "Offloaded parameters are not modelled with Megatron-LM, nor activations without offload_modules."),
    unknown("framework", megatron.recomputes_biased_feed_forward,
            "Recomputing a feed-forward with biases was seen in no trace: its checkpoint returns the bias, a parameter, "
            "whose backward then leads into checkpoints of earlier steps (megatron-core 0.16.1); without biases it is "
            "modelled."),
    unknown("framework", megatron.recomputes_other_modules,
            "Recomputing {other_modules} is not modelled; {recomputable_modules} are."),
))

_OPTIONS = Section("options", (
    _unmodelled("fp32_residual_connection"),
    _unmodelled("delay_wgrad_compute"),
    _unmodelled("use_transformer_engine_op_fuser"),
    _unmodelled("apply_residual_connection_post_layernorm"),
    less("framework_options.distribute_saved_activations",
         option("distribute_saved_activations") & job.pipeline_parallel & job.full_checkpointing,
         "framework_options.distribute_saved_activations is not modelled with pipeline parallelism, where it cuts what a "
         "stage received too."),
    unknown("framework_options", job.context_parallel & megatron.mixed_exchange,
            "cp-comm-type={exchanges} is not modelled; {known_exchanges} in every layer is."),
    nearly_more("offload.activations", job.offloads_activations & option("offload_modules"),
                "Offloaded activations are counted as if copies took no time. They live until their copy has ended; two "
                "published runs, which run two micro-batches at once as well, have 1 % more.", share=0.01),
))

# megatron-core 0.17.1 `transformer/transformer_config.py` `__post_init__`; what graphs keep: `megatron/cuda_graphs.py`
_CUDA_GRAPHS = Section("CUDA graphs", when=megatron.records_graphs, rows=(
    fails("framework_options.cuda_graph_scope", megatron.graphs_of_engine & option("cuda_graph_scope", "full_iteration"),
          "Megatron-LM refuses cuda_graph_scope=full_iteration with cuda_graph_impl=transformer_engine; local has it."),
    fails("framework_options.cuda_graph_scope", job.full_checkpointing & ~option("cuda_graph_scope", "full_iteration"),
          "Megatron-LM refuses full recomputation within graphs of layers; use cuda_graph_scope=full_iteration."),
    nearly("framework_options.cuda_graph_impl", megatron.graphs_of_own_layers,
           "Graphs of single layers with cuda_graph_impl=local follow the source of megatron-core 0.16.1: from the second "
           "step on, what these layers make, {graphed_bytes} at once on this job's first stage, is reserved, but no longer "
           "allocated. Two published runs of GRPO, with such graphs and without, differ by 1.8 GB in what a step adds, "
           "where the ledger has 2.1, and by 0.4 GB in what stays, where it has none; what warms layers up before they are "
           "recorded is not counted."),
    less("framework_options.cuda_graph_warmup_steps", megatron.graphs_from_the_start,
         "cuda_graph_warmup_steps={graph_warmup_steps} leaves no step with optimizer states without graphs, but such a "
         "step is counted. What graphed parts make, {graphed_bytes} at once on this job's first stage, is not allocated "
         "then."),
    nearly("framework_options.cuda_graph_impl", ~megatron.graphs_of_own_layers,
           "CUDA graphs follow their source. Allocated memory of the one published run with graphs of layers agrees "
           "(0.2 %); what their pool, {graphed_bytes} on this job's first stage, adds to reserved memory was compared with "
           "no run."),
))

_EXPERTS = Section("latent attention, multi-token prediction and experts", (
    unknown("framework_options", megatron.own_modules & job.latent_attention,
            "Multi-latent attention with transformer-impl=local is not modelled."),
    unknown("framework_options", job.latent_attention & job.context_parallel,
            "Multi-latent attention with context parallelism is not modelled."),
    unknown("framework_options", megatron.no_layers_on_last_stage & job.predicts_further_tokens & ~megatron.overlaps,
            "Multi-token prediction on a last stage without layers is not modelled."),
    unknown("framework_options.defer_embedding_wgrad_compute",
            option("defer_embedding_wgrad_compute") & job.predicts_further_tokens,
            "framework_options.defer_embedding_wgrad_compute is not modelled with multi-token prediction, whose output "
            "layer runs more than once for a micro-batch."),
    unknown("framework_options", job.full_checkpointing & job.predicts_further_tokens,
            "Full recomputation together with multi-token prediction is not modelled."),
    nearly_more("framework_options.moe_flex_dispatcher_backend",
                megatron.flex_dispatcher & option("moe_flex_dispatcher_backend", "hybridep"),
                "HybridEP is counted as its source has it; two published runs have 1.2 % more.", share=0.012),
    unknown("framework_options.moe_token_dispatcher_type",
            job.experts & option("moe_token_dispatcher_type", "alltoall_seq"),
            "moe-token-dispatcher-type=alltoall_seq is counted as alltoall, which newer releases have in its place."),
    unknown("framework_options.moe_expert_capacity_factor", megatron.flex_dispatcher & option("moe_expert_capacity_factor"),
            "framework_options.moe_expert_capacity_factor is not modelled with the flex token dispatcher."),
    unknown("framework_options.moe_token_dispatcher_type", megatron.flex_dispatcher & ~job.expert_parallel,
            "The flex token dispatcher is not modelled without expert parallelism."),
    unknown("parallelism.expert_tensor_parallel_size", megatron.flex_dispatcher & megatron.several_expert_tensor_ranks,
            "The flex token dispatcher is not modelled with expert tensor parallelism."),
    fails("framework_options.overlap_moe_expert_parallel_comm",
          megatron.overlaps & (job.full_checkpointing | ~job.expert_parallel),
          "Megatron-LM refuses overlap-moe-expert-parallel-comm with full recomputation, and without expert parallelism."),
    more("framework_options.overlap_moe_expert_parallel_comm", megatron.overlaps & megatron.asks_fsdp,
         "framework_options.overlap_moe_expert_parallel_comm is not modelled with Megatron-FSDP: it runs two micro-batches "
         "at once."),
    nearly_more("framework_options.overlap_moe_expert_parallel_comm",
                megatron.overlaps & ~option("overlapped_layers_are_released"),
                "Before megatron-core 0.16 overlap-moe-expert-parallel-comm keeps what a layer's parts hand to each other, "
                "and its gradients, until the micro-batch's backward ends, which is not counted. The one published run of "
                "such code has 11 % more.", share=0.11),
    nearly_more("framework_options.overlap_moe_expert_parallel_comm",
                megatron.overlaps & above("architecture.num_nextn_predict_layers", 1),
                "With overlap-moe-expert-parallel-comm, layers that predict further tokens run beside the backward of "
                "another micro-batch. One such layer is counted as it is traced; with several, the peak may be up to 3 % "
                "higher.", share=0.03),
    more("framework_options.moe_router_padding_for_quantization",
         job.experts & option("moe_router_padding_for_quantization"),
         "framework_options.moe_router_padding_for_quantization is not modelled."),
    unknown("framework_options", megatron.experts_with_biases & option("moe_grouped_gemm"),
            "Grouped experts with biases are not modelled."),
))
# fmt: on

MEGATRON = (_NETWORKS, _ADAPTERS, _TRAINING, _OPTIONS, _CUDA_GRAPHS, _EXPERTS)
