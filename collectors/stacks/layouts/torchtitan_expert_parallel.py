"""torchtitan's expert parallelism: each rank of a group of data-parallel ranks holds some of the experts whole, and
all-to-all sends tokens to the experts and back.

Source: torchtitan 0.3.0 models/common/token_dispatcher.py (AllToAllTokenDispatcher), moe_sharding.py, distributed/fsdp.py
(`apply_fsdp`: two meshes for the parameters of one block) and distributed/utils.py (`_clip_grad_norm_with_ep`).
"""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Shard

from peakcast.collectors.stacks import layouts
from peakcast.jobs.spec import TrainingJob


@lru_cache(maxsize=1)
def sparse_mesh(job: TrainingJob) -> Any:
    """The data-parallel ranks as [shards of an expert, parts of the experts] (torchtitan `parallel_dims.py`)."""
    experts = job.parallelism.expert_parallel_size
    return layouts.mesh_of({"efsdp": job.parallelism.data_parallel_size // experts, "ep": experts})


def divide(model: Any, job: TrainingJob) -> None:
    """Keep only this rank's experts in `model`, before FSDP2 shards each of them."""
    mesh = sparse_mesh(job)["ep"]
    for module in list(model.modules()):
        if not hasattr(module, "token_dispatcher"):
            continue
        module.token_dispatcher.wire_meshes(ep_mesh=mesh)
        for name, weight in list(module.inner_experts.named_parameters()):
            part = weight.detach()[: weight.shape[0] // mesh.size()].clone()
            divided = DTensor.from_local(part, mesh, [Shard(0)], run_check=False)
            module.inner_experts.register_parameter(name, torch.nn.Parameter(divided))


def placement(layer: Any, job: TrainingJob, dense_mesh: Any) -> dict[str, Any]:
    """Arguments of `fully_shard` for `layer`: over which ranks each of its parameters is sharded."""
    from torch.distributed.fsdp._fully_shard._fsdp_common import ShardPlacementResult
    from torch.distributed.fsdp._fully_shard._fsdp_init import _get_mesh_info

    routed = [module for module in layer.modules() if hasattr(module, "token_dispatcher")]
    if not routed:
        return {}
    mesh = sparse_mesh(job)
    sparse, dense = _get_mesh_info(mesh["efsdp"], None), _get_mesh_info(dense_mesh, None)
    experts = {weight for module in routed for weight in module.inner_experts.parameters()}
    side = Shard(1 if mesh.size() > routed[0].inner_experts.num_experts else 0)

    def place(weight: Any) -> Any:
        chosen = (side, sparse) if weight in experts else (Shard(0), dense)
        return ShardPlacementResult(placement=chosen[0], mesh_info=chosen[1])

    return {"shard_placement_fn": place}


def prefetch(model: Any) -> None:
    """Make each block gather the next one in forward and in backward. FSDP2 does so by itself too late: the exchange of
    tokens first reads its counts back from the GPU."""
    blocks = [[block] for block in model.model.layers]
    order = [[model.model.embed_tokens], *blocks, [model.model.norm, model.lm_head]]
    for units, following in pairwise(order):
        units[-1].set_modules_to_forward_prefetch(following)
        following[-1].set_modules_to_backward_prefetch(units)


def clip(parameters: list[Any], max_norm: float) -> None:
    """Clip by one factor, from the norms of the experts' gradients and of the others, which are computed separately."""
    divided = [weight for weight in parameters if "ep" in weight.device_mesh.mesh_dim_names]
    others = [weight for weight in parameters if "ep" not in weight.device_mesh.mesh_dim_names]
    norms = []
    for group in (divided, others):
        norm: Any = torch.nn.utils.get_total_norm([weight.grad for weight in group])
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    total = (norms[0] ** 2 + norms[1] ** 2) ** 0.5
    for group in (divided, others):
        torch.nn.utils.clip_grads_with_norm_(group, max_norm, total)
