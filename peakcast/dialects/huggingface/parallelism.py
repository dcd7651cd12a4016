"""How a Hugging Face run is divided over GPUs: DDP, FSDP (TrainingArguments' or accelerate's settings), DeepSpeed ZeRO."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Literal

from peakcast.core.errors import SpecError
from peakcast.core.findings import Direction
from peakcast.dialects.common.translation import Notes, Settings
from peakcast.dialects.huggingface import keys as keys
from peakcast.jobs.architecture import Architecture
from peakcast.jobs.spec import Offload, Parallelism

OF_LAUNCHER = ("distributed_type", "num_processes", "mixed_precision")
"""Keys that only accelerate's launch configuration has beside FSDP's own."""
RESHARDS = ("fsdp_reshard_after_forward", "reshard_after_forward")
CHECKPOINTS = ("fsdp_activation_checkpointing", "activation_checkpointing")
"""FSDP's keys for checkpoints around its units."""
OFFLOADED_CHECKPOINTS = ("fsdp_activation_checkpointing_offload", "activation_checkpointing_offload")
"""FSDP's keys for offloading the inputs of these checkpoints to the host."""
ZERO_3_SIZES = {
    "stage3_prefetch_bucket_size": 50_000_000, "stage3_param_persistence_threshold": 100_000,
    "stage3_max_live_parameters": 10**9, "stage3_max_reuse_distance": 10**9,
}  # fmt: skip
"""Defaults of DeepSpeed 0.19 runtime/zero/config.py, in elements."""
ALIASES = {key.removeprefix("stage3_"): key for key in (*ZERO_3_SIZES, "stage3_gather_16bit_weights_on_model_save")}
"""Names of fields in the same file, which DeepSpeed accepts as well as the keys."""
PLAIN: dict[str, Any] = {
    "contiguous_gradients": True, "sub_group_size": 10**9, "allgather_partitions": True, "reduce_scatter": True,
    "round_robin_gradients": False, "elastic_checkpoint": False,
}  # fmt: skip
"""Details with DeepSpeed's default value, which need no note."""


PART_OF_LAYER = re.compile(r"(MLP|Mlp|Attention|Experts?|Moe\w*Block|MoE|Linear)$")
"""Names of classes that are parts of a transformer layer."""


def fsdp_settings(fsdp: Mapping[str, Any] | str | None, training: Settings, notes: Notes) -> Settings | None:
    """FSDP's settings from `fsdp`, or from fsdp and fsdp_config of TrainingArguments; None without FSDP."""
    words = [word.lower() for word in training.words("fsdp") if word.lower() != "false"]
    inside = training.raw("fsdp_config")
    if isinstance(inside, str):
        raise training.refuse("fsdp_config", "is a path; give the mapping in that file as `fsdp_config`")
    merged: dict[str, Any] = dict(inside) if isinstance(inside, Mapping) else {}
    if isinstance(fsdp, str):
        words += fsdp.lower().split()
    elif isinstance(fsdp, Mapping):
        nested = fsdp.get("fsdp_config")
        merged |= {key: value for key, value in fsdp.items() if key != "fsdp_config"}
        merged |= nested if isinstance(nested, Mapping) else {}
    elif fsdp is not None:
        raise SpecError(f"huggingface.fsdp={fsdp!r} must be a mapping or a text.", parameter="fsdp", value=fsdp)
    elif not words:
        return None
    for word in words:
        if word in keys.SHARDING:
            merged.setdefault("fsdp_sharding_strategy", word)
        elif word == "offload":
            merged["fsdp_offload_params"] = True
        elif word not in ("auto_wrap", "true"):
            known = ", ".join((*keys.SHARDING, "offload", "auto_wrap"))
            raise SpecError(f"fsdp={word!r} must be among {known}.", parameter="fsdp", value=word)
    _note_units(merged, notes)
    return Settings(merged, notes, "accelerate")


def _note_units(merged: Mapping[str, Any], notes: Notes) -> None:
    """Note classes to wrap that are parts of layers: FSDP's units are then these, and the root has all else."""
    for key in ("fsdp_transformer_layer_cls_to_wrap", "transformer_layer_cls_to_wrap"):
        given = merged.get(key) or ()
        names = given if isinstance(given, (list, tuple)) else str(given).split(",")
        if parts := [name for each in names if PART_OF_LAYER.search(name := str(each).strip())]:
            notes.unsupported.append(
                f"FSDP's units are counted as whole layers; with {key}={', '.join(parts)} they are parts of layers, and "
                "the rest of the network is one unit, which is gathered throughout.",
                key,
                "more",
            )


