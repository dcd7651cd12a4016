"""verl's actor under Megatron: Megatron's settings in `actor.megatron` (or in `engine` of the SFT trainer) for a network of
the hub.

Source: volcengine/verl verl/trainer/config/engine/megatron.yaml (9b30d863), actor/megatron_actor.yaml (f471e0b9): bfloat16,
the distributed optimizer, sequence parallelism, recomputation by `override_transformer_config`; verl 0.9.1
utils/megatron/optimizer.py `init_megatron_optim_config`: the optimizer's settings in `optim`, which
`override_optimizer_config` replaces.
"""

from __future__ import annotations

import math
import re
from typing import Any

from peakcast.dialects.common.job_file import note_network, resolve_architecture
from peakcast.dialects.common.pasted import Pasted
from peakcast.dialects.common.translation import Settings
from peakcast.dialects.megatron.adapters import BRIDGE, with_adapters
from peakcast.dialects.megatron.job import from_megatron
from peakcast.dialects.megatron.launch import flags_of_yaml, with_gradient_dtype
from peakcast.dialects.megatron_bridge import DDP
from peakcast.jobs.spec import TrainingJob

SIZES = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "virtual_pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size", "expert_tensor_parallel_size",
)  # fmt: skip
MOVED = ("param_offload", "optimizer_offload", "grad_offload")
OVERRIDDEN = ("override_transformer_config", "override_ddp_config")
NARROW_STATES = ("main_grads_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
"""Settings of `optim` that only have an effect with `use_precision_aware_optimizer`."""
DETAILS = re.compile(
    r"_target_|seed|use_mbridge|vanilla_mbridge|use_dist_checkpointing|dist_checkpointing_\w+|use_remove_padding|override_mcore_model\S*"
    r"|forward_only|dtype|load_weight|router_replay\S*|use_megatron_fsdp_off|default_model_config|extra|lora_.*"
)


def megatron_job(
    settings: Settings, section: str, named: Any, pasted: Pasted, num_gpus: int, step: dict[str, Any]
) -> TrainingJob:
    """The job of an actor whose Megatron settings are in `section`. `step`: the training settings of its micro-batches.

    Raises: SpecError naming the key, its value, the rule and the way out.
    """
    notes = settings.notes
    network = resolve_architecture(named)
    note_network(named, notes)
    flags = _layout_flags(settings, section) | {"bf16": True, "attention_backend": "flash"}
    moved = [key for key in MOVED if settings.switch(f"{section}{key}")]
    if moved:
        notes.assumptions.append(f"{' and '.join(moved)}: what leaves the GPU between phases is back during the update.")
    overridden = _overridden(settings, section, OVERRIDDEN)
    flags |= {flag: settings.raw(key) for flag, key in overridden.items()}
    _ignore_details(settings, section)
    above = section.removesuffix("megatron.").removesuffix("engine.")
    flags |= _optimizer_flags(settings, f"{above}optim.")
    of_optimizer = _overridden(settings, f"{above}optim.", ("override_optimizer_config",))
    flags = with_gradient_dtype(flags | {flag: settings.raw(key) for flag, key in of_optimizer.items()})
    if step["gradient_checkpointing"] and not flags.get("recompute_granularity"):
        notes.assumptions.append(
            "model.enable_gradient_checkpointing has no effect under Megatron, where "
            "override_transformer_config.recompute_granularity=full recomputes every layer: nothing is recomputed."
        )
    _check_gpus(settings, section, flags, num_gpus, routed=network.moe is not None)
    flags |= _batch_flags(step, flags, num_gpus)
    if network.moe is None:
        flags = {key: value for key, value in flags.items() if not key.startswith("expert_")}
    else:  # Megatron reads settings of experts only beside their number
        flags["num_experts"] = network.moe.num_experts
    versions = pasted.versions.of("megatron")
    job = notes.include(from_megatron(flags_of_yaml(flags, notes), num_gpus, {}, versions, network))
    written = overridden | of_optimizer
    for names in (notes.ignored, notes.unknown):
        given_names = (name for name in names if name != "num-experts")  # which is given here, not by the user
        names[:] = [written.get(name.replace("-", "_"), name) for name in given_names]
    return _with_lora(job, settings)


def _layout_flags(settings: Settings, section: str) -> dict[str, Any]:
    """Megatron's flags for how the network and its optimizer states are divided over ranks."""
    flags: dict[str, Any] = {key: settings.size(f"{section}{key}", 1) for key in SIZES[:2] + SIZES[3:5]}
    for key in (SIZES[2], SIZES[5]):
        if settings.raw(f"{section}{key}") is not None:
            flags[key] = settings.integer(f"{section}{key}")
    flags["sequence_parallel"] = settings.switch(f"{section}sequence_parallel", True) and flags[SIZES[0]] > 1
    flags["use_distributed_optimizer"] = settings.switch(f"{section}use_distributed_optimizer", True)
    return flags


def _overridden(settings: Settings, section: str, parts: tuple[str, ...]) -> dict[str, str]:
    """Megatron's flag -> the key that gives it, for the keys in `parts` of `section`, which replace Megatron's fields."""
    keys = {key: key.removeprefix(section).partition(".") for key in settings.left() if key.startswith(section)}
    return {DDP.get(name, name): key for key, (part, _, name) in keys.items() if part in parts and name}


def _ignore_details(settings: Settings, section: str) -> None:
    """Note the keys of `section` that do not affect a step's memory."""
    for key in settings.left():
        if key.startswith(section) and DETAILS.fullmatch(key.removeprefix(section)):
            settings.given(key)
            settings.notes.ignored.append(key)


def _check_gpus(settings: Settings, section: str, flags: dict[str, Any], num_gpus: int, *, routed: bool) -> None:
    """Raises: SpecError if `num_gpus` cannot be divided by the sizes in `flags`. `routed`: the network has experts."""
    ranks = flags[SIZES[0]] * flags["context_parallel_size"]
    experts = flags["expert_model_parallel_size"] * (flags.get(SIZES[5]) or flags[SIZES[0]])
    least = flags[SIZES[1]] * math.lcm(ranks, experts if routed else 1)
    if num_gpus % least:
        raise settings.refuse(
            f"{section}{SIZES[1]}", f"needs a multiple of {least} GPUs with the other sizes, not {num_gpus}", 1
        )


def _batch_flags(step: dict[str, Any], flags: dict[str, Any], num_gpus: int) -> dict[str, Any]:
    """Megatron's flags for the batch. Its global batch has as many samples as verl's step, or one micro-batch a replica."""
    micro = int(step["per_device_train_batch_size"])
    replicas = num_gpus // (flags[SIZES[0]] * flags[SIZES[1]] * flags["context_parallel_size"])
    share = micro * replicas
    total = micro * num_gpus * int(step["gradient_accumulation_steps"])
    return {
        "micro_batch_size": micro,
        "seq_length": step["max_length"],
        "global_batch_size": max(total // share, 1) * share,
    }


def _with_lora(job: TrainingJob, settings: Settings) -> TrainingJob:
    """`job` with the adapters of `model.lora`, if their rank is not 0."""
    lora = "actor_rollout_ref.model.lora."
    if not settings.integer(f"{lora}rank", 0, least=0):
        return job
    job = with_adapters(job, settings, BRIDGE._replace(rank="rank").under(lora), "megatron_bridge")
    settings.notes.ignored += filter(settings.given, [key for key in settings.left() if key.startswith(lora)])
    return job


def _optimizer_flags(settings: Settings, optim: str) -> dict[str, Any]:
    """Megatron's flags of the optimizer, from the keys that begin with `optim`."""
    flags: dict[str, Any] = {"optimizer": settings.text(f"{optim}optimizer", "adam").lower()}
    narrow = settings.switch(f"{optim}use_precision_aware_optimizer")
    for key in NARROW_STATES:
        value = settings.raw(f"{optim}{key}")
        if narrow and value is not None:
            flags[key] = value
    if narrow:
        flags["use_precision_aware_optimizer"] = True
    return flags
