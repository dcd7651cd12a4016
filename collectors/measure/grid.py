"""Grids: short YAML files that say which jobs to measure.

    base: {sequence_length: 2048}                       # keys of a job file, for every cell; alone, one cell
    axes:                                               # the product of these lists; dotted keys reach inside
      architecture: [gpt2, {name: llama-3.1-8b, num_hidden_layers: 4}]
      activation_checkpointing.mode: [none, full]
    include: [{architecture: qwen3-0.6b, optimizer.implementation: fused}]    # further cells, on top of base
    exclude: [{architecture: gpt2, activation_checkpointing.mode: full}]      # cells with all of these are left out
    parts: [{axes: {...}}, {base: {...}, include: [...]}]                     # more grids like this one, on top of base

`architecture` may be a catalog name, or a mapping with `name` and fields to change (a depth-cut version of a big one).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from peakcast import catalog
from peakcast.core.bounded import exists
from peakcast.core.errors import CollectorError, near_misses
from peakcast.core.fields import to_mapping
from peakcast.jobs.spec import TrainingJob

KEYS = ("base", "axes", "include", "exclude", "parts")
WHOLE = ("architecture", "versions", "framework_options")
"""Keys whose mappings are single values and have no dotted form."""
MOST_CELLS = 20_000


def load_grid(grid: str | Path) -> list[TrainingJob]:
    """The jobs of a grid: a YAML file, or the name of a shipped one ("quick", "standard").

    Raises: CollectorError, SpecError or CatalogError naming what is wrong.
    """
    from peakcast.dialects.common.job_file import read_mapping

    path = Path(grid)
    if not path.suffix and not exists(path):
        folder = resources.files("peakcast.collectors").joinpath("grids")
        names = sorted(file.name.removesuffix(".yaml") for file in folder.iterdir())
        if str(grid) not in names:
            raise CollectorError(
                f"grid={str(grid)!r} is neither a file nor a shipped grid{near_misses(str(grid), names) or '.'} "
                f"Shipped: {', '.join(names)}.",
                parameter="grid",
                value=str(grid),
            )
        path = Path(str(folder.joinpath(f"{grid}.yaml")))
    return expand(read_mapping(path))


def expand(grid: Mapping[str, Any]) -> list[TrainingJob]:
    """The distinct jobs of a grid's mapping, most distinct architectures first: each architecture's first cell, then
    each one's second, and so on, so that a collection cut short still has seen them all."""
    cells = _cells(grid, {})
    if len(cells) > MOST_CELLS:
        raise _too_many(len(cells))
    by_architecture: dict[str, list[TrainingJob]] = {}
    for job in dict.fromkeys(map(_job, cells)):
        by_architecture.setdefault(job.architecture.name, []).append(job)
    rounds = itertools.zip_longest(*by_architecture.values())
    return [job for cells_of_round in rounds for job in cells_of_round if job is not None]


def _too_many(cells: int) -> CollectorError:
    return CollectorError(f"the grid has {cells:,} cells, more than {MOST_CELLS:,}; shorten its axes.", parameter="axes")


def _cells(grid: Mapping[str, Any], outer: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The cells of a grid as flat mappings; `outer` is the base of the grid that contains this one."""
    for key, value in grid.items():
        if key not in KEYS:
            raise CollectorError(f"grid.{key} is not a known key{near_misses(key, KEYS)} Known: {', '.join(KEYS)}.")
        if key in ("include", "exclude", "parts") and value is not None and not isinstance(value, list):
            raise CollectorError(f"grid.{key}={value!r} must be a list.", parameter=key, value=value)
    base = {**outer, **_flat(grid.get("base") or {}, "base")}
    axes = grid.get("axes") or {}
    if not isinstance(axes, Mapping) or not all(isinstance(values, list) for values in axes.values()):
        raise CollectorError("grid.axes must map each key to a list of values.", parameter="axes")
    if math.prod(map(len, axes.values())) > MOST_CELLS:
        raise _too_many(math.prod(map(len, axes.values())))
    products = itertools.product(*axes.values()) if axes else ()
    cells = [base | _flat(dict(zip(axes, values, strict=True)), "axes") for values in products]
    cells += [base | _flat(cell, "include") for cell in grid.get("include") or []]
    for part in grid.get("parts") or []:
        if not isinstance(part, Mapping):
            raise CollectorError(f"grid.parts must hold grids, not {part!r}.", parameter="parts")
        cells += _cells(part, base)
    if base and not any(grid.get(key) for key in ("axes", "include", "parts")):
        cells = [base]
    excluded = [_flat(cell, "exclude") for cell in grid.get("exclude") or []]
    return [cell for cell in cells if not any(_matches(cell, pattern) for pattern in excluded)]


def _flat(mapping: object, where: str) -> dict[str, Any]:
    if not isinstance(mapping, Mapping):
        raise CollectorError(f"grid.{where} must hold mappings of job keys to values, not {mapping!r}.", parameter=where)
    return dict(_dotted(mapping, ""))


def _dotted(mapping: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    """The items of `mapping` with dotted keys: `{optimizer: {name: sgd}}` becomes `optimizer.name: sgd`, so that both
    spellings are equal in every part of a grid."""
    for key, value in mapping.items():
        name = f"{prefix}{key}"
        if isinstance(value, Mapping) and value and name not in WHOLE:
            yield from _dotted(value, f"{name}.")
        else:
            yield name, value


def _matches(cell: Mapping[str, Any], pattern: Mapping[str, Any]) -> bool:
    return all(cell.get(key) == value for key, value in pattern.items())


def _job(cell: Mapping[str, Any]) -> TrainingJob:
    from peakcast.dialects.common.job_file import job_from_mapping

    nested: dict[str, Any] = {}
    for key, value in cell.items():
        if key == "architecture":
            nested[key] = _architecture(value)
            continue
        *outer, last = key.split(".")
        place = nested
        for part in outer:
            place = place.setdefault(part, {})
            if not isinstance(place, dict):
                raise CollectorError(f"{key} in the grid goes inside {part}, which is given as a value.", parameter=key)
        place[last] = value
    return job_from_mapping(nested)


def _architecture(value: Any) -> Any:
    """An architecture mapping for a catalog name with changes; any other value unchanged."""
    if not isinstance(value, Mapping) or "model_type" in value or "name" not in value:
        return value
    changed = {**to_mapping(catalog.architecture(str(value["name"]))), **{k: v for k, v in value.items() if k != "name"}}
    marks = "-".join(f"{key}={item}" for key, item in value.items() if key != "name")
    return {**changed, "name": f"{value['name']}[{marks}]" if marks else value["name"]}
