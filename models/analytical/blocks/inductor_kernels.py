"""Which operations of a compiled graph are one kernel.

Source: torch 2.13 `_inductor/scheduler.py` (fuse_nodes). What is not here: how Inductor scores fusions; an operation says
with which others it would be fused, and is, unless they would then wait for each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One operation: the buffers it reads, and those it writes with their bytes."""

    name: str
    reads: tuple[str, ...]
    writes: Mapping[str, int]
    fuses: tuple[str, ...] = ()
    """Operations of whose kernel it would be a part, the most wanted first."""
    replaces: tuple[str, ...] = ()
    """Of what it reads, those read at the very elements that it writes: its (first) result may take their place."""
    parts: bool = False
    """Whether its results are parts of what one call gives (a kernel of a library): each is a node of its own."""
    is_result: bool = False
    """Whether what it writes leaves the graph."""
    wide: bool = False
    """Whether its results have wider elements than most; one named `.narrow` has not, one named `.wide` always."""


@dataclass(eq=False, slots=True)
class Kernel:
    """Operations that run as one."""

    ops: tuple[Op, ...]
    reads: tuple[str, ...]
    makes: dict[str, int]
    """The buffers that it makes, with the bytes that are released with each."""
    allocates: int
    part_of: str = ""
    """Of a part of what a call gave: the call's name."""


def fused(ops: Sequence[Op]) -> list[Kernel]:
    """`ops` as kernels, each at the place of its first operation."""
    groups = {op.name: [op] for op in ops}
    maker = {name: op.name for op in ops for name in op.writes}
    place = {op.name: index for index, op in enumerate(ops)}
    for op in ops:
        for other in op.fuses:
            mine, theirs = groups[op.name], groups.get(other, [])
            if not theirs or mine is theirs:
                continue
            if not (_waits(mine, theirs, groups, maker, place) or _waits(theirs, mine, groups, maker, place)):
                joined = sorted([*mine, *theirs], key=lambda one: place[one.name])
                groups |= {one.name: joined for one in joined}
                break
    distinct = {id(group): group for group in groups.values()}.values()
    return [kernel for group in sorted(distinct, key=lambda one: place[one[0].name]) for kernel in kernels_of(group)]


def kernels_of(group: Sequence[Op]) -> list[Kernel]:
    """One, or a call and each of its results: the call allocates them all, and each is released by itself."""
    makes = {name: size for op in group for name, size in op.writes.items()}
    reads = tuple(dict.fromkeys(name for op in group for name in op.reads if name not in makes))
    if not group[0].parts:
        return [Kernel(tuple(group), reads, makes, sum(makes.values()))]
    call = group[0].name
    parts = [
        Kernel((Op(name=name, reads=(call,), writes={name: size}),), (call,), {name: size}, 0, call)
        for name, size in makes.items()
    ]
    return [Kernel(tuple(group), reads, {call: 0}, sum(makes.values())), *parts]


def _waits(
    later: Sequence[Op],
    earlier: Sequence[Op],
    groups: Mapping[str, Sequence[Op]],
    maker: Mapping[str, str],
    place: Mapping[str, int],
) -> bool:
    """Whether `later` needs, by way of some third kernel, what `earlier` makes. Operations are in an order in which nothing
    needs what comes after it, so what lies before all of `earlier` is not followed."""
    seen: set[int] = {id(later)}
    stack: list[Sequence[Op]] = [later]
    first = place[earlier[0].name]
    while stack:
        behind = stack.pop()
        for op in behind:
            for name in op.reads:
                if name not in maker:
                    continue
                group = groups[maker[name]]
                if group is earlier and behind is not later:
                    return True
                if id(group) not in seen and group is not earlier and place[group[-1].name] > first:
                    seen.add(id(group))
                    stack.append(group)
    return False
