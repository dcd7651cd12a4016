"""LitGPT's YAML (`litgpt finetune_full`, `finetune_lora`, `pretrain` --config).

Source: LitGPT 0.5 litgpt/finetune/full.py and lora.py, litgpt/args.py (TrainArgs), config_hub/.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, Literal

from peakcast.core.fields import FrozenMapping, flat
from peakcast.dialects.common.litgpt_targets import PROJECTIONS, adapted_of_qkv, litgpt_targets
from peakcast.dialects.common.pasted import Pasted
from peakcast.dialects.common.translation import Notes, Settings, Translation, states_direction
from peakcast.dialects.litgpt.network import litgpt_network
from peakcast.jobs.architecture import Architecture
from peakcast.jobs.spec import (
    DECAYING_GRADIENTS,
    ActivationCheckpointing,
    Dtype,
    Finetuning,
    Optimizer,
    OptimizerName,
    Parallelism,
    Precision,
    TrainingJob,
)

ON_BY_DEFAULT = ("lora_query", "lora_value")
LOSS_CHUNK = 128
"""Tokens per chunk of the loss (litgpt 0.5.13 utils.py chunked_cross_entropy, `chunk_size`)."""
OPTIMIZERS: dict[str, OptimizerName] = {
    "adamw": "adamw", "adam": "adam", "sgd": "sgd", "lion": "lion", "adafactor": "adafactor",
    "adamw8bit": "adamw_8bit", "pagedadamw": "paged_adamw_32bit", "galore": "galore", "galoreadamw": "galore",
}  # fmt: skip
LORA = re.compile(r"finetune|(finetune_)?lora")
"""Commands and programs that always finetune by LoRA (litgpt 0.5.13 __main__.py, finetune/)."""
ADAPTERS = re.compile(r"(finetune_)?adapter(_v2)?")
LORA_RANK = 8
"""`lora_r` of finetune/lora.py where it is not given (lit-gpt of 2023, litgpt 0.4.0, 0.5.13)."""
QUANTIZED = ("", "bnb.nf4", "bnb.nf4-dq", "bnb.fp4", "bnb.fp4-dq", "bnb.int8", "bnb.int8-training")
"""Values of `quantize` (litgpt 0.5.13 finetune/lora.py `setup`)."""
IGNORED = re.compile(
    r"(data|eval|out_dir|logger_name|log|seed|access_token|resume|initial_checkpoint_dir|tokenizer_dir|optimizer\.init_args"
    r"|generate)(\..*|$)"
    r"|train\.(save_interval|log_interval|lr_warmup_.*|epochs|max_tokens|max_steps|max_time|max_norm|min_lr"
    r"|learning_rate|weight_decay|beta1|beta2|lr_warmup_fraction|max_additional_steps|max_iters)"
)


def _options(settings: Settings, architecture: Architecture, finetuning: Finetuning, tokens: int) -> dict[str, Any]:
    """Framework options: the chunks of the loss over `tokens` (finetune/lora.py computes it for 128 tokens of every
    sequence at a time), and the parts of the fused projection that have adapters."""
    options: dict[str, Any] = {"logits_chunks": -(-tokens // LOSS_CHUNK)}
    if finetuning.method != "full" and (parts := adapted_of_qkv(_adapted(settings), architecture)) not in ("", "qkv"):
        options["adapted_of_qkv"] = parts
    return options


def from_litgpt(pasted: Pasted) -> Translation:
    """The job of a LitGPT configuration. Raises: SpecError naming the key, its value, the rule and the way out."""
    notes = Notes()
    settings = Settings(flat(pasted.values), notes, "LitGPT")
    pretrains = not settings.given("checkpoint_dir")
    architecture = litgpt_network(settings, pasted)
    num_gpus = _num_gpus(settings, pasted)
    finetuning = _finetuning(settings, architecture, re.split(r"[ /]", pasted.program)[-1].removesuffix(".py"))
    micro = settings.size("train.micro_batch_size", 1 if finetuning.method != "full" else 4, assume=True)
    steps = _accumulation(settings, micro, num_gpus)
    length = _length(settings, architecture.max_position_embeddings or 2048, pretrains=pretrains)
    # finetune/full.py and lora.py: FSDPStrategy with checkpointed blocks on several GPUs, neither on one
    # pretrain.py: FSDPStrategy with HYBRID_SHARD and no checkpoints, a compiled network, a fused optimizer
    several = num_gpus > 1
    _note_strategy(settings, pretrains=pretrains, several=several)
    if finetuning.method == "full":  # one matrix for queries, keys, values; LoRA names its parts separately
        architecture = replace(architecture, fused_qkv=True)
    precision = _precision(settings)
    if (mixed := precision.parameters != precision.compute) and several:
        sentence = "Weights that FSDP gathers in float32 for autocast (a mixed precision) are not modelled."
        notes.unsupported.append(sentence, "precision", "more")
    options = _options(settings, architecture, finetuning, micro * length if finetuning.method == "full" else length)
    options |= {"autocast": True} if mixed and not several else {}
    job = TrainingJob(
        architecture=architecture,
        framework="torch",
        versions=FrozenMapping(pasted.versions.of("torch", {"litgpt": "main"})),
        micro_batch_size=micro,
        sequence_length=length,
        gradient_accumulation_steps=steps,
        precision=precision,
        optimizer=_optimizer(settings, fused=pretrains, pages=finetuning.quantization is not None),
        finetuning=finetuning,
        activation_checkpointing=ActivationCheckpointing(mode="full" if several and not pretrains else "none"),
        compile=pretrains,
        parallelism=Parallelism(data_parallel_size=num_gpus, sharding="fsdp1" if several else "none"),
        framework_options=FrozenMapping(options),
    )
    settings.note_left(IGNORED)
    return notes.finish(job)


def _note_strategy(settings: Settings, *, pretrains: bool, several: bool) -> None:
    """Say how LitGPT uses several GPUs, and which part of that is not modelled."""
    if several:
        recipe = "compiles the network and keeps activations" if pretrains else "checkpoints each block"
        settings.notes.assumptions.append(f"on several GPUs LitGPT shards by FSDP and {recipe}.")
    if pretrains and (settings.integer("num_nodes", 1) or 1) > 1:
        settings.notes.unsupported.append(
            "LitGPT's pretraining shards within a node (HYBRID_SHARD); sharding over all is assumed.", "strategy", "more"
        )


def _length(settings: Settings, longest: int, *, pretrains: bool) -> int:
    """Tokens per sample: `train.max_seq_length`. Without it, pretraining fills every sample up to `longest`, the network's
    maximum (litgpt 0.5.13 pretrain.py: `model.max_seq_length`), and finetuning does not cut samples."""
    length, notes = settings.integer("train.max_seq_length"), settings.notes
    if length is not None:
        notes.assumptions.append("sequences are treated as long as train.max_seq_length; shorter samples need less.")
        return length
    if pretrains:
        notes.assumptions.append(f"train.max_seq_length is not given; pretraining uses the network's maximum, {longest}.")
        return longest
    length = min(longest, 2048)
    notes.warnings.append(
        f"train.max_seq_length is not given: samples are as long as the data, up to {longest} tokens; {length} are "
        "assumed. Give those of the longest sample: --sequence-length.",
        "train.max_seq_length",
        "more" if length < longest else "less",
    )
    return length


def _num_gpus(settings: Settings, pasted: Pasted) -> int:
    """`devices` (all GPUs of the machine for "auto") times `num_nodes`."""
    nodes = settings.integer("num_nodes", 1) or 1
    if settings.text("devices", "1") == "auto":
        return pasted.gpus(settings.notes, nodes, " for devices=auto")
    return pasted.num_gpus or (settings.integer("devices", 1) or 1) * nodes


def _accumulation(settings: Settings, micro: int, num_gpus: int) -> int:
    """litgpt/args.py `gradient_accumulation_iters`: the global batch divided by ranks and micro-batches, at least 1."""
    total = settings.integer("train.global_batch_size", 16, assume=True) or 16
    per_rank = total // num_gpus
    if per_rank < micro:
        raise settings.refuse(
            "train.global_batch_size",
            f"must be at least micro_batch_size={micro} × {num_gpus} GPUs = {micro * num_gpus}",
            total,
        )
    return per_rank // micro


def _finetuning(settings: Settings, network: Architecture, program: str) -> Finetuning:
    """What trains. `program`: the name of LitGPT's command or script, which may say so alone."""
    rank = settings.integer("lora_r")
    if ADAPTERS.fullmatch(program):
        settings.notes.unsupported.append(
            f"LitGPT's {program} is not modelled; LoRA of rank {LORA_RANK} is assumed instead: of such runs that it "
            "publishes, those of version 1 took 4 to 6 % less and those of version 2 12 to 36 % more.",
            "finetuning.method",
        )
    if rank is None and (ADAPTERS.fullmatch(program) or LORA.fullmatch(program)):
        rank = LORA_RANK
        settings.notes.assumptions.append(f"lora_r is not given; LitGPT's default is {rank}.")
    targets = litgpt_targets(_adapted(settings), network)
    alpha, dropout = settings.number("lora_alpha", 16), settings.number("lora_dropout", 0.05)
    quantize = settings.one_of("quantize", "", QUANTIZED)
    if rank is None:
        return Finetuning()
    kind: Literal["nf4", "int8"] | None = None
    if quantize:
        kind = "int8" if "int8" in quantize else "nf4"
        if "fp4" in quantize:
            settings.notes.unsupported.append(
                f"quantize={quantize} is not modelled; nf4 is assumed, of the same size.", "quantize"
            )
    word = settings.text("precision")
    return Finetuning(
        method="qlora" if kind else "lora",
        rank=rank,
        alpha=alpha,
        targets=targets,
        dropout=dropout or 0.0,
        adapter_dtype="float32" if word.startswith("32") or word.endswith("mixed") else "bfloat16",
        quantization=kind,
        double_quantization=quantize.endswith("-dq"),
    )