def started_with(shards: Settings | None, num_gpus: int, notes: Notes) -> Settings | None:
    """`shards`, or None where FSDP is asked for and not used: on one GPU, unless a launcher's configuration asks for it.
    Without such a configuration accelerate always starts the program as on one GPU (accelerate 1.15 commands/launch.py
    `launch_command`), and then without FSDP (state.py `PartialState`, `AcceleratorState`)."""
    if shards is None or num_gpus > 1 or any(map(shards.given, OF_LAUNCHER)):
        return shards
    notes.warnings.append(
        "FSDP is not used on one GPU, nor is its offload, unless accelerate launches it (distributed_type: FSDP, or "
        "--use_fsdp). On several GPUs each needs less: --num-gpus.",
        "fsdp",
        "less",
    )
    return None


def fsdp_version(shards: Settings) -> int:
    """The version of FSDP, 1 or 2, by accelerate's rule."""
    return shards.integer("fsdp_version", shards.integer("version", 1)) or 1


def has_checkpoints(shards: Settings | None, training: Settings) -> bool:
    """Whether FSDP checkpoints its units. Raises: SpecError if the Trainer is to checkpoint as well, which transformers
    refuses (transformers 5.17 trainer.py, after `create_accelerator_and_postprocess`)."""
    asked = [key for key in CHECKPOINTS if shards is not None and shards.switch(key)]
    if shards is not None and asked and training.switch("gradient_checkpointing"):
        other = training.spell("gradient_checkpointing")
        rule = (
            f"cannot be given with {other}, which is on by default since trl 0.22: transformers' Trainer refuses both; "
            f"set {other}: false"
        )
        raise shards.refuse(asked[0], rule)
    return bool(asked)


def offloads_checkpoints(shards: Settings | None, training: Settings) -> bool:
    """Whether the inputs that checkpoints save are offloaded to the host: `save_on_cpu` around each checkpoint, by
    transformers (5.17 modeling_utils.py `gradient_checkpointing_enable`) or accelerate (1.15 utils/fsdp_utils.py
    `fsdp2_apply_ac`). Raises: SpecError where accelerate does (utils/dataclasses.py
    `FullyShardedDataParallelPlugin.__post_init__`)."""
    details = training.raw("gradient_checkpointing_kwargs") or {}
    asked = [key for key in OFFLOADED_CHECKPOINTS if shards is not None and shards.switch(key)]
    if shards is not None and asked and not (has_checkpoints(shards, training) and fsdp_version(shards) == 2):
        raise shards.refuse(asked[0], "needs fsdp_activation_checkpointing: true and fsdp_version: 2, as accelerate says")
    by_trainer = training.switch("gradient_checkpointing") and isinstance(details, Mapping)
    return bool(asked) or (by_trainer and Settings(details, training.notes, "transformers").switch("offload"))


def without_second_checkpoints(training: dict[str, Any], *sharded: object) -> None:
    """Take the Trainer's checkpoints out of `training` if one of the mappings `sharded` has FSDP checkpoint its units. It
    is for programs that checkpoint the layers themselves, without the Trainer's knowledge: where one checkpoint is inside
    another, only the outer one saves the layer's input."""
    for fsdp in sharded:
        if isinstance(fsdp, Mapping) and any(str(fsdp.get(key, "")).lower() == "true" for key in CHECKPOINTS):
            training["gradient_checkpointing"] = False


def layout_and_offload(
    engine: Settings | None,
    shards: Settings | None,
    training: Settings,
    num_gpus: int,
    architecture: Architecture,
    notes: Notes,
    options: dict[str, Any],
) -> tuple[Parallelism, Offload]:
    """The layout on `num_gpus` GPUs and what lives in host memory; `options` gets ZeRO\'s bucket sizes."""
    activations = training.switch("activation_offloading") or offloads_checkpoints(shards, training)
    if engine is not None:
        written = {ALIASES.get(key, key): value for key, value in mapping_at(engine, "zero_optimization").items()}
        spelled = {ALIASES.get(key, key): key for key in mapping_at(engine, "zero_optimization")}
        zero = Settings(written, notes, "DeepSpeed", lambda key: f"zero_optimization.{spelled.get(key, key)}")
        return _zero(zero, num_gpus, architecture, notes, options, activations)
    if shards is None:
        _note_replicas(num_gpus, training, notes)
        return Parallelism(data_parallel_size=num_gpus), Offload(activations=activations)
    sharding = _sharding(shards, notes, options)
    offloads = shards.switch("fsdp_offload_params") or shards.switch("offload_params") or shards.switch("cpu_offload")
    if num_gpus == 1:
        sentence = "FSDP on one GPU shards nothing. On several, each needs less: --num-gpus."
        notes.warnings.append(sentence, "fsdp", "less")
        sharding = "no_shard"
    layout = Parallelism(data_parallel_size=num_gpus, sharding=sharding)
    return layout, Offload(parameters=offloads, optimizer=offloads, activations=activations)


