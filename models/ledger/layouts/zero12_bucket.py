"""The bucket in which ZeRO-1 and ZeRO-2 collect gradients to reduce them.

Source: DeepSpeed 0.19.8 `runtime/zero/stage_1_and_2.py` (`reduce_independent_p_g_buckets_and_remove_grads`,
`average_tensor`, `allreduce_and_scatter`).
"""

from __future__ import annotations

from dataclasses import dataclass

from peakcast.models.ledger.layouts.base import StoredTensor
from peakcast.models.ledger.layouts.zero12_division import Division, Slices


@dataclass(frozen=True, slots=True)
class Arrival:
    """A gradient that waits in the bucket or, if it is larger than the bucket, outside it. `born`: the instant it was
    made."""

    tensor: StoredTensor
    born: int


class Zero12Bucket:
    """Gradients that wait to be reduced. `size`: the elements that it has room for."""

    def __init__(self, size: int, division: Division) -> None:
        self.size, self.division = size, division
        self.content: list[Arrival] = []

    def overflows_with(self, tensor: StoredTensor) -> bool:
        """Whether the bucket has to be reduced before the tensor's gradient is added."""
        return bool(self.content) and sum(one.tensor.numel for one in self.content) + tensor.numel > self.size

    def has_room_for(self, tensor: StoredTensor) -> bool:
        """Whether the tensor's gradient fits into the bucket."""
        return tensor.numel <= self.size

    def add(self, tensor: StoredTensor, born: int) -> None:
        """Add a gradient that was made at instant `born`."""
        self.content.append(Arrival(tensor, born))

    def empty(self) -> list[Arrival]:
        """Take all gradients out."""
        content, self.content = self.content, []
        return content

    def copied_elements(self) -> int:
        """Elements of the largest copy that reducing makes. Parts of different ranks are sent together until they fill a
        bucket; a single part is sent from where it is."""
        slices = self._slices()
        largest = together = number = 0
        left = sum(one.ranks for one in slices)
        for _, size, count in slices:
            while count:
                taken = min(count, (self.size - together) // size + 1)
                together, number, count, left = together + taken * size, number + taken, count - taken, left - taken
                if together > self.size or not left:
                    largest = max(largest, together if number > 1 else 0)
                    together = number = 0
        return largest

    def _slices(self) -> list[Slices]:
        """The parts of all gradients by rank; consecutive ones of a rank are one."""
        slices: list[Slices] = []
        for one in (part for arrival in self.content for part in self.division.of(arrival.tensor).slices):
            if slices and slices[-1].ranks == one.ranks == 1 and slices[-1].first == one.first:
                one = one._replace(size=one.size + slices.pop().size)
            slices.append(one)
        return slices
