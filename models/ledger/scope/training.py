"""What the ledger does not cover of how a network is trained or generates, under any framework but Megatron, and of batches
under all: batches, preference losses, adapters, optimizers, precision, and mixtures that differ from their traces."""

from __future__ import annotations

from peakcast.models.ledger.scope import facts as job
from peakcast.models.ledger.scope.fact import above, differs, option, setting, trait
from peakcast.models.ledger.scope.table import Section, fails, less, more, nearly_less, nearly_more, unknown

# fmt: off
BATCHES = Section("padded and padding-free batches", (
    unknown("batch.form", ~job.full_rows & (job.megatron | ~job.decoder),
            "batch.form={batch.form!r} is modelled for decoders of Hugging Face transformers only."),
))

LENGTHS = Section("lengths that change", (
    unknown("batch.shortest_sequence",
            job.changing_lengths & (job.divides_model | job.compiles | job.generates | job.megatron | ~job.decoder),
            "batch.shortest_sequence={batch.shortest_sequence}: lengths that change are modelled in training decoders "
            "without tensor, pipeline and context parallelism, compile and Megatron."),
))

FROZEN = Section("frozen parts of a network", (
    less("finetuning.frozen", setting("finetuning.frozen"),
         "finetuning.frozen={frozen_parts}: these weights are counted as if they trained; only recipes and traces leave "
         "out their gradients and optimizer states."),
))

_KIND = "loss.kind"
PREFERENCES = Section("preference losses (TRL)", when=job.preference, start="loss.kind={loss.kind!r} ", rows=(
    fails("micro_batch_size", job.odd_pairs,
          "counts the two completions of a pair as two sequences: give an even micro_batch_size."),
    unknown(_KIND, job.generates, "is a loss of training; task={task!r} has none."),
    unknown(_KIND, ~setting("framework", "huggingface", "deepspeed"),
            "is modelled for TRL's trainers only, not with framework={framework!r}."),
    unknown(_KIND, job.whole_logits & ~job.traced_whole_logits,
            "over whole logits is compared with traces of DPO only, by transformers' Trainer, and for trl 0.12 to 1.14 "
            "under autocast; others are counted as if they took log-probabilities as some release of trl does: ask with "
            "your command (`peakcast dryrun`)."),
    Section("preference losses under ZeRO", when=job.zero, start="under ZeRO", rows=(
        unknown(_KIND, setting("parallelism.data_parallel_size", 1) & job.zero3 & job.adapts,
                "-3 on one rank with adapters: a traced first step had 20 % more than is counted."),
        unknown(_KIND, setting("loss.kind", "reward") & job.zero3,
                "-3 was compared with no trace: transformers 5.17 cannot make a classifier's weights in parts."),
        more(_KIND, job.zero3 & job.copies_ends,
             "-3 with finetuning.modules_to_save is counted without the frozen table and head that are gathered beside "
             "their copies: a traced forward has 20 % more."),
        unknown(_KIND, ~job.zero_alone, " was compared with traces without other parallelism."),
    )),
    unknown(_KIND, ~(job.zero | job.data_parallel_alone | job.fsdp1_alone | job.fsdp2_alone),
            "was compared with traces on one GPU, under DDP, FSDP1, FSDP2 and ZeRO only."),
    unknown(_KIND, job.fsdp1_alone & ~setting("loss.kind", "dpo", "reward"),
            "under FSDP1 was compared with no trace."),
    unknown(_KIND, job.fsdp1_alone & job.has_reference,
            "under FSDP1 was compared with traces without a reference network only: adapters that are switched off, or its "
            "log-probabilities computed before."),
    unknown(_KIND, job.fsdp1_alone & setting("loss.kind", "reward") & job.adapts,
            "under FSDP1 was compared with traces of full training only; with adapters one trace had 17 % less."),
    unknown(_KIND, ~job.decoder, "is modelled for decoders only."),
    unknown(_KIND, job.experts, "is not modelled with experts, whose load-balancing loss is added to it."),
    unknown(_KIND, ~job.default_batch,
            "is modelled for sequences of equal length only: TRL pads to the longest of both halves."),
    unknown(_KIND, job.compiles, "is not modelled with torch.compile."),
    unknown(_KIND, job.offloads, "is not modelled with offload."),
    unknown(_KIND, job.fused_loss,
            "is not computed by cross entropy, so nothing fuses it: leave loss.fused_linear_cross_entropy out."),
    unknown(_KIND, job.quantized & job.many_ranks, "over quantised weights was compared with traces on one GPU only."),
    unknown(_KIND, job.quantized & setting("loss.kind", "grpo"), "over quantised weights was compared with no trace."),
    unknown(_KIND, job.some_layers, "was compared with every layer checkpointed only."),
    unknown(_KIND, job.float8, "is not modelled in float8."),
    unknown(_KIND, job.flex, "was compared with sdpa and eager, and not with attention='flex'."),
    unknown(_KIND, option("neftune"), "is not modelled with neftune."),
    nearly_more(_KIND, job.returns_cache,
                "with trl 0.12 to 0.17 returns keys and values of all layers (use_cache), which stay for a while: dry runs "
                "had up to 1.4 % more.", share=0.014),
))

