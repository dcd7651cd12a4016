"""accelerate's launch configuration (`accelerate config` writes it), as DeepSpeed, FSDP and a number of GPUs.

Source: accelerate 1.15 commands/config/config_args.py, utils/dataclasses.py (DeepSpeedPlugin,
FullyShardedDataParallelPlugin).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from peakcast.core.errors import SpecError
from peakcast.dialects.common.mesh import MESH_PREFIX
from peakcast.dialects.common.pasted import Pasted
from peakcast.dialects.common.translation import Notes, Settings, words
from peakcast.dialects.huggingface.keys import SHARDING

KINDS = {
    "NO": "one", "MULTI_GPU": "ddp", "FSDP": "fsdp", "DEEPSPEED": "deepspeed",
}  # fmt: skip
MIXED = ("no", "fp16", "bf16", "fp8")
"""Values of `mixed_precision` (accelerate 1.15 utils/dataclasses.py, PrecisionType)."""
_SHARDS = {
    "fsdp_auto_wrap_policy": "TRANSFORMER_BASED_WRAP", "fsdp_activation_checkpointing": False, "fsdp_offload_params": False,
}  # fmt: skip
OF_TRL: dict[str, dict[str, Any]] = {
    "single_gpu": {"distributed_type": "NO", "mixed_precision": "bf16"},
    "multi_gpu": {"distributed_type": "MULTI_GPU", "mixed_precision": "bf16", "num_processes": 8},
    "fsdp1": {
        "distributed_type": "FSDP", "mixed_precision": "bf16", "num_processes": 8,
        "fsdp_config": {
            **_SHARDS, "fsdp_version": 1, "fsdp_reshard_after_forward": "FULL_SHARD", "fsdp_use_orig_params": True,
            "fsdp_backward_prefetch": "BACKWARD_PRE", "fsdp_forward_prefetch": True, "fsdp_sync_module_states": True,
        },
    },
    "fsdp2": {
        "distributed_type": "FSDP", "mixed_precision": "bf16", "num_processes": 8,
        "fsdp_config": {**_SHARDS, "fsdp_version": 2, "fsdp_reshard_after_forward": True},
    },
    **{
        f"zero{stage}": {
            "distributed_type": "DEEPSPEED", "mixed_precision": "bf16", "num_processes": 8,
            "deepspeed_config": {"zero_stage": stage},
        }
        for stage in (1, 2, 3)
    },
}  # fmt: skip
"""What trl's `--accelerate_config` names (trl 1.16 accelerate_configs/*.yaml)."""
_DEEPSPEED = {
    "zero_stage": ("stage",),
    "offload_optimizer_device": ("offload_optimizer", "device"),
    "offload_param_device": ("offload_param", "device"),
}
_IGNORED = words("""
    command_file commands compute_environment debug deepspeed_hostfile deepspeed_multinode_launcher
    enable_cpu_affinity gpu_ids
    machine_rank main_process_ip main_process_port main_training_function mpirun_config num_machines rdzv_backend
    same_network downcast_bf16 tpu_env tpu_name tpu_use_cluster tpu_use_sudo tpu_zone use_cpu ipex_config
    deepspeed_config.deepspeed_multinode_launcher deepspeed_config.deepspeed_hostfile
    deepspeed_config.gradient_clipping deepspeed_config.zero3_init_flag deepspeed_config.zero3_save_16bit_model
    deepspeed_config.deepspeed_inclusion_filter deepspeed_config.deepspeed_exclusion_filter
    deepspeed_config.offload_optimizer_nvme_path deepspeed_config.offload_param_nvme_path
    deepspeed_config.deepspeed_moe_layer_cls_names deepspeed_config.seq_parallel_communication_data_type
""")


@dataclass(frozen=True, slots=True, kw_only=True)
class Launcher:
    """Settings that a run gets from `accelerate launch`."""

    num_gpus: int | None = None
    deepspeed: Mapping[str, Any] | None = None
    fsdp: Mapping[str, Any] | None = None
    mixed_precision: str = "no"
    mesh: Mapping[str, Any] = field(default_factory=dict)
    """The content of `parallelism_config`."""

    def gpus(self, pasted: Pasted, notes: Notes, ranks: int | None = None) -> int:
        """The number of GPUs that the question gives, else the launcher's, else `ranks`, to which the sizes of a layout
        multiply, else 1 with an assumption."""
        if pasted.num_gpus is None and self.num_gpus is not None:
            return self.num_gpus
        if pasted.num_gpus is None and ranks is not None:
            return ranks
        return pasted.gpus(notes)


