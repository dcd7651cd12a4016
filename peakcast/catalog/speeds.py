"""How fast GPU types compute and send, by their data sheets (`speeds.toml`): for the order of a search's plans, and for
whether something takes longer than something else."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

UTILISATION = 0.5
"""Fraction of the data sheet's operations per second that a step reaches while it computes. A judgement: whole runs reach
0.38 to 0.43, including what they lose to communication and idle time (Llama Team 2024, arXiv:2407.21783, table 4)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Of one GPU. `speeds.toml` says what each number is."""

    bf16_tflops: float
    link_gb_per_s: float
    network_gb_per_s: float
    source: str

    @property
    def operations_per_second(self) -> float:
        """Floating-point operations in bfloat16 per second that a training step reaches while it computes."""
        return self.bf16_tflops * 1e12 * UTILISATION


def has_data_sheet(gpu: str) -> bool:
    """Whether the speed of the GPU type called `gpu` is known."""
    return gpu in _speeds()


def speed(gpu: str) -> Speed:
    """The speed of the GPU type called `gpu` in the catalog. If there is no data sheet of it (`has_data_sheet`), the speed
    of an H100: its operations and links have about the usual ratio, so shares of a step are right, seconds are not."""
    return _speeds().get(gpu) or _speeds()["H100-80GB"]


@cache
def _speeds() -> dict[str, Speed]:
    table: dict[str, dict[str, Any]] = tomllib.loads(files("peakcast.catalog").joinpath("speeds.toml").read_text("utf-8"))
    found: dict[str, Speed] = {}
    for name, row in table.items():
        same = row.pop("same", ())
        found |= dict.fromkeys((name, *same), Speed(**row))
    return found
