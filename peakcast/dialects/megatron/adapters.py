"""LoRA over Megatron-LM's layers, as the projects that have it name its settings."""

from __future__ import annotations

from typing import Literal, NamedTuple

from peakcast.core.fields import FrozenMapping
from peakcast.dialects.common.translation import Settings
from peakcast.jobs.conventions import conventions
from peakcast.jobs.spec import Finetuning, TrainingJob


class AdapterKeys(NamedTuple):
    """The keys of an adapter's settings in a project, and the project's defaults."""

    rank: str
    alpha: str
    dropout: str
    targets: str
    default_rank: int
    default_dropout: float = 0.0
    default_targets: tuple[str, ...] = ()
    """Empty: the four projections of attention and feed-forward."""

    def under(self, section: str) -> AdapterKeys:
        """The same keys after the name of their section."""
        names = {name: section + getattr(self, name) for name in ("rank", "alpha", "dropout", "targets")}
        return self._replace(**names)


BRIDGE = AdapterKeys("dim", "alpha", "dropout", "target_modules", 32)
"""Those of Megatron-Bridge and NeMo 2 (`peft/lora.py`), without their section."""


def with_adapters(
    job: TrainingJob, settings: Settings, keys: AdapterKeys, library: Literal["megatron_bridge", "mcore_bridge"]
) -> TrainingJob:
    """`job` with the LoRA that `settings` ask for under `keys`. Raises: SpecError for a value that is none."""
    targets = settings.words(keys.targets) or keys.default_targets
    tuning = Finetuning(
        method="lora",
        rank=settings.size(keys.rank, keys.default_rank),
        alpha=settings.number(keys.alpha, keys.default_rank),
        targets=("all-linear",) if {"all", "all-linear"} & set(targets) else targets,
        dropout=settings.number(keys.dropout, keys.default_dropout) or 0.0,
    )
    _note_details(settings, keys.rank.rpartition(".")[0])
    options = {**job.framework_options, "adapter_library": library}
    if conventions(job)["adapter_library"] == library:
        del options["adapter_library"]
    return job.replace(finetuning=tuning, framework_options=FrozenMapping(options))


def _note_details(settings: Settings, section: str) -> None:
    """Note what the adapters' `section` says beyond their rank and targets and no job can express."""
    place = f"{section}." if section else ""
    if excluded := settings.words(f"{place}exclude_modules"):
        settings.notes.unsupported.append(
            f"Layers without adapters ({place}exclude_modules={', '.join(excluded)}) are counted as if they had them.",
            f"{place}exclude_modules",
            "less",
        )
    dtype = settings.text(f"{place}lora_dtype", settings.text(f"{place}dtype")).removeprefix("torch.")
    if dtype not in ("", "none", "None", "null", "bfloat16", "bf16"):
        settings.notes.unsupported.append(
            f"Adapters in {dtype} are counted in the dtype of the weights.", f"{place}lora_dtype", "more"
        )
