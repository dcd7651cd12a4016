"""When weights get their gradients, and what waits for that, where backward is split in two.

The inputs' half retains the graph; the weights' half takes them in the order of `parameters()`, each as a graph of its own.
Source: torch 2.13 `distributed/pipelining/_backward.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from peakcast.models.analytical.template import INPUTS_DONE

PARTS = ("self_attn", "mlp")
"""Of a layer, in the order of `parameters()`; its own norms come after them."""


def weight_turns(names: Mapping[int, str]) -> dict[int, int]:
    """The turns of operations with a weight, by their index in forward; `names` are theirs. A part's norms are last."""

    def place(index: int) -> tuple[int, bool]:
        part, _, rest = names[index].partition(".")
        return (PARTS.index(part) if part in PARTS else len(PARTS)), part in PARTS and "norm" in rest

    return {index: turn for turn, index in enumerate(sorted(names, key=place))}


def waits_until(savers: Collection[int], turns: Mapping[int, int]) -> tuple[int | None, int]:
    """`Waiting.until` and `until_on_top` of what the operations `savers` keep: one with a weight lets go when it has run,
    another when no operation above it is left whose weight is still to come."""
    held = [
        turns[saver] if saver in turns else max((turn for one, turn in turns.items() if one > saver), default=INPUTS_DONE)
        for saver in savers
    ]
    return (max(held) if set(savers) <= turns.keys() else None), max(held)
