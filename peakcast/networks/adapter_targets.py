"""Which projections peft adapts in each family if `finetuning.targets` names none."""

from __future__ import annotations

from peakcast.jobs.architecture import Architecture
from peakcast.networks.families import family_of

_QUERY_AND_VALUE = ("q_proj", "v_proj")
OTHER_DEFAULTS: dict[str, tuple[str, ...]] = {
    "beft": ("v_proj",),
    "ia3": ("k_proj", "v_proj", "down_proj"),
}
"""Method -> its default targets, for methods whose defaults differ from the others' in families whose projections are
called as Llama's. Source: each method's mapping in the same file."""


def has_default_targets(architecture: Architecture) -> bool:
    """Whether peft has default targets for this family."""
    return bool(family_of(architecture).libraries.peft_targets)


def default_adapter_targets(architecture: Architecture, method: str = "lora") -> tuple[str, ...]:
    """The last parts of the names of the projections that get an adapter if none are named; where peft has no default, q
    and v, or the fused qkv."""
    family = family_of(architecture)
    pefts = family.libraries.peft_targets
    if method in OTHER_DEFAULTS and pefts == _QUERY_AND_VALUE:
        return OTHER_DEFAULTS[method]
    return pefts or ((family.names.qkv,) if architecture.fused_qkv else _QUERY_AND_VALUE)
