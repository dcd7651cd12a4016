"""What the ledger covers. A job outside is named with its reason; it is never answered as if it were inside."""

from __future__ import annotations

from peakcast.architecture import Architecture
from peakcast.conventions import conventions, fuses_loss
from peakcast.dialects.hf_families import FAMILIES
from peakcast.findings import (
    FAILS,
    LESS,
    MORE,
    NEARLY,
    NEARLY_LESS,
    NEARLY_MORE,
    UNKNOWN,
    Check,
    Finding,
    first,
    found,
    sentences,
)
from peakcast.lengths import lengths_change
from peakcast.models.analytical.adapter_scope import adapter_reason
from peakcast.models.analytical.compile_scope import compile_reason
from peakcast.models.analytical.kernel_scope import fused_kernels_reason
from peakcast.models.analytical.layouts import gathered_dtype
from peakcast.models.analytical.parallel_scope import parallel_reason
from peakcast.models.analytical.preference_scope import preference_reason
from peakcast.models.analytical.zero_scope import zero_reason
from peakcast.spec import Offload, TrainingJob


def scope_findings(job: TrainingJob) -> tuple[Finding, ...]:
    """Why the ledger does not cover `job`: a finding for each part that it does not, none when it covers all."""
    reasons = [_batch_reason(job), preference_reason(job), _lengths_reason(job)]
    if job.framework == "megatron":
        from peakcast.models.analytical.megatron_scope import megatron_findings

        reasons += megatron_findings(job)
    else:
        reasons += [_architecture_reason(job.architecture), _encoder_decoder_reason(job), parallel_reason(job)]
        reasons += [_huggingface_reason(job), _mixture_reason(job), adapter_reason(job), _kernels_reason(job)]
        reasons += [fused_kernels_reason(job)]
        reasons += [zero_reason(job), compile_reason(job), _in_backward_reason(job)]
    return tuple(reason for reason in reasons if reason)


def out_of_scope(job: TrainingJob) -> str:
    """What `scope_findings` say, as one text; "" when the ledger covers `job`."""
    return " ".join(sentences(scope_findings(job)))


def _batch_reason(job: TrainingJob) -> Finding | None:
    if job.batch.form == "rows" or (job.framework != "megatron" and job.architecture.kind == "decoder"):
        return None
    said = f"batch.form={job.batch.form!r} is modelled for decoders of Hugging Face transformers only."
    return found(said, "batch.form")


def _lengths_reason(job: TrainingJob) -> Finding | None:
    """Where lengths change from step to step, what is run by no collector."""
    layout = job.parallelism
    shared = layout.tensor_parallel_size * layout.pipeline_parallel_size * layout.context_parallel_size > 1
    otherwise = job.compile or job.task != "train" or job.framework == "megatron" or job.architecture.kind != "decoder"
    if lengths_change(job) and (shared or otherwise):
        return found(
            f"batch.shortest_sequence={job.batch.shortest_sequence}: lengths that change are modelled in training decoders "
            "without tensor, pipeline and context parallelism, compile and Megatron.",
            "batch.shortest_sequence",
        )
    return None


def _architecture_reason(architecture: Architecture) -> Finding | None:
    sentence = _unmodelled_network(architecture)
    if not sentence:
        return None
    # of state-space layers the ledger has what the kernels save, and not what they allocate for a moment
    return found(sentence, "architecture", effect=MORE if architecture.kind == "hybrid" else UNKNOWN)


