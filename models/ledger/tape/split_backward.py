"""When weights get their gradients in a backward that is split in two, and which tensors wait for that.

The first half computes the inputs' gradients and retains the graph. The second half computes the weights' gradients in the
order of `parameters()`, each as a graph of its own.

Source: torch 2.13 `distributed/pipelining/_backward.py`.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from peakcast.models.ledger.tape.operations import Operation
from peakcast.models.ledger.tape.template import INPUTS_DONE

PARTS = ("self_attn", "mlp")
"""The modules of a layer in the order of `parameters()`; the layer's own norms come after them."""


def weight_turns(operations: Sequence[Operation], norms: Collection[int]) -> dict[int, int]:
    """The position of each operation that has a weight in the order of the second half, by its index in forward. Within a
    module of `PARTS`, the operations of `norms` (indices) come last."""
    names = {index: one.name for index, one in enumerate(operations) if one.weight_gradients}

    def place(index: int) -> tuple[int, bool]:
        part = names[index].partition(".")[0]
        return (PARTS.index(part) if part in PARTS else len(PARTS)), part in PARTS and index in norms

    return {index: turn for turn, index in enumerate(sorted(names, key=place))}


def waits_until(savers: Collection[int], turns: Mapping[int, int]) -> tuple[int | None, int]:
    """`Waiting.until` and `Waiting.until_on_top` of a tensor that the operations `savers` save. An operation with a weight
    frees its saved tensors when its turn in the second half is over. One without a weight frees them when the weights of
    all operations after it in forward have their gradients."""
    held = [
        turns[saver] if saver in turns else max((turn for one, turn in turns.items() if one > saver), default=INPUTS_DONE)
        for saver in savers
    ]
    return (max(held) if set(savers) <= turns.keys() else None), max(held)
