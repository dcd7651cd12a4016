"""Framework conventions by version: what a framework does when it is not asked. Data, in `catalog/frameworks.toml`.

A convention is a named value ("logits_upcast", "transformer_impl", ...). The base stanza of a framework gives each one's
default; stanzas with `when` (packages and version ranges, or a `model_type`) override it in file order;
`framework_options` of a job override all. So a ledger asks for a convention and never compares versions.
"""

from __future__ import annotations

import functools
import math
import tomllib
from collections.abc import Mapping
from importlib import resources
from typing import Any

from peakcast.errors import SpecError, near_misses
from peakcast.fields import FrozenMapping
from peakcast.findings import Finding
from peakcast.spec import TrainingJob
from peakcast.versions import ASSUMED_TORCH as ASSUMED_TORCH
from peakcast.versions import CONTAINER, compare, not_compared, resolved
from peakcast.versions import release as release
from peakcast.versions import torch_release as torch_release

DRIVEN_BY = {"deepspeed": "huggingface"}
"""Whose conventions hold beside a framework's own: transformers' Trainer drives DeepSpeed's engine."""

@functools.cache
def _stanzas() -> dict[str, list[dict[str, Any]]]:
    text = resources.files("peakcast").joinpath("catalog", "frameworks.toml").read_text(encoding="utf-8")
    stanzas: dict[str, list[dict[str, Any]]] = tomllib.loads(text)
    return {name: [*stanzas.get(DRIVEN_BY.get(name, ""), []), *own] for name, own in stanzas.items()}


def conventions(job: TrainingJob) -> Mapping[str, Any]:
    """Every convention that holds for `job`, by name."""
    return _resolve(job.framework, job.architecture.model_type, job.versions, job.framework_options)


def adapter_dtype(job: TrainingJob) -> str:
    """The dtype of adapters: DeepSpeed's engine casts them to the network's, but for what stage 3 has partitioned
    (DeepSpeed 0.19 runtime/engine.py `_cast_module_mixed_precision`), which TRL's trainers make so (trl 1.16.0, `if
    args.deepspeed_plugin.zero_stage == 3`)."""
    whole = job.finetuning.quantization is not None  # transformers does not make such networks in parts
    cast = job.loss.kind != "cross_entropy" or whole
    stages = (1, 2, 3) if cast else (1, 2)
    if job.parallelism.zero_stage in stages:
        return job.precision.parameters
    chosen: str = job.finetuning.adapter_dtype or conventions(job).get("adapter_dtype", "float32")
    return chosen


def mixes_precision(job: TrainingJob) -> bool:
    """Whether FSDP gathers what is wider than the compute dtype in that: where the dtypes say so and, by accelerate,
    wherever it computes under autocast, also beside frozen weights that are narrow (accelerate 1.15 utils/dataclasses.py
    `set_mixed_precision`)."""
    layout, precision = job.parallelism, job.precision
    sharded = layout.sharding in ("fsdp1", "fsdp2", "hsdp") and layout.num_replicas > 1
    accelerate = job.framework == "huggingface" and bool(conventions(job).get("autocast"))
    return sharded and precision.compute != "float8" and (precision.compute != precision.parameters or accelerate)


@functools.lru_cache(maxsize=4096)
def _resolve(framework: str, model_type: str, versions: FrozenMapping, options: FrozenMapping) -> Mapping[str, Any]:
    values: dict[str, Any] = {}
    facts = {**resolved(versions), "model_type": model_type}
    for stanza in _stanzas().get(framework, []):
        if _holds(stanza.get("when", {}), facts):
            values.update(stanza["conventions"])
    values.update(options)
    return values


def unmodelled_versions(job: TrainingJob) -> list[Finding]:
    """A finding for each entry of `job.versions` that no stanza of its framework knows, or that is no release."""
    stanzas = _stanzas().get(job.framework, [])
    known = {CONTAINER} | {package for stanza in stanzas for package in stanza.get("when", {})}
    known |= {package for stanza in stanzas for package in stanza.get("packages", [])}
    return not_compared({name: version for name, version in job.versions.items() if name in known}) + [
        Finding(
            "version_not_modelled",
            f"versions.{package}",
            "either",
            f"versions.{package}={version!r} has no conventions of its own here; those of {job.framework} are assumed.",
        )
        for package, version in job.versions.items()
        if package not in known
    ]


@functools.cache
def known_conventions(framework: str) -> tuple[str, ...]:
    """The names of all conventions of `framework`, sorted."""
    return tuple(sorted({name for stanza in _stanzas().get(framework, []) for name in stanza["conventions"]}))


@functools.cache
def default_of(framework: str, name: str) -> Any:
    """What the convention `name` is where nothing else is said: the value of the first stanza that has it."""
    stanzas = (stanza["conventions"] for stanza in _stanzas().get(framework, []))
    return next((values[name] for values in stanzas if name in values), None)


def check_framework_options(job: TrainingJob) -> None:
    """Refuse an option that is no convention of the job's framework, or a value that the convention cannot have.

    Raises: SpecError.
    """
    known = known_conventions(job.framework)
    for name, value in job.framework_options.items():
        if name not in known:
            raise SpecError(
                f"framework_options.{name} is not an option of framework={job.framework!r}"
                f"{near_misses(name, known) or '; known: ' + ', '.join(known)}",
                parameter=f"framework_options.{name}",
                value=value,
            )
        if rule := _broken_rule(job.framework, name, value):
            raise SpecError(
                f"framework_options.{name}={value!r} must be {rule}.", parameter=f"framework_options.{name}", value=value
            )


def _broken_rule(framework: str, name: str, value: object) -> str:
    """What `value` would have to be for the convention `name`: one of its choices, or else of its default's kind; "" where
    it is."""
    choices = next((s["choices"][name] for s in _stanzas()[framework] if name in s.get("choices", {})), None)
    if choices is not None:
        alike = any(type(choice) is type(value) and choice == value for choice in choices)
        words = ", ".join(map(repr, choices))
        return "" if alike else f"one of {words}{near_misses(str(value), map(str, choices))}".rstrip("?")
    default = default_of(framework, name)
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < math.inf
    if isinstance(default, bool):
        return "" if isinstance(value, bool) else "true or false"
    if isinstance(default, int):
        return "" if number and isinstance(value, int) else "a whole number of at least 0"
    if isinstance(default, float):
        return "" if number else "a number of at least 0"
    return "" if isinstance(value, type(default)) else "a text" if isinstance(default, str) else "a mapping"


def _holds(when: Mapping[str, str], facts: Mapping[str, Any]) -> bool:
    """Whether every `package = ">=a,<b"` of `when` holds (see `compare`); one whose version is not given does not."""
    return all(
        package in facts and all(compare(facts[package], clause) for clause in ranges.split(","))
        for package, ranges in when.items()
    )
