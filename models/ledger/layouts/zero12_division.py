"""How ZeRO-1 and ZeRO-2 divide the trained tensors over ranks.

Source: DeepSpeed 0.19.8 `runtime/zero/stage_1_and_2.py` (`_round_robin_reorder`, `get_data_parallel_partitions`,
`average_tensor`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from peakcast.models.ledger.layouts.base import StoredTensor


class Slices(NamedTuple):
    """Parts of a tensor that lie in the partitions of `ranks` consecutive ranks from `first` on, `size` elements in
    each."""

    first: int
    size: int
    ranks: int


@dataclass(frozen=True, slots=True)
class PartitionShare:
    """Where a tensor lies. `owners`: the ranks in whose partitions it lies. `mine`: how many of its elements are in the
    partition of the rank in question."""

    owners: range
    slices: tuple[Slices, ...]
    mine: int


class Division:
    """The partitions of `ranks` ranks, seen from `rank`. Groups are divided without regard to tensors, each into partitions
    of the number of elements given with it. `round_robin`: a group's tensors are first dealt out to the ranks one by one.
    """

    def __init__(
        self, groups: Iterable[tuple[Sequence[StoredTensor], int]], *, ranks: int, rank: int, round_robin: bool
    ) -> None:
        self.rank = rank
        self._shares: dict[StoredTensor, PartitionShare] = {}
        for group, size in groups:
            offset = 0
            for tensor in _dealt_out(group, ranks) if round_robin else group:
                self._shares[tensor] = _share(offset, tensor.numel, size, rank)
                offset += tensor.numel

    def of(self, tensor: StoredTensor) -> PartitionShare:
        """Where a tensor lies."""
        return self._shares[tensor]

    def is_mine(self, tensor: StoredTensor) -> bool:
        """Whether part of the tensor lies in this rank's partition."""
        return self.rank in self._shares[tensor].owners

    def my_tensors(self) -> list[StoredTensor]:
        """The tensors of which a part lies in this rank's partition."""
        return [tensor for tensor in self._shares if self.is_mine(tensor)]

    def most_of_mine(self) -> int:
        """The most elements of one tensor in this rank's partition."""
        return max(share.mine for share in self._shares.values())


def _dealt_out(group: Sequence[StoredTensor], ranks: int) -> list[StoredTensor]:
    """The tensors of a group, those of the first rank first."""
    return [tensor for rank in range(min(ranks, len(group))) for tensor in group[rank::ranks]]


def _share(begins: int, numel: int, size: int, rank: int) -> PartitionShare:
    """Where a tensor lies that begins at element `begins` of a group whose partitions have `size` elements."""
    ends, first = begins + numel, begins // size
    last = (ends - 1) // size
    slices = [Slices(first, numel, 1)]
    if first != last:
        head, tail = Slices(first, (first + 1) * size - begins, 1), Slices(last, ends - last * size, 1)
        slices = [head, Slices(first + 1, size, last - first - 1), tail]
    mine = max(0, min(ends, (rank + 1) * size) - max(begins, rank * size))
    return PartitionShare(range(first, last + 1), tuple(slices), mine)
