"""Compiled graphs that run one after the other, as a single graph: a graph's result lives until the last graph that reads
it."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Protocol

from peakcast.models.ledger.compiled.inductor_graph import InductorGraph, Life
from peakcast.models.ledger.compiled.inductor_kernels import Kernel, Op


class Graph(Protocol):
    """What `compiled_template` needs to know of a graph."""

    @property
    def order(self) -> Sequence[Kernel]: ...
    @property
    def parameters(self) -> Mapping[str, str]: ...
    def labels(self) -> list[str]: ...
    def last_read(self, name: str) -> int: ...
    def lives(self) -> tuple[list[Life], dict[str, int]]: ...
    def size_of(self, name: str) -> int: ...


class GraphsInTurn:
    """`graphs`, in the order in which they run."""

    def __init__(self, graphs: Sequence[InductorGraph]) -> None:
        self.graphs = graphs
        self.order = [kernel for graph in graphs for kernel in graph.order]
        self.parameters = {name: one for graph in graphs for name, one in graph.parameters.items()}
        self._starts = [0, *itertools.accumulate(len(graph.order) for graph in graphs)]

    def size_of(self, name: str) -> int:
        """Bytes of the buffer `name`."""
        return next(graph.size_of(name) for graph in self.graphs if graph.makes(name))

    def labels(self) -> list[str]:
        """The kernels' names, in the order in which they run."""
        return [label for graph in self.graphs for label in graph.labels()]

    def last_read(self, name: str) -> int:
        """The instant after the last one at which `name` is read; 0 if it is not read."""
        reads = zip(self._starts, (graph.last_read(name) for graph in self.graphs), strict=False)
        return max((start + read for start, read in reads if read), default=0)

    def lives(self) -> tuple[list[Life], dict[str, int]]:
        """The lifetimes of the buffers, and the instant at which each input is freed."""
        lives, until = list[Life](), dict[str, int]()
        for start, graph in zip(self._starts, self.graphs, strict=False):
            own, gone = graph.lives()
            until |= {name: start + instant for name, instant in gone.items()}
            lives += [Life(life.name, life.num_bytes, start + life.born, start + life.dies) for life in own]
        return [self._until_last_read(life) for life in lives], until

    def _until_last_read(self, life: Life) -> Life:
        """A result lives until a later graph has read it, or to the end if none does."""
        if not any(life.name in graph.results for graph in self.graphs):
            return life
        return Life(life.name, life.num_bytes, life.born, self.last_read(life.name) or len(self.order))


def both_graphs(
    forward: Sequence[Op], backward: Sequence[Op], kept: set[str], results: set[str], seen: Mapping[str, int] | None = None
) -> tuple[InductorGraph, InductorGraph]:
    """The graph of `forward`, which returns `results` and what backward reads of `kept`, and the graph of `backward`.
    `seen`: bytes of buffers of which backward reads only a part."""
    sizes = {name: size for one in forward for name, size in one.writes.items()} | dict(seen or {})
    needed = {name for one in backward for name in one.reads} & kept & sizes.keys()
    first = InductorGraph(forward, {}, needed | results)
    return first, InductorGraph(backward, {name: size for name, size in sizes.items() if name in needed})
