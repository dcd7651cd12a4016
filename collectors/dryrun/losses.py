"""Describes what a script computes its loss by: whose trainer, which reference, and which fused kernels its network has."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from peakcast.collectors.dryrun.steps import ScriptSteps

KINDS = {
    "DPOTrainer": "dpo", "KTOTrainer": "kto", "BCOTrainer": "kto", "RewardTrainer": "reward", "GRPOTrainer": "grpo",
    "RLOOTrainer": "grpo",
}  # fmt: skip
"""Class of a trainer of trl -> the kind of its loss in jobs."""
LIGER, TRL = "liger_kernel", "trl"
KERNELS = {
    "norm_kernel": ("liger_kernel.transformers.rms_norm",),
    "gated_activation_kernel": ("liger_kernel.transformers.swiglu", "liger_kernel.transformers.geglu"),
}
"""Option of a job -> the modules of its fused kernel's forward."""


def loss_of(steps: ScriptSteps, network: torch.nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """(a job's loss, the framework options of its kernels) of a `network` of transformers."""
    kind = next((KINDS[base.__name__] for base in type(steps.trainer).__mro__ if base.__name__ in KINDS), "")
    loss: dict[str, Any] = {"kind": kind, **_reference(steps.trainer, kind)} if kind else {}
    if kind == "grpo" and (most := getattr(steps.trainer, "max_completion_length", None)):
        loss["completion_length"] = min(most, max(1, (steps.tokens or (1,))[-1] - 1))  # only its words have logits
    options = _of_layers(network)
    headed = [part for part in network.modules() if _head(part) is not None]
    if not headed or id(_head(headed[0])) in steps.ran:  # the head was called, and not its weight given to a kernel
        return loss, options
    codes = {code.partition(".")[0] for part in headed for code in _codes(part)}
    if LIGER in codes:
        return loss | {"fused_linear_cross_entropy": True}, options
    return loss, options | ({"loss_kernel": "tiles"} if TRL in codes and not kind else {})


def packages(network: torch.nn.Module) -> Iterator[str]:
    """The packages whose code the forwards of `network` run."""
    return (name.partition(".")[0] for part in network.modules() for name in _codes(part))


def _reference(trainer: Any, kind: str) -> Mapping[str, str]:
    """The source of the log-probabilities with which `trainer` compares, as trl 1.16's `dpo_trainer.py` and
    `grpo_trainer.py` choose it."""
    if kind not in ("dpo", "kto", "grpo"):
        return {}
    if getattr(trainer, "precompute_ref_logps", getattr(trainer, "precompute_ref_log_probs", False)):
        return {"reference": "precomputed"}
    if getattr(trainer, "ref_model", None) is not None:
        return {"reference": "model"}
    compares = kind != "grpo" or bool(getattr(trainer, "beta", 0.0))
    return {"reference": "adapter_off" if compares else "none"}


def has_head(network: torch.nn.Module) -> bool:
    """Whether a network of transformers makes logits of its words."""
    return any(_head(part) is not None for part in network.modules())


def _head(part: torch.nn.Module) -> torch.nn.Module | None:
    """The module that makes the logits of `part`, if that is a network of transformers with such a head."""
    head = getattr(part, "get_output_embeddings", lambda: None)()
    return head if isinstance(head, torch.nn.Module) else None


def _of_layers(network: torch.nn.Module) -> dict[str, str]:
    """Which functions of layers are fused kernels of Liger; those that a job says without being asked are left out."""
    codes = {code for part in network.modules() for code in _codes(part)}
    found = {option: "fused" if codes & set(modules) else "eager" for option, modules in KERNELS.items()}
    modelings = (vars(sys.modules[module]) for module in {type(part).__module__ for part in network.modules()})
    rotaries = (getattr(names.get("apply_rotary_pos_emb"), "__module__", "") for names in modelings)
    found["rotary_kernel"] = "fused" if any(name.startswith(f"{LIGER}.") for name in rotaries) else "eager"
    return found


def _codes(part: torch.nn.Module) -> Iterator[str]:
    """The modules of the functions that run when `part` is called: its forward, and those that it replaced or wraps."""
    waiting: list[Any] = [part.forward, vars(part).get("_original_forward")]
    seen: Sequence[Any] = ()
    while waiting:
        function = waiting.pop()
        function = getattr(function, "__func__", function)
        if function is None or function in seen:
            continue
        seen = (*seen, function)
        if (names := getattr(function, "__globals__", None)) is not None:
            yield names.get("__name__", "")
        waiting.append(getattr(function, "__wrapped__", None))
