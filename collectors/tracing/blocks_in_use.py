"""On which stream each block of memory was made, and which freed ones the allocator may not hand out yet.

A block that another stream than its own uses (`record_stream`) stays out of the cache after its tensor is gone, until the
CPU knows that this stream is done with it (c10/cuda/CUDACachingAllocator.cpp `free`, `process_events`). When that is
depends on how far the CPU is ahead of the GPU. It is taken to be as far ahead as it can be, as in a run whose kernels take
longer than their launches: it knows that what it has waited for is done, and what went `MOST_LAUNCHES_AHEAD` kernels ago.
"""

from __future__ import annotations

import bisect
from collections import deque

import torch

from peakcast.collectors.tracing import fake_streams

MOST_LAUNCHES_AHEAD = 1000
"""Kernels that are sent and have not begun, at most: sending another one waits then
(https://stackoverflow.com/questions/53970187)."""


class BlocksInUse:
    """Blocks by their numbers."""

    def __init__(self) -> None:
        self._streams: dict[int, int] = {}
        """Of the blocks that were not made on the stream that computes, which is 0."""
        self._used: set[int] = set()
        self._waiting: deque[tuple[int, int, int]] = deque()
        """Number, the operation at which the tensor went, and how many kernels had been sent by then."""
        self._reusable: dict[int, int] = {}
        self._launches = 0
        self._nodes: list[int] = [0]
        self._nodes_on: list[int] = [0]
        """From which number on autograd's nodes were made on which stream."""

    def switched(self, stream: int) -> None:
        """From now on blocks are made on `stream`."""
        self._nodes.append(torch._C._autograd._get_sequence_nr())
        self._nodes_on.append(stream)

    def made(self, number: int, *, backward: bool) -> None:
        """A block was made, in backward or not."""
        if stream := self._stream(backward=backward):
            self._streams[number] = stream

    def _stream(self, *, backward: bool) -> int:
        """The stream of what is made now: backward runs on the streams on which its forward did (torch
        `csrc/autograd/engine.cpp`, `evaluate_function`) unless it says otherwise."""
        current: int = fake_streams.current_stream().stream_id
        if current or not backward or len(self._nodes) == 1:
            return current
        node = torch._C._current_autograd_node()
        return self._nodes_on[bisect.bisect_right(self._nodes, node._sequence_nr()) - 1] if node is not None else current

    def stream(self, number: int) -> int:
        """The stream on which it was made."""
        return self._streams.get(number, 0)

    def use(self, number: int, stream: int) -> None:
        """`stream` uses it (`record_stream`)."""
        if self.stream(number) != stream:
            self._used.add(number)

    def gone(self, number: int, now: int) -> None:
        """Its tensor is gone from the operation `now` on."""
        if number in self._used:
            self._waiting.append((number, now, self._launches))

    def launch(self, now: int) -> None:
        """A kernel is sent, which waits where too many are on their way."""
        self._launches += 1
        while self._waiting and self._waiting[0][2] + MOST_LAUNCHES_AHEAD <= self._launches:
            self._reusable[self._waiting.popleft()[0]] = now

    def done(self, until: int, now: int) -> None:
        """The CPU knows that the GPU has done all that was asked for before the operation `until`."""
        while self._waiting and self._waiting[0][1] <= until:
            self._reusable[self._waiting.popleft()[0]] = now

    def reusable(self) -> dict[int, int | None]:
        """From which operation on the blocks that waited are free again; None: they still wait."""
        return {**self._reusable, **{number: None for number, _, _ in self._waiting}}
