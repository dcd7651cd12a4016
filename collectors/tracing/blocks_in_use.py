"""On which stream each block of memory was allocated, and which freed blocks the allocator may not reuse yet.

If another stream than a block's own uses it (`record_stream`), the block stays out of the cache after its tensor is freed,
until the CPU knows that this stream has finished with it (c10/cuda/CUDACachingAllocator.cpp `free`, `process_events`). The
time of that depends on how far the CPU is ahead of the GPU. It is assumed to be as far ahead as possible, as in a run whose
kernels take longer than their launches: it knows that what it has waited for is finished, and what was launched
`MOST_LAUNCHES_AHEAD` kernels ago.
"""

from __future__ import annotations

import bisect
from collections import deque

import torch

from peakcast.collectors.tracing import fake_streams

MOST_LAUNCHES_AHEAD = 1000
"""The most kernels that are launched and have not begun; launching another one blocks
(https://stackoverflow.com/questions/53970187)."""


class BlocksInUse:
    """Blocks by their numbers."""

    def __init__(self) -> None:
        self._streams: dict[int, int] = {}
        """Block -> stream, for blocks that were not allocated on the computing stream, which is 0."""
        self._used: set[int] = set()
        self._waiting: deque[tuple[int, int, int]] = deque()
        """(block, operation at which its tensor was freed, number of kernels launched by then)."""
        self._reusable: dict[int, int] = {}
        self._launched: deque[int] = deque(maxlen=MOST_LAUNCHES_AHEAD)
        """The operations that launched the last kernels."""
        self._launches = 0
        self._waited = 0
        """The operation up to which the CPU has waited."""
        self._nodes: list[int] = [0]
        self._nodes_on: list[int] = [0]
        """For each change of stream, the number of autograd's first node after it."""

    def switched(self, stream: int) -> None:
        """From now on blocks are allocated on `stream`."""
        self._nodes.append(torch._C._autograd._get_sequence_nr())
        self._nodes_on.append(stream)

    def made(self, number: int, *, backward: bool) -> None:
        """A block was allocated, in backward or not."""
        self._streams.pop(number, None)
        if stream := self._stream(backward=backward):
            self._streams[number] = stream

    def _stream(self, *, backward: bool) -> int:
        """The stream of what is allocated now. Backward runs on the streams on which its forward ran (torch
        `csrc/autograd/engine.cpp`, `evaluate_function`) unless it changes the stream itself."""
        current: int = fake_streams.current_stream().stream_id
        if current or not backward or len(self._nodes) == 1:
            return current
        node = torch._C._current_autograd_node()
        return self._nodes_on[bisect.bisect_right(self._nodes, node._sequence_nr()) - 1] if node is not None else current

    def stream(self, number: int) -> int:
        """The stream on which block `number` was allocated."""
        return self._streams.get(number, 0)

    def use(self, number: int, stream: int) -> None:
        """`stream` uses block `number` (`record_stream`)."""
        if self.stream(number) != stream:
            self._used.add(number)

    def gone(self, number: int, now: int) -> None:
        """The block's tensor is freed at the operation `now`."""
        if number in self._used:
            self._waiting.append((number, now, self._launches))

    def launch(self, now: int) -> None:
        """A kernel is launched; the launch blocks if too many are waiting."""
        self._launches += 1
        self._launched.append(now - 1)
        while self._waiting and self._waiting[0][2] + MOST_LAUNCHES_AHEAD <= self._launches:
            self._reusable[self._waiting.popleft()[0]] = now

    def done(self, until: int, now: int) -> None:
        """The CPU knows that the GPU has finished everything launched before the operation `until`."""
        self._waited = max(self._waited, until)
        while self._waiting and self._waiting[0][1] <= until:
            self._reusable[self._waiting.popleft()[0]] = now

    @property
    def finished(self) -> int:
        """The operation up to which the GPU has finished everything: what the CPU has waited for, or what was launched
        `MOST_LAUNCHES_AHEAD` kernels ago."""
        return max(self._waited, self._launched[0] if len(self._launched) == MOST_LAUNCHES_AHEAD else 0)

    def reusable(self) -> dict[int, int | None]:
        """Block -> the operation from which it can be reused, for blocks that waited; None: it still waits."""
        return {**self._reusable, **{number: None for number, _, _ in self._waiting}}
