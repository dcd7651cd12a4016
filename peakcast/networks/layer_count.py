"""Shortens a network to its first layers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from peakcast.jobs.architecture import Architecture
from peakcast.jobs.spec import canonical_json

COUNTS = (
    *("num_hidden_layers", "n_layer", "n_layers", "num_layers"),
    *("num_encoder_layers", "num_decoder_layers", "encoder_layers", "decoder_layers"),
)
"""Names that configurations use for the number of layers."""
OF_DECODER = ("num_decoder_layers", "decoder_layers")
"""Those of them that are of the decoder of an encoder-decoder alone."""
TOWERS = ("vision_config", "audio_config", "vq_config", "qformer_config", "vision_tower_config")
"""Parts of a configuration that have layers of their own."""


def with_layers(architecture: Architecture, layers: int) -> Architecture:
    """`architecture` with its first `layers` layers; in both stacks if they are equally deep."""
    if architecture.configuration:
        config = _shortened(json.loads(architecture.configuration), architecture.num_hidden_layers, layers)
        return replace(architecture, num_hidden_layers=layers, configuration=canonical_json(config))
    everything = architecture.full_attention_layers
    decoder = architecture.num_decoder_layers
    return replace(
        architecture,
        num_hidden_layers=layers,
        num_decoder_layers=layers if decoder == architecture.num_hidden_layers else decoder,
        layer_types=architecture.layer_types[:layers],
        full_attention_layers=None if everything is None else tuple(one for one in everything if one < layers),
    )


def depths(architecture: Architecture) -> tuple[int, int]:
    """The numbers of layers of both stacks of a network without a family, if it is an encoder-decoder; else twice the
    number of all layers."""
    config, encoder = json.loads(architecture.configuration or "{}"), architecture.num_hidden_layers
    decoder = next((config[name] for name in OF_DECODER if isinstance(config.get(name), int)), encoder)
    return encoder, decoder


def equally_deep(architecture: Architecture) -> Architecture:
    """The same encoder-decoder without a family, with a decoder as deep as its encoder."""
    config = json.loads(architecture.configuration or "{}")
    alike = {name: architecture.num_hidden_layers for name in OF_DECODER if name in config}
    return replace(architecture, configuration=canonical_json({**config, **alike})) if alike else architecture


def told_by_layer(architecture: Architecture) -> tuple[tuple[object, ...], ...]:
    """For each layer, what lists with an entry per layer say in the configuration of a network without a family."""
    config = json.loads(architecture.configuration or "{}")
    lists = (value for value in config.values() if isinstance(value, list))
    return tuple(zip(*(one for one in lists if len(one) == architecture.num_hidden_layers), strict=True))


def _shortened(config: Mapping[str, Any], before: int, layers: int) -> dict[str, Any]:
    """`config` for `layers` instead of `before` layers: every count of layers, every list with an entry per layer and every
    mapping with settings per layer is shortened, at any depth."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        if _is_by_layer(value):
            value = {layer: told for layer, told in value.items() if int(layer) < layers}
        elif isinstance(value, Mapping) and key not in TOWERS:
            value = _shortened(value, before, layers)
        elif key in COUNTS and value == before:
            value = layers
        elif isinstance(value, list) and len(value) == before:
            value = value[:layers]
        found[key] = value
    return found


def _is_by_layer(value: Any) -> bool:
    """Whether the keys of `value` are numbers of layers (such as Gemma 4's `per_layer_config`, for its wider heads)."""
    numbered = isinstance(value, Mapping) and bool(value) and all(str(key).isdecimal() for key in value)
    return numbered and all(isinstance(told, Mapping) for told in value.values())
