"""The orders in which Inductor considers running the kernels, and the memory that it estimates for each.

Kernels and buffers are numbers here, as a network has thousands. Source: torch 2.13 `_inductor/memory.py`
(estimate_peak_memory, topological_sort_lpmf, topological_sort_bfs, topological_sort_dfs).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray


@dataclass(slots=True)
class KernelGraph:
    """Which buffers each kernel reads and makes, and so which kernels wait for which. A buffer that no kernel makes is
    passed in."""

    allocates: list[int]
    """For each kernel: the bytes that it allocates."""
    reads: list[list[int]]
    makes: list[list[int]]
    sizes: list[int]
    """For each buffer: its bytes."""
    leaves: list[bool]
    """For each buffer: whether it is a result, which the graph does not free."""
    readers: list[list[int]] = field(init=False)
    maker: list[int] = field(init=False)
    """For each buffer: the kernel that makes it; -1 if it is passed in."""
    users: NDArray[np.int64] = field(init=False)
    """The makers and readers of all buffers that are freed, concatenated; a buffer's begin where `starts` says."""
    starts: NDArray[np.int64] = field(init=False)
    released_bytes: NDArray[np.int64] = field(init=False)
    before: list[list[int]] = field(init=False)
    after: list[list[int]] = field(init=False)

    def __post_init__(self) -> None:
        self.readers = [[] for _ in self.sizes]
        self.maker = [-1] * len(self.sizes)
        for kernel, (reads, makes) in enumerate(zip(self.reads, self.makes, strict=True)):
            for buffer in reads:
                self.readers[buffer].append(kernel)
            for buffer in makes:
                self.maker[buffer] = kernel
        released = [buffer for buffer, leaves in enumerate(self.leaves) if not leaves]
        users = [[self.maker[buffer], *self.readers[buffer]] for buffer in released]
        self.users = np.array([user for each in users for user in each], dtype=np.int64)
        self.starts = np.cumsum([0, *map(len, users)], dtype=np.int64)[:-1]
        self.released_bytes = np.array([self.sizes[buffer] for buffer in released], dtype=np.int64)
        self.before = [sorted({self.maker[buffer] for buffer in reads} - {-1}) for reads in self.reads]
        self.after = [sorted({reader for buffer in makes for reader in self.readers[buffer]}) for makes in self.makes]

    @property
    def output_gradient_bytes(self) -> int:
        """Bytes of the buffers that exist before the first kernel."""
        return sum(size for size, maker in zip(self.sizes, self.maker, strict=True) if maker < 0)

    def levels(self, order: Sequence[int]) -> NDArray[np.int64]:
        """`estimate_peak_memory`: every kernel allocates what it makes and then frees what nothing reads any more.
        [num_kernels + 1]"""
        at = np.empty(len(order) + 1, dtype=np.int64)
        at[list(order)] = np.arange(len(order))
        at[-1] = 0  # for what is passed in
        change = np.zeros(len(order) + 2, dtype=np.int64)
        change[0] = self.output_gradient_bytes
        np.add.at(change, at[:-1], np.array(self.allocates, dtype=np.int64))
        if len(self.starts):
            np.subtract.at(change, np.maximum.reduceat(at[self.users], self.starts) + 1, self.released_bytes)
        return np.cumsum(change)[: len(order) + 1]

    def orders(self) -> tuple[list[int], ...]:
        """The orders: as written, least memory first, breadth first, depth first."""
        return list(range(len(self.reads))), self._least_memory_first(), self._breadth_first(), self._depth_first()

    def _least_memory_first(self) -> list[int]:
        """Among the kernels that can run, next is one that stays below the peak so far and leaves least memory."""
        allocates, sizes, readers = self.allocates, self.sizes, self.readers
        waits = [len(before) for before in self.before]
        left = [len(of_buffer) + leaves for of_buffer, leaves in zip(readers, self.leaves, strict=True)]
        freed = [sum(sizes[buffer] for buffer in reads if left[buffer] == 1) for reads in self.reads]
        for kernel, makes in enumerate(self.makes):
            freed[kernel] += sum(sizes[buffer] for buffer in makes if not left[buffer])
        ready = _Ready(allocates, freed)
        for kernel, waiting in enumerate(waits):
            if not waiting:
                ready.add(kernel)
        live = self.output_gradient_bytes
        most = max(live, sum(size for size, leaves in zip(sizes, self.leaves, strict=True) if leaves))
        order: list[int] = []
        while len(order) < len(waits):
            chosen = ready.take(most - live)
            order.append(chosen)
            live += allocates[chosen]
            most = max(most, live)
            live -= freed[chosen]
            for after in self.after[chosen]:
                waits[after] -= 1
                if not waits[after]:
                    ready.add(after)
            for buffer in self.reads[chosen]:
                left[buffer] -= 1
                if left[buffer] == 1:
                    for reader in readers[buffer]:
                        freed[reader] += sizes[buffer]
                        if not waits[reader]:
                            ready.add(reader)
        return order

    def _breadth_first(self) -> list[int]:
        """Next is the kernel whose predecessors ran earliest."""
        waits = [len(before) for before in self.before]
        heap: list[tuple[list[int], int]] = [([], kernel) for kernel, waiting in enumerate(waits) if not waiting]
        ran = [0] * len(waits)
        order: list[int] = []
        while heap:
            _, kernel = heapq.heappop(heap)
            ran[kernel] = len(order)
            order.append(kernel)
            for after in self.after[kernel]:
                waits[after] -= 1
                if not waits[after]:
                    heapq.heappush(heap, (sorted(ran[one] for one in self.before[after]), after))
        return order

    def _depth_first(self) -> list[int]:
        """Kernels that read and write least come first, each after those that it needs."""
        moved = [
            allocated + sum(self.sizes[buffer] for buffer in reads)
            for allocated, reads in zip(self.allocates, self.reads, strict=True)
        ]
        order = sorted(range(len(moved)), key=moved.__getitem__)
        return after_what_they_need(order, [sorted(before, key=moved.__getitem__) for before in self.before])


