"""Files that tell a cluster which command to run: the command is read as a launch script.

Sources: SkyPilot's docs, "SkyPilot YAML" (`run`, `envs`, `resources.accelerators`, `num_nodes`) and "Task environment
variables"; Kubernetes API reference, Container v1 (`command`, `args`, `env`).
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from typing import Any


def script_in(values: Mapping[str, Any]) -> str | None:
    """The launch script inside a SkyPilot task or a Kubernetes manifest; None for any other mapping."""
    if isinstance(values.get("run"), str) and {"resources", "setup", "envs", "num_nodes", "file_mounts"} & set(values):
        return _with_variables(values["run"], {**_of_skypilot(values), **_texts(values.get("envs"))})
    if {"apiVersion", "kind"} <= set(values):
        return next(_of_containers(values), None)
    return None


def _of_skypilot(values: Mapping[str, Any]) -> dict[str, str]:
    """SkyPilot's own variables, as far as the file tells them."""
    resources = values.get("resources")
    asked = resources.get("accelerators") if isinstance(resources, Mapping) else None
    names = [str(name) for name in asked] if isinstance(asked, (list, Mapping)) else [str(asked or "")]
    gpus = {name.partition(":")[2] or "1" for name in names if name}
    variables = {"SKYPILOT_NUM_NODES": str(values.get("num_nodes") or 1)}
    return variables | ({"SKYPILOT_NUM_GPUS_PER_NODE": gpus.pop()} if len(gpus) == 1 else {})


def _of_containers(place: Any) -> Iterator[str]:
    """The commands of the containers in a manifest, each with its variables."""
    if isinstance(place, Mapping) and "image" in place:
        words = [str(word) for key in ("command", "args") for word in _items(place.get(key))]
        given = [each for each in _items(place.get("env")) if isinstance(each, Mapping) and "value" in each]
        if words:
            yield _with_variables(shlex.join(words), _texts({str(each.get("name")): each["value"] for each in given}))
    for each in place.values() if isinstance(place, Mapping) else _items(place):
        yield from _of_containers(each)


def _items(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _texts(values: Any) -> dict[str, str]:
    pairs = values.items() if isinstance(values, Mapping) else ()
    return {str(key): str(value) for key, value in pairs if value is not None and str(key).isidentifier()}


def _with_variables(script: str, variables: Mapping[str, str]) -> str:
    return "".join(f"export {name}={shlex.quote(value)}\n" for name, value in variables.items()) + script
