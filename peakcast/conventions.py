"""Framework conventions by version: what a framework does when it is not asked. Data, in `catalog/frameworks.toml`.

A convention is a named value ("logits_upcast", "transformer_impl", ...). The base stanza of a framework gives each one's
default; stanzas with `when` (packages and version ranges, a `model_type`, what of a job is in `_facts`, or a convention
that stanzas before have settled) override it in file order; `framework_options` of a job override all. So a ledger asks
for a convention and never compares versions. `choices` of a base stanza lists the values of those that are names.
"""

from __future__ import annotations

import functools
import tomllib
from collections.abc import Callable, Mapping
from importlib import resources
from typing import Any

from peakcast.errors import SpecError, near_misses
from peakcast.fields import FrozenMapping
from peakcast.findings import Finding
from peakcast.spec import TrainingJob
from peakcast.versions import ASSUMED_TORCH as ASSUMED_TORCH
from peakcast.versions import CONTAINER, STACKS, compare, not_compared, resolved
from peakcast.versions import release as release
from peakcast.versions import torch_release as torch_release

DRIVEN_BY = {"deepspeed": "huggingface"}
"""Whose conventions hold beside a framework's own: transformers' Trainer drives DeepSpeed's engine."""

ONLY_USED_BY: Mapping[str, Callable[[TrainingJob], bool]] = {
    "liger_kernel": lambda job: job.loss.fused_linear_cross_entropy,
    "trl": lambda job: job.loss.kind != "cross_entropy",
    "bitsandbytes": lambda job: job.finetuning.quantization is not None or "8bit" in job.optimizer.name,
    "peft": lambda job: job.finetuning.method != "full",
    "flash_attn": lambda job: job.attention == "flash_attention_2",
}
"""Packages whose versions are of no account to jobs that do not use them."""


@functools.cache
def _stanzas() -> dict[str, list[dict[str, Any]]]:
    text = resources.files("peakcast").joinpath("catalog", "frameworks.toml").read_text(encoding="utf-8")
    stanzas: dict[str, list[dict[str, Any]]] = tomllib.loads(text)
    return {name: [*stanzas.get(DRIVEN_BY.get(name, ""), []), *own] for name, own in stanzas.items()}


FACTS = {"model_type", "quantization", "fused_linear_cross_entropy"}
"""What of a job, beside versions and other conventions, the `when` of a stanza may name."""


def conventions(job: TrainingJob) -> Mapping[str, Any]:
    """Every convention that holds for `job`, by name."""
    return conventions_of(job.framework, job.versions, _facts(job), job.framework_options)


def _facts(job: TrainingJob) -> FrozenMapping:
    """What of a job, beside its versions, a stanza may depend on (`FACTS`)."""
    return FrozenMapping(
        {
            "model_type": job.architecture.model_type,
            "quantization": job.finetuning.quantization or "none",
            "fused_linear_cross_entropy": job.loss.fused_linear_cross_entropy,
        }
    )


def fuses_loss(job: TrainingJob) -> bool:
    """Whether lm_head and loss are one kernel, which never has all logits."""
    return conventions(job).get("loss_kernel") in ("fused_linear", "chunked")


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
    if chosen == "base_layer":
        return "float32" if whole else job.precision.parameters
    return chosen


def mixes_precision(job: TrainingJob) -> bool:
    """Whether FSDP gathers what is wider than the compute dtype in that: where the dtypes say so and, by accelerate,
    wherever it computes under autocast, also beside frozen weights that are narrow (accelerate 1.15 utils/dataclasses.py
    `set_mixed_precision`)."""
    layout, precision = job.parallelism, job.precision
    sharded = layout.sharding in ("fsdp1", "fsdp2", "hsdp") and layout.num_replicas > 1
    accelerate = job.framework == "huggingface" and bool(conventions(job).get("autocast"))
    return sharded and (precision.wide_compute != precision.parameters or accelerate)


@functools.lru_cache(maxsize=4096)
def conventions_of(
    framework: str, versions: FrozenMapping, facts: FrozenMapping, options: FrozenMapping
) -> Mapping[str, Any]:
    """Every convention that holds for a job of these; `facts` are named as `FACTS`."""
    values: dict[str, Any] = {}
    for stanza in _stanzas().get(framework, []):
        if _holds(stanza.get("when", {}), {**values, **resolved(versions), **facts, **options}):
            values.update(stanza["conventions"])
    values.update(options)
    return values


def packages_of(framework: str) -> frozenset[str]:
    """The packages whose versions the stanzas of `framework` understand."""
    stanzas = _stanzas().get(framework, [])
    conditions = {name for stanza in stanzas for name in stanza["conventions"]} | FACTS
    asked_for = {package for stanza in stanzas for package in stanza.get("when", {})} - conditions
    return frozenset(asked_for | {package for stanza in stanzas for package in stanza.get("packages", [])})


def assumed_versions(job: TrainingJob) -> str:
    """The sentence on the versions that are not given and would change what is assumed of `job`; "" where all are."""
    given = {name: version for name, version in resolved(job.versions).items() if release(version)}
    facts = {**conventions(job), **given, **_facts(job)}
    unused = {package for package, uses in ONLY_USED_BY.items() if not uses(job)}
    newest = sorted(
        {
            package
            for stanza in _stanzas().get(job.framework, [])
            for package in stanza.get("when", {})
            if package not in {"torch", CONTAINER, *facts, *STACKS, *unused}
            and _holds({other: ranges for other, ranges in stanza["when"].items() if other != package}, facts)
        }
    )
    torch = [] if "torch" in given else [f"torch {ASSUMED_TORCH}"]
    assumed = torch + ([f"the newest {' and '.join(newest)}"] if newest else [])
    if not assumed:
        return ""
    ways = f"--versions {(['torch'] * len(torch) + newest)[0]}=..., --container with the tag of NVIDIA's image, or --here"
    return f"versions not given are taken as {' and '.join(assumed)}; if yours differ, say so ({ways})."


def unmodelled_versions(job: TrainingJob) -> list[Finding]:
    """A finding for each entry of `job.versions` that no stanza of its framework knows, or that is no release."""
    known = {CONTAINER, *packages_of(job.framework)}
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


def check_framework_options(job: TrainingJob) -> None:
    """Refuse an option that is no convention of the job's framework, or has a value that is none of its choices.

    Raises: SpecError.
    """
    stanzas = _stanzas().get(job.framework, [])
    known = {name for stanza in stanzas for name in stanza["conventions"]}
    choices = {name: values for stanza in stanzas for name, values in stanza.get("choices", {}).items()}
    for name, value in job.framework_options.items():
        if value not in choices.get(name, [value]):
            raise SpecError(
                f"framework_options.{name}={value!r} must be one of {', '.join(choices[name])}.",
                parameter=f"framework_options.{name}",
                value=value,
            )
        if name not in known:
            raise SpecError(
                f"framework_options.{name} is not an option of framework={job.framework!r}"
                f"{near_misses(name, known) or '; known: ' + ', '.join(sorted(known))}",
                parameter=f"framework_options.{name}",
                value=value,
            )


def _holds(when: Mapping[str, str], facts: Mapping[str, Any]) -> bool:
    """Whether every `package = ">=a,<b"` of `when` holds (see `compare`); one whose version is not given does not."""
    return all(
        package in facts and all(compare(_text(facts[package]), clause) for clause in ranges.split(","))
        for package, ranges in when.items()
    )


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
