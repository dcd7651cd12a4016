"""OpenRLHF's command lines: `train_sft`, `train_dpo`, `train_rm`, `train_kto`, and the actor's update of `train_ppo_ray`.

Source: OpenRLHF/OpenRLHF openrlhf/cli/train_*.py (006cd708, 021d1b09), utils/deepspeed/deepspeed_utils.py
`get_train_ds_config` (0a3fbcef), utils/fsdp2/strategy.py (012aae8c), models/actor.py (log-probabilities of whole logits in
float32).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from peakcast.core.fields import flat
from peakcast.dialects.common.generation import Generation
from peakcast.dialects.common.mesh import with_shared_sequences
from peakcast.dialects.common.pasted import Pasted
from peakcast.dialects.common.translation import (
    AlternativeReading,
    Notes,
    Settings,
    Translation,
    note_numbers,
    note_unsupported,
    speller,
)
from peakcast.dialects.huggingface.balancing import KEY as BALANCING
from peakcast.dialects.huggingface.job import from_huggingface
from peakcast.dialects.huggingface.post_training import with_method
from peakcast.dialects.huggingface.trl_adapters import without_cache
from peakcast.dialects.openrlhf_names import WITHOUT_EFFECT, by_older_names
from peakcast.jobs.spec import TrainingJob

METHODS = {"sft": "sft", "dpo": "dpo", "rm": "rm", "kto": "kto", "ppo": "grpo", "ppo_ray": "grpo"}
"""The part of a program's name after `train_` -> the training method."""
LENGTHS = {"dpo": 512, "rm": 512, "kto": 512}
"""Training method -> the default of max_len, where it is not 2,048."""
UNSUPPORTED = {
    "ds_tensor_parallel_size": "DeepSpeed's tensor parallelism", "zpg": "ZeRO++",
    "grad_accum_dtype": "gradients added up in another dtype", "deepcompile": "DeepCompile",
    "freezing_actor_steps": "an actor that is frozen at first",
}  # fmt: skip
COUNTED = {"nll_loss_coef": "A likelihood term on the preferences"}
"""Settings that any number except 0 switches on -> the feature."""
IGNORED = re.compile(
    r"(save|ckpt|max_ckpt|load|logging|eval|wandb|use_wandb|use_tensorboard|lr|adam_betas|l2|seed|local_rank|learning_rate"
    r"|dataset|input|output|apply_chat_template|tokenizer|prompt_data|prompt_key|chosen|rejected|label|train_split|value_head"
    r"|reward|critic|normalize|top_p|temperature|eps_clip|dual_clip|value_clip|gamma|lambd|kl_|use_kl|policy_loss"
    r"|advantage|no_advantage|overlong|vllm|enforce_eager|num_episodes|rollout|micro_rollout|n_samples|ptx|dynamic_filtering"
    r"|ref_num|actor_(num|learning)|colocate|async|remote_rm|agent_func|enable_vllm|enable_prefix|perf|ring_head|full_determinism"
    r"|multiturn|pretrain_(mode|data|split)|compute_fp32|best_metric|train_max_tokens|desirable|undesirable|unpaired)\w*"
    r"|max_(epochs|samples|norm|new_tokens)|max_ckpt_(num|mem)|disable_(fast_tokenizer|trace_cache|ds_ckpt)|use_ms"
    r"|use_ds_universal_ckpt|margin_loss|beta|ipo|label_smoothing|loss|overlap_comm|bf16|flash_attn|deepspeed_enable_sleep"
    r"|gradient_checkpointing_use_reentrant|save_hf_ckpt|init_kl_coef|generate_max_len|prompt_max_len|max_len|module|bos_token"
)


