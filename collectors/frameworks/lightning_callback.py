"""A callback of Lightning's Trainer that tells when a run is set up, before its model's weights are made, when it begins
and when it has ended."""

from __future__ import annotations

import importlib
import sys
from typing import Any, Protocol

from peakcast.errors import CollectorError

PACKAGES = ("lightning.pytorch", "pytorch_lightning")
"""The two names of the same library, whose classes do not mix."""


class Listener(Protocol):
    """Who is told."""

    def sets_up(self) -> None:
        """A fit is about to begin; `configure_model` has not run."""

    def begins(self) -> None:
        """The first step is about to run."""

    def ends(self, num_steps: int) -> None:
        """The last of so many optimizer steps has run."""


def telling_callback(listener: Listener) -> Any:
    """The callback, of the package that the script has imported, or of the first that can be. Raises: CollectorError."""
    loaded = [name for name in PACKAGES if name in sys.modules]
    for name in (*loaded, *PACKAGES):
        try:
            return _made(importlib.import_module(name).Callback, listener)
        except ImportError:
            continue
    raise CollectorError("a callback for Lightning needs lightning; install it with: pip install lightning.")


def _made(base: Any, listener: Listener) -> Any:
    class TellingCallback(base):  # type: ignore[misc]
        """Tells a `Listener`. Add it to a Trainer's `callbacks`."""

        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            if stage == "fit":
                listener.sets_up()

        def on_fit_start(self, trainer: Any, pl_module: Any) -> None:
            listener.begins()

        def on_fit_end(self, trainer: Any, pl_module: Any) -> None:
            listener.ends(int(trainer.global_step))

    return TellingCallback()
