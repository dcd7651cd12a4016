"""ms-swift's settings of DeepSpeed and FSDP: names of its own files (swift/config/zero*.json, fsdp2.json), or files."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from peakcast.dialects.common.pasted import Pasted
from peakcast.dialects.common.translation import Settings, note_two_layers
from peakcast.dialects.huggingface.parallelism import without_second_checkpoints


def engine_of(name: Any, pasted: Pasted) -> Mapping[str, Any]:
    """The DeepSpeed configuration to which a name such as zero2_offload refers, else that in the file `name`."""
    match = re.fullmatch(r"(?:default-)?zero([0-3])(_offload)?", str(name))
    if match is None:
        return pasted.file(name, "deepspeed", "deepspeed")
    stage, offloads = int(match[1]), bool(match[2])
    device = {"device": "cpu" if offloads else "none", "pin_memory": True}
    zero: dict[str, Any] = {
        "stage": stage,
        "offload_optimizer": device,
        "contiguous_gradients": True,
        "overlap_comm": False,
    }
    if stage == 3:
        names = ("reduce_bucket_size", "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold")
        zero |= {"offload_param": device, "sub_group_size": 1_000_000_000, **dict.fromkeys(names, "auto")}
    elif stage:
        zero |= {"reduce_bucket_size": 200_000_000, "allgather_bucket_size": 200_000_000}
    automatic = ("gradient_accumulation_steps", "gradient_clipping", "train_batch_size", "train_micro_batch_size_per_gpu")
    half = {"enabled": "auto"}
    return {"fp16": half, "bf16": half, "zero_optimization": zero, **dict.fromkeys(automatic, "auto")}


def put_fsdp(settings: Settings, training: dict[str, Any], pasted: Pasted) -> None:
    """Put FSDP's settings into `training`. `fsdp: fsdp2` also checkpoints activations (swift/config/fsdp2.json); any other
    value is the name of a file. `activation_cpu_offload` in it is ms-swift's own, verl's offloading of what layers keep
    (swift/callbacks/activation_cpu_offload.py of ms-swift 4)."""
    name = settings.raw("fsdp")
    if not name:
        return
    if name == "fsdp2":
        inside: Mapping[str, Any] = {"fsdp_version": 2, "reshard_after_forward": True, "activation_checkpointing": True}
        training |= {"fsdp": "full_shard auto_wrap", "fsdp_config": inside}
    elif str(name).endswith(".json"):
        file = pasted.file(name, "fsdp", "fsdp")
        inside = dict(file.get("fsdp_config") or {})
        training["activation_offloading"] = str(inside.pop("activation_cpu_offload", False)).lower() == "true"
        if training["activation_offloading"]:
            note_two_layers(settings.notes, "activation_cpu_offload")
        training |= {"fsdp": file.get("fsdp", "full_shard auto_wrap"), "fsdp_config": inside}
    else:
        training["fsdp"] = name
    without_second_checkpoints(training, training.get("fsdp_config"))