_METHOD = "finetuning.method"
_NOT_ALL = "is counted in part: parameters, gradients and optimizer states are exact; "
_METHODS = Section(
    "adapters other than LoRA", when=~setting("finetuning.method", "full", "lora", "qlora"),
    start="finetuning.method={finetuning.method!r} ", rows=(
    unknown(_METHOD, job.many_ranks | job.zero, "is modelled on one GPU only."),
    unknown(_METHOD, job.quantized, "over quantised weights is not modelled; qlora is."),
    unknown(_METHOD, ~job.decoder, "is modelled for decoders only."),
    unknown(_METHOD, above("finetuning.dropout", 0), "is modelled without dropout only."),
    unknown(_METHOD, job.preference, "is not modelled with loss.kind={loss.kind!r}."),
    fails(_METHOD, setting("finetuning.method", "dora") & job.experts & job.names_experts,
          "fails in peft 0.21 where finetuning.targets names experts, which are one parameter; name other targets."),
    more("versions.peft", job.unconfirmed_method,
         "is implemented otherwise in the peft release that versions name: published runs with it took up to 28 % more."),
    more(_METHOD, setting("finetuning.method", "adalora", "boft", "c3a", "hira", "hra", "ia3", "vblora"),
         _NOT_ALL + "what autograd keeps is counted as peft's source has it, which no whole run has confirmed."),
    more(_METHOD, setting("finetuning.method", "adaption_prompt", "prefix_tuning"),
         _NOT_ALL
         + "what attention keeps for the prompts that every layer has is not counted, up to 11 % of published peaks."),
    more(_METHOD, setting("finetuning.method", "p_tuning", "prompt_tuning"),
         _NOT_ALL + "published runs reserved up to 3 % more."),
    more(_METHOD, setting("finetuning.method", "trainable_tokens"),
         _NOT_ALL + "activations are counted as if only the token table trained."),
))

ADAPTERS = Section("adapters", when=job.adapts, rows=(
    _METHODS,
    more("finetuning.targets", job.trains & job.names_ends,
         "finetuning.targets names {ends_named}: adapters on the token table or the head are not counted."),
    more("finetuning.modules_to_save", job.trains & job.copies_inside,
         "finetuning.modules_to_save names {copied_inside}: the copies that peft trains of them are not counted."),
    unknown("finetuning.modules_to_save", job.trains & job.copies_ends & job.fused_lora,
            "finetuning.modules_to_save with fused LoRA kernels has not been traced: Unsloth keeps the frozen token table "
            "and lm_head elsewhere, other libraries on the GPU, as is counted."),
    more("finetuning.targets", job.trains & job.adapts_shared_experts,
         "adapters on the shared experts of {architecture.name!r} ({shared_expert_projections}) are not counted."),
    more("finetuning.targets", job.trains & job.experts & job.leaves_out_experts,
         "adapters on the experts of {architecture.name!r} are not counted."),
    Section("adapters on experts", when=job.trains & job.adapts_experts, rows=(
        fails("finetuning.dropout", above("finetuning.dropout", 0),
              "finetuning.dropout={finetuning.dropout} fails in peft 0.21 with adapters on experts, which it adds to the "
              "weights, before there is an input to drop; use 0, or name other targets."),
        fails("finetuning.targets", job.asks_fsdp1 & job.replicated,
              "adapters on experts fail under FSDP1 (torch 2.13): autograd refuses to write into views of its flat "
              "parameter; use fsdp2, or name other targets."),
        unknown("framework_options.quantized_experts", option("quantized_experts"),
                "adapters on quantised experts are counted as on whole ones."),
        unknown("versions.peft", job.before_baddbmm,
                "adapters on experts are counted as peft 0.21 makes them; earlier releases make the change of the weights "
                "apart from the weights, or adapt no experts."),
        nearly_less("framework_options.autocast", job.autocast & setting("precision.parameters", "float32"),
                    "adapters on float32 experts under autocast: up to 0.9 % too much is counted.", share=0.009),
    )),
))

