"""How Oumi divides a run over GPUs: its sections `fsdp` and `deepspeed` under the names of accelerate and of DeepSpeed.

Source: oumi-ai/oumi, release 0.9: core/configs/params/fsdp_params.py and deepspeed_params.py (`to_deepspeed`),
core/distributed.py (`get_accelerate_env_vars`, `_get_use_orig_params`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from peakcast.dialects.common.pasted import Pasted
from peakcast.dialects.common.translation import Settings, words
from peakcast.dialects.huggingface.accelerate import launcher_beside, refuse_twice

STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "NO_SHARD", "HYBRID_SHARD_ZERO2")
POLICIES = ("NO_WRAP", "SIZE_BASED_WRAP", "TRANSFORMER_BASED_WRAP")
PREFETCHES = ("BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH")
OF_FSDP = words("""
    sharding_strategy cpu_offload mixed_precision backward_prefetch forward_prefetch use_orig_params state_dict_type
    auto_wrap_policy min_num_params transformer_layer_cls sync_module_states force_full_state_dict_on_final_save
""")
"""The keys of `fsdp` beside its switch, with one of a later commit than the release (499e914b)."""
AUTOMATIC = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "gradient_clipping")
BEFORE_3 = {
    "allgather_partitions": True, "allgather_bucket_size": 500_000_000, "overlap_comm": False, "reduce_scatter": True,
    "reduce_bucket_size": 500_000_000, "contiguous_gradients": True, "round_robin_gradients": False,
}  # fmt: skip
OF_3 = {
    "overlap_comm": False, "contiguous_gradients": True, "sub_group_size": 10**9, "reduce_bucket_size": 500_000_000,
    "stage3_prefetch_bucket_size": 50_000_000, "stage3_param_persistence_threshold": 100_000,
    "stage3_max_live_parameters": 10**9, "stage3_max_reuse_distance": 10**9,
    "stage3_gather_16bit_weights_on_model_save": False,
}  # fmt: skip
"""Keys of ZeRO that Oumi writes before stage 3 and in it, and its defaults."""
OF_DEEPSPEED = {
    *AUTOMATIC, *BEFORE_3, *OF_3, *words("deepspeed_config_path zero_stage offload_optimizer offload_param precision"),
    *words("zero_allow_untested_optimizer zero_force_ds_cpu_optimizer steps_per_print wall_clock_breakdown"),
    *words("memory_efficient_linear activation_checkpointing"),
}  # fmt: skip
"""The keys of `deepspeed` beside its switch."""
OF_OFFLOAD = words("""
    device pin_memory buffer_count buffer_count_nvme block_size queue_depth single_submit overlap_events thread_count
