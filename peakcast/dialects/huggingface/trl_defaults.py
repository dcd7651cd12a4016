"""Defaults of trl's configurations that differ from transformers' TrainingArguments, by trl's release.

Source: trl 0.11.4-0.28.0 and 1.16.0 trainer/sft_config.py, dpo_config.py; what each needs: its package metadata.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from peakcast.core.versions import release, resolved
from peakcast.dialects.common.translation import Notes


class Default(NamedTuple):
    """A default of trl's configurations: its value, the first release with it, and the oldest transformers that this
    release needs."""

    value: object
    since: tuple[int, int]
    needs: tuple[int, int]


DEFAULTS = {
    "gradient_checkpointing": Default(True, (0, 22), (4, 55)),
    "bf16": Default(True, (0, 19), (4, 51)),  # unless fp16 is given
}
_INIT = ("dtype", "torch_dtype", "attn_implementation")
"""Keys of model_init_kwargs that affect memory."""


def take_trl_defaults(training: dict[str, Any], versions: Mapping[str, Any], notes: Notes) -> None:
    """Fill the defaults of trl's release into `training`, with a note; the newest release's, if `versions` do not say."""
    for key in left_out(training):
        default = DEFAULTS[key]
        since = ".".join(map(str, default.since))
        if has_default(default, versions):
            training[key] = default.value
            notes.assumptions.append(f"{key} is not given; the default of trl (since {since}) is {default.value}.")
        else:
            notes.assumptions.append(f"{key} is not given; trl before {since} leaves it to transformers, which has it off.")
    inner = training.pop("model_init_kwargs", None)
    if isinstance(inner, Mapping):
        for key, value in inner.items():
            if key in _INIT and value is not None:
                training.setdefault(key, value)
            elif key not in _INIT:
                notes.ignored.append(f"model_init_kwargs.{key}")


def left_out(training: Mapping[str, Any]) -> list[str]:
    """The keys of `DEFAULTS` that `training` leaves to trl."""
    return [key for key in DEFAULTS if training.get(key) is None and not (key == "bf16" and training.get("fp16"))]


def has_default(default: Default, versions: Mapping[str, Any]) -> bool:
    """Whether the trl of `versions` has `default`; if trl's version is not given, whether a trl with that default can run
    with the transformers of `versions`."""
    known = resolved(versions)
    if trl := release(known.get("trl", "")):
        return trl >= default.since
    transformers = release(known.get("transformers", ""))
    return not transformers or transformers >= default.needs