SETTINGS = Section("settings of one rank", (
    unknown("task", job.generates & job.encoder,
            "{architecture.name!r} is an encoder, which generates nothing: task='inference' is not modelled for it."),
    nearly_more("task", job.generates & differs("generation"),
                "generation with model_type={architecture.model_type!r}, whose attention has tables of its own, is up to 5 "
                "% below its trace.", share=0.05),
    nearly_more("task", job.generates & differs("generation in float32") & job.computes_float32,
                "generation with BLOOM in float32: not all attention scores are counted that a variable of its code keeps "
                "until the output is added; up to 0.7 % below its trace.", share=0.007),
    more("versions.torch", job.softmax_keeps_input & job.eager,
         "before torch 1.11 softmax saves its input too, and zero_grad fills gradients with zeros instead of freeing them: "
         "neither the scores of each layer's attention nor, during forward, the gradients are counted."),
    more("versions.torch", job.gradients_stay,
         "before torch 2.0 zero_grad fills gradients with zeros instead of freeing them (set_to_none=False): during "
         "forward they are not counted."),
    unknown("versions.transformers", job.generates & job.latent_attention & option("latent_cache", False),
            "generation with multi-latent attention before transformers 5.17, which cached expanded keys and values, is "
            "counted as its source has it; no trace has confirmed it."),
    unknown("optimizer.name", job.optimizer("adamw_4bit"),
            "between the kernels of torchao's 4-bit update, codes of 8 bytes are counted from torch 2.5 on: Inductor of "
            "2.13 makes them, a published run of torch 2.4 has no room for them, and no release between was looked at."),
    unknown("optimizer.name", job.optimizer("galore") & trait("linear.conv1d"),
            "optimizer.name='galore' projects nn.Linear alone, and GPT-2 has Conv1D: it is not modelled there."),
    unknown("offload.parameters", job.offloads_parameters & ~(job.offloads_by_fsdp | job.zero),
            "offload.parameters is modelled with ZeRO-3, and with FSDP on several GPUs; here weights, gradients and "
            "optimizer states are counted on the GPU. Ask for several GPUs, or with your command (`peakcast dryrun`)."),
    unknown("offload.optimizer", job.offloads_optimizer & ~(job.offloads_by_fsdp | job.zero),
            "offload.optimizer alone is modelled with ZeRO only; here its states are counted on the GPU. FSDP has them on "
            "the host together with the weights (offload.parameters)."),
    unknown("activation_checkpointing.modules", setting("activation_checkpointing.modules"),
            "activation_checkpointing.modules is not modelled here; without it, matrix products and attention are kept."),
    more("framework_options.autocast", job.experts & job.torchtitans_experts & job.autocast,
         "torchtitan's experts under autocast have not been traced: their activations are counted without it."),
    unknown("framework_options.loss_chunks", job.asks_loss_chunks & option("loss_kernel", "chunked"),
            "Unsloth computes the number of chunks of its loss from the GPU's free memory; with a number that is given, "
            "the loss is counted as Unsloth's source has it, and no trace has confirmed it."),
    unknown("framework_options.loss_chunks", job.asks_loss_chunks,
            "a loss in chunks of the sequence is counted as torchtitan 0.3's source has it; only traces made by "
            "hand confirm it."),
    unknown("framework_options.smooths_labels", option("smooths_labels") & (
                ~job.decoder | job.preference | job.divides_weights | job.zero),
            "the label smoother's loss is counted for decoders alone, without tensor or pipeline parallelism or ZeRO."),
    Section("float8", when=job.float8, rows=(
        fails("precision.compute", job.ragged_tiles,
              "precision.compute='float8' needs a multiple of 16 tokens in a micro-batch (torch._scaled_mm), and it has "
              "{tokens:,}; change micro_batch_size or sequence_length."),
        unknown("precision.compute", ~job.plain_float8,
                "float8 compute is modelled for full training of bf16 nn.Linear layers with torchao's dynamic scales "
                "alone."),
        more("framework_options.float8_recipe", option("float8_recipe", "rowwise"),
             "rowwise scales of float8 are counted as one scale for a whole tensor: two compiled layers of Llama 3.1 8B in "
             "eight shards need 7.5 % more than counted."),
        more("framework_options.float8_recipe", option("float8_recipe", "rowwise_with_gw_hp"),
             "rowwise scales of float8 with gradients of weights in bf16 are counted as bf16: two compiled layers of "
             "Llama 3.1 8B in eight shards need 16 % more than counted."),
    )),
))

