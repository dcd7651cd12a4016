"""Recipes as data: a list of them in a compressed JSON file. Reading one runs no code; a damaged file is refused."""

from __future__ import annotations

import gzip
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from peakcast.core.bounded import file_bytes
from peakcast.core.errors import RecordError
from peakcast.core.fields import FrozenMapping
from peakcast.jobs.architecture import MOST_LAYERS
from peakcast.models.recipes.chunked import KEPT, Chunking, ChunkRule, Loop, lengthened
from peakcast.models.recipes.depth import Repeats, Run
from peakcast.models.recipes.recipe import Recipe
from peakcast.models.recipes.sizes import BY_POINTS, Sizes
from peakcast.models.recipes.walk import Visit, Walk, WalkedParameter, groups_from_json, pairs_of

T = TypeVar("T")
SCHEMA = 2
MAX_FILE_BYTES = 2**24
MAX_CONTENT_BYTES = 2**28
"""A recipe of 600 layers that all differ has about 50 MB of JSON."""
_WALK = ("categories", "lives", "gradients")
_VISIT = ("runs", "enters", "module", "instant", "weights")


def written(recipes: list[Recipe]) -> bytes:
    """The content of a file of `recipes`; the same recipes give the same bytes."""
    text = json.dumps({"schema_version": SCHEMA, "recipes": [to_mapping(one) for one in recipes]}, separators=(",", ":"))
    return gzip.compress(text.encode(), mtime=0)


def read(path: Path) -> list[Recipe]:
    """The recipes in the file at `path`. Raises: RecordError if it has none."""
    return reading(path, lambda content: [from_mapping(one) for one in content["recipes"]])


