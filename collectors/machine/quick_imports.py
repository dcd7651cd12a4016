"""Shortens imports of transformers, which take longer than most steps that are followed: packages that a step hardly calls
are not imported, or only when they are called.

Source: transformers 5.17 `utils/import_utils.py` fetch__all__, `loss/loss_*.py`, `generation/candidate_generator.py`.
"""

from __future__ import annotations

import functools
import importlib
import sys
from typing import Any

from peakcast.collectors.machine.imports import when_imported


@functools.cache
def install() -> None:
    """Shorten them in this process."""
    when_imported("transformers.utils.import_utils", _read_ends)
    when_imported("transformers.utils", _without_science)


def _read_ends(module: Any) -> None:
    """Importing transformers reads what each of its files exports, line by line; that is after the last line that begins
    with `__all__`."""
    fetch = getattr(module, "fetch__all__", None)
    if fetch is None:
        return

    @functools.wraps(fetch)
    def fetched(text: str) -> Any:
        return fetch(text[text.rfind("\n__all__") + 1 :])

    module.fetch__all__ = fetched


def _without_science(module: Any) -> None:
    """transformers imports scikit-learn for one way of assisted generation alone, which takes longer than torch; and scipy
    for the losses of networks that detect objects."""
    module.is_sklearn_available = lambda: False
    has_scipy = getattr(module, "is_scipy_available", None)
    if has_scipy is None or not has_scipy():
        return
    module.is_scipy_available = lambda: False

    def scipy_when_called(_: Any) -> None:
        module.is_scipy_available = has_scipy
        for name, loss in list(sys.modules.items()):
            if name.startswith("transformers.loss.") and hasattr(loss, "is_scipy_available"):
                vars(loss).update(is_scipy_available=has_scipy)
                vars(loss).setdefault("linear_sum_assignment", _assigned)

    when_imported("transformers.loss.loss_utils", scipy_when_called)


def _assigned(*arguments: Any, **keywords: Any) -> Any:
    """`scipy.optimize.linear_sum_assignment`."""
    return importlib.import_module("scipy.optimize").linear_sum_assignment(*arguments, **keywords)
