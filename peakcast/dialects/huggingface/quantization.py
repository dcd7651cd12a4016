"""How the base model is quantised: according to the arguments, its config.json, or the name under which it was
published."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from peakcast.dialects.common.translation import Settings

NAMED: dict[str, dict[str, Any]] = {
    r"gptq": {"quant_method": "gptq"},
    r"(bnb|nf4)[-_]?(4[-_]?bit)?": {"load_in_4bit": True},
    r"awq|aqlm|hqq|eetq|fp8|nvfp4|mxfp4|gguf": {},
}
"""Part of a name -> quantization settings; {}: quantised in a way that no job can express."""


def quantization_of(model: Mapping[str, Any], training: Settings, name: object) -> dict[str, Any]:
    """The quantization settings of the base model; {} if it is not quantised. Raises: SpecError."""
    given = training.raw("quantization_config", model.get("quantization_config")) or {}
    if not isinstance(given, Mapping):
        raise training.refuse("quantization_config", "must be a mapping")
    loose = {key: training.switch(key) for key in ("load_in_4bit", "load_in_8bit") if training.given(key)}
    return {**given, **loose} or quantization_of_name(name)


def quantization_of_name(name: object) -> dict[str, Any]:
    """The settings implied by a hub id such as `TheBloke/Llama-2-7B-GPTQ`; {} if it implies none."""
    if not isinstance(name, str) or "/" not in name:
        return {}
    for pattern, settings in NAMED.items():
        if found := re.search(rf"(?:^|[-_.])({pattern})(?=$|[-_.])", name.rsplit("/", 1)[-1], re.IGNORECASE):
            return settings or {"quant_method": found[1].lower()}
    return {}