def _unmodelled_network(architecture: Architecture) -> str:
    """What of the network itself the ledger does not have, as a sentence; "" for nothing."""
    if architecture.kind == "encoder" and architecture.model_type != "bert":
        return f"{architecture.name!r}: of encoders only BERT is modelled, not model_type={architecture.model_type!r}."
    if architecture.kind == "hybrid":
        return (
            f"{architecture.name!r} has state-space layers: parameters, gradients and optimizer states are exact, their "
            "mixers' activations are what mamba_ssm's kernels save, without what those allocate in passing and not what "
            "transformers computes without that package (`peakcast explain --trace` shows that)."
        )
    if architecture.kind == "undescribed":
        return f"model_type={architecture.model_type!r} is not known to the ledger; trace it (`peakcast explain --trace`)."
    if architecture.kind not in ("decoder", "encoder", "encoder_decoder"):
        return f"{architecture.name!r} is not a decoder-only transformer, BERT or T5 (kind={architecture.kind!r})."
    if architecture.model_type not in FAMILIES:
        return (
            f"model_type={architecture.model_type!r} is not known to the ledger, which takes it for Llama by its keys; "
            "trace it (`peakcast explain --trace`)."
        )
    if architecture.model_type == "dbrx":
        return (
            f"{architecture.name!r}: DBRX clips its projections and runs its experts one by one, which is counted as other "
            "families do; parameters, gradients and optimizer states are exact."
        )
    if architecture.model_type == "mpt" and architecture.intermediate_size != 4 * architecture.hidden_size:
        return (
            f"{architecture.name!r} has intermediate_size={architecture.intermediate_size}, and transformers makes MPT's "
            f"feed-forward 4 * hidden_size wide, whatever is asked for; use {4 * architecture.hidden_size}."
        )
    return ""


def _encoder_decoder_reason(job: TrainingJob) -> Finding | None:
    if job.architecture.kind != "encoder_decoder":
        return None
    checkpointing, layout = job.activation_checkpointing, job.parallelism
    name = f"{job.architecture.name!r} is an encoder-decoder:"
    checks: list[Check] = [
        (job.task != "train", "generation with it is not modelled.", UNKNOWN, "task"),
        (
            layout.world_size > layout.data_parallel_size,
            "of several ranks it is modelled with DDP, FSDP and ZeRO only.",
            UNKNOWN,
            "parallelism",
        ),
        (
            layout.sharding in ("fsdp2", "hsdp") and conventions(job).get("fsdp2_units") == "ends",
            "FSDP2 cannot shard it as accelerate asks: modules of several groups share its table; use fsdp1.",
            FAILS,
            "parallelism.sharding",
        ),
        (
            layout.sharding != "none" and layout.num_replicas > 1 and job.finetuning.method != "full",
            "adapters in shards are not modelled for it.",
            UNKNOWN,
            "finetuning.method",
        ),
        (
            job.attention not in ("eager", "sdpa"),
            f"attention={job.attention!r} is not modelled for it; use sdpa or eager.",
            UNKNOWN,
            "attention",
        ),
        (
            "float16" in (job.precision.parameters, job.precision.compute),
            "T5 in float16 keeps projections in float32 and clamps what it adds, which is not modelled; use bfloat16.",
            MORE,
            "precision.compute",
        ),
        (
            checkpointing.mode == "selective" or checkpointing.every_n_layers > 1 or checkpointing.use_reentrant,
            "of checkpointing, mode full of every layer without use_reentrant is modelled for it.",
            UNKNOWN,
            "activation_checkpointing",
        ),
        (
            bool(job.finetuning.quantization),
            "quantised weights are not modelled for it.",
            UNKNOWN,
            "finetuning.quantization",
        ),
        (job.offload != Offload(), "offloading is not modelled for it.", UNKNOWN, "offload"),
        (
            bool(conventions(job).get("liger_kernels")) or fuses_loss(job),
            "Liger has no kernels for it.",
            UNKNOWN,
            "framework_options.liger_kernels",
        ),
    ]
    return first(checks, "architecture", start=f"{name} ")


