"""Framework conventions by version: what a framework does when a job does not say. Data, in `catalog/frameworks.toml`.

A convention is a named value ("logits_upcast", "transformer_impl", ...). The base stanza of a framework gives the default
of each. Stanzas with `when` override it in file order; `when` may name packages and version ranges, a `model_type`, a
property of the job in `_facts`, or a convention that earlier stanzas have set. A job's `framework_options` override all of
them. A ledger thus asks for a convention and never compares versions. In a base stanza, `choices` lists the allowed values
of conventions that are names, and `patterns` gives the form of lists of names and sizes.
"""

from __future__ import annotations

import functools
import math
import re
import tomllib
from collections.abc import Callable, Mapping
from importlib import resources
from typing import Any

from peakcast.core.errors import SpecError, near_misses
from peakcast.core.fields import FrozenMapping
from peakcast.core.findings import Finding
from peakcast.core.versions import ASSUMED_TORCH as ASSUMED_TORCH
from peakcast.core.versions import CONTAINER, OWN_NETWORK_STACKS, STACKS, compare, not_compared, resolved
from peakcast.core.versions import release as release
from peakcast.core.versions import torch_release as torch_release
from peakcast.jobs.loss import REFERRING
from peakcast.jobs.spec import IN_8_BITS, PAGED, TrainingJob

DRIVEN_BY = {"deepspeed": "huggingface"}
"""Framework -> the framework whose conventions apply as well: transformers' Trainer drives DeepSpeed's engine."""

ONLY_USED_BY: Mapping[str, Callable[[TrainingJob], bool]] = {
    "liger_kernel": lambda job: job.loss.fused_linear_cross_entropy,
    "trl": lambda job: job.loss.kind != "cross_entropy",
    "bitsandbytes": lambda job: job.finetuning.quantization is not None or job.optimizer.in_8_bits,
    "peft": lambda job: job.finetuning.method != "full",
    "transformers": lambda job: not any(stack in job.versions for stack in OWN_NETWORK_STACKS),
    "flash_attn": lambda job: job.attention == "flash_attention_2",
}
"""Package -> whether a job uses it; for other jobs its version does not matter."""


@functools.cache
def _stanzas() -> dict[str, list[dict[str, Any]]]:
    text = resources.files("peakcast").joinpath("catalog", "frameworks.toml").read_text(encoding="utf-8")
    stanzas: dict[str, list[dict[str, Any]]] = tomllib.loads(text)
    return {name: [*stanzas.get(DRIVEN_BY.get(name, ""), []), *own] for name, own in stanzas.items()}


def read_ahead() -> None:
    """Read the table of conventions now. A process that forks others calls it, since each of them would read it again."""
    _stanzas()


FACTS = {"model_type", "quantization", "fused_linear_cross_entropy", "sharding"}
"""Properties of a job that the `when` of a stanza may name, in addition to versions and other conventions."""


@functools.lru_cache(maxsize=4096)
def conventions(job: TrainingJob) -> Mapping[str, Any]:
    """Every convention that applies to `job`, by name."""
    return conventions_of(job.framework, job.versions, _facts(job), job.framework_options)


def _facts(job: TrainingJob) -> FrozenMapping:
    """The properties of a job, other than versions, on which a stanza may depend (`FACTS`)."""
    return FrozenMapping(
        {
            "model_type": job.architecture.model_type,
            "quantization": job.finetuning.quantization or "none",
            "fused_linear_cross_entropy": job.loss.fused_linear_cross_entropy,
            "sharding": job.parallelism.sharding,
        }
    )


def fuses_loss(job: TrainingJob) -> bool:
    """Whether lm_head and loss are one kernel, which never materialises all logits."""
    return conventions(job).get("loss_kernel") in ("fused_linear", "chunked")


def replaces_linear(job: TrainingJob) -> bool:
    """Whether DeepSpeed's Linear stands in for torch's: stage 3 puts it there when the network is made within `zero.Init`
    (runtime/zero/partition_parameters.py `_enable_mem_efficient_linear`), newer releases also when it partitions a
    finished one."""
    chosen = conventions(job)
    early, late = (bool(chosen.get(name, True)) for name in ("partitions_as_made", "replaces_linear_late"))
    return job.parallelism.zero_stage == 3 and (early or late)


