"""The shelf: where recipes are stored, and which of them answers a job.

There is a file for each network, regime (`regime.py`) and set of releases: those recorded in this installation come first,
then those shipped with peakcast. What was found once stays in memory.
"""

from __future__ import annotations

import hashlib
import os
import re
from dataclasses import replace
from functools import cache, lru_cache
from pathlib import Path

from peakcast.core.bounded import is_file
from peakcast.core.durable import replace_file
from peakcast.core.errors import RecordError
from peakcast.core.fields import FrozenMapping
from peakcast.core.versions import NEWEST, release
from peakcast.dialects.common.own_networks import LITGPT, TORCHTUNE, TRANSFORMERS, library_of, of_any_release, own_network
from peakcast.jobs.audio import hears
from peakcast.jobs.spec import TrainingJob, canonical_json, job_to_mapping
from peakcast.models.recipes import files
from peakcast.models.recipes.baseline_choice import chosen
from peakcast.models.recipes.lent import lent
from peakcast.models.recipes.recipe import Recipe
from peakcast.models.recipes.recordable import cannot_be_recorded
from peakcast.models.recipes.regime import point_of, regime
from peakcast.models.recipes.shipped import is_of_release, shipped_recipe
from peakcast.networks.trained_parts import trains_other_parts

MOST = 16
"""Most recipes of one regime that are kept, for different ranges of batch and length."""
RECIPE_PACKAGES = {
    TRANSFORMERS: ("torch", "transformers", "peft", "fla-core"),
    LITGPT: ("torch", "litgpt", "lightning"),
    TORCHTUNE: ("torch", "torchtune", "torchao"),
}
"""Library -> packages whose releases a recipe of its networks depends on."""
NAMELESS = r"[^A-Za-z0-9_.]"
"""Characters of a family's name that are replaced in a file's name."""
_found: dict[str, list[Recipe]] = {}
_reasons: dict[str, str] = {}
"""Why a job could not be recorded, by shelf name."""
_endless: set[str] = set()
"""Those of which not even one step of the whole network could be waited for."""


def wants_recipe(job: TrainingJob) -> bool:
    """Whether a recipe should answer `job`: the ledger does not know its family or counts other parts as trained, there is
    one of the network that the job's library has of its own, or a recipe is asked for."""
    if lent() is not None or chosen() == "recipe":
        return True
    if chosen() != "auto":
        return False
    return bool(job.architecture.configuration) or trains_other_parts(job) or _has_own(job)


def _has_own(job: TrainingJob) -> bool:
    """Whether there is a recipe of the network that the job's library has of its own."""
    return own_network(job) is not None and not cannot_be_recorded(job) and _kept(job) is not None


def recipe_of(job: TrainingJob) -> Recipe | None:
    """The recipe that answers `job`; None if none is wanted, or there is none."""
    if (brought := lent()) is not None:
        return brought.recipe_of(job)
    if not wants_recipe(job):
        return None
    return _kept(job)


def _kept(job: TrainingJob) -> Recipe | None:
    """The recipe of `job` that was recorded here or comes with peakcast."""
    own = next((one for one in recipes_of(job) if one.covers(*point_of(job))), None)
    return shipped_recipe(job) if own is None else own.at(*point_of(job))


def recipes_of(job: TrainingJob) -> list[Recipe]:
    """All recipes of the job's network and regime: of the releases that it names, else of the installed ones."""
    found = _recipes(shelf_name(job))
    return found if found or not is_of_release(job, installed_libraries()) else _recipes(shelf_name(of_any_release(job)))


def shelve(job: TrainingJob, recipe: Recipe) -> None:
    """Keep a recipe of `job` for later, under the releases with which it was recorded, in a file if one can be written."""
    name = shelf_name(job.replace(versions=FrozenMapping(recipe.versions)))
    _found[name] = [recipe, *_recipes(name)][:MOST]
    try:
        replace_file(_own_folder() / f"{name}.json.gz", files.written(_found[name]))
    except RecordError:
        return  # it stays in memory all the same


def could_not_record(job: TrainingJob, reason: str, *, endless: bool = False) -> None:
    """Remember why `job` has no recipe, and whether its first step took longer than anyone waits (`endless`)."""
    _reasons[shelf_name(job)] = reason
    if endless:
        _endless.add(shelf_name(job))


def why_not(job: TrainingJob) -> str:
    """Why `job` could not be recorded; "" if nobody tried."""
    return _reasons.get(shelf_name(job), "") if _reasons else ""


def is_endless(job: TrainingJob) -> bool:
    """Whether the first step of `job` took too long to be recorded, so that a trace of two would too."""
    return bool(_endless) and shelf_name(job) in _endless


@lru_cache(maxsize=1024)
def shelf_name(job: TrainingJob) -> str:
    """The name of the file of the job's recipes."""
    alone, family = regime(job), job.architecture.model_type
    alone = alone.replace(architecture=replace(alone.architecture, name=family))
    packages = RECIPE_PACKAGES[library_of(job)]
    asked_for = {name: str(job.versions[name]) for name in packages if release(job.versions.get(name, "main")) != NEWEST}
    releases = {name: one for name, one in {**installed_libraries(), **asked_for}.items() if name in packages}
    heard = ["sound"] if hears(job.architecture) else []  # until then its decoder was recorded alone
    asked = canonical_json([job_to_mapping(alone), releases, *heard])
    return f"{re.sub(NAMELESS, '_', family)[:40]}-{hashlib.sha256(asked.encode()).hexdigest()[:20]}"


@cache
def installed_libraries() -> dict[str, str]:
    """Releases of the installed libraries that recipes depend on."""
    import importlib.metadata  # takes longer to import than a prediction

    found = {}
    for package in dict.fromkeys(name for names in RECIPE_PACKAGES.values() for name in names):
        try:
            found[package] = public(importlib.metadata.version(package))
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def public(version: str) -> str:
    """A release without its build: "2.13.0" for "2.13.0+cpu"."""
    return version.partition("+")[0]


def _recipes(name: str) -> list[Recipe]:
    """The recipes in the file with this shelf name."""
    if name not in _found:
        path = _own_folder() / f"{name}.json.gz"
        try:
            _found[name] = files.read(path) if is_file(path) else []
        except RecordError:
            _found[name] = []  # it is recorded again and replaced
    return _found[name]


def _own_folder() -> Path:
    """The folder for recipes recorded by this installation."""
    if own := os.environ.get("PEAKCAST_RECIPES"):
        return Path(own)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "peakcast" / "recipes"
