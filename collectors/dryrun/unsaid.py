"""What a job cannot say of the network and the loop that a script turned out to have, in words."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from peakcast.collectors.dryrun.losses import has_head, loss_of
from peakcast.collectors.dryrun.steps import ScriptSteps
from peakcast.core.units import format_gib

FROZEN = 0.5
"""A network of which less than this share trains is frozen but for some parts."""


def unsaid(steps: ScriptSteps, network: torch.nn.Module, config: Any, *, adapters: bool, of_loops: bool) -> Iterator[str]:
    """Sentences on the trained `network`; on one of transformers, which has a `config`, more than on the script's own.
    `adapters`: the job names the adapters that it has; `of_loops`: the job says whether the loop keeps outputs."""
    if not adapters and (share := _trained_share(network)) < FROZEN:
        yield f"{share:.2%} of its weights train, and those are no adapters that it can name"
    if config is None:
        return
    whole = next(part for part in network.modules() if hasattr(vars(part).get("config"), "to_dict"))  # no FSDP1 around it
    if not has_head(whole) and not loss_of(steps, network)[0]:
        yield f"the network is a {type(whole).__name__}, without the logits of all words that a job's network makes"
    if getattr(config, "is_encoder_decoder", False):
        yield "its decoder's sequences have a length of their own"
    if beside := _beside(steps, network):
        yield f"another network runs beside the one that is trained, with weights of {format_gib(beside)}"
    weights = {one.dtype for one in network.parameters() if one.is_floating_point()}
    if steps.autocast and (others := weights - {steps.autocast, torch.float32}):
        named = ", ".join(sorted(str(one).removeprefix("torch.") for one in others))
        narrow = str(steps.autocast).removeprefix("torch.")
        yield f"autocast computes in {narrow} with weights in {named}, and what both meet in is float32"
    if steps.gradient_bytes:
        yield (
            f"gradients stay until after the next forward, where zero_grad comes ({format_gib(steps.gradient_bytes)} that "
            "a zero_grad behind the optimizer's step frees)"
        )
    if steps.output_bytes and steps.loop != "transformers" and not of_loops:
        yield f"the network's outputs stay until the next forward has returned ({format_gib(steps.output_bytes)})"
    if steps.cache_bytes and not of_loops:
        yield (
            f"keys and values of all layers stay with the network's outputs until the next forward has returned "
            f"({format_gib(steps.cache_bytes)}; use_cache=False leaves them out)"
        )


def _trained_share(network: torch.nn.Module) -> float:
    """The share of the weights of `network` that train."""
    counted = [(getattr(one, "ds_numel", None) or one.numel(), one.requires_grad) for one in network.parameters()]
    return float(sum(count for count, trains in counted if trains) / max(1, sum(count for count, _ in counted)))


def _beside(steps: ScriptSteps, network: torch.nn.Module) -> int:
    """Bytes of the weights of other networks, such as a teacher, whose weights may be said to need gradients and are in no
    optimizer; 0 if a job names the one that there is, the reference of a preference loss."""
    if loss_of(steps, network)[0].get("reference") == "model":
        return 0
    own = {id(one) for one in network.parameters()}
    others = {id(one): one for part in steps.networks for one in part.parameters()}
    return sum(one.nbytes for key, one in others.items() if key not in own)