def _sharding(shards: Settings, notes: Notes, options: dict[str, Any]) -> Literal["fsdp1", "fsdp2", "no_shard", "hsdp"]:
    """How FSDP shards over several GPUs; `options` gets whether units are gathered again, and FSDP 1's own settings."""
    strategy = (shards.text("fsdp_sharding_strategy") or shards.text("sharding_strategy", "full_shard")).lower()
    if strategy not in keys.SHARDING:
        raise shards.refuse("fsdp_sharding_strategy", f"must be one of {', '.join(keys.SHARDING)}")
    version = fsdp_version(shards)
    sharding: Literal["fsdp1", "fsdp2", "no_shard", "hsdp"] = keys.SHARDING[strategy]
    reshards = [shards.text(key, "true").lower() for key in RESHARDS]
    for key, word in zip(RESHARDS, reshards, strict=True):
        if word not in ("true", "false", *keys.SHARDING):
            raise shards.refuse(key, "must be true or false, or a sharding strategy of FSDP 1")
    if strategy in ("shard_grad_op", "2", "hybrid_shard_zero2", "5") or (version == 2 and "false" in reshards):
        options["fsdp_reshard_after_forward"] = False
    if version == 2 and (shards.switch("fsdp_forward_prefetch") or shards.switch("forward_prefetch")):
        notes.unsupported.append(
            "accelerate refuses forward_prefetch under FSDP2; it is left out.", "fsdp_forward_prefetch", "either"
        )
    if version == 2 and sharding == "fsdp1":
        sharding = "fsdp2"
    if sharding == "fsdp1":
        _fsdp1_options(shards, options)
    policy = shards.text("fsdp_auto_wrap_policy") or shards.text("auto_wrap_policy")
    if policy.upper() not in ("", "TRANSFORMER_BASED_WRAP"):
        notes.unsupported.append(
            f"Units by another rule than layers (auto_wrap_policy={policy}) are not modelled.", "fsdp_auto_wrap_policy"
        )
    return sharding


def _note_replicas(num_gpus: int, training: Settings, notes: Notes) -> None:
    """Note that every GPU holds a replica, where nothing says how the network is divided."""
    if num_gpus > 1 and training.raw("parallelism_config") is None:
        notes.assumptions.append(
            f"no DeepSpeed or FSDP configuration is given, so that nothing is sharded over the {num_gpus} GPUs; --with "
            "FILE gives one."
        )


def _fsdp1_options(shards: Settings, options: dict[str, Any]) -> None:
    """Set FSDP1's options: when it gathers in backward, what its optimizer sees, whether rank 0 sends its weights to the
    others (which then need none of their own), and whether the CPU waits before a gather."""
    prefetch = (shards.text("fsdp_backward_prefetch") or shards.text("backward_prefetch") or "").upper()
    if prefetch:
        options["fsdp1_backward_prefetch"] = "" if prefetch == "NO_PREFETCH" else prefetch
    for name in ("forward_prefetch", "use_orig_params", "sync_module_states", "limit_all_gathers"):
        for key in (f"fsdp_{name}", name):
            if shards.given(key):
                options[f"fsdp1_{name}"] = shards.switch(key)
    for key in ("fsdp_cpu_ram_efficient_loading", "cpu_ram_efficient_loading"):
        if shards.given(key) and not shards.switch(key):
            options["fsdp1_others_on_meta"] = False


def _zero(
    zero: Settings, num_gpus: int, architecture: Architecture, notes: Notes, options: dict[str, Any], activations: bool
) -> tuple[Parallelism, Offload]:
    stage = zero.integer("stage", 0, least=0) or 0
    if stage > 3:
        raise zero.refuse("stage", "must be 0, 1, 2 or 3")
    _zero_sizes(zero, stage, architecture.hidden_size, notes, options)
    for key in ("overlap_comm", "round_robin_gradients") if stage in (1, 2) else ():
        if zero.given(key) and zero.raw(key) not in (None, "auto"):
            options[key] = zero.switch(key)
    if stage == 3 and zero.raw("overlap_comm") not in (None, "auto") and not zero.switch("overlap_comm"):
        options["overlap_comm"] = False  # otherwise DeepSpeed's default holds
    moved = _zero_offload(zero, notes, options)
    _note_left_of_zero(zero, notes, options)
    offload = Offload(
        optimizer=moved["offload_optimizer"] in ("cpu", "nvme"),
        parameters=moved["offload_param"] in ("cpu", "nvme"),
        activations=activations,
    )
    return Parallelism(data_parallel_size=num_gpus, zero_stage=stage), offload


