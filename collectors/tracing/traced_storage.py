"""`TracedStorage`: a storage as the tracer records it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class TracedStorage:
    """A storage that operation `born` allocates and that is free from operation `dies` on; None: it is still alive."""

    name: str
    num_bytes: int
    """Rounded up to the allocator's unit."""
    born: int
    dies: int | None
    module: str
