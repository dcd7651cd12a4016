"""Recipes that come with peakcast: `datasets/recipes/<library>-<release>/<family>.json.gz`.

A file lists kinds of networks of one family (`kinds.py`), each with the recipe that represents it; equal recipes are stored
once. Reading a file runs no code, and parses only the recipe that is needed.
"""

from __future__ import annotations

import gzip
import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

import peakcast
from peakcast.core.bounded import is_file
from peakcast.core.fields import flat
from peakcast.core.versions import NEWEST, release
from peakcast.dialects.common.network_values import NETWORK_PREFIX
from peakcast.dialects.common.own_networks import TRANSFORMERS, library_of
from peakcast.jobs.spec import TrainingJob, job_to_mapping
from peakcast.models.recipes import files
from peakcast.models.recipes.kinds import NetworkKind, with_values
from peakcast.models.recipes.recipe import Recipe
from peakcast.models.recipes.regime import point_of, regime
from peakcast.models.recipes.widths import Widths
from peakcast.networks.layer_count import depths

FOLLOWING = (
    *("precision.gradients", "precision.optimizer_states"),
    *("finetuning.adapter_dtype", "finetuning.rank", "finetuning.targets"),
)
"""Settings that follow from others (`precision.parameters`, `finetuning.method`) in the regimes that are shipped."""
MOST_SAID = 40
"""Longest value that is put into a sentence."""
Shipped = tuple[NetworkKind, str]
"""A kind of network, and its recipe as text."""


def shipped_recipe(job: TrainingJob) -> Recipe | None:
    """The shipped recipe that covers `job`, of the release of its library that the job names, else of the newest; None if
    there is none."""
    found = _of_regime(regime(job), str(job.versions.get(library_of(job), "")))
    return next((one for one in found if one.covers(*point_of(job))), None)


@lru_cache(maxsize=256)
def _of_regime(job: TrainingJob, asked: str) -> tuple[Recipe, ...]:
    """All shipped recipes of the job's network, for any batch and length."""
    family = file_name(job.architecture.model_type)
    library = library_of(job)
    stacks = sorted(_stacks(library), key=lambda folder: release(_release_of(folder, library)), reverse=True)
    named = [one for one in stacks if asked and _minor(_release_of(one, library)) == _minor(asked)]
    others = [one for one in stacks[:1] if is_of_release(job, {library: _release_of(one, library)}, asked)]
    for folder in named or others:
        return tuple(_recipes_of(job, folder / family))
    return ()


def stack_name(library: str, version: str) -> str:
    """The name of the folder with the recipes of a release."""
    return f"{library}-{version}"


def _release_of(folder: Path, library: str) -> str:
    return folder.name.removeprefix(stack_name(library, ""))


def is_of_release(job: TrainingJob, releases: Mapping[str, str], asked: str | None = None) -> bool:
    """Whether recipes of the library in `releases` answer `job`: of transformers' networks any release does, and a finding
    says which it is; of other libraries' the asked minor release, since the ledger answers too."""
    library = library_of(job)
    named = str(job.versions.get(library, "")) if asked is None else asked
    if library == TRANSFORMERS or release(named) in ((), NEWEST):
        return True
    return _minor(named) == _minor(releases.get(library, ""))


def _recipes_of(job: TrainingJob, path: Path) -> list[Recipe]:
    """The recipes in the file at `path` that represent the job's network."""
    found = []
    for kind, text in read(path) if is_file(path) else ():
        values = kind.values(job)
        if values is not None:
            recipe = _parsed(text)
            encoder, decoder = depths(job.architecture)
            more = recipe.walk.stacks * (encoder - kind.layers) if encoder == decoder else 0
            blocks = recipe.walk.num_layers + more
            try:
                made = with_values(recipe, kind.widths, values, blocks if kind.unit else recipe.layers)
                found.append(made if encoder == decoder else made.of_depths((encoder, decoder)))
            except ValueError:  # no network has these values
                continue
    return found


def nearest_shipped(job: TrainingJob) -> str:
    """What the shipped recipe of the job's family that is nearest to `job`, and does not cover it, is of; "" if the family
    has none."""
    family = file_name(job.architecture.model_type)
    paths = [folder / family for folder in _stacks(library_of(job)) if is_file(folder / family)]
    found = [(kind.otherwise(job), kind, text) for path in paths for kind, text in read(path)]
    if not found:
        return ""
    others, kind, text = min(found, key=lambda one: (len(one[0]), one[1].values(job) is None))
    if others:
        usual = flat(job_to_mapping(TrainingJob(architecture=job.architecture)))
        given = {name: usual.get(name) if value is None else value for name, value in others.items()}
        values = {name.removeprefix(NETWORK_PREFIX): value for name, value in given.items()}
        return " and ".join(_told(name, value) for name, value in values.items() if name not in FOLLOWING)
    if kind.values(job) is None:
        return "of networks of other sizes"
    recipe = _parsed(text)
    (fewest, most), (shortest, longest) = recipe.batches, recipe.lengths
    return f"of micro-batches of {fewest} to {most} sequences of {shortest} to {longest} tokens"