def _adapted(settings: Settings) -> list[str]:
    """The switches that are on."""
    return [key for key in PROJECTIONS if settings.switch(key, key in ON_BY_DEFAULT)]


def _precision(settings: Settings) -> Precision:
    word = settings.text("precision")
    if not word:
        settings.notes.assumptions.append("precision is not given; LitGPT's default is bf16-true on GPUs that have "
            "bfloat16.")
        word = "bf16-true"
    names: dict[str, Dtype] = {"bf16": "bfloat16", "16": "float16", "32": "float32"}
    first, _, kind = word.partition("-")
    if first not in names or kind not in ("true", "mixed"):
        raise settings.refuse("precision", "must be one of bf16-true, bf16-mixed, 16-true, 16-mixed, 32-true")
    weights: Dtype = names[first] if kind == "true" else "float32"
    return Precision(parameters=weights, compute=names[first], gradients=weights, optimizer_states=weights)


def _optimizer(settings: Settings, *, fused: bool, pages: bool) -> Optimizer:
    """`pages`: quantised weights train with bitsandbytes' PagedAdamW in AdamW's place (litgpt 0.4.2, 0.5.13 utils.py
    instantiate_bnb_optimizer; lit-gpt of October 2023 finetune/lora.py)."""
    given = settings.text("optimizer", "") or settings.text("optimizer.class_path", "AdamW")
    name = given.rpartition(".")[2].lower()
    if name not in OPTIMIZERS:
        settings.notes.unsupported.append(
            f"optimizer={given} is not modelled; AdamW is assumed instead.", "optimizer", states_direction(str(given))
        )
    fused = settings.switch("optimizer.init_args.fused", fused)
    kind = OPTIMIZERS.get(name, "adamw")
    kind = "paged_adamw_32bit" if pages and kind == "adamw" else kind
    eight = kind in ("adamw_8bit", "paged_adamw_32bit")
    numbers = {key: settings.number(f"optimizer.init_args.{key}", 0.0) or 0.0 for key in ("momentum", "weight_decay")}
    return Optimizer(
        name=kind,
        implementation="fused" if fused or eight else "foreach",
        momentum=numbers["momentum"] if kind == "sgd" else 0.0,
        weight_decay=numbers["weight_decay"] if kind in DECAYING_GRADIENTS else 0.0,
    )
