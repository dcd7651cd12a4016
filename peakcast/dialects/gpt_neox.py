"""GPT-NeoX's YAML: GPT-NeoX's own networks under DeepSpeed, with Megatron's tensor and pipeline parallelism.

Source: EleutherAI/gpt-neox configs/neox_arguments.md, megatron/neox_arguments/neox_args.py (defaults),
megatron/model/gpt2_model.py, configs/20B.yml (252ddc52), configs/6-7B.yml (03547ba9).
"""

from __future__ import annotations

import re
from typing import Any

from peakcast.core.fields import FrozenMapping
from peakcast.core.units import round_up
from peakcast.dialects.common.job_file import resolve_architecture
from peakcast.dialects.common.pasted import Pasted, merged
from peakcast.dialects.common.translation import Notes, Settings, Translation, note_inner, note_unsupported
from peakcast.dialects.huggingface.job import from_huggingface
from peakcast.jobs.architecture import Architecture
from peakcast.jobs.conventions import conventions
from peakcast.jobs.spec import ActivationCheckpointing, Parallelism, TrainingJob

POSITIONS = ("rotary", "learned", "none", "sinusoidal", "rpe", "alibi")
SHAPES = (
    "gpt_j_residual", "rotary_pct", "gpt_j_tied", "use_bias_in_mlp", "use_bias_in_attn_linear", "use_bias_in_norms",
)  # fmt: skip
"""Keys about the layers that transformers' networks settle by their family."""
ENGINE = ("zero_optimization", "optimizer", "fp16", "bf16")
UNSUPPORTED = {
    "sequence_parallel": "sequence parallelism", "context_parallel_size": "context parallelism",
    "moe_num_experts": "experts",
    "num_experts": "experts", "gmlp_attn_dim": "gMLP", "partition_activations": "checkpoints shared by tensor ranks",
    "checkpoint_in_cpu": "checkpoints in host memory", "contiguous_checkpointing": "contiguous checkpoints",
    "use_bnb_optimizer": "bitsandbytes' optimizer", "mup_width_scale_": "muP", "lora": "LoRA",
    "te_fp8_format": "FP8 training",
    "te_fp8_mha": "FP8 attention", "te_mha": "Transformer Engine's attention",
    "te_layernorm_mlp": "Transformer Engine's MLP",
    "te_columnparallel": "Transformer Engine's layers", "te_rowparallel": "Transformer Engine's layers",
    "soft_prompt_tuning": "prompt tuning", "mlp_multiple_of_": "another width",
    "use_qk_layernorm": "norms of queries and keys",
    "communication_data_type": "gradients that are sent in another dtype", "fp32_allreduce": "gradients reduced in float32",
    "sliding_window_width": "attention over a window", "kto_beta": "KTO", "dpo_beta": "DPO", "pack_impl_": "packing",
}  # fmt: skip
IGNORED = re.compile(
    r"(data|train_data|valid_data|test_data|label_data|pos_\w+_data|neg_\w+_data|save|load|eval|log|tensorboard|wandb|use_wandb|comet"
    r"|use_comet|tokenizer|vocab|merge|train_iters|lr|min_lr|warmup|weight_decay|init_method|output_layer_init|extra_save|monitor"
    r"|keep_last|finetune|iteration|do_|launcher|hostfile|deepspeed|num_workers|seed|dynamic_loss|loss_scale|initial_loss|adlr|git"
    r"|memory_profiling|profile|autotuning|checkpoint_(validation|scale|factor)|s3|text_gen|top_|temperature|sample|num_samples"
    r"|maximum_tokens|return_logits|recompute|prompt_end|norm_epsilon|layernorm_epsilon|rms_norm_epsilon|char_level|exit|wall_clock"
    r"|steps_per_print|gradient_clipping|gradient_noise|no_load|no_save|override|use_checkpoint|strict|distributed_backend|split"
    r"|mmap|shuffle|enforce|train_epochs|allow_chopping|pack|weighted|weight_by|master_|include|exclude|user_script|account|comment"
    r"|no_ssh|world_size|global_num_gpus|local_rank|rank|scheduler|attention_softmax_in_fp32|apply_query_key|synchronize_each"
    r"|checkpoint_num_layers|scaled_|bias_\w+_fusion|rope_fusion|use_fused|async_tensor|onnx|reward|precompute|dpo|kto|mup|opt_pos"
    r"|rotary_emb_base|rotary_save|output_layer_parallelism|partition|use_flashattn|activation_checkpointing|zero_allow|curriculum"
    r"|make_vocab_size_divisible_by|train_batch_size|optimizer_type|use_mup|flops_profiler|csv_monitor|clip_grad|hysteresis|min_scale)\w*"
)