def _in_backward_reason(job: TrainingJob) -> Finding | None:
    """What of optimizers that update in backward no trace has confirmed."""
    at_once = bool(conventions(job).get("optimizer_in_backward"))
    if job.optimizer.name not in ("lomo", "adalomo") and not at_once:
        return None
    name = f"optimizer.name={job.optimizer.name!r} updates in backward, which"
    checks: list[Check] = [
        (
            at_once and job.gradient_accumulation_steps > 1,
            "leaves no gradient to add to; use gradient_accumulation_steps=1, or set optimizer_in_backward=false.",
            FAILS,
            "gradient_accumulation_steps",
        ),
        (
            at_once and (job.finetuning.method != "full" or job.precision.main_parameters is not None),
            "is modelled with full fine-tuning and no second copy of the weights only.",
        ),
        (at_once and job.optimizer.name == "muon", "would make a Muon of every vector, which takes matrices only.", FAILS),
        (
            job.parallelism.world_size > 1 and not (at_once and _under_fsdp2(job)),
            "is modelled on one GPU only, or with an optimizer for each parameter under FSDP2.",
        ),
        (
            at_once and job.offload.parameters,
            "is not modelled with offloaded parameters: FSDP2 then waits for each gradient on the host.",
        ),
        (job.compile, "is modelled without torch.compile only."),
        (job.loss.kind != "cross_entropy", f"is not modelled with loss.kind={job.loss.kind!r}."),
        (
            bool(conventions(job).get("autocast")) and job.precision.compute == "float16",
            "is not modelled under autocast in float16: the loss scaler would have to be asked for every gradient.",
        ),
        (
            fuses_loss(job) and job.finetuning.method == "full" and not at_once,
            "is not all counted beside a fused loss: backward is up to 1.2 % below its trace.",
            NEARLY_MORE,
        ),
        (
            job.optimizer.name == "adalomo" and job.architecture.moe is not None,
            "fails with experts held in one parameter: lomo-optim 0.1.1 factors matrices only; use lomo.",
            FAILS,
        ),
    ]
    return first(checks, "optimizer.name", start=f"{name} ")


def _under_fsdp2(job: TrainingJob) -> bool:
    """Whether FSDP2, or HSDP, shards what no pipeline and no ZeRO divides."""
    layout = job.parallelism
    return layout.sharding in ("fsdp2", "hsdp") and layout.pipeline_parallel_size == 1 and not layout.zero_stage


def _plain_float8(job: TrainingJob) -> bool:
    """Whether float8 is torchao's over weights that blocks see in bf16, as which FSDP's mixed precision gathers wider ones.
    GPT-2's Conv1D is no nn.Linear and stays as it is."""
    plain = job.task == "train" and job.finetuning.method == "full" and job.framework in ("huggingface", "torch")
    wide = gathered_dtype(job) == "bfloat16" and not job.framework_options.get("autocast")
    return plain and wide and job.architecture.model_type not in ("gpt2", "gpt_bigcode")


def _rows(job: TrainingJob) -> int:
    """Tokens of a micro-batch, with padding where it has some."""
    return job.num_tokens if job.batch.form == "padding_free" else job.micro_batch_size * job.sequence_length


NO_FLASH_ATTENTION = ("bloom", "codegen", "mpt")
"""transformers 5.17 models/*/modeling_*.py: `_supports_flash_attn` is not set."""
NO_FLEX_ATTENTION = ("bloom", "codegen", "falcon", "gpt2", "gpt_bigcode", "gpt_neo", "gptj", "mpt", "olmoe", "stablelm")
"""... nor `_supports_flex_attn`."""


