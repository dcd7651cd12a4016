"""Networks that are given sound for each sequence and trained to write what it says, such as Whisper."""

from __future__ import annotations

import json
import tomllib
from functools import cache
from importlib.resources import files
from typing import Any

from peakcast.jobs.architecture import Architecture


def hears(architecture: Architecture) -> bool:
    """Whether a network without rules of its own is given sound: `sequence_length` is then that of what it writes."""
    return architecture.model_type in _families()


def sound_shape(architecture: Architecture) -> tuple[int, int]:
    """(frequencies, frames) of the sound of each sequence."""
    config, family = json.loads(architecture.configuration or "{}"), _families()[architecture.model_type]
    frequencies, positions = (
        int(config.get(family[name]["key"], family[name]["default"])) for name in ("frequencies", "positions")
    )
    return frequencies, positions * int(family["frames"])


@cache
def _families() -> dict[str, Any]:
    return tomllib.loads(files("peakcast.catalog").joinpath("sound_networks.toml").read_text(encoding="utf-8"))
