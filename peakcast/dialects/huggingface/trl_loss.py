"""How TRL's SFTTrainer computes its loss, by release.

Source: trl 1.5.1, 1.6.0, 1.14.2, 1.15.0 and 1.16.0 `trainer/sft_config.py` loss_type, `trainer/sft_trainer.py`
SFTTrainer.__init__ and compute_loss; `trainer/utils.py` add_fused_lm_head.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from peakcast.core.fields import FrozenMapping
from peakcast.core.versions import release, resolved
from peakcast.dialects.common.translation import Notes
from peakcast.dialects.huggingface.trl_defaults import Default, has_default
from peakcast.jobs.spec import TrainingJob

TILES = Default("tiles", (1, 15), (4, 56))
CHUNKS = Default("chunked_nll", (1, 6), (4, 56))
"""From 1.6 to 1.14, unless Liger's kernels are asked for."""
METRICS = (
    ((1, 6), "entropy_of_a_view"),
    ((1, 3), "entropy_of_a_copy"),
    ((0, 23), "entropy"),
    ((0, 22), "entropy_of_sequences"),
    ((0, 15), "accuracy"),
)
"""The first release of trl that computes these for its logs from whole logits: the convention `sft_metrics` (trl 0.14.0,
0.15.2, 0.21.0, 0.22.2, 0.23.1, 1.2.0, 1.3.0, 1.5.1, 1.6.0 and 1.14.2)."""

LARGE = ("entropy_of_a_copy", "entropy_of_sequences")
"""Those that need more than backward does, under autocast."""


def with_sft_loss(job: TrainingJob, options: Mapping[str, Any], notes: Notes) -> TrainingJob:
    """`job` with what `take_sft_loss` returned. Recordings of a network run TRL's head only where TRL is installed."""
    if options.get("loss_kernel") == TILES.value and job.architecture.configuration and find_spec("trl") is None:
        notes.unsupported.append(
            "trl (since 1.15) never has all logits at once. For this network that can only be recorded where trl is "
            "installed, so all logits are counted: pip install trl.",
            "loss_type",
            "less",
        )
        return job
    if "sft_metrics" in options and job.architecture.configuration:  # recordings run the Trainer's own compute_loss
        if options["sft_metrics"] in LARGE and job.framework_options.get("autocast"):
            notes.unsupported.append(
                "What this release of SFTTrainer copies of the logits for its logs (entropy, accuracy) is not counted for "
                "networks that recipes answer; trl 1.16 does without.",
                "versions.trl",
                "more",
            )
        return job
    if options and "trl" not in resolved(job.versions):
        notes.warnings.append(
            "The release of trl is not given: from 1.15 on SFTTrainer makes no whole logits, as counted here; before "
            "1.6 it made them, which takes more: --versions trl=1.5 counts that.",
            "versions.trl",
            "more",
        )
    return job.replace(framework_options=FrozenMapping({**job.framework_options, **options}))


def take_sft_loss(training: dict[str, Any], method: str, versions: Mapping[str, Any], notes: Notes) -> dict[str, Any]:
    """Remove `loss_type` from `training`, and return the conventions of SFTTrainer's own loss; {} for other methods. If
    SFTTrainer replaces the head, only those of Liger's kernels run that are inside layers."""
    if method not in ("sft", "pt"):
        return {}
    kind = training.pop("loss_type", None)
    if "unsloth" in resolved(versions):  # replaces the head itself
        return {}
    if has_default(TILES, versions):
        if training.get("compute_loss_func") or training.get("label_smoothing_factor"):
            notes.unsupported.append(
                "trl (since 1.15) also computes whole logits if a custom loss or label_smoothing_factor needs them; its "
                "own head is then not counted in addition.",
                "label_smoothing_factor",
                "more",
            )
            return {}
        if training.pop("use_liger_kernel", False):
            training["liger_kernels"] = True
        return {"loss_kernel": TILES.value}
    usual = "nll" if training.get("use_liger_kernel") or not has_default(CHUNKS, versions) else CHUNKS.value
    if (kind or usual) == CHUNKS.value:
        notes.unsupported.append(
            "trl's loss over chunks of 256 tokens (loss_type=chunked_nll, the default of trl 1.6 to 1.14) is not modelled; "
            "whole logits are assumed.",
            "loss_type",
            "less",
        )
        return {}
    if kind is not None:
        notes.ignored.append("loss_type")
    if training.get("use_liger_kernel") or "trl" not in resolved(versions):  # Liger's loss returns no logits
        return {}
    now = release(resolved(versions)["trl"])
    return next(({"sft_metrics": name} for since, name in METRICS if now >= since), {})