def _kernels_reason(job: TrainingJob) -> Finding | None:
    """What of kernels that are asked for the family does not have, or the ledger does not count."""
    family = job.architecture.model_type
    flash, flex = job.attention == "flash_attention_2", job.attention == "flex"
    checks: list[Check] = [
        (
            flash and family in NO_FLASH_ATTENTION,
            f"model_type={family!r} has no flash_attention_2 in transformers; use eager.",
            FAILS,
            "attention",
        ),
        (
            flex and family in NO_FLEX_ATTENTION,
            f"model_type={family!r} has no flex_attention in transformers; use sdpa.",
            FAILS,
            "attention",
        ),
        (
            flex and job.architecture.attention_sinks and bool(conventions(job).get("autocast")),
            "attention sinks beside flex_attention under autocast: what they widen is not all counted; use eager.",
            MORE,
            "attention",
        ),
        (
            flex and job.task == "train" and job.architecture.attention_dropout > 0,
            f"flex_attention has no dropout: transformers refuses attention_dropout={job.architecture.attention_dropout}.",
            FAILS,
            "attention",
        ),
        (
            flash and job.precision.parameters == "float32" and not conventions(job).get("autocast"),
            "flash_attention_2 has no kernel for float32; use autocast or half precision.",
            FAILS,
            "attention",
        ),
        (
            flash and family == "falcon",
            "flash_attention_2 of Falcon, whose key heads are copied for it, is not modelled; use sdpa.",
            MORE,
            "attention",
        ),
        (
            job.offload.activations
            and family == "falcon"
            and (job.attention == "eager" or bool(conventions(job).get("autocast"))),
            "Falcon's offloaded activations with eager attention or under autocast are up to 1.2 % off their trace.",
            NEARLY,
            "offload.activations",
        ),
        (
            flash and job.batch.form == "padding_free" and family in ("gpt_bigcode", "gpt_neo", "opt"),
            f"model_type={family!r} tells attention no positions, so that flash_attention_2 without padding is not "
            "modelled there.",
        ),
        (
            flash and family == "opt",
            "OPT makes a padding mask of its own, by which flash_attention_2 takes rows apart in its trace: up to 1 %.",
            NEARLY,
            "attention",
        ),
    ]
    return first(checks, "attention")


def _mixture_reason(job: TrainingJob) -> Finding | None:
    """Mixtures of which traces of small networks showed more, or less, than the ledger has."""
    if job.task != "train":
        return None
    architecture, checkpointing = job.architecture, job.activation_checkpointing
    adapts, autocast = job.finetuning.method != "full", bool(conventions(job).get("autocast"))
    reentrant = checkpointing.mode == "full" and checkpointing.use_reentrant
    leaves = reentrant and architecture.kind == "encoder"
    if architecture.norm_placement == "post":  # projections read a layer's input, not a norm
        leaves = reentrant or (adapts and checkpointing.mode != "none")
    checks: list[Check] = [
        (
            job.offload.activations and job.attention == "flex",
            "offloaded activations are compared with traces of sdpa, eager and flash attention, not of flex.",
        ),
        (
            autocast and architecture.model_type in ("bloom", "codegen", "gptj"),
            f"model_type={architecture.model_type!r} under autocast: what its own attention widens is not all counted.",
            MORE,
            "framework_options.autocast",
        ),
        (
            autocast and adapts and checkpointing.mode != "none" and architecture.model_type in ("cohere", "cohere2"),
            f"model_type={architecture.model_type!r} under autocast, with adapters and checkpointing: backward is up to "
            "1.6 % below its trace.",
            NEARLY_MORE,
            "framework_options.autocast",
        ),
        (
            autocast and leaves,
            f"{architecture.name!r} under autocast with reentrant checkpoints, or with adapters and any: inputs of layers "
            "are leaves, which autocast casts once for all projections; up to 2.5 % too much is counted.",
            NEARLY_LESS,
            "framework_options.autocast",
        ),
        (
            job.optimizer.name == "lomo" and autocast and checkpointing.mode != "none",
            "lomo under autocast with checkpointing: backward is up to 0.4 % above its trace.",
            NEARLY_LESS,
            "optimizer.name",
        ),
        (
            (checkpointing.mode != "none" or job.offload.activations) and architecture.model_type in ("codegen", "gptj"),
            f"model_type={architecture.model_type!r} with checkpointing or offloaded activations: position tables and "
            "rotated parts that its attention names are not counted where no graph keeps them.",
            MORE,
            "activation_checkpointing",
        ),
    ]
    return first(checks, "activation_checkpointing")