def launcher_of(values: Mapping[str, Any], pasted: Pasted, notes: Notes) -> Launcher:
    """The launcher's settings in the mapping of an accelerate configuration. Raises: SpecError."""
    settings = Settings(values, notes, "accelerate")
    kind = settings.one_of("distributed_type", "NO", (*KINDS, "MEGATRON_LM", "XLA", "MULTI_CPU", "MULTI_XPU", "TP"))
    if kind not in KINDS:
        raise settings.refuse("distributed_type", f"is not modelled; {', '.join(KINDS)} are")
    mixed = settings.text("mixed_precision", "no").lower().replace("false", "no")
    if mixed not in MIXED:
        raise settings.refuse("mixed_precision", f"must be one of {', '.join(MIXED)}")
    alone = kind == "NO" and "distributed_type" in values
    num_gpus = settings.integer("num_processes", 1 if alone else None)
    deepspeed = _deepspeed(settings, pasted, notes) if kind == "DEEPSPEED" else None
    fsdp = settings.raw("fsdp_config")
    if kind == "FSDP" and not isinstance(fsdp, Mapping):
        raise settings.refuse("fsdp_config", "must be a mapping of FSDP's settings, since distributed_type is FSDP")
    reshards = str((fsdp or {}).get("fsdp_reshard_after_forward", "")) if isinstance(fsdp, Mapping) else ""
    if reshards.lower() in SHARDING and isinstance(fsdp, Mapping):  # FSDP1's sharding strategy under its newer key
        fsdp = {"fsdp_sharding_strategy": reshards, **fsdp}
    mesh = settings.raw("parallelism_config") or {}
    if not isinstance(mesh, Mapping):
        raise settings.refuse("parallelism_config", "must map sizes, such as parallelism_config_dp_shard_size: 8")
    for key in ("fp8_config", "megatron_lm_config"):
        if settings.raw(key):
            notes.unsupported.append(f"accelerate's {key} is not modelled.", key)
    dynamo = settings.raw("dynamo_config") or {}
    backend = str(dynamo.get("dynamo_backend", "NO") if isinstance(dynamo, Mapping) else dynamo)
    if backend.upper() not in ("NO", "FALSE", ""):
        sentence = f"accelerate's own compilation (dynamo_backend={backend}) is not modelled."
        notes.unsupported.append(sentence, "dynamo_config.dynamo_backend")
    settings.raw("deepspeed_config")
    settings.note_left(_IGNORED)
    return Launcher(
        num_gpus=num_gpus,
        deepspeed=deepspeed,
        fsdp={**fsdp, "mixed_precision": mixed} if kind == "FSDP" and isinstance(fsdp, Mapping) else None,
        mixed_precision=mixed,
        mesh=mesh,
    )


def launcher_beside(pasted: Pasted, notes: Notes) -> Launcher:
    """The settings that an accelerate configuration gives the run of another project; empty without such a file."""
    if "accelerate" not in pasted.companions:
        return Launcher()
    pasted.used.add("accelerate")
    return launcher_of(pasted.companions["accelerate"], pasted, notes)


def launcher_with_engine(pasted: Pasted, settings: Settings) -> Launcher:
    """The launcher's settings, with the DeepSpeed configuration that the project's own key `deepspeed` names.

    Raises: SpecError if both give one.
    """
    engine = settings.raw("deepspeed")
    deepspeed = pasted.file(engine, "deepspeed", "deepspeed") if engine else None
    launcher = launcher_beside(pasted, settings.notes)
    refuse_twice(deepspeed, launcher.deepspeed, "deepspeed", pasted.where)
    return launcher if deepspeed is None else replace(launcher, deepspeed=deepspeed)


def of_flags(flags: Mapping[str, Any]) -> dict[str, Any]:
    """The flags of `accelerate launch` as the mapping that its configuration file would contain."""
    out: dict[str, Any] = {key: flags[key] for key in ("num_processes", "mixed_precision") if key in flags}
    engine = {
        key: flags[key] for key in (*_DEEPSPEED, "deepspeed_config_file", "gradient_accumulation_steps") if key in flags
    }
    shards = {key: value for key, value in flags.items() if key.startswith("fsdp_")}
    mesh = {key: value for key, value in flags.items() if key.startswith(MESH_PREFIX)}
    out |= {"parallelism_config": mesh} if mesh else {}
    if flags.get("use_deepspeed") or engine:
        out |= {"distributed_type": "DEEPSPEED", "deepspeed_config": engine}
    elif flags.get("use_fsdp") or shards:
        out |= {"distributed_type": "FSDP", "fsdp_config": shards}
    elif flags.get("multi_gpu"):
        out["distributed_type"] = "MULTI_GPU"
    own = ("config_file", "use_deepspeed", "use_fsdp", "multi_gpu", "use_parallelism_config", "m", "module")
    return out | {key: value for key, value in flags.items() if key not in (*own, *out, *engine, *shards, *mesh)}


def _deepspeed(settings: Settings, pasted: Pasted, notes: Notes) -> Mapping[str, Any]:
    """The DeepSpeed configuration: the named file, or the few keys that accelerate's own file has."""
    own = settings.raw("deepspeed_config") or {}
    if not isinstance(own, Mapping):
        raise settings.refuse("deepspeed_config", "must be a mapping of DeepSpeed's settings")
    if own.get("deepspeed_config_file"):
        return pasted.file(own["deepspeed_config_file"], "deepspeed", "deepspeed_config_file")
    zero: dict[str, Any] = {"stage": own.get("zero_stage", 2)}
    if "zero_stage" not in own:
        notes.assumptions.append("zero_stage is not given; the default of accelerate is 2.")
    for key, path in _DEEPSPEED.items():
        if len(path) == 2 and str(own.get(key) or "none") != "none":
            zero[path[0]] = {path[1]: own[key]}
    for key in own:
        if key not in _DEEPSPEED and key != "gradient_accumulation_steps":
            name = f"deepspeed_config.{key}"
            (notes.ignored if name in _IGNORED else notes.unknown).append(name)
    mapping: dict[str, Any] = {"zero_optimization": zero, "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}}
    if own.get("gradient_accumulation_steps") is not None:
        mapping["gradient_accumulation_steps"] = own["gradient_accumulation_steps"]
    return mapping


def refuse_twice(first: object, second: object, what: str, where: str) -> None:
    """Refuse settings that are given in two files. Raises: SpecError."""
    if first is not None and second is not None:
        raise SpecError(f"{what} is given twice, in {where} and in another file; keep one.", parameter=what)
