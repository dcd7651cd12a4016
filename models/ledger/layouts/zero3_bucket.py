"""The bucket in which stage 3 collects gradients and reduces them.

Source: DeepSpeed 0.19.8 `runtime/zero/stage3.py` (`__reduce_and_partition_ipg_grads`, `__avg_scatter_grads`,
`partition_grads`) and `comm/coalesced_collectives.py` (`reduce_scatter_coalesced`).
"""

from __future__ import annotations

from dataclasses import dataclass

from peakcast.models.ledger.layouts.zero3_instants import Reduction


@dataclass(frozen=True, slots=True)
class Gradient:
    """A gradient that is ready. `elements`: as the allocator rounds it. `born`: the instant at which it was made."""

    elements: int
    born: int


class Zero3Bucket:
    """Gradients that wait to be reduced over `ranks` ranks. `size`: the elements that it has room for. `copies`: whether
    they are copied into it; otherwise, and if one is larger than the bucket, they wait where backward made them.
    `made_bytes`, `sent_bytes`: of an element as backward makes it, and as it is sent."""

    def __init__(self, *, ranks: int, size: int, copies: bool, made_bytes: int, sent_bytes: int) -> None:
        self.ranks, self.size, self.copies = ranks, size, copies
        self.made_bytes, self.sent_bytes = made_bytes, sent_bytes
        self.content: list[Gradient] = []
        self._filled = 0
        """Elements of `content`."""
        self._at = -1
        self._taken_bytes = 0
        """Bytes of gradients that have been copied into the bucket at instant `_at`, or reduced in it, one after the
        other."""

    def begin_instant(self, now: int) -> None:
        """Gradients arrive at instant `now`."""
        if self._at != now:
            self._at, self._taken_bytes = now, 0

    def overflows_with(self, gradient: Gradient) -> bool:
        """Whether the bucket has to be reduced before a gradient is added."""
        return bool(self.content) and self._filled + gradient.elements > self.size

    def add(self, gradient: Gradient) -> bool:
        """Add a gradient, at the instant that has begun. Returns whether it has been copied."""
        self.content.append(gradient)
        self._filled += gradient.elements
        if copied := self.has_room_for(gradient):
            self._taken_bytes += gradient.elements * self.made_bytes
        return copied

    def has_room_for(self, gradient: Gradient) -> bool:
        """Whether a gradient waits in the bucket."""
        return self.copies and gradient.elements <= self.size

    def outside(self) -> list[Gradient]:
        """The gradients that wait where backward made them."""
        return [one for one in self.content if not self.has_room_for(one)]

    def parts(self) -> list[int]:
        """Elements of this rank's part of each gradient."""
        return [-(-one.elements // self.ranks) for one in self.content]

    def reduction(self, now: int, parts_bytes: int, gone_bytes: int) -> Reduction:
        """The bytes that reducing allocates after the operation at `now`: a joined copy of the gradients, unless there is
        only one, of the dtype that is sent and without padding. `parts_bytes`: bytes of the tensors that are then made of
        this rank's part. `gone_bytes`: bytes that the operation has freed."""
        sent = sum(self.parts()) * self.ranks
        alone = len(self.content) == 1 and self.made_bytes == self.sent_bytes and sent == self.content[0].elements
        joined = 0 if alone else sent * self.sent_bytes
        return Reduction(joined, parts_bytes, gone_bytes + (self._taken_bytes if self._at == now else 0))

    def empty(self, now: int) -> None:
        """Its gradients have been reduced at `now`."""
        if self._at == now:
            self._taken_bytes += sum(one.elements for one in self.outside()) * self.made_bytes
        self.content.clear()
        self._filled = 0
