"""Which parts of a network train, where that is neither all of it nor LoRA on matrices inside its layers."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

from peakcast.jobs.architecture import Architecture
from peakcast.jobs.conventions import conventions
from peakcast.jobs.spec import TrainingJob
from peakcast.networks.families import family, family_of, model_types

STACKS = ("huggingface", "torch", "deepspeed")
"""Frameworks that train whichever modules of the network they are told."""


def trained_network(job: TrainingJob) -> Architecture:
    """The network with the head that its trainer gives it: a reward model is a classifier with one output, and other losses
    of preferences need the vocabulary's logits."""
    if job.loss.kind == "cross_entropy" or (job.loss.kind != "reward" and job.architecture.head == "language_model"):
        return job.architecture
    if job.loss.kind == "reward":
        return replace(job.architecture, head="sequence_classifier", num_labels=1)
    return replace(job.architecture, head="language_model")


@cache
def end_names() -> frozenset[str]:
    """What families call the token table and the head."""
    names = [known.names for known in map(family, model_types()) if known is not None]
    return frozenset(name for each in names for name in (*each.table, *each.head))


def ends_named(job: TrainingJob) -> list[str]:
    """The token table and the head, as far as `finetuning.targets` names them."""
    names = family_of(job.architecture).names
    return sorted(set(job.finetuning.targets).intersection((*names.table, *names.head)))


def copied_modules(job: TrainingJob) -> list[str]:
    """Modules of which peft trains a copy because `modules_to_save` names them. Not the head of a classifier, which it
    copies in any case, nor what the network does not have (`passed_over`)."""
    always = set() if trained_network(job).head == "language_model" else {"score", "classifier"}
    return [name for name in job.finetuning.modules_to_save if name not in always.union(passed_over(job))]


def passed_over(job: TrainingJob) -> list[str]:
    """Names in `modules_to_save` of token tables and heads of other families. peft passes names over that no module has
    (peft 0.21 `utils/other.py` _set_trainable)."""
    known = family(job.architecture.model_type)
    if known is None or job.architecture.configuration:  # whose names only the library knows
        return []
    others = [name for name in job.finetuning.modules_to_save if name not in (*known.names.table, *known.names.head)]
    return [name for name in others if name in end_names()]


def copies_table(job: TrainingJob) -> bool:
    """Whether peft trains a copy of the token table."""
    return not set(copied_modules(job)).isdisjoint(family_of(job.architecture).names.table)


def copies_head(job: TrainingJob) -> bool:
    """Whether peft trains a copy of the head."""
    return not set(copied_modules(job)).isdisjoint(family_of(job.architecture).names.head)


def copied_inside(job: TrainingJob) -> list[str]:
    """`copied_modules` other than the token table and the head."""
    names = family_of(job.architecture).names
    return [name for name in copied_modules(job) if name not in (*names.table, *names.head)]


def trains_other_parts(job: TrainingJob) -> bool:
    """Whether parts of the network stay frozen, or LoRA by peft's own kernels also trains something outside the layers:
    with adapters, or as a copy that is not of the token table or the head."""
    tuning = job.finetuning
    if job.framework not in STACKS or job.task != "train":
        return False
    if tuning.frozen:
        return True
    adapts = tuning.method in ("lora", "qlora") and conventions(job).get("lora_kernel", "eager") == "eager"
    return adapts and bool(ends_named(job) or copied_inside(job))
