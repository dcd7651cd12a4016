"""Which operations of a compiled graph become one kernel.

Source: torch 2.13 `_inductor/scheduler.py` (fuse_nodes). How Inductor scores fusions is not modelled: an operation lists
the others with which it would be fused, and is fused unless the two would then wait for each other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto
from typing import NamedTuple


class Float8Step(Enum):
    """What is done with an operand of a product in float8 before the product."""

    MEASURE = auto()
    """The largest absolute values of its parts are taken."""
    SCALE = auto()
    """The largest of those and the scale that follows from it are computed."""
    WIDEN = auto()
    """Its scaled values are computed in fp32, if that is a kernel of its own."""
    CONVERT = auto()
    """It is converted, in the layout that forward's product or the gradient of the input reads."""
    TRANSPOSE = auto()
    """It is converted in the other layout, which backward reads."""


class Float8Operand(NamedTuple):
    """What an operation does for a product in float8, and with which operand."""

    step: Float8Step
    buffer: str
    is_weight: bool = False
    dtype: str = ""
    """The dtype that a conversion gives it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Op:
    """One operation: the buffers it reads, and those it writes with their bytes."""

    name: str
    reads: tuple[str, ...]
    writes: Mapping[str, int]
    fuses: tuple[str, ...] = ()
    """Operations whose kernel it would join, the most wanted first."""
    replaces: tuple[str, ...] = ()
    """Inputs that it reads at exactly the elements that it writes: its (first) result may reuse their memory."""
    parts: bool = False
    """Whether its results are parts of what one library call returns: each is a node of its own."""
    is_result: bool = False
    """Whether what it writes leaves the graph."""
    wide: frozenset[str] = frozenset()
    """Names of its results whose elements are wider than those of most results."""
    parameter: str = ""
    """If it makes a parameter's gradient: the parameter's name in its module."""
    elementwise: bool = False
    """Whether it computes, element by element, what matrix products read."""
    float8: Float8Operand | None = None
    """If it measures or converts an operand of a product in float8: which, and how."""

    @property
    def dtype(self) -> str:
        """The dtype of its results, if it is neither that of most results nor fp32."""
        return self.float8.dtype if self.float8 is not None else ""

    def leaving(self, parameter: str = "") -> Op:
        """This operation with results that leave the graph; `parameter`: whose gradient its result is, if it is one."""
        return replace(self, is_result=True, parameter=parameter)


@dataclass(eq=False, slots=True)
class Kernel:
    """Operations that run as one kernel."""

    ops: tuple[Op, ...]
    reads: tuple[str, ...]
    makes: dict[str, int]
    """The buffers that it makes: name -> bytes that are freed with it."""
    allocates: int
    part_of: str = ""
    """For a part of a library call's result: the call's name."""


def fused(ops: Sequence[Op]) -> list[Kernel]:
    """`ops` as kernels, each at the position of its first operation."""
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
    """One kernel; for a library call, the call and each of its results: the call allocates them all, and each is freed by
    itself."""
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
    """Whether `later` needs, through some third kernel, what `earlier` makes. No operation needs one that comes after it,
    so operations before all of `earlier` need not be followed."""
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