def reading(path: Path, parse: Callable[[dict[str, Any]], T]) -> T:
    """What `parse` returns for the content of the file at `path`. Raises: RecordError if the content is not valid."""
    try:
        with gzip.open(io.BytesIO(file_bytes(path, MAX_FILE_BYTES))) as file:
            content = file.read(MAX_CONTENT_BYTES + 1)
        if len(content) > MAX_CONTENT_BYTES:
            raise ValueError(f"it has more than {MAX_CONTENT_BYTES:,} bytes")
        mapping = json.loads(content)
        if not isinstance(mapping, dict) or mapping.get("schema_version") != SCHEMA:
            raise ValueError(f"schema_version must be {SCHEMA}")
        return parse(mapping)
    except OSError as error:
        raise _refused(path, error.strerror or str(error)) from error
    except (EOFError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise _refused(path, f"{type(error).__name__}: {error}") from error


def _refused(path: Path, reason: str) -> RecordError:
    return RecordError(f"{path} is no file of recipes: {reason}; delete it, and it is recorded anew.", parameter="recipe")


def to_mapping(recipe: Recipe) -> dict[str, Any]:
    """The recipe as plain data."""
    walk, how, sizes = recipe.walk, recipe.repeats, recipe.sizes
    return {
        "num_places": walk.num_places,
        "stretches": [[list(labels), list(phases)] for labels, phases in zip(walk.labels, walk.phases, strict=True)],
        "names": list(walk.names),
        **{name: np.asarray(getattr(walk, name)).astype(int).tolist() for name in _WALK},
        "parameters": [[*one[:2], list(one.shape), *one[3:]] for one in walk.parameters],
        "layers": recipe.layers,
        "repeats": None if how is None else _of_repeats(how, recipe.copies),
        "exponents": [list(one) for one in sizes.exponents],
        "coefficients": sizes.coefficients.tolist(),
        "multiples": sizes.multiples.tolist(),
        "batches": list(recipe.batches),
        "lengths": list(recipe.lengths),
        **({"targets": list(recipe.targets)} if recipe.targets else {}),
        **({"chunking": _of_chunking(recipe.chunking)} if recipe.chunking else {}),
        "even": recipe.even,
        "wrapped": walk.wrapped,
        "visits": [[[*map(one.__getattribute__, _VISIT)] for one in visits] for visits in walk.visits],
        "groups": [[one.role, one.begins, [list(pair) for pair in one.weights]] for one in walk.groups],
        "stacks": walk.stacks,
        "image_tokens": walk.image_tokens,
        **({"replaced": [list(pair) for pair in walk.replaced]} if walk.replaced else {}),
        **({"returned": list(walk.returned)} if walk.returned else {}),
        "versions": dict(recipe.versions),
    }


def from_mapping(mapping: dict[str, Any]) -> Recipe:
    """The recipe of plain data. Raises: ValueError, KeyError, TypeError if the data is not a recipe."""
    walk = _walk(mapping)
    count = len(walk.names)
    sizes = _sizes(mapping, count)
    if not walk.num_places // 2 <= int(mapping["layers"]) <= MOST_LAYERS:
        raise ValueError(f"layers must be from those that were recorded to {MOST_LAYERS:,}")
    how: Repeats | None = None
    copies: tuple[int, ...] = ()
    if mapping["repeats"] is not None:
        how, copies = _repeats(mapping["repeats"], int(mapping["layers"]) - walk.num_places // 2, count)
    low, high = mapping["batches"]
    short, long = mapping["lengths"]
    targets = tuple(map(int, mapping["targets"])) if "targets" in mapping else None
    chunking = _chunking(mapping["chunking"], walk) if "chunking" in mapping else None
    told = 2 + (targets is not None) + (chunking is not None)
    if len(sizes.exponents[0]) != told or (targets is not None and len(targets) != 2):
        raise ValueError("its sizes are of other lengths than it says")
    return Recipe(
        walk,
        how,
        copies,
        sizes,
        (int(low), int(high)),
        (int(short), int(long)),
        (targets[0], targets[1]) if targets else None,
        bool(mapping["even"]),
        FrozenMapping({str(key): str(value) for key, value in mapping["versions"].items()}),
        chunking,
    )


def _sizes(mapping: dict[str, Any], count: int) -> Sizes:
    """The sizes of the recipe's `count` tensors."""
    exponents = tuple(tuple(map(int, powers)) for powers in mapping["exponents"])
    coefficients = np.array(mapping["coefficients"], dtype=np.int64).reshape(len(exponents), count)
    multiples = np.array(mapping["multiples"], dtype=np.int64)
    if multiples.shape != (count,):
        raise ValueError("its columns are not of one length")
    if exponents not in BY_POINTS.values() or (multiples < 1).any():
        raise ValueError("its sizes are no polynomials")
    return Sizes(exponents, coefficients, multiples)


def _walk(mapping: dict[str, Any]) -> Walk:
    """The recorded step, whose tensors have no sizes of their own: those of the recipe are polynomials."""
    names, stretches = tuple(map(str, mapping["names"])), mapping["stretches"]
    count, places = len(names), int(mapping["num_places"])
    columns = {name: np.array(mapping[name], dtype=np.int64) for name in _WALK}
    shapes = {"categories": (count,), "gradients": (count,), "lives": (7, count)}
    if any(columns[name].shape != shape for name, shape in shapes.items()):
        raise ValueError("its columns are not of one length")
    if places < 1:
        raise ValueError("it has no places")
    returned = tuple(map(int, mapping.get("returned", ())))
    if any(not 0 <= entry < count for entry in returned):
        raise ValueError("it returns tensors that it does not have")
    if not stretches or len(stretches) % (2 * places) or (abs(columns["lives"]) > len(stretches) + 10**6).any():
        raise ValueError("its stretches are not those of a step")
    return Walk(
        num_places=places,
        labels=tuple(tuple(map(str, labels)) for labels, _ in stretches),
        phases=tuple(bytes(phases) for _, phases in stretches),
        names=names,
        categories=columns["categories"],
        raw_bytes=np.zeros(count, dtype=np.int64),
        lives=columns["lives"],
        gradients=columns["gradients"].astype(bool),
        parameters=tuple(map(_parameter, mapping["parameters"])),
        wrapped=bool(mapping["wrapped"]),
        visits=tuple(tuple(map(_visit, visits)) for visits in mapping["visits"]),
        groups=groups_from_json(mapping.get("groups", ())),
        stacks=int(mapping.get("stacks", 1)),
        image_tokens=int(mapping.get("image_tokens", 0)),
        replaced=pairs_of(mapping.get("replaced", ())),
        returned=returned,
    )


def _of_chunking(chunking: Chunking) -> list[Any]:
    """[tokens of a chunk, whether sequences are cut, for each loop whether it is in backward, its start and unit]."""
    rule, loops = chunking.rule, chunking.loops
    return [rule.size, rule.by_length, [[loop.backward, loop.start, loop.unit] for loop in loops]]


def _chunking(written: list[Any], walk: Walk) -> Chunking:
    """What `_of_chunking` wrote of a recipe with this walk. Raises: ValueError if the walk has no such chunks."""
    size, by_length, loops = written
    found = Chunking(
        ChunkRule(int(size), bool(by_length)),
        tuple(Loop(bool(backward), int(start), int(unit)) for backward, start, unit in loops),
    )
    if found.rule.size < 1 or any(loop.unit < 1 or loop.start < 0 for loop in found.loops):
        raise ValueError("its chunks have no tokens or operations")
    if lengthened(walk, found.loops, KEPT + 1) is None:
        raise ValueError("its chunks are not alike")
    return found


def _of_repeats(how: Repeats, copies: tuple[int, ...]) -> list[Any]:
    """[layers before each run, its unit, entries that move, copies of it]. A number for a single run, or for runs that are
    all alike, and no copies where the number of layers tells them: as before runs could differ."""
    prefixes, units = [run.prefix for run in how.runs], [run.unit for run in how.runs]
    moving = np.flatnonzero(how.moves).tolist()
    alike = len(set(units)) == len(set(copies)) == 1
    plain = [prefixes[0] if len(prefixes) == 1 else prefixes, units[0], moving]
    return plain if alike else [prefixes, units, moving, list(copies)]


def _repeats(written: list[Any], more: int, count: int) -> tuple[Repeats, tuple[int, ...]]:
    """What `_of_repeats` wrote of a walk with `count` entries, and copies that are `more` layers."""
    prefixes, units, moving, *copies = written
    moves = np.zeros(count, dtype=bool)
    moves[np.array(moving, dtype=np.int64)] = True
    starts = np.atleast_1d(prefixes).tolist()
    runs = tuple(Run(int(start), int(unit)) for start, unit in zip(starts, np.resize(units, len(starts)), strict=True))
    layers = sum(run.unit for run in runs)
    found = tuple(map(int, copies[0])) if copies else (more // layers if layers else 0,) * len(runs)
    if any(run.unit < 1 or run.prefix < 0 for run in runs) or len(found) != len(runs):
        raise ValueError("its runs of layers are not of one length")
    if min(found, default=0) < 0 or sum(run.unit * one for run, one in zip(runs, found, strict=True)) != more:
        raise ValueError("its runs of layers do not make the network")
    return Repeats(runs, moves), found


def _parameter(written: list[Any]) -> WalkedParameter:
    module, name, shape, element_bytes, trains = written
    return WalkedParameter(str(module), str(name), tuple(map(int, shape)), int(element_bytes), bool(trains))


def _visit(written: list[Any]) -> Visit:
    runs, enters, module, instant, weights = written
    return Visit(str(runs), bool(enters), str(module), int(instant), tuple((str(of), str(name)) for of, name in weights))
