"""Which parts of a network train, where that is neither all of it nor LoRA on matrices inside its layers."""

from __future__ import annotations

from peakcast.jobs.conventions import conventions
from peakcast.jobs.spec import TrainingJob

TABLES = ("embed_tokens", "wte", "word_embeddings", "embed_in")
"""What families call the token table."""
HEADS = ("lm_head", "embed_out")
"""What families call the head."""
STACKS = ("huggingface", "torch", "deepspeed")
"""Frameworks that train whichever modules of the network they are told."""


def ends_named(job: TrainingJob) -> list[str]:
    """The token table and the head, as far as `finetuning.targets` names them."""
    return sorted(set(job.finetuning.targets).intersection((*TABLES, *HEADS)))


def copied_modules(job: TrainingJob) -> list[str]:
    """Modules of which peft trains a copy because `modules_to_save` names them. Not the head of a reward model, which it
    copies in any case."""
    always = {"score"} if job.loss.kind == "reward" else set()
    return [name for name in job.finetuning.modules_to_save if name not in always]


def copies_table(job: TrainingJob) -> bool:
    """Whether peft trains a copy of the token table."""
    return any(name in TABLES for name in copied_modules(job))


def copies_head(job: TrainingJob) -> bool:
    """Whether peft trains a copy of the head."""
    return any(name in HEADS for name in copied_modules(job))


def copied_inside(job: TrainingJob) -> list[str]:
    """`copied_modules` other than the token table and the head."""
    return [name for name in copied_modules(job) if name not in (*TABLES, *HEADS)]


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