class _Ready:
    """Kernels that can run. What a kernel would free may grow until it runs, so only its newest entry counts."""

    def __init__(self, allocates: Sequence[int], freed: Sequence[int]) -> None:
        self._allocates = allocates
        self._freed = freed
        self._heaps: dict[int, list[tuple[int, int]]] = {size: [] for size in sorted(set(allocates))}
        """By bytes that they allocate: (bytes that they leave, kernel)."""
        self._taken: set[int] = set()

    def add(self, kernel: int) -> None:
        if kernel not in self._taken:
            size = self._allocates[kernel]
            heapq.heappush(self._heaps[size], (size - self._freed[kernel], kernel))

    def take(self, gap: int) -> int:
        """Take the next kernel: of those that allocate at most `gap` bytes, the one after which the fewest bytes are
        allocated. If none allocates so little, take one of those that allocate least."""
        best: tuple[int, int] | None = None
        for size, heap in self._heaps.items():
            while heap and (heap[0][1] in self._taken or heap[0][0] != size - self._freed[heap[0][1]]):
                heapq.heappop(heap)
            if heap and (best is None or (size <= gap and heap[0] < best)):
                best = heap[0]
            if best is not None and size > gap:
                break
        assert best is not None
        self._taken.add(best[1])
        return best[1]


def after_what_they_need(order: Iterable[int], needed: Sequence[Sequence[int]]) -> list[int]:
    """`order` with the kernels that each kernel needs, `needed[kernel]`, moved to before it."""
    found: dict[int, None] = {}
    for kernel in order:
        stack = [(kernel, iter(needed[kernel]))] if kernel not in found else []
        while stack:
            one, waiting = stack[-1]
            before = next((each for each in waiting if each not in found), None)
            if before is None:
                stack.pop()
                found[one] = None
            else:
                stack.append((before, iter(needed[before])))
    return list(found)
