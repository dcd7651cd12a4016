"""Makes the installed torch allocate as an older release does, where a difference is known."""

from __future__ import annotations

from typing import Any

import torch

from peakcast.collectors.dryrun.noted import Notes
from peakcast.core.versions import release

FLOAT32_NORM = (2, 12)
"""From this release on, autocast computes `rms_norm` in float32; before, in the dtype of its input. Source: pytorch issue
188955; torch 2.13 ATen/autocast_mode.h, AT_FORALL_FP32."""
NORMS = ("rms_norm", "RMSNorm")
_keep_alive: list[Any] = []


def install(asked: str | None) -> None:
    """Allocate as the release `asked` does; None: as the installed one."""
    if asked is not None and _is_older(asked) and not _is_older(torch.__version__):
        library = torch.library.Library("aten", "IMPL")
        library.impl("rms_norm", torch.library.fallthrough_kernel, "AutocastCUDA")
        _keep_alive.append(library)


def say(notes: Notes, asked: str | None, script: str, *, autocast: bool) -> None:
    """Say what another release would allocate, if none was `asked`: of a `script`, its text, that ran under `autocast`."""
    if asked is None and autocast and not _is_older(torch.__version__) and any(name in script for name in NORMS):
        notes.add(
            "script_part_skipped",
            "torch",
            "autocast computes rms_norm in float32 from torch 2.12 on, as here; an older release keeps the dtype of its "
            "input and needs less: --torch 2.11 follows it.",
            "less",
        )


def _is_older(version: str) -> bool:
    return bool(release(version)) and release(version)[:2] < FLOAT32_NORM
