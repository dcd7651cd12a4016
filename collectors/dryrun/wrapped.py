"""What scripts ask of FSDP and DDP, read from the modules that these wrap: the layout's settings, as a job says them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch.distributed.fsdp import CPUOffloadPolicy, FullyShardedDataParallel, ShardingStrategy
from torch.nn.parallel import DistributedDataParallel

from peakcast.core.units import MIB

DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.float16: "float16"}


def mixed(networks: Sequence[torch.nn.Module]) -> tuple[str, str]:
    """(dtype to which FSDP casts weights, dtype in which it reduces gradients), as in most of its units; "" without mixed
    precision."""
    policies: Counter[tuple[torch.dtype, torch.dtype]] = Counter()
    for part in _parts(networks):
        state = _state(part)
        policy: Any = state._mp_policy if state is not None else getattr(part, "mixed_precision", None)  # FSDP2's, FSDP1's
        if getattr(policy, "param_dtype", None) in DTYPES:
            policies[policy.param_dtype, policy.reduce_dtype or policy.param_dtype] += 1
    if not policies:
        return "", ""
    (computed, reduced), _ = policies.most_common(1)[0]
    return DTYPES[computed], DTYPES.get(reduced, "")


def layout(networks: Sequence[torch.nn.Module]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(fields of a job's parallelism, framework options) of what wraps the networks; both empty if nothing does."""
    units = [part for part in _parts(networks) if isinstance(part, FullyShardedDataParallel)]
    if units:
        return _of_fsdp1(units)
    if groups := [group for part in _parts(networks) if (group := _group(part)) is not None]:
        return _of_fsdp2(networks, groups)
    replicated = next((part for part in _parts(networks) if isinstance(part, DistributedDataParallel)), None)
    if replicated is None:
        return {}, {}
    bucket = {"ddp_bucket_cap_mib": max(1, replicated.bucket_bytes_cap // MIB)}
    return {}, {**bucket, "ddp_gradient_as_bucket_view": bool(replicated.gradient_as_bucket_view)}


def offloads(networks: Sequence[torch.nn.Module]) -> dict[str, bool]:
    """Which of weights and optimizer states FSDP or DeepSpeed keeps on the host; FSDP both or neither."""
    for part in _parts(networks):
        if _is_engine(part):
            settings = part._config.zero_config
            devices = {"parameters": settings.offload_param, "optimizer": settings.offload_optimizer}
            return {name: one is not None and one.device != "none" for name, one in devices.items()}
        group = _group(part)
        of_fsdp2 = group is not None and isinstance(group.offload_policy, CPUOffloadPolicy)
        if of_fsdp2 or (isinstance(part, FullyShardedDataParallel) and part.cpu_offload.offload_params):
            return {"parameters": True, "optimizer": True}
    return {"parameters": False, "optimizer": False}


OF_ZERO = {
    **{name: name for name in ("reduce_bucket_size", "allgather_bucket_size", "sub_group_size", "contiguous_gradients")},
    **{name: name for name in ("reduce_scatter", "round_robin_gradients")},
    "stage3_prefetch_bucket_size": "prefetch_bucket_size",
    "stage3_param_persistence_threshold": "param_persistence_threshold",
    "stage3_max_reuse_distance": "max_reuse_distance",
    "stage3_max_live_parameters": "max_live_parameters",
}
"""Option of a job -> the setting of DeepSpeed's `DeepSpeedZeroConfig`."""


def of_deepspeed(networks: Sequence[torch.nn.Module]) -> dict[str, Any]:
    """The framework options of a DeepSpeed engine, as its configuration came out ("auto" is a number by then)."""
    engine = next((part for part in _parts(networks) if _is_engine(part)), None)
    if engine is None or not engine.zero_optimization_stage():
        return {}
    settings = engine._config.zero_config
    overlaps = bool(settings.overlap_comm)
    own = {"overlap_comm": overlaps} if overlaps != (engine.zero_optimization_stage() == 3) else {}
    found = {option: getattr(settings, name) for option, name in OF_ZERO.items()}
    return {**own, **{option: value if isinstance(value, bool) else int(value) for option, value in found.items()}}


def engine_steps(networks: Sequence[torch.nn.Module]) -> bool:
    """Whether a DeepSpeed engine among `networks` has an optimizer. From ZeRO-1 on, a backward's end releases the gradients
    of parameters, whether or not the optimizer steps then (DeepSpeed 0.19 runtime/zero/stage_1_and_2.py
    `independent_gradient_partition_epilogue`: `zero_grad`; stage3.py `partition_grads`: `param.grad = None`)."""
    return any(_is_engine(one) and getattr(one, "optimizer", None) is not None for one in networks)


def _is_engine(part: torch.nn.Module) -> bool:
    return type(part).__name__ == "DeepSpeedEngine"


def _of_fsdp1(units: Sequence[FullyShardedDataParallel]) -> tuple[dict[str, Any], dict[str, Any]]:
    root = units[0]
    ahead = root.backward_prefetch
    options = {
        "fsdp1_backward_prefetch": ahead.name if ahead is not None else "",
        "fsdp1_forward_prefetch": bool(root.forward_prefetch),
        "fsdp1_use_orig_params": bool(root._use_orig_params),
        "fsdp1_limit_all_gathers": bool(root.limit_all_gathers),
        "fsdp_reshard_after_forward": root.sharding_strategy is not ShardingStrategy.SHARD_GRAD_OP,
    }
    whole = root.sharding_strategy is ShardingStrategy.NO_SHARD
    return {"sharding": "no_shard" if whole else "fsdp1"}, {**options, **_reduced(mixed(units))}


def _of_fsdp2(networks: Sequence[torch.nn.Module], groups: Sequence[Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    roots = {_group(network) for network in networks}
    others = [group for group in groups if group not in roots]
    tables = (part for part in _parts(networks) if isinstance(part, torch.nn.Embedding))
    options: dict[str, Any] = {
        "fsdp2_units": "ends" if any(_state(table) is not None for table in tables) else "root",
        "fsdp_reshard_after_forward": not others or any(group._reshard_after_forward for group in others),
    }
    sizes = groups[0].mesh_info
    replicas = getattr(sizes, "replicate_mesh_size", 1)
    if replicas > 1 and hasattr(sizes, "shard_mesh_size"):
        options["shard_group_size"] = int(sizes.shard_mesh_size)
    return {"sharding": "hsdp" if "shard_group_size" in options else "fsdp2"}, {**options, **_reduced(mixed(networks))}


def _reduced(policy: tuple[str, str]) -> dict[str, str]:
    """The option of the dtype in which gradients are reduced under mixed precision."""
    computed, reduced = policy
    return {"fsdp_reduce_dtype": reduced or computed} if computed else {}


def _parts(networks: Iterable[torch.nn.Module]) -> Iterable[torch.nn.Module]:
    return (part for network in networks for part in network.modules())


def _state(part: torch.nn.Module) -> Any:
    """FSDP2's state of a module that `fully_shard` was called with; None for others."""
    return part._get_fsdp_state() if hasattr(part, "_get_fsdp_state") else None


def _group(part: torch.nn.Module) -> Any:
    """The tensors that FSDP2 gathers for a module; None if it gathers none for it."""
    state = _state(part)
    return state._fsdp_param_group if state is not None else None
