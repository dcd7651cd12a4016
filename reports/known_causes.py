"""Known causes of errors in predictions: `known_causes.toml`, with a cause for each kind of row.

A cause names a tensor that the ledger lacks or a fact that the source of the row does not give, and how that is known. It
changes no figure: the errors of rows remain.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files

from peakcast.models.evaluation.metrics import Scored


@dataclass(frozen=True, slots=True, kw_only=True)
class KnownCause:
    """A cause of errors, and which rows have them."""

    name: str
    quantity: str
    error: str
    """`under` or `over`: the direction of these rows' errors."""
    missing: str
    """The missing tensor or fact, in a sentence."""
    evidence: str
    """How that is known."""
    case: str = ""
    """A regular expression that is searched in the row's case."""
    layout: str = ""
    """A regular expression that matches the row's layout."""
    gpu: str = ""
    """The GPU type; "" for any."""

    def explains(self, cell: Scored) -> bool:
        """Whether `cell` is such a row with an error in that direction."""
        return (
            cell.quantity == self.quantity
            and (cell.error < 0) == (self.error == "under")
            and self.gpu in ("", cell.gpu)
            and re.search(self.case, cell.case) is not None
            and (not self.layout or re.fullmatch(self.layout, cell.layout) is not None)
        )


@cache
def known_causes() -> tuple[KnownCause, ...]:
    """All causes in the order of the file; the first that explains a row is used."""
    content = files("peakcast.reports").joinpath("known_causes.toml").read_text(encoding="utf-8")
    return tuple(KnownCause(**entry) for entry in tomllib.loads(content)["cause"])


def cause_of(cell: Scored, known: Sequence[KnownCause] | None = None) -> KnownCause | None:
    """The cause that explains the error of `cell`; None if it is not known."""
    return next((cause for cause in (known_causes() if known is None else known) if cause.explains(cell)), None)
