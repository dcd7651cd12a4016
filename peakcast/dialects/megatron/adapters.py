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
    options = {**job.framework_options, "adapter_library": library}
    if conventions(job)["adapter_library"] == library:
        del options["adapter_library"]
    return job.replace(finetuning=tuning, framework_options=FrozenMapping(options))
