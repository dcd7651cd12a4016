"""Which fraction of a head the rotary embedding rotates: what a configuration says, and the default of its family's
class."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from peakcast.core.errors import SpecError
from peakcast.jobs.architecture import Architecture
from peakcast.networks.rules import Row

ROTARY_FRACTION: Mapping[str, float] = {
    "gpt_neox": 0.25,
    "stablelm": 0.25,
    "phi": 0.5,
    "nemotron": 0.5,
    "glm": 0.5,
    "glm4": 0.5,
    "glm4_moe": 0.5,
    "phi3": 1.0,
}
"""`model_type` -> the fraction of head_dim that is rotated by default (transformers 5.17 configuration_*.py)."""
ROTARY_DIM: Mapping[str, int] = {"gptj": 64, "codegen": 64}
"""Families whose configuration has the width itself -> its default."""


def read_rotary(config: Mapping[str, Any], values: Row) -> None:
    """Set `rotary_fraction` if `config` has another value than its family's default.

    Source: transformers 5.17 modeling_rope_utils.py `standardize_rope_params`: `rope_parameters` has priority.
    """
    family, width = str(config.get("model_type")), values["head_dim"]
    key, said = "rotary_dim", config.get("rotary_dim")
    usual: float | None = ROTARY_DIM.get(family)
    if usual is None:
        usual = ROTARY_FRACTION.get(family)
        key, said = _said(config)
    if usual is None or said is None or said == usual:
        return
    most = width if family in ROTARY_DIM else 1
    if isinstance(said, bool) or not isinstance(said, (int, float)) or not math.isfinite(said) or not 0 < said <= most:
        raise SpecError(f"{key}={said!r} must be above 0 and at most {most}; correct it.", parameter=key, value=said)
    values["rotary_fraction"] = said / width if family in ROTARY_DIM else float(said)


def _said(config: Mapping[str, Any]) -> tuple[str, Any]:
    for where in ("rope_parameters", "rope_scaling"):  # its names in transformers 5 and before
        inner = config.get(where)
        if isinstance(inner, Mapping) and inner.get("partial_rotary_factor") is not None:
            return f"{where}.partial_rotary_factor", inner["partial_rotary_factor"]
    key = "rotary_pct" if config.get("rotary_pct") is not None else "partial_rotary_factor"
    return key, config.get(key)


def rotary_key(architecture: Architecture) -> Row:
    """The key of config.json from which `read_rotary` reads the fraction, with its value."""
    if architecture.rotary_fraction is None:
        return {}
    if architecture.model_type in ROTARY_DIM:
        return {"rotary_dim": rotated_width(architecture)}
    key = "rotary_pct" if architecture.model_type == "gpt_neox" else "partial_rotary_factor"
    return {key: architecture.rotary_fraction}


def rotated_width(architecture: Architecture) -> int:
    """Number of rotated elements in every head."""
    family, width, said = architecture.model_type, architecture.head_dim, architecture.rotary_fraction
    if family in ROTARY_DIM:
        return min(ROTARY_DIM[family], width) if said is None else round(width * said)
    return int(width * (ROTARY_FRACTION.get(family, 1.0) if said is None else said))
