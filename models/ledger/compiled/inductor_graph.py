"""A compiled graph as Inductor runs it: which operations are one kernel, in which order kernels run, which buffer reuses
the memory of which, and so the lifetime of each.

Source: torch 2.13 `_inductor/scheduler.py` (topological_sort_schedule, decide_inplace_update) and `_inductor/memory.py`
(reorder_for_peak_memory).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from peakcast.models.ledger.compiled.inductor_kernels import Kernel, Op, fused
from peakcast.models.ledger.compiled.inductor_orders import KernelGraph, after_what_they_need


@dataclass(frozen=True, slots=True)
class Life:
    """A buffer that the graph allocates: it lives from kernel `born` until before kernel `dies`."""

    name: str
    num_bytes: int
    born: int
    dies: int


class _Pool:
    """Buffers that nothing needs any more. Instead of freeing one, Inductor gives its memory to a new buffer of the same
    size and dtype: to the next kernel's, or to a later one's if keeping it until then does not raise the estimated peak
    (torch 2.13 `_inductor/codegen/wrapper.py` AllocateLine). `levels`: the estimated bytes at every kernel."""

    def __init__(self, levels: NDArray[np.int64]) -> None:
        self.levels = levels.copy()
        self.most = int(levels.max())
        self.free: dict[tuple[int, str], list[tuple[str, int]]] = {}

    def give(self, name: str, size: int, dtype: str, instant: int) -> None:
        """Add `name`, which was last read at `instant`."""
        self.free.setdefault((size, dtype), []).append((name, instant))

    def take(self, size: int, dtype: str, instant: int) -> str | None:
        """The buffer whose memory a new one of `size` bytes at `instant` reuses; None if there is none."""
        if not size or not self.free.get((size, dtype)):
            return None
        name, since = self.free[size, dtype][-1]
        between = self.levels[since + 1 : instant]
        if len(between) and size + between.max() > self.most:
            return None
        between += size
        self.free[size, dtype].pop()
        return name


class InductorGraph:
    """`ops` in the order of the graph. `inputs`: bytes of the tensors that are passed in and freed after their last reader.
    A name that is read but neither made nor in `inputs` is owned by other code. `results`: names that leave the graph."""

    def __init__(self, ops: Sequence[Op], inputs: Mapping[str, int], results: Iterable[str] = ()) -> None:
        self.inputs = dict(inputs)
        self.parameters = {name: op.parameter for op in ops if op.parameter for name in op.writes}
        """By name of a parameter's gradient, the parameter's name in its module."""
        self.results = {name for op in ops if op.is_result for name in op.writes} | set(results)
        used = self.results.union(*(op.reads for op in ops))
        self._unused = {one.name: {k: v for k, v in one.writes.items() if k not in used} for one in ops if one.parts}
        ops = [replace(op, writes={k: v for k, v in op.writes.items() if k in used}) if op.parts else op for op in ops]
        self.kernels = _in_graph_order(fused(ops))
        self._size = self.inputs | {name: size for kernel in self.kernels for name, size in kernel.makes.items()}
        self._number = {name: number for number, name in enumerate(self._size)}
        number = self._number
        self._all = KernelGraph(
            allocates=[kernel.allocates for kernel in self.kernels],
            reads=[[number[name] for name in kernel.reads if name in number] for kernel in self.kernels],
            makes=[[number[name] for name in kernel.makes] for kernel in self.kernels],
            sizes=list(self._size.values()),
            leaves=[name in self.results for name in self._size],
        )
        self._orders = self._all.orders()
        levels = [self._all.levels(order) for order in self._orders]
        self._peaks = [int(each.max()) for each in levels]
        chosen = self._peaks.index(min(self._peaks))  # the first, if several are equal
        self._levels = levels[chosen]
        self.order = [self.kernels[index] for index in self._orders[chosen]]
        self._at = [0] * len(self.order)
        for instant, index in enumerate(self._orders[chosen]):
            self._at[index] = instant
        self._last_read = {name: self._last_reader(readers) for name, readers in self._readers().items()}

    def size_of(self, name: str) -> int:
        """Bytes of the buffer `name`."""
        return self._size[name]

    def makes(self, name: str) -> bool:
        """Whether `name` is a buffer of this graph."""
        return name in self._size and name not in self.inputs

    def peaks(self) -> list[int]:
        """Bytes at the peak of each of Inductor's orders, as it estimates them."""
        return self._peaks

    def labels(self) -> list[str]:
        """The kernels' names, in the order in which they run."""
        return ["+".join(op.name for op in kernel.ops) for kernel in self.order]

    def last_read(self, name: str) -> int:
        """The instant after the last one at which `name` is read; 0 if it is not read."""
        return self._last_read.get(name, 0)

    def lives(self) -> tuple[list[Life], dict[str, int]]:
        """The lifetimes of the buffers, and the instant at which each of `inputs` is freed. If several buffers use the same
        memory one after the other, each lives until the next one does."""
        ends = {name: self._instant_freed(name) for name in self._size}
        released: dict[int, list[str]] = {}
        for name, end in ends.items():
            if name not in self.inputs and name not in self.results:
                released.setdefault(end - 1, []).append(name)
        replaced, inside = set[str](), self._fused_names()
        dtypes = {
            name: op.dtype or ("wide" if name in op.wide else "")
            for one in self.kernels
            for op in one.ops
            for name in op.writes
        }
        pool = _Pool(self._levels)
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
                        taken = pool.take(size, dtypes[result], instant)
                    if taken is not None:
                        ends[taken] = instant
            for name in released.get(instant, ()):
                if name not in replaced and name not in inside:
                    pool.give(name, self._size[name], dtypes.get(name, ""), instant)
        return self._lifetimes(ends, inside), {name: ends[name] for name in self.inputs}

    def _lifetimes(self, ends: Mapping[str, int], inside: Collection[str]) -> list[Life]:
        """The lifetimes of what kernels make, until `ends`, except what stays `inside` a kernel; and of a call's results
        that nothing reads."""
        lives = [
            Life(name, size, self._instant_made(kernel.part_of, instant), ends[name])
            for instant, kernel in enumerate(self.order)
            for name, size in kernel.makes.items()
            if size and name not in inside
        ]
        for instant, kernel in enumerate(self.order):
            unused = self._unused.get(kernel.ops[0].name, {})
            lives += [Life(name, size, instant, instant + 1) for name, size in unused.items()]
        return lives

    def _readers(self) -> dict[str, list[int]]:
        """By name, the kernels that read it, including names that other code owns."""
        readers: dict[str, list[int]] = {}
        for index, kernel in enumerate(self.kernels):
            for name in kernel.reads:
                readers.setdefault(name, []).append(index)
        return readers

    def _last_reader(self, readers: Sequence[int]) -> int:
        """The instant after the last of these kernels."""
        return max(self._at[index] for index in readers) + 1

    def _instant_made(self, name: str, instant: int) -> int:
        """The instant of the kernel that makes `name`; `instant` if `name` is ""."""
        return self._at[self._all.maker[self._number[name]]] if name else instant

    def _fused_names(self) -> set[str]:
        """Names of results that are read only inside the kernel that computes them. No buffer holds them, but Inductor's
        memory estimates count them."""
        read = {name for kernel in self.kernels for op in kernel.ops for name in op.reads if name in kernel.makes}
        return {name for name in read if name not in self._last_read and name not in self.results}

    def _instant_freed(self, name: str) -> int:
        """The instant at which a buffer is freed."""
        if name in self.results:
            return len(self.order)
        maker = self._all.maker[self._number[name]]
        return self.last_read(name) or (self._at[maker] + 1 if maker >= 0 else 0)

    def _is_free(self, op: Op, kernel: Kernel, instant: int, result: str, name: str) -> bool:
        """Whether `name` is as large as `result` and only `op` still reads it, in its own kernel and later."""
        if name in self.results or self._size.get(name) != self._size[result]:
            return False
        others = (other for other in kernel.ops if other is not op and not set(other.writes) & set(op.reads))
        return self.last_read(name) == instant + 1 and all(name not in other.reads for other in others)


def _in_graph_order(kernels: Sequence[Kernel]) -> list[Kernel]:
    """`topological_sort_schedule`: the kernels as written, each after those that it needs."""
    maker = {name: index for index, kernel in enumerate(kernels) for name in kernel.makes}
    needed = [sorted(maker[name] for name in kernel.reads if name in maker) for kernel in kernels]
    return [kernels[index] for index in after_what_they_need(range(len(kernels)), needed)]
