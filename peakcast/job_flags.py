"""A job from the flags of the command line, on top of a job file where one is given."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from peakcast.errors import SpecError
from peakcast.questions import FORMS, mapping_named


def job_from_flags(job: str | None, flags: Mapping[str, object], settings: Sequence[str]) -> Mapping[str, Any]:
    """The mapping of `job` (a file or a catalog name, None for none) with the fields that `flags` and `settings` change.

    `flags` go by the field's path ("parallelism.zero_stage"), None meaning not given; `settings` are texts "path=value"
    whose values are read as YAML. Raises: SpecError.
    """
    values: dict[str, Any] = dict(mapping_named(job)) if job is not None else {}
    changes = {path: value for path, value in flags.items() if value is not None}
    changes.update(_setting(text) for text in settings)
    if len(values) == 1 and next(iter(values)) in FORMS:
        if changes:
            raise SpecError(
                f"{job} is written in the form {next(iter(values))!r}, which job flags cannot change; change the file.",
                parameter=next(iter(changes)),
            )
        return values
    for path, value in changes.items():
        *parents, name = path.split(".")
        place = values
        for parent in parents:
            inner = place.get(parent)
            if inner is not None and not isinstance(inner, Mapping):
                raise SpecError(f"{path} cannot be set: {parent} is {inner!r} in {job}, not a mapping.", parameter=path)
            place[parent] = dict(inner or {})
            place = place[parent]
        place[name] = value
    if "architecture" not in values:
        raise SpecError(
            "no architecture is given; give a job file, or --model with a catalog name such as llama-3.1-8b.",
            parameter="architecture",
        )
    return values


def _setting(text: str) -> tuple[str, Any]:
    import yaml

    path, equals, value = text.partition("=")
    if not equals or not all(path.split(".")):
        raise SpecError(f"--set {text!r} must be FIELD=VALUE, such as precision.parameters=float32.", parameter="set")
    try:
        return path, yaml.safe_load(value)
    except yaml.YAMLError as error:
        raise SpecError(f"--set {text!r} has no valid value: {' '.join(str(error).split())}.", parameter="set") from error
