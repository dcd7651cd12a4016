"""Replaces CUDA graphs: the captured part runs normally, and a replay makes no tensors, as on a GPU. Those that
`torch.compile` would record are left out.

A capture has a pool of memory of its own, whose blocks come back to no other one (torch 2.13 `cuda/graphs.py`,
c10/cuda/CUDACachingAllocator.cpp `PrivatePool`). A stream has such a pool too, so each capture is on a stream of its own;
captures that share a pool share the stream.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from peakcast.collectors.dryrun.noted import RunFindings, where
from peakcast.timelines.timeline import PRIVATE_STREAM

MOST_POOLS = 63
"""More pools than these share memory: a timeline has room for so many streams."""


def install(notes: RunFindings, replayed: Callable[[], None]) -> None:
    """Replace CUDA graphs in this process. `replayed` is called at each replay."""

    streams: dict[Any, Any] = {}
    """The pool of a capture -> the stream that it is on."""
    handles = itertools.count(1)

    class ReplacedGraph:
        """Replaces `torch.cuda.CUDAGraph`."""

        def __init__(self, keep_graph: bool = False) -> None:
            self._pool: Any = (0, next(handles))

        def capture_begin(self, pool: Any = None, *_: Any, **__: Any) -> None:
            """Capturing begins."""
            self._pool = pool or self._pool
            sentence = (
                f"{where()} captures a CUDA graph: its memory is counted as a pool of its own, and what the GPU keeps of "
                "the graph itself is not."
            )
            notes.add("script_part_skipped", "torch.cuda.graph", sentence, "more")
            within.append(torch.cuda.stream(streams.setdefault(self._pool, _private_stream(len(streams)))))
            within[-1].__enter__()

        def capture_end(self) -> None:
            """Capturing ends."""
            if within:
                within.pop().__exit__(None, None, None)

        def pool(self) -> Any:
            """The handle of its memory pool."""
            return self._pool

        def replay(self) -> None:
            """What was captured runs once more, in the memory that it has."""
            replayed()

        def _nothing(self, *_: Any, **__: Any) -> None:
            """Has no effect on memory."""

        reset = instantiate = register_generator_state = _nothing
        enable_debug_mode = debug_dump = _nothing

    within: list[Any] = []

    @contextlib.contextmanager
    def capturing(graph: ReplacedGraph, pool: Any = None, *_: Any, **__: Any) -> Iterator[None]:
        torch.cuda.empty_cache()  # as torch's own `graph` does
        graph.capture_begin(pool)
        try:
            yield
        finally:
            graph.capture_end()

    cuda: Any = torch.cuda
    cuda.is_current_stream_capturing = cuda.graphs.is_current_stream_capturing = lambda: bool(within)
    for module in (cuda, cuda.graphs):
        module.CUDAGraph = ReplacedGraph
        module.graph_pool_handle = lambda: (0, next(handles))
        module.graph = capturing
    _say_of_compiled(notes)


def _private_stream(number: int) -> Any:
    """The stream that stands for the pool of that number."""
    stream: Any = torch.cuda.Stream()
    stream.stream_id = PRIVATE_STREAM + number % MOST_POOLS
    return stream


def _say_of_compiled(notes: RunFindings) -> None:
    """Say where `torch.compile` is asked for CUDA graphs. Their tensors lie in a pool of their own, and those within a
    graph that replays are not counted as allocated (torch 2.13 `_inductor/cudagraph_trees.py`)."""
    wrapper: Any = torch._TorchCompileInductorWrapper
    make = wrapper.__init__

    @functools.wraps(make)
    def made(self: Any, *arguments: Any, **keywords: Any) -> None:
        make(self, *arguments, **keywords)
        if self.config.get("triton.cudagraphs"):
            notes.add(
                "script_part_skipped",
                "torch.compile",
                f"{where()} asks torch.compile for CUDA graphs, which a dry run does not record: they have a pool of their "
                "own, and what lives inside one that replays does not count as allocated. A published run with them "
                "printed 2.6 % less allocated and 12 % less reserved than its dry run.",
            )

    wrapper.__init__ = made