def adapter_dtype(job: TrainingJob) -> str:
    """The dtype of adapters. DeepSpeed's engine casts them to the network's dtype; since 0.19.2 not those that stage 3 has
    partitioned (runtime/engine.py `_cast_module_mixed_precision`), which TRL's trainers make so themselves (trl 1.16.0,
    `if args.deepspeed_plugin.zero_stage == 3`)."""
    chosen_first = conventions(job)
    # transformers does not partition quantised networks while it makes them
    whole = job.finetuning.quantization is not None or not chosen_first.get("partitions_as_made", True)
    cast = job.loss.kind != "cross_entropy" or whole or bool(chosen_first.get("casts_partitioned_weights"))
    stages = (1, 2, 3) if cast else (1, 2)
    if job.parallelism.zero_stage in stages:
        return job.precision.parameters
    chosen: str = job.finetuning.adapter_dtype or conventions(job).get("adapter_dtype", "float32")
    if chosen == "base_layer":
        return "float32" if job.finetuning.quantization is not None else job.precision.parameters
    return chosen


def fsdp_offloads(job: TrainingJob) -> bool:
    """Whether FSDP has the weights on the host. FSDP1's CPUOffload and FSDP2's CPUOffloadPolicy leave gradients there too,
    and so the optimizer and its states, whether `offload.optimizer` says so or not."""
    layout = job.parallelism
    return job.offload.parameters and layout.num_replicas > 1 and layout.sharding in ("fsdp1", "fsdp2", "hsdp")


def steps_in_bitsandbytes(job: TrainingJob) -> bool:
    """Whether the optimizer is one of bitsandbytes."""
    name, library = job.optimizer.name, conventions(job).get(f"{job.optimizer.name}_library")
    return library == "bitsandbytes" if library is not None else name in (*IN_8_BITS, *PAGED, "ademamix")


def mixes_precision(job: TrainingJob) -> bool:
    """Whether FSDP gathers parameters that are wider than the compute dtype in the compute dtype: if the dtypes say so and,
    under accelerate, whenever it computes with autocast, even if frozen weights are narrow (accelerate 1.15
    utils/dataclasses.py `set_mixed_precision`)."""
    layout, precision = job.parallelism, job.precision
    sharded = layout.sharding in ("fsdp1", "fsdp2", "hsdp") and layout.num_replicas > 1
    accelerate = job.framework == "huggingface" and bool(conventions(job).get("autocast"))
    return sharded and (precision.wide_compute != precision.parameters or accelerate)


def sums_in_float32(job: TrainingJob) -> bool:
    """Whether a loop adds the gradients of each micro-batch, once its backward has ended, to float32 ones, with which it
    updates float32 copies of narrower weights (nanotron 0.4 optim/gradient_accumulator.py `FP32GradientAccumulator`)."""
    precision, layout = job.precision, job.parallelism
    wide = precision.gradients == precision.main_parameters == "float32" != precision.parameters
    alone = layout.sharding == "none" and layout.pipeline_parallel_size == 1 and not layout.zero_stage
    return wide and alone and job.framework == "torch" and job.task == "train" and job.finetuning.method == "full"


@functools.lru_cache(maxsize=4096)
def conventions_of(
    framework: str, versions: FrozenMapping, facts: FrozenMapping, options: FrozenMapping
) -> Mapping[str, Any]:
    """Every convention that applies to a job with these properties; the keys of `facts` are `FACTS`."""
    values: dict[str, Any] = {}
    given = {**resolved(versions), **facts, **options}
    for stanza in _stanzas().get(framework, []):
        if _holds(stanza.get("when", {}), {**values, **given}):
            values.update(stanza["conventions"])
    values.update(options)
    return values


@functools.cache
def packages_of(framework: str) -> frozenset[str]:
    """The packages whose versions the stanzas of `framework` understand."""
    stanzas = _stanzas().get(framework, [])
    conditions = {name for stanza in stanzas for name in stanza["conventions"]} | FACTS
    asked_for = {package for stanza in stanzas for package in stanza.get("when", {})} - conditions
    return frozenset(asked_for | {package for stanza in stanzas for package in stanza.get("packages", [])})


def assumed_network(job: TrainingJob) -> str:
    """A sentence about whose network a plain PyTorch loop is assumed to train; "" for another stack."""
    if job.framework != "torch" or job.task != "train" or not set(OWN_NETWORK_STACKS).isdisjoint(job.versions):
        return ""
    return (
        f"the network is that of transformers; {', '.join(OWN_NETWORK_STACKS)} have networks of their own, which save "
        "other tensors: if one of them trains, give its release in versions."
    )


def assumed_versions(job: TrainingJob) -> str:
    """A sentence about versions that are not given and would change what is assumed about `job`; "" if all are given."""
    unused = frozenset(package for package, uses in ONLY_USED_BY.items() if not uses(job))
    return _assumed_versions(job.framework, job.versions, _facts(job), job.framework_options, unused)


