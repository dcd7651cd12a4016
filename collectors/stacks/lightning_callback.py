"""A callback of Lightning's Trainer that reports when a run is set up (before its model's weights are made), when it begins
and when it has ended."""

from __future__ import annotations

import importlib
import sys
from typing import Any, Protocol

from peakcast.core.errors import CollectorError

PACKAGES = ("lightning.pytorch", "pytorch_lightning")
"""Two names of the same library, whose classes cannot be mixed."""


class LightningListener(Protocol):
    """Receives what the callback reports."""

    def sets_up(self) -> None:
        """A fit is about to begin; `configure_model` has not run."""

    def begins(self) -> None:
        """The first step is about to run."""

    def ends(self, num_steps: int) -> None:
        """The last of `num_steps` optimizer steps has run."""


def telling_callback(listener: LightningListener) -> Any:
    """The callback, made for the package that the script has imported, or else for the first one that can be imported.
    Raises: CollectorError."""
    loaded = [name for name in PACKAGES if name in sys.modules]
    for name in (*loaded, *PACKAGES):
        try:
            return _made(importlib.import_module(name).Callback, listener)
        except ImportError:
            continue
    raise CollectorError("a callback for Lightning needs lightning; install it with: pip install lightning.")


def _made(base: Any, listener: LightningListener) -> Any:
    class TellingLightningCallback(base):  # type: ignore[misc]
        """Reports to a `LightningListener`. Add it to a Trainer's `callbacks`."""

        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            if stage == "fit":
                listener.sets_up()

        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            listener.begins()

        def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
            listener.ends(int(trainer.global_step))

    return TellingLightningCallback()
