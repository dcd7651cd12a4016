"""Which networks the ledger covers, and which settings of encoder-decoders."""

from __future__ import annotations

from peakcast.models.ledger.scope import facts as job
from peakcast.models.ledger.scope.fact import setting, trait
from peakcast.models.ledger.scope.table import (
    Section,
    fails,
    guessed,
    less,
    more,
    nearly,
    nearly_less,
    nearly_more,
    unknown,
)

# fmt: off
NETWORKS = Section("networks", (
    unknown("architecture", job.encoder & ~trait("layer.norm_after_residual"),
            "{architecture.name!r}: of encoders only BERT is modelled, not model_type={architecture.model_type!r}."),
    # of state-space layers the ledger has what the kernels save, but not their temporaries
    more("architecture", job.hybrid,
         "{architecture.name!r} has state-space layers: parameters, gradients and optimizer states are exact; of "
         "their mixers' activations, what mamba_ssm's kernels save is counted, but neither the kernels' temporaries nor "
         "what transformers computes where that package is missing (`peakcast explain --trace` shows that)."),
    unknown("architecture", setting("architecture.kind", "undescribed"),
            "model_type={architecture.model_type!r} is not known to the ledger. `peakcast record` learns the network from "
            "the installed transformers, `--baseline trace` traces it."),
    unknown("architecture", ~setting("architecture.kind", "decoder", "encoder", "encoder_decoder"),
            "{architecture.name!r} is not a decoder-only transformer, BERT or T5 (kind={architecture.kind!r})."),
    guessed("architecture", ~job.known_family,
            "model_type={architecture.model_type!r} is not known to the ledger, and is counted as a Llama, whose keys "
            "it has. `peakcast record` learns the network from the installed transformers, `--baseline trace` traces it."),
    unknown("architecture", job.unmodelled_family, "{architecture.name!r}: {unmodelled}"),
    nearly("architecture", job.remote_code & ~job.megatron & ~job.own_networks,
           "the code of model_type={architecture.model_type!r} comes with its weights, and is counted as it was read, "
           "without a trace: eighteen published peaks of Qwen-1 are from 10 % below to 12 % above such answers; ask with "
           "your script (`peakcast dryrun`).", share=0.12),
    unknown("architecture", job.otherwise_than_four_hidden,
            "{architecture.name!r} has intermediate_size={architecture.intermediate_size}, but transformers makes MPT's "
            "feed-forward 4 * hidden_size wide whatever its configuration says; use {four_hidden}."),
))

CLASSIFIERS = Section(
    "classifiers", when=job.classifies, start="architecture.head={architecture.head!r} ", rows=(
    less("architecture.head", job.megatron | ~(job.decoder | job.encoder),
         "is counted for decoders and encoders of Hugging Face transformers only; here the head that predicts words is."),
    unknown("architecture.head", job.compiles, "is not modelled with torch.compile."),
    unknown("architecture.head", job.generates, "generates nothing: task={task!r} is not modelled for it."),
    unknown("architecture.head", job.divides_model | job.zero3,
            "was compared with traces on one GPU, under DDP, FSDP and ZeRO-2 only."),
    unknown("architecture.head", job.encoder & job.replicated & ~job.asks_ddp,
            "of an encoder was compared with traces on one GPU and under DDP only."),
))

# LitGPT's config_hub/finetune/README.md, its tutorials/resource-tables.md and torchtune's README.md print such runs' peaks
OWN_NETWORKS = Section("networks of a training library's own", (
    fails("finetuning.quantization", job.litgpt & job.quantized & job.replicated,
          "LitGPT refuses quantized weights on several GPUs; use one."),
    nearly_less("finetuning.method", job.litgpt & job.adapts & job.many_ranks,
                "LitGPT's own {architecture.name!r} with adapters is counted as transformers' network of that name: "
                "published peaks on several GPUs are 1 to 15 % below such answers, where micro-batches after the first had "
                "shorter samples; ask with your command (`peakcast dryrun`).", share=0.15),
    nearly("finetuning.method", job.litgpt & job.adapts,
           "LitGPT's own {architecture.name!r} with adapters is counted as transformers' network of that name: published "
           "peaks on one GPU are from 3 % below to 7 % above such answers; ask with your command (`peakcast dryrun`).",
           share=0.07),
    nearly_more("architecture", job.litgpt & ~setting("architecture.normalization", "rmsnorm"),
                "LitGPT's own {architecture.name!r} is counted as transformers' network of that name: published "
                "runs of four such networks took up to 5 % more.", share=0.05),
    nearly_more("architecture", job.litgpt & ~job.adapts,
                "LitGPT's own {architecture.name!r} is counted as transformers' network of that name: published "
                "runs of full finetuning of two networks took 2 and 3 % more.", share=0.03),
    unknown("finetuning", job.own_networks & job.trains_other_parts,
            "what trains outside the layers is counted from transformers' network, but this library has a network of its "
            "own; ask with your command (`peakcast dryrun`)."),
    more("versions", trait("experts.viewed_before_5") & job.loops_over_experts & job.trains & ~job.adapts,
         "in this release of transformers each expert of {architecture.name!r} reads a view of one parameter, whose "
         "gradient is as large as all experts of a layer: a small network's backward needs 13 % more than is counted."),
    more("versions", job.clamps_scores & job.trains,
         "in this release of transformers eager attention of {architecture.name!r} takes the maximum of each score and the "
         "least number, whose backward makes more copies: a small network's needs 17 % more than is counted."),
))

TRACED_NETWORKS = Section("traces of networks", (
    unknown("versions", job.own_networks & ~job.builds_own_network,
            "the trace is of transformers' network of {architecture.name!r}, but {own_library} has its own; ask with your "
            "command (`peakcast dryrun`)."),
))

ENCODER_DECODERS = Section(
    "encoder-decoders", when=job.encoder_decoder, start="{architecture.name!r} is an encoder-decoder: ", rows=(
    unknown("task", job.generates, "generation with it is not modelled."),
    unknown("parallelism", job.parallel_otherwise, "on several ranks it is modelled with DDP, FSDP and ZeRO only."),
    fails("parallelism.sharding", job.asks_fsdp2 & job.ends_apart,
          "FSDP2 cannot shard it as accelerate asks: modules of several groups share its table; use fsdp1."),
    unknown("finetuning.method", ~job.asks_ddp & job.replicated & job.adapts,
            "adapters in shards are not modelled for it."),
    unknown("attention", ~(job.eager | job.sdpa), "attention={attention!r} is not modelled for it; use sdpa or eager."),
    more("precision.compute", setting("precision.parameters", "float16") | setting("precision.compute", "float16"),
         "T5 in float16 keeps projections in float32 and clamps what it adds, which is not modelled; use bfloat16."),
    unknown("activation_checkpointing", job.selective | job.some_layers | job.reentrant,
            "of activation checkpointing only mode full, of every layer and without use_reentrant, is modelled for it."),
    unknown("finetuning.quantization", job.quantized, "quantised weights are not modelled for it."),
    unknown("offload", job.offloads, "offloading is not modelled for it."),
    unknown("framework_options.liger_kernels", job.liger | job.fused_loss, "Liger has no kernels for it."),
))
