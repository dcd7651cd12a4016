"""Parts of a network whose weights do not train (`finetuning.frozen`): a vision tower, a projector, or modules by name.

The modules of the vision tower are recognised by the configuration from which they were made, so no table of families is
needed.
"""

from __future__ import annotations

from typing import Any

from peakcast.core.errors import CollectorError, near_misses
from peakcast.jobs.spec import TrainingJob

VISION, LANGUAGE, PROJECTOR = "vision", "language", "projector"
_CONFIGURATIONS = {VISION: "vision_config", LANGUAGE: "text_config"}
"""Part of a vision-language model -> the part of its configuration from which its modules are made."""


def freeze(model: Any, job: TrainingJob) -> None:
    """Freeze the weights of `job.finetuning.frozen` (no gradients). Raises: CollectorError for a name that is no
    module's."""
    frozen = frozen_weights(model, job)
    for name, weight in model.named_parameters():
        if name in frozen:
            weight.requires_grad_(False)


def frozen_modules(model: Any, job: TrainingJob) -> list[str]:
    """The modules that get no adapter, by name. Raises: CollectorError."""
    return sorted({name.rpartition(".")[0] for name in frozen_weights(model, job)})


def frozen_weights(model: Any, job: TrainingJob) -> set[str]:
    """The names of the weights that do not train. Raises: CollectorError."""
    weights = [name for name, _ in model.named_parameters()]
    return {weight for asked in job.finetuning.frozen for weight in _weights_of(asked, weights, model)}


def _weights_of(asked: str, weights: list[str], model: Any) -> list[str]:
    if asked == PROJECTOR and (tower := _roots(model, VISION)):  # modules of neither part; some towers contain it
        return [weight for weight in weights if not weight.startswith((*tower, *_roots(model, LANGUAGE)))]
    if asked in _CONFIGURATIONS:
        found = [weight for weight in weights if weight.startswith(_roots(model, asked))]
    else:
        found = [weight for weight in weights if f".{asked}." in f".{weight}"]
    if not found:
        names = {part for weight in weights for part in weight.split(".")[:-1]}
        raise CollectorError(
            f"finetuning.frozen={asked!r} is no part of {type(model).__name__}: give {VISION}, {LANGUAGE} or {PROJECTOR} "
            f"of a vision-language model, or the name of a module{near_misses(asked, names) or '.'}",
            parameter="finetuning.frozen",
            value=asked,
        )
    return found


def _roots(model: Any, part: str) -> tuple[str, ...]:
    """Prefixes of the names of a part's weights."""
    configuration = getattr(model.config, _CONFIGURATIONS[part], None)
    if configuration is None:
        return ()
    made = (name for name, module in model.named_modules() if name and _is_made_from(module, configuration))
    roots = tuple(f"{name}." for name in made)
    head = model.get_output_embeddings() if part == LANGUAGE else None
    return roots + tuple(f"{name}." for name, module in model.named_modules() if head is not None and module is head)


def _is_made_from(module: Any, configuration: Any) -> bool:
    return type(getattr(module, "config", None)) is type(configuration)
