"""Which fraction of a head the rotary embedding rotates: what a configuration says, and the default of its family's
class."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from peakcast.core.errors import SpecError
from peakcast.jobs.architecture import Architecture
from peakcast.networks.families import counted_as, family_of
from peakcast.networks.rules import TomlTable


def read_rotary(config: Mapping[str, Any], values: TomlTable) -> None:
    """Set `rotary_fraction` if `config` has another value than its family's default.

    Source: transformers 5.17 modeling_rope_utils.py `standardize_rope_params`: `rope_parameters` has priority.
    """
    rotary, width = counted_as(str(config.get("model_type"))).rotary, values["head_dim"]
    if not rotary.config_key:
        return
    key, said = ("rotary_dim", config.get("rotary_dim")) if rotary.width else _said(config)
    if said is None or said == (rotary.width or rotary.fraction):
        return
    most = width if rotary.width else 1
    if isinstance(said, bool) or not isinstance(said, (int, float)) or not math.isfinite(said) or not 0 < said <= most:
        raise SpecError(f"{key}={said!r} must be above 0 and at most {most}; correct it.", parameter=key, value=said)
    values["rotary_fraction"] = said / width if rotary.width else float(said)


def _said(config: Mapping[str, Any]) -> tuple[str, Any]:
    for where in ("rope_parameters", "rope_scaling"):  # its names in transformers 5 and before
        inner = config.get(where)
        if isinstance(inner, Mapping) and inner.get("partial_rotary_factor") is not None:
            return f"{where}.partial_rotary_factor", inner["partial_rotary_factor"]
    key = "rotary_pct" if config.get("rotary_pct") is not None else "partial_rotary_factor"
    return key, config.get(key)


def rotary_key(architecture: Architecture) -> TomlTable:
    """The key of config.json from which `read_rotary` reads the fraction, with its value."""
    if architecture.rotary_fraction is None:
        return {}
    rotary = family_of(architecture).rotary
    fraction = rotated_width(architecture) if rotary.width else architecture.rotary_fraction
    return {rotary.config_key or "partial_rotary_factor": fraction}


def rotated_width(architecture: Architecture) -> int:
    """Number of rotated elements in every head."""
    rotary, width, said = family_of(architecture).rotary, architecture.head_dim, architecture.rotary_fraction
    if rotary.width:
        return min(rotary.width, width) if said is None else round(width * said)
    return int(width * (rotary.fraction if said is None else said))