MIXTURES = Section("mixtures that differ from their traces", when=job.trains, rows=(
    unknown("activation_checkpointing", job.offloads_activations & job.flex,
            "offloaded activations are compared with traces of sdpa, eager and flash attention, not of flex."),
    more("framework_options.autocast", job.autocast & differs("autocast"),
         "model_type={architecture.model_type!r} under autocast: not all float32 tensors of its attention are counted."),
    more("framework_options.autocast",
         job.autocast & trait("linear.transposes_weight") & setting("architecture.mlp_bias")
         & setting("precision.parameters", "float32"),
         "{architecture.name!r} adds float32 biases to narrow products under autocast, which widens the results of its "
         "matrices: that is not counted, 11 % of a small network's step."),
    nearly_more("framework_options.autocast",
                differs("autocast with adapters and checkpointing") & job.autocast & job.adapts & job.checkpoints,
                "model_type={architecture.model_type!r} under autocast, with adapters and checkpointing: backward is up to "
                "1.6 % below its trace.", share=0.016),
    nearly_less("framework_options.autocast", job.autocast & job.inputs_are_leaves,
                "{architecture.name!r} under autocast with reentrant checkpoints, or with adapters and any checkpoints: "
                "autocast then casts a layer's input once for all projections; up to 2.5 % too much is counted.",
                share=0.025),
    nearly_less("optimizer.name", job.optimizer("lomo") & job.autocast & job.checkpoints,
                "lomo under autocast with checkpointing: backward is up to 0.4 % above its trace.", share=0.004),
    more("activation_checkpointing",
         differs("checkpointing or offloaded activations") & (job.checkpoints | job.offloads_activations),
         "model_type={architecture.model_type!r} with checkpointing or offloaded activations: position tables and rotated "
         "parts that only variables of its attention's code keep alive are not counted."),
))

_OPTIMIZER = "optimizer.name"
ADAM_MINI = Section(
    "Adam-mini", when=job.optimizer("adam_mini"), start="optimizer.name='adam_mini' ", rows=(
    fails(_OPTIMIZER, job.adapts, "cannot divide adapters of queries and keys into heads; use adamw."),
    fails(_OPTIMIZER, job.uneven_adam_mini_heads,
          "cannot divide the keys of {architecture.name!r} into a whole number of heads; use adamw."),
    unknown(_OPTIMIZER, ~job.decoder | setting("architecture.normalization", "layernorm"),
            "treats a norm called final_layer_norm, as in OPT and T5, as a matrix and fails; use adamw there."),
    fails(_OPTIMIZER, job.experts, "fails with experts that one parameter holds; use adamw."),
    unknown(_OPTIMIZER, ~job.asks_ddp | job.zero, "is modelled on one GPU and under DDP only."),
))

UPDATES_IN_BACKWARD = Section(
    "optimizers that update in backward", when=job.optimizer("lomo", "adalomo") | job.optimizer_in_backward,
    start="optimizer.name={optimizer.name!r} updates in backward, which ", rows=(
    fails("gradient_accumulation_steps", job.optimizer_in_backward & job.accumulates,
          "leaves no gradient to add to; use gradient_accumulation_steps=1, or set optimizer_in_backward=false."),
    unknown(_OPTIMIZER, job.optimizer_in_backward & (job.adapts | setting("precision.main_parameters")),
            "is modelled only with full fine-tuning and without a second copy of the weights."),
    fails(_OPTIMIZER, job.optimizer_in_backward & job.optimizer("muon"),
          "would make a Muon for every parameter, vectors included, but Muon updates only matrices."),
    unknown(_OPTIMIZER, job.many_ranks & ~(job.optimizer_in_backward & job.asks_fsdp2 & ~job.pipeline_parallel & ~job.zero),
            "is modelled on one GPU only, or with an optimizer for each parameter under FSDP2."),
    unknown(_OPTIMIZER, job.optimizer_in_backward & job.offloads_parameters,
            "is not modelled with offloaded parameters: FSDP2 then waits for each gradient on the host."),
    unknown(_OPTIMIZER, job.compiles, "is modelled without torch.compile only."),
    unknown(_OPTIMIZER, job.preference, "is not modelled with loss.kind={loss.kind!r}."),
    unknown(_OPTIMIZER, job.autocast & job.computes_float16,
            "is not modelled under autocast in float16: the loss scaler would have to be asked for every gradient."),
    nearly_more(_OPTIMIZER, job.fused_loss & ~job.adapts & ~job.optimizer_in_backward,
                "is counted in part with a fused loss: backward is up to 1.2 % below its trace.", share=0.012),
    fails(_OPTIMIZER, job.optimizer("adalomo") & job.experts,
          "fails with experts held in one parameter: lomo-optim 0.1.1 factors matrices only; use lomo."),
))