@functools.lru_cache(maxsize=4096)
def _assumed_versions(
    framework: str, versions: FrozenMapping, facts: FrozenMapping, options: FrozenMapping, unused: frozenset[str]
) -> str:
    """`assumed_versions` of a job with these properties. `unused`: packages that it does not use."""
    given = {name: version for name, version in resolved(versions).items() if release(version)}
    known = {**conventions_of(framework, versions, facts, options), **given, **facts}
    said = {"torch", CONTAINER, *known, *STACKS, *unused}
    newest = sorted(
        {
            package
            for stanza in _stanzas().get(framework, [])
            for package in stanza.get("when", {})
            if package not in said
            and _holds({other: ranges for other, ranges in stanza["when"].items() if other != package}, known)
        }
    )
    torch = [] if "torch" in given else [f"torch {ASSUMED_TORCH}"]
    assumed = torch + ([f"the newest {' and '.join(newest)}"] if newest else [])
    if not assumed:
        return ""
    ways = f"--versions {(['torch'] * len(torch) + newest)[0]}=..., --container with the tag of NVIDIA's image, or --here"
    return f"versions not given are assumed to be {' and '.join(assumed)}; if yours differ, say so ({ways})."


def unmodelled_versions(job: TrainingJob) -> list[Finding]:
    """A finding for each entry of `job.versions` that no stanza of its framework knows, or that is not a release."""
    known = {CONTAINER, *packages_of(job.framework)}
    return not_compared({name: version for name, version in job.versions.items() if name in known}) + [
        Finding(
            "version_not_modelled",
            f"versions.{package}",
            "either",
            f"versions.{package}={version!r} has no conventions of its own here; those of {job.framework} are assumed"
            f"{near_misses(package, known) or '.'}",
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
    """The default of the convention `name`: its value in the first stanza that has it."""
    stanzas = (stanza["conventions"] for stanza in _stanzas().get(framework, []))
    return next((values[name] for values in stanzas if name in values), None)


def check_framework_options(job: TrainingJob) -> None:
    """Refuse an option that is not a convention of the job's framework, or a value that the convention cannot have.

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
    """The rule for the convention `name` that `value` breaks: one of its choices, or else a value of its default's type; ""
    if it breaks none."""
    choices = next((s["choices"][name] for s in _stanzas()[framework] if name in s.get("choices", {})), None)
    if choices is not None:
        alike = any(type(choice) is type(value) and choice == value for choice in choices)
        words = ", ".join(map(repr, choices))
        return "" if alike else f"one of {words}{near_misses(str(value), map(str, choices))}".rstrip("?")
    pattern = next((s["patterns"][name] for s in _stanzas()[framework] if name in s.get("patterns", {})), None)
    if pattern is not None:
        return "" if isinstance(value, str) and re.fullmatch(pattern, value) else f"a text like {pattern}"
    default = default_of(framework, name)
    number = isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < math.inf
    if isinstance(default, bool):
        return "" if isinstance(value, bool) else "true or false"
    if isinstance(default, int):
        return "" if number and isinstance(value, int) else "a whole number of at least 0"
    if isinstance(default, float):
        return "" if number else "a number of at least 0"
    if isinstance(default, list):
        texts = isinstance(value, (list, tuple)) and all(isinstance(word, str) for word in value)
        return "" if texts else "a list of texts"
    return "" if isinstance(value, type(default)) else "a text" if isinstance(default, str) else "a mapping"


def _holds(when: Mapping[str, str], facts: Mapping[str, Any]) -> bool:
    """Whether every `package = ">=a,<b"` of `when` is true (see `compare`); it is false for a version that is not given."""
    return all(
        package in facts and all(compare(_text(facts[package]), clause) for clause in ranges.split(","))
        for package, ranges in when.items()
    )


def _text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def scores_tokens(job: TrainingJob) -> bool:
    """Whether the loss is computed from the log-probability of each token, which TRL's head takes without whole logits:
    preference training, and from trl 1.15 on SFTTrainer (the convention `loss_kernel = "tiles"`)."""
    return (job.loss.kind in REFERRING and not makes_whole_logits(job)) or conventions(job).get("loss_kernel") == "tiles"


def makes_whole_logits(job: TrainingJob) -> bool:
    """Whether log-probabilities are computed from whole logits."""
    return token_scores(job) not in ("", "tiles")


def token_scores(job: TrainingJob) -> str:
    """How preference training takes the log-probability of each token (the convention `preference_logits`); "" if the loss
    is another one."""
    if job.loss.kind not in REFERRING:
        return ""
    asked = str(conventions(job).get("preference_logits", ""))
    return "whole" if job.loss.kind != "dpo" and asked in ("shifted", "viewed") else asked  # of DPOTrainer alone
