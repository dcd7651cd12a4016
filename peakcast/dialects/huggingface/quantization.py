"""How the base model is quantised: according to the arguments, its config.json, or the name under which it was
published."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from peakcast.dialects.common.translation import Notes, Settings

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


STORAGES = ("uint8", "int8", "float16", "bfloat16", "float32", "float64")
"""Values of BitsAndBytesConfig's bnb_4bit_quant_storage, its default first."""
AS_PARAMETERS = "packed_as_parameters"
"""Added to quantization settings here: whether the program turns GPTQ's buffers into parameters, which FSDP then
divides."""


def storage_under_fsdp(quantization: Mapping[str, Any], version: int, notes: Notes) -> dict[str, Any]:
    """The framework options that say that FSDP does not divide the run's packed weights; {} if it divides them. It does not
    divide 4-bit weights that are stored as integers, BitsAndBytesConfig's default: FSDP1 refuses them, and accelerate
    leaves them out of what FSDP2 shards. Nor GPTQ's, which are buffers of its layers (`register_buffer` in the QuantLinears
    of AutoGPTQ and GPTQModel)."""
    if quantization.get("quant_method") == "gptq" and not quantization.get(AS_PARAMETERS):
        notes.warnings.append(
            "GPTQ's packed weights are buffers, which FSDP does not divide: every GPU has all of them.",
            "quantization_config",
            "less",
        )
        return {"quantized_storage": "buffers"}
    if not quantization.get("load_in_4bit") or "float" in str(quantization.get("bnb_4bit_quant_storage")):
        return {}
    if version == 2:
        notes.warnings.append(
            "4-bit weights are stored as uint8 (bnb_4bit_quant_storage), which accelerate leaves out of what FSDP2 "
            "shards: every GPU has all of them. If they are stored as bfloat16, each GPU has its part.",
            "bnb_4bit_quant_storage",
            "less",
        )
    return {"quantized_storage": "uint8"}


def quantization_of_name(name: object) -> dict[str, Any]:
    """The settings implied by a hub id such as `TheBloke/Llama-2-7B-GPTQ`; {} if it implies none."""
    if not isinstance(name, str) or "/" not in name:
        return {}
    for pattern, settings in NAMED.items():
        if found := re.search(rf"(?:^|[-_.])({pattern})(?=$|[-_.])", name.rsplit("/", 1)[-1], re.IGNORECASE):
            return settings or {"quant_method": found[1].lower()}
    return {}
