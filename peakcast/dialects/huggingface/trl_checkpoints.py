"""Whether the checkpoints of TRL's trainers are reentrant, by trl's release.

Source: trl 0.27.2, 0.28.0, 1.8.0, 1.9.0 and 1.16.0 `trainer/sft_trainer.py`, `dpo_trainer.py`, `grpo_trainer.py`: "PEFT +
DeepSpeed ZeRO-3 requires reentrant checkpointing"; "default to the recommended non-reentrant behavior here".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from peakcast.core.versions import release, resolved
from peakcast.dialects.common.translation import Notes
from peakcast.dialects.huggingface.trl_defaults import Default, has_default

KWARGS = "gradient_checkpointing_kwargs"
_NOT_REENTRANT = Default(False, (0, 28), (4, 56))
_REENTRANT_IN_STAGE_3 = {
    "sft": Default(True, (0, 28), (4, 56)),
    **dict.fromkeys(("dpo", "ipo", "grpo", "rloo", "kto", "reward", "rm"), Default(True, (1, 9), (4, 56))),
    "distillation": Default(True, (1, 10), (4, 56)),
}
"""Training method -> from which release on its trainer does so; those of trl.experimental do not."""


def has_stage_3(deepspeed: Mapping[str, Any] | None) -> bool:
    """Whether a DeepSpeed configuration asks for ZeRO-3."""
    zero = (deepspeed or {}).get("zero_optimization")
    return isinstance(zero, Mapping) and str(zero.get("stage")) == "3"


def take_checkpoints(
    training: dict[str, Any], method: str, adapts_in_stage_3: bool, versions: Mapping[str, Any], notes: Notes
) -> None:
    """Put into `training` whether the checkpoints of a run of `method` are reentrant, where TRL decides that.
    `adapts_in_stage_3`: whether it trains adapters under ZeRO-3, for which newer releases make them reentrant."""
    given = training.get(KWARGS) or {}
    if not training.get("gradient_checkpointing") or not isinstance(given, Mapping):
        return
    forced = _REENTRANT_IN_STAGE_3.get(method)
    modern = (release(resolved(versions).get("transformers", "")) or (5, 0)) >= (5, 0)
    if adapts_in_stage_3 and forced is not None and has_default(forced, versions):
        since = ".".join(map(str, forced.since))
        notes.assumptions.append(f"trl (since {since}) makes checkpoints reentrant for adapters under ZeRO-3.")
        training[KWARGS] = {**given, "use_reentrant": True}
    elif given.get("use_reentrant") is None and not modern and has_default(_NOT_REENTRANT, versions):
        notes.assumptions.append("use_reentrant is not given; the default of trl (since 0.28) is False.")
        training[KWARGS] = {**given, "use_reentrant": False}