def _zero(engine: dict[str, Any]) -> dict[str, Any]:
    """The settings of ZeRO, in which an optimizer on the host has the key that today's DeepSpeed reads."""
    zero = dict(engine.get("zero_optimization") or {"stage": 0})
    moved = zero.pop("cpu_offload", False)
    return zero | ({"offload_optimizer": {"device": "cpu"}} if str(moved).lower() == "true" else {})


def from_gpt_neox(pasted: Pasted) -> Translation:
    """The job of a GPT-NeoX run, whose files have been merged into one. Raises: SpecError naming the key and the rule."""
    notes = Notes()
    values = merged({str(k).replace("-", "_"): v for k, v in pasted.values.items()}, {})
    written = {str(key).replace("-", "_"): str(key) for key in pasted.values}
    settings = Settings(values, notes, "GPT-NeoX", lambda key: written.get(key, key))
    tensor, pipeline = settings.size("model_parallel_size", 1), settings.integer("pipe_parallel_size", 0, least=0) or 1
    ranks = tensor * pipeline
    num_gpus = pasted.gpus(notes, ranks, ", the least for this layout")
    if num_gpus % ranks:
        raise settings.refuse(
            "pipe_parallel_size", f"times model_parallel_size is {ranks}, which must divide {num_gpus} GPUs"
        )
    network = _network(settings, tensor)
    checkpoints = settings.switch("checkpoint_activations")
    engine = {key: settings.raw(key) for key in ENGINE if isinstance(settings.raw(key), dict)}
    half = _precision(settings, engine)
    engine["zero_optimization"] = _zero(engine)
    attention = _attention(settings)
    note_unsupported(settings, UNSUPPORTED)
    training = {
        "per_device_train_batch_size": settings.size("train_micro_batch_size_per_gpu", settings.integer("batch_size")),
        "gradient_accumulation_steps": settings.size("gradient_accumulation_steps", settings.integer("gas", 1)),
        "max_length": settings.size("seq_length"),
        "packing": True,
        "attn_implementation": attention,
        "torch_dtype": {"bf16": "bfloat16", "fp16": "float16"}.get(half, "float32"),
        **({half: True} if half else {}),
    }
    versions = pasted.versions.of("deepspeed")
    job = notes.include(from_huggingface(network, training, None, engine, None, num_gpus // ranks, versions=versions))
    if checkpoints:
        job = job.replace(activation_checkpointing=ActivationCheckpointing(mode="full", use_reentrant=True))
    job = _with_layout(job, num_gpus // ranks, tensor, pipeline)
    notes.unsupported.append(
        "GPT-NeoX's own layers, which fuse masks, biases and softmax, are read as transformers' GPT-NeoX under DeepSpeed.",
        "num_layers",
    )
    settings.note_left(IGNORED)
    return notes.finish(job)


def _with_layout(job: TrainingJob, replicas: int, tensor: int, pipeline: int) -> TrainingJob:
    """`job`, which was read as data-parallel over `replicas` GPUs, with tensor and pipeline parallelism added, and without
    the framework options that do not exist under those."""
    layout = Parallelism(
        data_parallel_size=replicas,
        tensor_parallel_size=tensor,
        pipeline_parallel_size=pipeline,
        zero_stage=job.parallelism.zero_stage,
    )
    job = job.replace(parallelism=layout)
    known = conventions(job)
    return job.replace(framework_options=FrozenMapping({k: v for k, v in job.framework_options.items() if k in known}))


def _network(settings: Settings, tensor: int) -> Architecture:
    """The network, read by way of the keys of transformers' GPT-NeoX configuration."""
    hidden, heads = settings.size("hidden_size"), settings.size("num_attention_heads")
    shape = _shape(settings, hidden, heads)
    divisor = settings.size("make_vocab_size_divisible_by", 128) * tensor
    vocabulary = settings.integer("padded_vocab_size") or round_up(50257, divisor)
    if not settings.given("padded_vocab_size"):
        settings.notes.assumptions.append(f"the vocabulary is assumed to have {vocabulary} tokens; padded_vocab_size "
            "sets another number.")
    _note_undescribed(settings)
    return resolve_architecture(
        {
            **shape,
            "name": f"neox-{settings.size('num_layers')}-layers-{hidden}",
            "hidden_size": hidden,
            "num_hidden_layers": settings.size("num_layers"),
            "num_attention_heads": heads,
            "vocab_size": vocabulary,
            "max_position_embeddings": settings.size("max_position_embeddings", settings.integer("seq_length")),
            "tie_word_embeddings": not settings.switch("no_weight_tying"),
        }
    )


def _shape(settings: Settings, hidden: int, heads: int) -> dict[str, Any]:
    """The keys that describe a layer: those of Llama's configuration if the activation is gated or key-value heads are
    fewer than heads, else those of GPT-NeoX's."""
    groups, width = settings.integer("num_kv_heads"), settings.integer("intermediate_size")
    for key in SHAPES:
        settings.given(key)
    # megatron/model/transformer.py LLaMAParallelMLP, as of configs/llama/7B.yml; later releases name the activation alone
    own = settings.one_of("mlp_type", "regular", ("regular", "llama")) == "llama"
    gated = own or settings.text("activation", "gelu") in ("swiglu", "geglu")
    if gated or (groups and groups != heads):
        third = 4 * hidden * 2 // 3
        return {
            "model_type": "llama",
            "num_key_value_heads": groups or heads,
            "intermediate_size": width or (round_up(third, 256) if own else third),
            "hidden_act": "silu",
        }
    return {
        "model_type": "gpt_neox",
        "intermediate_size": width or 4 * hidden,
        "hidden_act": "gelu",
        "use_parallel_residual": settings.switch("gpt_j_residual"),
        "rotary_pct": settings.number("rotary_pct", 1.0),
    }


def _note_undescribed(settings: Settings) -> None:
    """Note features of GPT-NeoX's layers that transformers' implementation does not have: other positions, other norms,
    dropout."""
    position = settings.one_of("pos_emb", "learned", POSITIONS)
    if position != "rotary":
        settings.notes.unsupported.append(f"pos_emb={position} is not modelled; rotary is assumed.", "pos_emb")
    norm = settings.text("norm", "layernorm")
    if norm not in ("layernorm", "rmsnorm", "te_layernorm", "te_rmsnorm"):
        settings.notes.unsupported.append(f"norm={norm} is not modelled; the family's is assumed.", "norm")
    for key in ("hidden_dropout", "attention_dropout"):
        if settings.number(key, 0):
            settings.notes.unsupported.append(f"Dropout ({key}) is not modelled.", key, "more")


def _precision(settings: Settings, engine: dict[str, Any]) -> str:
    """bf16, fp16, or "" for float32: from the key `precision`, or from the section of the engine that is enabled."""
    word = settings.text("precision")
    on = {key for key in ("bf16", "fp16") if str((engine.get(key) or {}).get("enabled", False)).lower() == "true"}
    half = {"bfloat16": "bf16", "fp16": "fp16", "fp32": ""}.get(word, next(iter(sorted(on)), ""))
    for key in ("bf16", "fp16"):
        scaling = ("loss_scale", "loss_scale_window", "initial_scale_power", "hysteresis", "min_loss_scale")
        note_inner(settings, key, ("enabled",), (key, "type", *scaling))
        engine.pop(key, None)
    if half:
        engine[half] = {"enabled": True}
    if not half and not word:
        settings.notes.assumptions.append("precision is not given; weights and products are float32.")
    return half


def _attention(settings: Settings) -> str:
    """The kernel of the first entry of `attention_config`, such as [[["flash"], 24]]."""
    given = settings.raw("attention_config")
    first = given
    while isinstance(first, list) and first:
        first = first[0]
    if first in (None, "global", "none"):
        return "eager"
    if first == "flash":
        return "flash_attention_2"
    settings.notes.unsupported.append(
        f"attention_config={first} is not modelled; plain attention is assumed.", "attention_config"
    )
    return "eager"