def _zero_sizes(zero: Settings, stage: int, hidden: int, notes: Notes, options: dict[str, Any]) -> None:
    """Set the sizes of buckets, and the size from which stage 3 partitions and gathers parameters."""
    # transformers 5.17 integrations/deepspeed.py, HfTrainerDeepSpeedConfig.trainer_config_finalize
    automatic = {"reduce_bucket_size": hidden**2}
    if stage == 3:
        automatic |= {
            "stage3_prefetch_bucket_size": int(0.9 * hidden**2),
            "stage3_param_persistence_threshold": 10 * hidden,
        }
    sizes = ["reduce_bucket_size", "allgather_bucket_size", "sub_group_size", *(ZERO_3_SIZES if stage == 3 else ())]
    for key in sizes:
        if zero.raw(key) == "auto":
            size = automatic.get(key, ZERO_3_SIZES.get(key, 500_000_000))
            notes.assumptions.append(f"zero_optimization.{key}='auto' is treated as {size:,} elements.")
            options[key] = size
        elif zero.given(key):
            options[key] = zero.integer(key, least=1 if key in ("reduce_bucket_size", "allgather_bucket_size") else 0)


def _zero_offload(zero: Settings, notes: Notes, options: dict[str, Any]) -> dict[str, str]:
    """Where the optimizer and the weights are offloaded to."""
    inside = {key: _inside(zero, key, notes) for key in ("offload_optimizer", "offload_param")}
    moved = {key: settings.one_of("device", "none", ("none", "cpu", "nvme")) for key, settings in inside.items()}
    pinned = {key: settings.switch("pin_memory") for key, settings in inside.items()}
    if any(place != "none" and not pinned[key] for key, place in moved.items()):
        options["offload_pin_memory"] = False
    for key, place in moved.items():
        if place == "nvme":
            notes.unsupported.append(
                f"zero_optimization.{key} to NVMe is not modelled; host memory is assumed.", zero.spell(key)
            )
    if moved["offload_optimizer"] != "none" and (ratio := mapping_at(zero, "offload_optimizer").get("ratio", 1)) != 1:
        notes.unsupported.append(
            f"zero_optimization.offload_optimizer.ratio={ratio!r} is not modelled: all states are assumed to be in host "
            "memory, and what stays on the GPU comes on top.",
            "zero_optimization.offload_optimizer.ratio",
            "more",
        )
    for where in moved:
        inner = mapping_at(zero, where)
        if inner.get("super_offload"):
            name = f"zero_optimization.{where}.super_offload"
            notes.unsupported.append(f"SuperOffload ({name}) is not modelled.", name, "more")
        for key in inner:
            if key not in keys.OFFLOAD_DETAILS:
                notes.unknown.append(f"zero_optimization.{where}.{key}")
    return moved


KEEPING = ("zero_hpz_partition_size", "mics_shard_size")
"""Keys of ZeRO-3 with which each rank keeps more: a second part of the weights, or a part of fewer ranks (deepspeed 0.19.8
runtime/zero/config.py)."""


def _note_left_of_zero(zero: Settings, notes: Notes, options: dict[str, Any]) -> None:
    """Note the keys that were not read: without effect, left to DeepSpeed, not modelled, or unknown."""
    for key in zero.left():
        if key in keys.ZERO_DETAILS:
            value = zero.raw(key)
            if key == "contiguous_gradients" and value is False:
                options[key] = False
            elif key == "stage3_gather_16bit_weights_on_model_save" or (key in PLAIN and value == PLAIN[key]):
                notes.ignored.append(zero.spell(key))
            elif value != "auto":
                notes.assumptions.append(f"{zero.spell(key)}={value!r} is left to DeepSpeed's default.")
        elif key.startswith(("zero_", "mics_")) and zero.raw(key) in (False, 1, -1):  # their defaults (zero/config.py)
            notes.ignored.append(zero.spell(key))
        elif key.startswith("zero_") or key in KEEPING:
            direction: Direction = "more" if key in KEEPING else "either"
            notes.unsupported.append(f"{zero.spell(key)}={zero.raw(key)!r} is not modelled.", zero.spell(key), direction)
        else:
            notes.unknown.append(zero.spell(key))


def _inside(zero: Settings, key: str, notes: Notes) -> Settings:
    return Settings(mapping_at(zero, key), notes, "DeepSpeed", lambda name: f"zero_optimization.{key}.{name}")


def mapping_at(settings: Settings, key: str) -> Mapping[str, Any]:
    """The mapping at `key`; {} if it is not given. Raises: SpecError if it is not a mapping."""
    value = settings.raw(key) or {}
    if not isinstance(value, Mapping):
        raise settings.refuse(key, "must be a mapping")
    return value
