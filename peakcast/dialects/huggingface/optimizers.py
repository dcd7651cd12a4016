"""The optimizer of the Trainer's arguments, or of the DeepSpeed configuration beside them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from peakcast.core.versions import release, resolved, torch_release
from peakcast.dialects.common.translation import Notes, Settings, states_direction
from peakcast.dialects.huggingface import keys
from peakcast.dialects.huggingface.deepspeed import engine_optimizer
from peakcast.jobs.spec import DECAYING_GRADIENTS, Optimizer

FIRST_FUSED = (4, 54)
"""The release of transformers from which AdamW is fused by default, with torch 2.8 and later (training_args.py
`default_optim` of 4.53.3, 4.54.1 and 5.17)."""


def engines_optimizer(engine: Settings | None, training: Settings, notes: Notes) -> Optimizer | None:
    """The optimizer that the DeepSpeed configuration names; the Trainer then uses it instead of its own `optim`
    (transformers 5.17 `integrations/deepspeed.py` `deepspeed_optim_sched`)."""
    optimizer = engine_optimizer(engine, notes)
    if optimizer is not None and training.given("optim"):
        name = training.raw("optim")
        notes.assumptions.append(f"optim={name} has no effect: the DeepSpeed configuration has an optimizer.")
    return optimizer


def default_optimizer(versions: Mapping[str, Any]) -> str:
    """The Trainer's optimizer where `optim` is not given."""
    newer = (release(resolved(versions).get("transformers", "")) or FIRST_FUSED) >= FIRST_FUSED
    return "adamw_torch_fused" if newer and torch_release(versions) >= (2, 8) else "adamw_torch"


RELEASES_OF_DEFAULT = {
    "adamw_torch_fused": "transformers since 4.54 with torch since 2.8",
    "adamw_torch": "transformers before 4.54, or with torch before 2.8,",
}
"""Default -> the releases that have it, in words."""


def optimizer_of(training: Settings, versions: Mapping[str, Any], notes: Notes, options: dict[str, Any]) -> Optimizer:
    """The optimizer of the training arguments; what else a job says of it is put into `options`."""
    default = default_optimizer(versions)
    if not training.given("optim"):
        notes.assumptions.append(f"optim is not given; the default of {RELEASES_OF_DEFAULT[default]} is {default}.")
    name = training.one_of("optim", default, {**keys.OPTIMIZERS, **keys.OTHER_OPTIMIZERS})
    if name in keys.OTHER_OPTIMIZERS:
        notes.unsupported.append(
            f"optim={name} is not modelled; {keys.OTHER_OPTIMIZERS[name].name} is assumed instead.",
            "optim",
            states_direction(name),
        )
    choice = keys.OPTIMIZERS.get(name) or keys.OTHER_OPTIMIZERS[name]
    if choice.library:
        options[f"{choice.name}_library"] = choice.library
    arguments = dict(re.findall(r"(\w+)\s*=\s*([^,\s]+)", str(training.raw("optim_args") or "")))
    if choice.name == "galore" and arguments.get("rank", "").isdigit():
        options["galore_rank"] = int(arguments["rank"])
    targets = training.raw("optim_target_modules")
    if choice.name == "galore" and targets not in (None, keys.LAYER_LINEARS, "all_linear"):
        notes.assumptions.append("optim_target_modules is treated as all-linear: every Linear is projected.")
    decay = training.number("weight_decay", 0.0) or 0.0 if choice.name in DECAYING_GRADIENTS else 0.0
    return Optimizer(name=choice.name, implementation=choice.implementation, weight_decay=decay)
