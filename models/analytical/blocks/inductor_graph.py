"""A compiled graph as Inductor runs it: which operations are one kernel, in which order kernels run, which buffer takes the
place of which, and so the life of each.

Source: torch 2.13 `_inductor/scheduler.py` (topological_sort_schedule, decide_inplace_update) and `_inductor/memory.py`
(reorder_for_peak_memory and its three orders).
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from peakcast.models.analytical.blocks.inductor_kernels import Kernel, Op, fused


@dataclass(frozen=True, slots=True)
class Life:
    """A buffer that is allocated in the graph: the instants of its kernels, the last one exclusive."""

    name: str
    num_bytes: int
    born: int
    dies: int


class _Pool:
    """Buffers that nobody needs any more and that one of the same size and dtype may take, so that they are not released
    after all: at once, or where Inductor's estimate of the peak is not exceeded meanwhile (torch 2.13
    `_inductor/codegen/wrapper.py` AllocateLine). `levels`: that estimate, of every kernel."""

    def __init__(self, levels: Sequence[int]) -> None:
        self.levels = np.array(levels, dtype=np.int64)
        self.most = max(levels, default=0)
        self.free: dict[tuple[int, bool], list[tuple[str, int]]] = {}

    def give(self, name: str, size: int, wide: bool, instant: int) -> None:
        """`name` was last read at `instant`."""
        self.free.setdefault((size, wide), []).append((name, instant))

    def take(self, size: int, wide: bool, instant: int) -> str | None:
        """The buffer whose memory one of `size`, made at `instant`, takes."""
        if not size or not self.free.get((size, wide)):
            return None
        name, since = self.free[size, wide][-1]
        between = self.levels[since + 1 : instant]
        if len(between) and size + between.max() > self.most:
            return None
        between += size
        self.free[size, wide].pop()
        return name


class InductorGraph:
    """`ops` in the order of the graph. `inputs`: what is handed in and dies with its last reader, with its bytes; what is
    read and neither made nor handed in so is owned by somebody else. Names in `results` leave the graph."""

    def __init__(self, ops: Sequence[Op], inputs: Mapping[str, int], results: Iterable[str] = ()) -> None:
        self.inputs = dict(inputs)
        self.results = {name for op in ops if op.is_result for name in op.writes} | set(results)
        used = self.results.union(*(op.reads for op in ops))
        self._unused = {op.name: {name: op.writes[name] for name in op.writes.keys() - used} for op in ops if op.parts}
        ops = [replace(op, writes={k: v for k, v in op.writes.items() if k in used}) if op.parts else op for op in ops]
        self.kernels = self._in_graph_order(fused(ops))
        for index, kernel in enumerate(self.kernels):
            kernel.index = index
        self._maker = {name: kernel for kernel in self.kernels for name in kernel.makes}
        self._size = self.inputs | {name: size for kernel in self.kernels for name, size in kernel.makes.items()}
        self._readers: dict[str, list[Kernel]] = {}
        for kernel in self.kernels:
            for name in sorted(kernel.reads):
                self._readers.setdefault(name, []).append(kernel)
        self.order = min(self._orders(), key=self._peak)  # the first of equal ones
        self._at = {id(kernel): instant for instant, kernel in enumerate(self.order)}

    def size_of(self, name: str) -> int:
        """Bytes of the buffer `name`."""
        return self._size[name]

    def makes(self, name: str) -> bool:
        """Whether `name` is a buffer of this graph."""
        return name in self._maker

    def peaks(self) -> list[int]:
        """Bytes at the peak in each of Inductor's orders, as it estimates them."""
        return [self._peak(order) for order in self._orders()]

    def labels(self) -> list[str]:
        """The kernels' names, in the order in which they run."""
        return ["+".join(op.name for op in kernel.ops) for kernel in self.order]

    def last_read(self, name: str) -> int:
        """The instant after the last at which `name` is read, 0 when it is not."""
        return max((self._at[id(kernel)] + 1 for kernel in self._readers.get(name, ())), default=0)

    def lives(self) -> tuple[list[Life], dict[str, int]]:
        """What is allocated, and the instant at which each of `inputs` is gone. Of several that have the same memory one
        after the other, each is there until the next one is."""
        ends = {name: self._ends(name) for name in self._size}
        released: dict[int, list[str]] = {}
        for name, end in ends.items():
            if name not in self.inputs and name not in self.results:
                released.setdefault(end - 1, []).append(name)
        replaced, inside = set[str](), self._inside()
        written = ((name, op.wide) for kernel in self.kernels for op in kernel.ops for name in op.writes)
        wide = {name for name, of_op in written if name.endswith(".wide") or (of_op and not name.endswith(".narrow"))}
        pool = _Pool(self._levels(self.order))
        for instant, kernel in enumerate(self.order):
            for op in kernel.ops:
                for nth, (result, size) in enumerate(op.writes.items()):
                    if result in inside:
                        continue
                    wanted = [name for name in op.replaces if not nth and name not in replaced]
                    free = (name for name in wanted if self._is_free(op, kernel, instant, result, name))
                    if (taken := next(free, None)) is not None:
                        replaced.add(taken)
                    elif not (op.parts or kernel.part_of):
                        taken = pool.take(size, result in wide, instant)
                    if taken is not None:
                        ends[taken] = instant
            for name in released.get(instant, ()):
                if name not in replaced and name not in inside:
                    pool.give(name, self._size[name], name in wide, instant)
        lives = [
            Life(name, size, self._at[id(self._maker.get(kernel.part_of, kernel))], ends[name])
            for kernel in self.order
            for name, size in kernel.makes.items()
            if size and name not in inside
        ]
        for instant, kernel in enumerate(self.order):  # what a call gives and nobody takes
            unused = self._unused.get(kernel.ops[0].name, {})
            lives += [Life(name, size, instant, instant + 1) for name, size in unused.items()]
        return lives, {name: ends[name] for name in self.inputs}

    def _inside(self) -> set[str]:
        """What only the kernel itself reads that makes it: no buffer, though Inductor's estimates count it as one."""
        read = {name for kernel in self.kernels for op in kernel.ops for name in op.reads if name in kernel.makes}
        return {name for name in read if not self._readers.get(name) and name not in self.results}

    def _ends(self, name: str) -> int:
        if name in self.results:
            return len(self.order)
        return self.last_read(name) or (self._at[id(self._maker[name])] + 1 if name in self._maker else 0)

    def _is_free(self, op: Op, kernel: Kernel, instant: int, result: str, name: str) -> bool:
        """Whether `name` is as large as `result` and nobody but `op` still needs it, later or in its own kernel."""
        if name in self.results or self._size.get(name) != self._size[result]:
            return False
        others = (other for other in kernel.ops if other is not op and not set(other.writes) & set(op.reads))
        return self.last_read(name) == instant + 1 and all(name not in other.reads for other in others)

    # -- the order ----------------------------------------------------------------------------------------------------

    def _orders(self) -> tuple[list[Kernel], ...]:
        return self.kernels, self._least_memory_first(), self._breadth_first(), self._depth_first()

    def _in_graph_order(self, kernels: list[Kernel]) -> list[Kernel]:
        """`topological_sort_schedule`: as written, each after what it needs."""
        maker = {name: kernel for kernel in kernels for name in kernel.makes}
        place = {id(kernel): index for index, kernel in enumerate(kernels)}

        def needed(kernel: Kernel) -> list[Kernel]:
            makers = [maker[name] for name in sorted(kernel.reads) if name in maker]
            return sorted(makers, key=lambda one: place[id(one)])

        return _after_what_they_need(kernels, needed)

    def _before(self, kernel: Kernel) -> list[Kernel]:
        found = {id(self._maker[name]): self._maker[name] for name in kernel.reads if name in self._maker}
        return sorted(found.values(), key=lambda one: one.index)

    def _after(self, kernel: Kernel) -> list[Kernel]:
        found = {id(reader): reader for name in kernel.makes for reader in self._readers.get(name, ())}
        return sorted(found.values(), key=lambda one: one.index)

    def _peak(self, order: Sequence[Kernel]) -> int:
        return max(self._levels(order), default=0)

    def _levels(self, order: Sequence[Kernel]) -> list[int]:
        """`estimate_peak_memory`: every kernel allocates what it makes and then releases what nobody reads any more."""
        at = {id(kernel): step for step, kernel in enumerate(order)}
        change = [0] * (len(order) + 1)
        change[0] = sum(self.inputs.values())
        for kernel in order:
            change[at[id(kernel)]] += kernel.allocates
        for name, size in self._size.items():
            if name not in self.results:
                readers = [at[id(reader)] for reader in self._readers.get(name, ())]
                readers += [at[id(self._maker[name])]] if name in self._maker else []
                change[max(readers, default=0) + 1] -= size
        return list(itertools.accumulate(change))

    def _least_memory_first(self) -> list[Kernel]:
        """`topological_sort_lpmf`: of the kernels that can run, one that stays below the peak so far and leaves least."""
        waits = {id(kernel): len(self._before(kernel)) for kernel in self.kernels}
        left = {name: len(self._readers.get(name, ())) + (name in self.results) for name in self._size}
        freed = {id(kernel): 0 for kernel in self.kernels}
        for kernel in self.kernels:
            freed[id(kernel)] += sum(self._size[name] for name in kernel.reads if left.get(name) == 1)
            freed[id(kernel)] += sum(size for name, size in kernel.makes.items() if left[name] == 0)
        live = sum(self.inputs.values())
        gap = max(live, sum(self._size[name] for name in self.results if name in self._size)) - live
        most = live + gap
        ready = [kernel for kernel in self.kernels if not waits[id(kernel)]]
        order: list[Kernel] = []
        while ready:
            ranks = [(k.allocates if k.allocates > gap else 0, k.allocates - freed[id(k)], k.index) for k in ready]
            chosen = ready[ranks.index(min(ranks))]
            ready.remove(chosen)
            order.append(chosen)
            live += chosen.allocates
            most = max(most, live)
            live -= freed[id(chosen)]
            gap = most - live
            for after in self._after(chosen):
                waits[id(after)] -= 1
                if not waits[id(after)]:
                    ready.append(after)
            for name in chosen.reads & self._size.keys():
                left[name] -= 1
                if left[name] == 1:
                    for reader in self._readers[name]:
                        freed[id(reader)] += self._size[name]
        return order

    def _breadth_first(self) -> list[Kernel]:
        """`topological_sort_bfs`: next is the kernel whose predecessors ran earliest."""
        waits = {id(kernel): len(self._before(kernel)) for kernel in self.kernels}
        heap: list[tuple[list[int], int, Kernel]] = []
        for kernel in self.kernels:
            if not waits[id(kernel)]:
                heapq.heappush(heap, ([], kernel.index, kernel))
        ran: dict[int, int] = {}
        order: list[Kernel] = []
        while heap:
            _, _, kernel = heapq.heappop(heap)
            ran[id(kernel)] = len(order)
            order.append(kernel)
            for after in self._after(kernel):
                waits[id(after)] -= 1
                if not waits[id(after)]:
                    heapq.heappush(heap, (sorted(ran[id(one)] for one in self._before(after)), after.index, after))
        return order

    def _depth_first(self) -> list[Kernel]:
        """`topological_sort_dfs`: those that read and write least first, each after what it needs."""
        size = {
            id(kernel): kernel.allocates + sum(self._size[name] for name in kernel.reads & self._size.keys())
            for kernel in self.kernels
        }
        def needed(kernel: Kernel) -> list[Kernel]:
            return sorted(self._before(kernel), key=lambda one: (size[id(one)], one.index))

        return _after_what_they_need(sorted(self.kernels, key=lambda one: (size[id(one)], one.index)), needed)


def _after_what_they_need(
    kernels: Iterable[Kernel], needed: Callable[[Kernel], Sequence[Kernel]]
) -> list[Kernel]:
    """`kernels` in their order, but each after what it needs, in the order that `needed` gives."""
    order: dict[int, Kernel] = {}
    for kernel in kernels:
        stack = [(kernel, iter(needed(kernel)))] if id(kernel) not in order else []
        while stack:
            one, waiting = stack[-1]
            before = next((each for each in waiting if id(each) not in order), None)
            if before is None:
                stack.pop()
                order[id(one)] = one
            else:
                stack.append((before, iter(needed(before))))
    return list(order.values())
