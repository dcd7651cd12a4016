"""Which networks the ledger covers, and what of encoder-decoders."""

from __future__ import annotations

from peakcast.models.ledger.scope import facts as job
from peakcast.models.ledger.scope.fact import setting, trait
from peakcast.models.ledger.scope.table import Section, fails, more, nearly_more, unknown

# fmt: off
NETWORKS = Section("networks", (
    unknown("architecture", job.encoder & ~trait("layer.norm_after_residual"),
            "{architecture.name!r}: of encoders only BERT is modelled, not model_type={architecture.model_type!r}."),
    # of state-space layers the ledger has what the kernels save, but not their temporaries
    more("architecture", job.hybrid,
         "{architecture.name!r} has state-space layers: parameters, gradients and optimizer states are exact, their "
         "mixers' activations are what mamba_ssm's kernels save, without what those allocate in passing and not what "
         "transformers computes without that package (`peakcast explain --trace` shows that)."),
    unknown("architecture", setting("architecture.kind", "undescribed"),
            "model_type={architecture.model_type!r} is not known to the ledger; trace it (`peakcast explain --trace`)."),
    unknown("architecture", ~setting("architecture.kind", "decoder", "encoder", "encoder_decoder"),
            "{architecture.name!r} is not a decoder-only transformer, BERT or T5 (kind={architecture.kind!r})."),
    unknown("architecture", ~job.known_family,
            "model_type={architecture.model_type!r} is not known to the ledger, which takes it for Llama by its keys; "
            "trace it (`peakcast explain --trace`)."),
    unknown("architecture", job.unmodelled_family, "{architecture.name!r}: {unmodelled}"),
    unknown("architecture", job.otherwise_than_four_hidden,
            "{architecture.name!r} has intermediate_size={architecture.intermediate_size}, and transformers makes MPT's "
            "feed-forward 4 * hidden_size wide, whatever is asked for; use {four_hidden}."),
))

# LitGPT's config_hub/finetune/README.md, its tutorials/resource-tables.md and torchtune's README.md print such runs' peaks
OWN_NETWORKS = Section("networks of a training library's own", (
    fails("finetuning.quantization", job.litgpt & job.quantized & job.replicated,
          "LitGPT refuses quantized weights on several GPUs; use one."),
    nearly_more("architecture", job.litgpt & ~setting("architecture.normalization", "rmsnorm"),
                "LitGPT's own {architecture.name!r} is counted as the one of transformers: of three such networks that it "
                "publishes, runs took up to 6 % more."),
    unknown("finetuning.method", job.litgpt & job.adapts,
            "LitGPT's own {architecture.name!r} with adapters is counted as the one of transformers: peaks that it "
            "publishes are from 4 % below to 10 % above such answers; ask with your command (`peakcast dryrun`)."),
    nearly_more("architecture", job.litgpt & ~job.adapts,
                "LitGPT's own {architecture.name!r} is counted as the one of transformers: of full finetuning that it "
                "publishes, runs of two networks took 3 and 4 % more."),
    unknown("finetuning", job.own_networks & job.trains_other_parts,
            "of what trains outside layers a recipe of transformers' network answers, and this library has its own; ask "
            "with your command (`peakcast dryrun`)."),
))

TRACED_NETWORKS = Section("traces of networks", (
    unknown("versions", job.own_networks & ~job.builds_own_network,
            "the trace is of transformers' network of {architecture.name!r}, and {own_library} has its own; ask with your "
            "command (`peakcast dryrun`)."),
))

ENCODER_DECODERS = Section(
    "encoder-decoders", when=job.encoder_decoder, start="{architecture.name!r} is an encoder-decoder: ", rows=(
    unknown("task", job.generates, "generation with it is not modelled."),
    unknown("parallelism", job.parallel_otherwise, "of several ranks it is modelled with DDP, FSDP and ZeRO only."),
    fails("parallelism.sharding", job.asks_fsdp2 & job.ends_apart,
          "FSDP2 cannot shard it as accelerate asks: modules of several groups share its table; use fsdp1."),
    unknown("finetuning.method", ~job.asks_ddp & job.replicated & job.adapts,
            "adapters in shards are not modelled for it."),
    unknown("attention", ~(job.eager | job.sdpa), "attention={attention!r} is not modelled for it; use sdpa or eager."),
    more("precision.compute", setting("precision.parameters", "float16") | setting("precision.compute", "float16"),
         "T5 in float16 keeps projections in float32 and clamps what it adds, which is not modelled; use bfloat16."),
    unknown("activation_checkpointing", job.selective | job.some_layers | job.reentrant,
            "of checkpointing, mode full of every layer without use_reentrant is modelled for it."),
    unknown("finetuning.quantization", job.quantized, "quantised weights are not modelled for it."),
    unknown("offload", job.offloads, "offloading is not modelled for it."),
    unknown("framework_options.liger_kernels", job.liger | job.fused_loss, "Liger has no kernels for it."),
))
