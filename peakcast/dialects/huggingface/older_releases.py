"""Older releases with other defaults, for runs that give neither the release nor the setting."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from peakcast.core.units import DTYPE_BYTES
from peakcast.dialects.huggingface.dtypes import FROM_PRETRAINED
from peakcast.dialects.huggingface.trl_defaults import DEFAULTS, left_out
from peakcast.dialects.huggingface.whose_trainer import Whose
from peakcast.jobs.spec import TrainingJob

TRANSFORMERS_4 = "4.57.1"
"""Its newest release."""


class OlderRelease(NamedTuple):
    """A release that a run may have."""

    package: str
    version: str
    name: str
    """The run with that release, in words."""
    way_out: str
    """How the user says which it is."""


def older_releases(training: Mapping[str, Any], whose: Whose, versions: Mapping[str, Any]) -> Iterator[OlderRelease]:
    """The older releases that a run with the arguments `training` may use. `versions`: releases that are known. None
    without arguments, since transformers' Trainer may then not run at all."""
    if not training:
        return
    dtypes = [training[key] for key in ("dtype", "torch_dtype") if training.get(key) is not None]
    if dtypes in ([], [FROM_PRETRAINED]) and not versions.get("transformers"):
        yield OlderRelease(
            "transformers",
            TRANSFORMERS_4,
            "a run of transformers 4, which loads weights in float32",
            "Say which by --versions transformers=4.57 (or yours), or the dtype by torch_dtype.",
        )
    if whose.trl and not versions.get("trl") and not versions.get("transformers") and (unsaid := left_out(training)):
        first = min(DEFAULTS[key].since for key in unsaid)
        keys = " and ".join(unsaid)
        yield OlderRelease(
            "trl",
            f"{first[0]}.{first[1] - 1}",
            f"a run of trl before {first[0]}.{first[1]}, which has {keys} off by default",
            f"Say which by --versions trl={first[0]}.{first[1] - 1} (or yours), or by {keys}.",
        )


def differ(job: TrainingJob, older: TrainingJob) -> bool:
    """Whether `job` and `older` differ in dtypes or activation checkpointing, whose defaults older releases change."""
    return _sizes(job) != _sizes(older) or job.activation_checkpointing.mode != older.activation_checkpointing.mode


def _sizes(job: TrainingJob) -> tuple[float, float]:
    """(bytes of an element of the weights, bytes of an element of the products)."""
    return DTYPE_BYTES[job.precision.parameters], DTYPE_BYTES[job.precision.compute]