def from_openrlhf(pasted: Pasted) -> Translation:
    """The job of an OpenRLHF command. Raises: SpecError naming the flag, its value, the rule and the way out."""
    notes = Notes()
    values, spell = by_older_names({str(key).replace("-", "_"): value for key, value in flat(pasted.values).items()})
    settings = Settings(values, notes, "OpenRLHF", spell)
    method = _method(settings, pasted.program)
    model = settings.model(pasted.model, "pretrain", "model_name_or_path")  # the second is its name since 2026
    num_gpus = _gpus(settings, pasted, method)
    training = _training(settings, max(1, num_gpus // (settings.integer("ring_attn_size", 1) or 1)), method)
    training[BALANCING] = bool(settings.number("aux_loss_coef"))  # models/actor.py
    generation = _generation(settings, training) if method == "grpo" else None
    adapter = _adapter(settings, training)
    sure, fsdp = settings.given("zero_stage") or settings.given("backend"), _fsdp2(settings)
    engine = {} if fsdp is not None else _engine(settings)
    note_unsupported(settings, UNSUPPORTED)
    note_numbers(settings, COUNTED, "more")
    _note_entropy(settings)

    def job_of(under: Notes, *, shards: bool) -> TrainingJob:
        half = {"torch_dtype": "float32"} if shards else {}  # master weights; FSDP2 computes in param_dtype
        given = (model, {**training, **half}, adapter, None if shards else engine, fsdp if shards else None, num_gpus)
        spell = speller({"aux_loss_coef": BALANCING})
        job = under.include(from_huggingface(*given, versions=pasted.versions.of("huggingface"), spell=spell))
        job = _with_a_ranks_part(without_cache(job), Settings(values, under, "OpenRLHF"))  # models/actor.py
        who = "" if method == "sft" else "OpenRLHF (models/actor.py)"
        return with_method(job, method, "the program", under, generation=generation, whole_logits=who)

    shards = fsdp is not None
    job = _with_reference(job_of(notes, shards=shards), settings, notes, shards=shards)
    if not shards and not sure:
        fsdp = {"fsdp_version": 2, "mixed_precision": "bf16"}
        other = _with_reference(job_of(Notes(), shards=True), settings, Notes(), shards=True)
        way_out = "Say which by --zero_stage or by --backend fsdp2 in the command."
        notes.others.append(AlternativeReading("OpenRLHF's FSDP2, which its releases of 2026 train with", other, way_out))
    if settings.given("bf16") and job.attention == "flash_attention_2" and not _asks_for_attention(settings):
        other = job.replace(attention="eager")  # models/actor.py until `--flash_attn` became `--attn_implementation`
        way_out = "Say which by --attn_implementation in the command."
        notes.others.append(AlternativeReading("an older OpenRLHF, eager without --flash_attn", other, way_out))
    settings.note_left(IGNORED, WITHOUT_EFFECT)
    return notes.finish(job)


def _note_entropy(settings: Settings) -> None:
    """Note that the entropy of all logits is computed as soon as its coefficient is given, even if it is 0 (0.11
    models/actor.py `compute_entropy`, trainer/ray/ppo_actor.py)."""
    if settings.given("entropy_loss_coef"):
        name = settings.spell("entropy_loss_coef")
        what = f"The entropy of all logits ({name}), whose float32 softmax is saved for backward, is not modelled."
        settings.notes.unsupported.append(what, name, "more")


def _asks_for_attention(settings: Settings) -> bool:
    return any([settings.raw("attn_implementation"), settings.switch("flash_attn"), settings.switch("packing_samples")])


def _method(settings: Settings, program: str) -> str:
    """The training method, from the program's name; without a program, from arguments that only one method has."""
    found = re.search(r"train_(\w+)", program)
    if found is not None:
        if found[1] not in METHODS:
            raise settings.refuse("program", f"is not modelled; {', '.join(METHODS)} are", found[0])
        return METHODS[found[1]]
    if settings.raw("prompt_data") or settings.raw("generate_max_len"):
        return "grpo"
    return "dpo" if settings.raw("beta") or settings.raw("ref_offload") else "sft"


def _gpus(settings: Settings, pasted: Pasted, method: str) -> int:
    nodes, each = settings.integer("actor_num_nodes", 1) or 1, settings.integer("actor_num_gpus_per_node")
    if method == "grpo" and pasted.num_gpus is None:
        return nodes * (each or 8)
    return pasted.gpus(settings.notes, 8, ", the GPUs of one node, all of which `deepspeed --module` uses")


def _training(settings: Settings, num_gpus: int, method: str) -> dict[str, Any]:
    """The training settings under the names of transformers' TrainingArguments."""
    notes = settings.notes
    micro = settings.size("micro_train_batch_size", 8, assume=True)
    total = settings.size("train_batch_size", 128, assume=True)
    packs = settings.switch("packing_samples")
    if settings.given("param_dtype"):
        dtype = settings.one_of("param_dtype", "bf16", ("bf16", "fp16"))
    else:
        dtype = "bf16"
        if not settings.switch("bf16"):
            notes.assumptions.append("param_dtype is not given; the default of OpenRLHF is bf16.")
    flash = settings.switch("flash_attn") or packs
    training: dict[str, Any] = {
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": max(1, total // (micro * num_gpus)),
        "max_length": settings.size("max_len", LENGTHS.get(method, 2048), assume=not settings.given("generate_max_len")),
        "padding_free": packs,
        dtype: True,
        "torch_dtype": dtype,
        "attn_implementation": settings.text("attn_implementation", "flash_attention_2"),
        "gradient_checkpointing": settings.switch("gradient_checkpointing"),
        "gradient_checkpointing_kwargs": {"use_reentrant": settings.switch("gradient_checkpointing_use_reentrant")},
        "use_liger_kernel": settings.switch("use_liger_kernel"),
    }
    if not settings.given("attn_implementation") and not flash:
        notes.assumptions.append("attn_implementation is not given; the default of OpenRLHF is flash_attention_2.")
    if settings.switch("use_dynamic_batch"):
        tokens = settings.size("train_max_tokens_per_gpu", 16192, assume=True)
        training |= {"per_device_train_batch_size": 1, "max_length": tokens, "padding_free": True}
        notes.assumptions.append(f"use_dynamic_batch fills micro-batches up to train_max_tokens_per_gpu={tokens} tokens.")
    return training


def _engine(settings: Settings) -> Mapping[str, Any]:
    """The DeepSpeed configuration that `get_train_ds_config` makes."""
    stage = settings.integer("zero_stage", 2, assume=True, least=0)
    zero: dict[str, Any] = {"stage": stage, "reduce_bucket_size": "auto"}
    if settings.switch("adam_offload"):
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": True}
    if settings.switch("offload"):
        zero["offload_param"] = {"device": "cpu"}
    if stage == 3:
        zero |= dict.fromkeys(("stage3_param_persistence_threshold", "stage3_prefetch_bucket_size"), "auto")
    if settings.switch("overlap_comm"):
        zero |= {"overlap_comm": True, "contiguous_gradients": True}
    named = settings.one_of("optim", "adam", ("adam", "muon"))
    return {"zero_optimization": zero, "optimizer": {"type": "Muon" if named == "muon" else "AdamW"}}


def _fsdp2(settings: Settings) -> dict[str, Any] | None:
    """FSDP2's settings if the command asks for FSDP2; None for DeepSpeed (utils/fsdp2/strategy.py `_apply_fsdp`)."""
    asked = settings.one_of("backend", "deepspeed", ("deepspeed", "fsdp2")) == "fsdp2"
    given = [key for key in settings.left() if key.startswith("fsdp2_")]
    offloads, reshards = settings.switch("fsdp2_cpu_offload"), settings.switch("fsdp2_reshard_after_forward", True)
    settings.given("fsdp2_enable_sleep")
    if not asked and not given:
        return None
    settings.notes.assumptions.append("weights and states under OpenRLHF's FSDP2 are treated as float32.")
    return {
        "fsdp_version": 2,
        "mixed_precision": "bf16",
        "fsdp_offload_params": offloads,
        "fsdp_reshard_after_forward": reshards,
    }


def _adapter(settings: Settings, training: dict[str, Any]) -> dict[str, Any] | None:
    rank, alpha = settings.integer("lora_rank", 0, least=0), settings.number("lora_alpha", 16)
    dropout, targets = settings.number("lora_dropout", 0), settings.words("target_modules")
    four = settings.switch("load_in_4bit")
    if not rank:
        if four:
            raise settings.refuse("load_in_4bit", "needs adapters; add lora_rank")
        return None
    if four:
        training["quantization_config"] = {"load_in_4bit": True, "bnb_4bit_use_double_quant": True}
    whole = targets in ((), ("all-linear",))
    return {
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": dropout,
        "target_modules": "all-linear" if whole else list(targets),
    }


def _generation(settings: Settings, training: dict[str, Any]) -> Generation:
    """The actor's update: the length of prompts with completions, and what else is on the actor's GPUs."""
    notes = settings.notes
    length = settings.integer("max_len")  # of prompt and completion together; 0.11 has no other limit
    if length is None:
        length = settings.size("prompt_max_len", 1024, assume=True) + settings.size("generate_max_len", 1024, assume=True)
    settings.given("prompt_max_len"), settings.given("generate_max_len")
    if not settings.switch("use_dynamic_batch"):
        training["max_length"] = length
    notes.assumptions.append(f"the sequences of the actor's update are prompts with their completions, of {length} tokens.")
    together = settings.switch("colocate_all_models")
    share = 0.0
    # cli/train_ppo_ray.py shares GPUs with vLLM `if args.colocate_all_models and not args.async_train`
    if together and not settings.switch("async_train") and settings.integer("vllm_num_engines", 0, least=0):
        share = settings.number("vllm_gpu_memory_utilization", 0.95) or 0.0
    sleeps = settings.switch("vllm_enable_sleep")
    where = f"vLLM takes vllm_gpu_memory_utilization={share:g} × the same GPU's memory" if share else "vLLM has other GPUs"
    freed = ", freed during the update (vllm_enable_sleep): what it keeps is not in the number" if share and sleeps else ""
    notes.warnings.append(f"The number is that of the actor's update; {where}{freed}.", "vllm_num_engines", "more")
    if together and settings.text("advantage_estimator", "gae") == "gae":
        asleep = settings.switch("deepspeed_enable_sleep")
        what = "with its states on the host while the actor trains" if asleep else "with its states"
        notes.unsupported.append(
            f"The critic on the same GPUs (colocate_all_models), {what}, is not in the number.",
            "colocate_all_models",
            "more",
        )
    if together and (settings.raw("reward_pretrain") and not settings.switch("ref_reward_offload")):
        notes.unsupported.append(
            "The reward model on the same GPUs (reward_pretrain) is not in the number.", "reward_pretrain", "more"
        )
    refers = settings.number("init_kl_coef", 0.01) != 0 and (together or settings.switch("colocate_actor_ref"))
    held = 0.0 if sleeps else share
    return Generation(sequence_length=length, completion_length=None, refers=refers, other_memory_fraction=held)


def _with_a_ranks_part(job: TrainingJob, settings: Settings) -> TrainingJob:
    """`job` with a rank's part of its rows under ring attention (models/ring_attn_utils.py). If rows are filled up to a
    number of tokens per GPU, each rank has that many tokens."""
    if not settings.switch("use_dynamic_batch"):
        return with_shared_sequences(job, settings, "ring_attn_size")
    what = {"ring_attn_size": "ring attention, and the buffers of its exchange,"}
    note_unsupported(settings, what, "more")
    return job


def _with_reference(job: TrainingJob, settings: Settings, notes: Notes, *, shards: bool) -> TrainingJob:
    """`job` with OpenRLHF's reference model: a frozen copy of the network, also if adapters are trained."""
    asked = [settings.switch("ref_offload"), settings.switch("ref_reward_offload")]
    offloads = any(asked) or shards  # `prepare_ref` of FSDP2 keeps it in host memory
    if job.reference not in ("model", "adapter_off"):
        return job
    if offloads:
        notes.unsupported.append(
            "The reference's weights in host memory (ref_offload) are not modelled: they are counted on the GPU.",
            "ref_offload",
            "less",
        )
    return job.replace(loss=replace(job.loss, reference="model"))