def _huggingface_reason(job: TrainingJob) -> Finding | None:
    checks: list[Check] = [
        (
            job.task == "inference" and job.architecture.kind == "encoder",
            f"{job.architecture.name!r} is an encoder, which generates nothing: task='inference' is not modelled for it.",
            UNKNOWN,
            "task",
        ),
        (
            job.task == "inference" and job.architecture.model_type in ("codegen", "gptj", "mpt"),
            f"generation with model_type={job.architecture.model_type!r}, whose attention has tables of its own, is up to "
            "5 % below its trace.",
            NEARLY_MORE,
            "task",
        ),
        (
            job.task == "inference" and job.architecture.model_type == "bloom" and job.precision.compute == "float32",
            "generation with BLOOM in float32: scores that its attention names until it has added its output are not all "
            "counted; up to 0.7 % below its trace.",
            NEARLY_MORE,
            "task",
        ),
        (
            job.architecture.mla is not None and bool(conventions(job).get("autocast")),
            "multi-latent attention under autocast is counted without what its concatenations widen.",
            MORE,
            "framework_options.autocast",
        ),
        (
            job.task == "inference" and job.architecture.mla is not None and not conventions(job).get("latent_cache", True),
            "generation with multi-latent attention before transformers 5.17, which cached expanded keys and values, is "
            "counted by its source; no trace has confirmed it.",
            UNKNOWN,
            "versions.transformers",
        ),
        (
            job.optimizer.name == "galore" and job.architecture.model_type == "gpt2",
            "optimizer.name='galore' projects nn.Linear alone, and GPT-2 has Conv1D: it is not modelled there.",
            UNKNOWN,
            "optimizer.name",
        ),
        (
            (job.offload.parameters or job.offload.optimizer)
            and not (_offloads_with_fsdp(job) or _offloads_with_zero(job)),
            "offload of parameters or optimizer states is modelled for FSDP's and ZeRO's only.",
            UNKNOWN,
            "offload",
        ),
        (
            bool(job.activation_checkpointing.modules),
            "activation_checkpointing.modules is not modelled here; without it, matrix products and attention are kept.",
            UNKNOWN,
            "activation_checkpointing.modules",
        ),
        (
            job.architecture.moe is not None
            and conventions(job).get("experts_implementation") == "torchtitan"
            and bool(conventions(job).get("autocast")),
            "torchtitan's experts under autocast have not been traced: their activations are counted without it.",
            MORE,
            "framework_options.autocast",
        ),
        (
            bool(job.framework_options.get("loss_chunks")),
            "a loss in chunks of the sequence is counted as torchtitan 0.3's source has it; traces by hand alone agree.",
            UNKNOWN,
            "framework_options.loss_chunks",
        ),
        (
            bool(job.framework_options.get("fused_kernels")),
            "fused LoRA, loss and norm kernels are not modelled.",
            LESS,
            "framework_options.fused_kernels",
        ),
        (
            job.precision.compute == "float8" and _rows(job) % 16 > 0,
            f"precision.compute='float8' multiplies by tokens, of which torch._scaled_mm takes multiples of 16, and a "
            f"micro-batch has {_rows(job):,}; change micro_batch_size or sequence_length.",
            FAILS,
            "precision.compute",
        ),
        (
            job.precision.compute == "float8" and not _plain_float8(job),
            "float8 compute is modelled for full training of bf16 nn.Linear layers with torchao's dynamic scales alone.",
            UNKNOWN,
            "precision.compute",
        ),
        (
            job.precision.compute == "float8" and job.activation_checkpointing.mode == "selective",
            "float8 compute with selective checkpointing is not modelled: traces multiply otherwise than torch._scaled_mm, "
            "which no list of kept operations has, and are up to 1.6 % lower; use mode=full or none.",
            NEARLY,
            "precision.compute",
        ),
    ]
    return first(checks, "framework_options")


def _offloads_with_zero(job: TrainingJob) -> bool:
    return job.parallelism.zero_stage > 0


def _offloads_with_fsdp(job: TrainingJob) -> bool:
    """FSDP1's CPUOffload and FSDP2's CPUOffloadPolicy move parameters, gradients and the optimizer's states together."""
    layout = job.parallelism
    sharded = layout.sharding in ("fsdp1", "fsdp2", "hsdp") and layout.num_replicas > 1
    return sharded and job.offload == Offload(parameters=True, optimizer=True)
