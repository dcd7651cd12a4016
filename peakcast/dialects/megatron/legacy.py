"""Megatron-LM's layers from before megatron-core: with `--use-legacy-models`, and in releases in which they were the
default.

Source: NVIDIA/Megatron-LM megatron/training/arguments.py: core 0.6 has `--use-mcore-models` and `--transformer-impl local`,
core 0.7 `--use-legacy-models` and `--transformer-impl transformer_engine`; megatron/legacy/model/transformer.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from peakcast.core.versions import release
from peakcast.dialects.common.translation import Settings

FIRST_CORE_DEFAULT = (0, 7)
LAST_LEGACY_RELEASE = "0.7"
"""The release of megatron-core that is assumed for legacy layers if none is given."""


def is_legacy(settings: Settings, versions: Mapping[str, Any]) -> bool:
    """Whether the layers are legacy ones: the flag is set, or the release uses megatron-core's layers only on request."""
    asked, core = settings.switch("use_legacy_models"), settings.switch("use_mcore_models")
    number = release(versions.get("megatron_core", ""))
    return asked or (not core and bool(number) and number < FIRST_CORE_DEFAULT)


def legacy_versions(settings: Settings, versions: dict[str, Any]) -> dict[str, Any]:
    """`versions` with the release that legacy layers imply, if none is given, and notes about further assumptions."""
    notes = settings.notes
    if "megatron_core" not in versions and "ngc_pytorch" not in versions:
        notes.assumptions.append(
            f"megatron-core {LAST_LEGACY_RELEASE} is assumed, with which legacy models were usual; give "
            "versions.megatron_core if yours differs."
        )
        versions = {**versions, "megatron_core": LAST_LEGACY_RELEASE}
    if not settings.given("transformer_impl"):
        notes.assumptions.append("Legacy models are assumed to use transformer-impl=local, Megatron-LM's own layers.")
    elif settings.text("transformer_impl") != "local":
        notes.assumptions.append(
            "Transformer Engine's whole layers, of which use-legacy-models builds the network, are counted as "
            "megatron-core's layers of its modules; two published runs in FP8 agree within 0.2 %."
        )
    if settings.given("num_experts") and settings.raw("num_experts"):
        notes.unsupported.append("Experts of legacy models (SwitchMLP) are not modelled.")
    if settings.given("encoder_num_layers") or settings.given("decoder_num_layers"):
        notes.unsupported.append("A legacy T5 is not modelled.")
    return versions


def note_flash_attention(settings: Settings) -> None:
    """Note that megatron-core's own attention ignores the flag (core 0.16.1 `transformer/dot_product_attention.py`)."""
    if settings.switch("use_flash_attn") and settings.text("transformer_impl") == "local":
        settings.notes.warnings.append(
            "use-flash-attn does nothing with transformer-impl=local: megatron-core's own attention is unfused and keeps "
            "its scores; transformer-impl=transformer_engine runs flash attention."
        )