""")


class Sharded(NamedTuple):
    """How a run is divided."""

    deepspeed: Mapping[str, Any] | None
    fsdp: Mapping[str, Any] | None
    num_gpus: int
    of_oumi: bool
    """Whether Oumi's own section `fsdp` asks for FSDP. Oumi then switches the Trainer's checkpointing off."""


def sharding_of(pasted: Pasted, settings: Settings) -> Sharded:
    """How the run is divided. If accelerate launches it, accelerate's FSDP settings apply and the section `fsdp` is ignored
    (train.py: `not is_using_accelerate()`).

    Raises: SpecError if both FSDP and DeepSpeed are asked for.
    """
    launcher = launcher_beside(pasted, settings.notes)
    engine = _engine(pasted, settings)
    refuse_twice(engine, launcher.deepspeed, "deepspeed", pasted.where)
    shards = _shards(settings)
    if "accelerate" in pasted.companions and shards is not None:
        settings.notes.assumptions.append("accelerate launches the run, so that Oumi's own section fsdp has no effect.")
        shards = None
    if engine is not None and shards is not None:
        raise settings.refuse("deepspeed.enable_deepspeed", "cannot be given with fsdp.enable_fsdp; keep one")
    gpus = launcher.gpus(pasted, settings.notes)
    return Sharded(engine or launcher.deepspeed, shards or launcher.fsdp, gpus, of_oumi=shards is not None)


def _shards(settings: Settings) -> dict[str, Any] | None:
    """FSDP's settings under accelerate's names; None if it is off."""
    if not settings.switch("fsdp.enable_fsdp"):
        return None
    trains_adapters, compiles = settings.switch("training.use_peft"), settings.switch("training.compile")
    shards: dict[str, Any] = {
        "fsdp_sharding_strategy": settings.one_of("fsdp.sharding_strategy", "FULL_SHARD", STRATEGIES),
        "fsdp_offload_params": settings.switch("fsdp.cpu_offload"),
        "fsdp_backward_prefetch": settings.one_of("fsdp.backward_prefetch", "BACKWARD_PRE", PREFETCHES),
        "fsdp_forward_prefetch": settings.switch("fsdp.forward_prefetch"),
        "fsdp_auto_wrap_policy": settings.one_of("fsdp.auto_wrap_policy", "NO_WRAP", POLICIES),
        "fsdp_use_orig_params": settings.switch("fsdp.use_orig_params", compiles or not trains_adapters),
        "fsdp_sync_module_states": settings.switch("fsdp.sync_module_states", True),
    }
    if layer := settings.text("fsdp.transformer_layer_cls"):
        shards["fsdp_transformer_layer_cls_to_wrap"] = layer.rpartition(".")[2]
        settings.notes.ignored.append("fsdp.transformer_layer_cls")  # units are counted as layers
    if not settings.given("fsdp.auto_wrap_policy"):
        settings.notes.assumptions.append("fsdp.auto_wrap_policy is not given; the default of Oumi is NO_WRAP.")
    return shards


def mixed_in_fsdp(settings: Settings) -> str:
    """The 16-bit type in which FSDP computes, "bf16" or "fp16"; "" without one."""
    mixed = settings.one_of("fsdp.mixed_precision", "", ("", "bf16", "fp16"))
    return mixed if settings.switch("fsdp.enable_fsdp") else ""


def _engine(pasted: Pasted, settings: Settings) -> Mapping[str, Any] | None:
    """The DeepSpeed configuration that Oumi writes; None if DeepSpeed is off."""
    if not settings.switch("deepspeed.enable_deepspeed"):
        return None
    if file := settings.raw("deepspeed.deepspeed_config_path"):
        return pasted.file(file, "deepspeed", "deepspeed.deepspeed_config_path")
    written = settings.text("deepspeed.zero_stage", "ZERO_0").upper().removeprefix("ZERO_")
    if written not in ("0", "1", "2", "3"):
        raise settings.refuse("deepspeed.zero_stage", "must be ZERO_0, ZERO_1, ZERO_2 or ZERO_3")
    defaults = OF_3 if written == "3" else BEFORE_3
    zero: dict[str, Any] = {"stage": int(written)}
    zero |= {key: settings.raw(f"deepspeed.{key}", value) for key, value in defaults.items()}
    zero |= {key: moved for key in ("offload_optimizer", "offload_param") if (moved := _moved(settings, key))}
    engine: dict[str, Any] = {key: settings.raw(f"deepspeed.{key}", "auto") for key in AUTOMATIC}
    engine |= {"zero_optimization": zero, **_precision(settings)}
    if settings.switch("deepspeed.memory_efficient_linear"):
        settings.notes.ignored.append("deepspeed.memory_efficient_linear")  # to_deepspeed does not write it
    return engine


def _moved(settings: Settings, section: str) -> dict[str, Any]:
    """Where DeepSpeed moves states or weights to; {} if the section is not there."""
    place = f"deepspeed.{section}"
    given = {key for key in OF_OFFLOAD if settings.given(f"{place}.{key}")}
    if not given:
        return {}
    device = settings.text(f"{place}.device", "CPU").lower()
    if device not in ("cpu", "nvme"):
        raise settings.refuse(f"{place}.device", "must be CPU or NVME")
    return {"device": device, "pin_memory": settings.switch(f"{place}.pin_memory", True)}


def _precision(settings: Settings) -> dict[str, Any]:
    """DeepSpeed's own mixed precision. Oumi writes `auto`, for which the Trainer fills in its own bf16 or fp16."""
    asked = settings.text("deepspeed.precision").lower()
    if asked not in ("", "bf16", "fp16"):
        raise settings.refuse("deepspeed.precision", "must be BF16 or FP16")
    if not asked:
        return {}
    if settings.text("training.mixed_precision_dtype", "NONE").upper() == "NONE":
        settings.notes.warnings.append(
            f"Oumi writes deepspeed.precision={asked} as auto, which without training.mixed_precision_dtype means off: "
            "DeepSpeed then keeps float32 weights. It is counted as on.",
            "deepspeed.precision",
        )
    return {asked: {"enabled": True}}
