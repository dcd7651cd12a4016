"""Adapter methods by name and the settings that each needs besides its rank, with peft's names and defaults."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from peakcast.core.errors import SpecError, near_misses

FinetuningMethod = Literal[
    "full",
    "lora",
    "qlora",
    "dora",
    "lora_fa",
    "adalora",
    "adaption_prompt",
    "beft",
    "boft",
    "bone",
    "c3a",
    "delora",
    "fourierft",
    "glora",
    "gralora",
    "hira",
    "hra",
    "ia3",
    "lily",
    "ln_tuning",
    "loha",
    "lokr",
    "miss",
    "oft",
    "p_tuning",
    "prefix_tuning",
    "prompt_tuning",
    "randlora",
    "road",
    "shira",
    "trainable_tokens",
    "unilora",
    "vblora",
    "vera",
    "waveft",
]

RANKED: Mapping[str, int] = {
    "lora": 8, "qlora": 8, "dora": 8, "lora_fa": 8, "adalora": 12, "bone": 64, "delora": 8, "glora": 8, "gralora": 32,
    "hira": 32, "hra": 8, "lily": 32, "loha": 8, "lokr": 8, "miss": 64, "oft": 0, "randlora": 32, "shira": 32,
    "unilora": 4, "vblora": 4, "vera": 256,
}  # fmt: skip
"""Methods with a rank -> peft's default for it (`init_r` for AdaLoRA). Source: peft 0.21 tuners/*/config.py."""

ADAPTER_SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "adaption_prompt": {"adapter_len": None, "adapter_layers": None},
    "boft": {"boft_block_size": 4, "boft_block_num": 0, "boft_n_butterfly_factor": 1},
    "bone": {"init_weights": True},
    "c3a": {"block_size": 256},
    "fourierft": {"n_frequency": 1000},
    "glora": {"config_A_B": "lora", "config_C": "lora", "config_D_E": "constant"},
    "gralora": {"gralora_k": 2, "hybrid_r": 0},
    "ia3": {"feedforward_modules": ()},
    "lily": {"stride_A": 1, "num_B": 2},
    "lokr": {"decompose_factor": -1, "decompose_both": False},
    "miss": {"mini_r": 1, "init_weights": True},
    "oft": {"oft_block_size": 32},
    "p_tuning": {"num_virtual_tokens": None, "encoder_hidden_size": None},
    "prefix_tuning": {"num_virtual_tokens": None, "prefix_projection": False, "encoder_hidden_size": None},
    "prompt_tuning": {"num_virtual_tokens": None},
    "road": {"variant": "road_1"},
    "trainable_tokens": {"num_tokens": None},
    "unilora": {"theta_d_length": 256},
    "vblora": {"num_vectors": 256, "vector_length": 256, "topk": 2},
    "waveft": {"n_frequency": 2592},
}
"""Method -> its other settings that decide its tensors, by peft's name, with peft's default; None if there is no default.
Two of these need not be given: the layers of AdaptionPrompt are then all, and a perceptron's width is the model's. Source:
peft 0.21 tuners/*/config.py."""
OPTIONAL = ("adapter_layers", "encoder_hidden_size")


def settings_of(method: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """All settings of `method`: those given, and peft's defaults. Raises: SpecError for one that the method does not have,
    or that is missing."""
    known = ADAPTER_SETTINGS.get(method, {})
    for name, value in given.items():
        if name not in known:
            raise SpecError(
                f"finetuning.settings.{name} is not a setting of finetuning.method={method!r}"
                f"{near_misses(name, known) or '; known: ' + (', '.join(known) or 'none')}",
                parameter=f"finetuning.settings.{name}",
                value=value,
            )
        if isinstance(known[name], int) and not isinstance(known[name], bool) and not isinstance(value, int):
            raise SpecError(
                f"finetuning.settings.{name}={value!r} must be a whole number, such as {known[name]}.",
                parameter=f"finetuning.settings.{name}",
                value=value,
            )
    chosen = {**known, **given}
    for name, value in chosen.items():
        if value is None and name not in OPTIONAL:
            raise SpecError(
                f"finetuning.settings.{name} is missing and finetuning.method={method!r} needs it; give a whole number.",
                parameter=f"finetuning.settings.{name}",
            )
    return chosen