def _told(name: str, value: object) -> str:
    """A value of a shipped recipe in words."""
    if value is None:
        return f"without {name}"
    return f"of another {name}" if len(str(value)) > MOST_SAID else f"of {name}={value}"


def _minor(version: str) -> tuple[int, ...]:
    """major.minor of a release."""
    return release(version)[:2]


@lru_cache(maxsize=8)
def _stacks(library: str) -> tuple[Path, ...]:
    """The folders of all releases of a library."""
    folders = [Path(one) / "datasets" / "recipes" for one in peakcast.__path__]
    prefix = stack_name(library, "")
    return tuple(one for folder in folders if folder.is_dir() for one in folder.iterdir() if one.name.startswith(prefix))


def file_name(family: str) -> str:
    """The name of the file with a family's recipes."""
    return f"{re.sub(r'[^A-Za-z0-9_.-]', '_', family)}.json.gz"


# -- files ---------------------------------------------------------------------------------------------------------------


def written(shipped: Sequence[tuple[NetworkKind, Recipe]]) -> bytes:
    """The content of a file; the same kinds and recipes give the same bytes."""
    texts = [json.dumps(files.to_mapping(recipe), separators=(",", ":"), sort_keys=True) for _, recipe in shipped]
    bodies = list(dict.fromkeys(texts))
    kinds = [{**_mapping(kind), "recipe": bodies.index(text)} for (kind, _), text in zip(shipped, texts, strict=True)]
    content = {"schema_version": files.SCHEMA, "kinds": kinds, "recipes": bodies}
    return gzip.compress(json.dumps(content, separators=(",", ":"), sort_keys=True).encode(), mtime=0)


def all_of(path: Path) -> list[tuple[NetworkKind, Recipe]]:
    """All kinds in the file at `path` with their recipes; empty if there is no file. Raises: RecordError."""
    return [(kind, _parsed(text)) for kind, text in read(path)] if is_file(path) else []


def read(path: Path) -> tuple[Shipped, ...]:
    """The kinds in the file at `path`, with their recipes as text. Raises: RecordError if it has none."""
    return _read(path, path.stat().st_mtime_ns)


@lru_cache(maxsize=64)
def _read(path: Path, changed: int) -> tuple[Shipped, ...]:
    """The content of the file at the time of its last change, cached."""
    return files.reading(
        path, lambda content: tuple((_kind(one), str(content["recipes"][one["recipe"]])) for one in content["kinds"])
    )


@lru_cache(maxsize=64)
def _parsed(text: str) -> Recipe:
    return files.from_mapping(json.loads(text))


def _mapping(kind: NetworkKind) -> dict[str, Any]:
    """A kind as JSON stores it; `_kind` reads it."""
    widths = kind.widths
    return {
        **{name: getattr(kind, name) for name in ("layers", "prefix", "unit")},
        **{name: dict(getattr(kind, name)) for name in ("conditions", "defaults", "same_as")},
        "idle": list(kind.idle),
        "read": sorted(kind.read),
        "keys": list(widths.keys),
        "base": list(widths.base),
        "products": [list(one) for one in widths.products],
        "parts": widths.parts.tolist(),
        "confirmed": kind.confirmed.tolist(),
    }


def _kind(mapping: Mapping[str, Any]) -> NetworkKind:
    """A kind from what `_mapping` wrote. Raises: ValueError, KeyError or TypeError if it is damaged."""
    keys = tuple(map(str, mapping["keys"]))
    products = tuple(tuple(map(int, one)) for one in mapping["products"])
    parts = np.array(mapping["parts"], dtype=np.int64).reshape(4, -1)
    confirmed = np.array(mapping["confirmed"], dtype=np.int64)
    base = tuple(map(int, mapping["base"]))
    if any(len(one) != len(keys) for one in (*products, base)) or confirmed.ndim != 2 or confirmed.shape[1] != len(keys):
        raise ValueError("its widths are not of one length")
    if (
        (parts[1] < 0).any()
        or (parts[1] >= len(products)).any()
        or (parts[0] < 0).any()
        or (parts[3] < 1).any()
        or min(base, default=1) < 1
    ):
        raise ValueError("its widths are no sums of products")
    return NetworkKind(
        conditions=dict(mapping["conditions"]),
        defaults=dict(mapping["defaults"]),
        layers=int(mapping["layers"]),
        prefix=int(mapping["prefix"]),
        unit=int(mapping["unit"]),
        idle=tuple(map(str, mapping["idle"])),
        same_as=dict(mapping["same_as"]),
        widths=Widths(keys, base, products, parts),
        confirmed=confirmed,
        read=frozenset(map(str, mapping.get("read", ()))),
    )
