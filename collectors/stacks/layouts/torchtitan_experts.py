"""torchtitan's own mixture of experts in place of transformers', for jobs whose experts are torchtitan's."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from peakcast.collectors.machine.packages import imported
from peakcast.jobs.conventions import conventions
from peakcast.jobs.spec import TrainingJob

INITIAL_STD = 0.02


def has_torchtitan_experts(job: TrainingJob) -> bool:
    """Whether the routed feed-forward of `job` is torchtitan's module."""
    return job.architecture.moe is not None and conventions(job).get("experts_implementation") == "torchtitan"


def are_divided(job: TrainingJob) -> bool:
    """Whether ranks of `job` have torchtitan's experts divided among them."""
    return job.parallelism.expert_parallel_size > 1 and has_torchtitan_experts(job)


def modules() -> SimpleNamespace:
    """The parts of torchtitan that make up its experts. Raises: CollectorError if torchtitan is missing or another
    version."""

    def found(name: str) -> Any:
        return imported(f"torchtitan.{name}", "torchtitan>=0.3", parameter="versions.torchtitan", value="0.3")

    return SimpleNamespace(
        moe=found("models.common.moe"),
        dispatchers=found("models.common.token_dispatcher"),
        linear=found("models.common.linear").Linear,
        feed_forward=found("models.common.feed_forward").FeedForward,
        backend=found("distributed.utils"),
    )


def put_in_place(model: Any, job: TrainingJob) -> None:
    """Replace every routed feed-forward of `model`. Raises: CollectorError without torchtitan."""
    found = modules()
    found.backend._spmd_backend = "partial_dtensor"  # plain local tensors
    architecture = job.architecture
    moe, width = architecture.moe, architecture.hidden_size
    assert moe is not None
    sizes = {"num_experts": moe.num_experts, "top_k": moe.num_experts_per_tok}
    experts = found.moe.GroupedExperts.Config(dim=width, hidden_dim=moe.moe_intermediate_size, num_experts=moe.num_experts)
    shared = moe.shared_expert_intermediate_size
    kind = "AllToAllTokenDispatcher" if are_divided(job) else "LocalTokenDispatcher"
    config = found.moe.MoE.Config(
        num_experts=moe.num_experts,
        routed_experts=found.moe.RoutedExperts.Config(
            inner_experts=experts, token_dispatcher=getattr(found.dispatchers, kind).Config(**sizes)
        ),
        router=found.moe.TokenChoiceTopKRouter.Config(
            gate=found.linear.Config(in_features=width, out_features=moe.num_experts),
            score_func="softmax",
            route_norm=True,
            **sizes,
        ),
        shared_experts=found.feed_forward.Config(
            w1=found.linear.Config(in_features=width, out_features=shared),
            w2=found.linear.Config(in_features=shared, out_features=width),
            w3=found.linear.Config(in_features=width, out_features=shared),
        )
        if shared
        else None,
    )
    usual = torch.get_default_dtype()
    torch.set_default_dtype(getattr(torch, job.precision.parameters))
    try:
        for layer in model.model.layers:
            if hasattr(layer.mlp, "experts"):
                layer.mlp = config.build()
                for parameter in layer.mlp.parameters():
                    torch.nn.init.normal_(parameter, std=INITIAL_STD)
    finally:
        torch.set_default_dtype(usual)


def repeated_product(job: TrainingJob) -> torch.Size | None:
    """Shape of the router's weight as the right factor of its product, or None without torchtitan's experts. torchtitan's
    selective checkpointing always recomputes products of that shape and never counts them
    (SelectiveAC.Config.force_recompute_mm_shapes_by_fqns)."""
    moe = job.architecture.moe
    if moe is None or not has_torchtitan_experts(job):
        return None
    return torch.Size((job.architecture.hidden_size, moe.num_experts))
