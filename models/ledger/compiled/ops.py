"""How operations of compiled graphs are written down, put into a larger graph, and recomputed."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from peakcast.models.ledger.compiled.inductor_kernels import Float8Operand, Op
from peakcast.models.ledger.tape.template import OUTPUT_GRADIENT

INPUT, OUTPUT = "hidden_states", "output"
"""The buffers that a layer reads and makes."""
MASK, SEEDS, NARROWED = "attention_mask", "seeds", f"{OUTPUT_GRADIENT}.narrow"
"""The attention mask; the seeds of dropout; the output's gradient as matrix products read it, if they are narrower."""
OF_OUTPUT_GRADIENT = (OUTPUT_GRADIENT, NARROWED, f"{OUTPUT_GRADIENT}.wide", f"{OUTPUT_GRADIENT}.copy")
"""The gradient of a layer's output and its copies. In a network they are those of the next layer's input."""
PRODUCTS = ("qkv", "q", "k", "v", "o", "gate_up", "gate", "up", "down")
"""The matrix products of a layer."""

Names = tuple[str, ...]
"""Names of buffers or operations."""


def op(
    name: str,
    reads: str | Names,
    writes: int | dict[str, int] = 0,
    *,
    fuses: str | Names = (),
    replaces: str | Names = (),
    wide: bool | Collection[str] = False,
    elementwise: bool = False,
    float8: Float8Operand | None = None,
) -> Op:
    """An operation. `writes`: the bytes of its result, which has the operation's name, or name -> bytes of several results.
    A single name may be given without a tuple. `wide`: whether all its results are wide, or which of them. Other arguments
    are as in `Op`."""
    made = writes if isinstance(writes, dict) else {name: writes}
    return Op(
        name=name,
        reads=names(reads),
        writes=made,
        fuses=names(fuses),
        replaces=names(replaces),
        wide=frozenset((made if wide else ()) if isinstance(wide, bool) else wide),
        elementwise=elementwise,
        float8=float8,
    )


def library_call(name: str, reads: Names, writes: dict[str, int]) -> Op:
    """A call of a library's kernel, each of whose results is a node of the graph."""
    return Op(name=name, reads=reads, writes=writes, parts=True)


def names(*of: str | Names) -> Names:
    """All names in `of`, one after the other."""
    return tuple([name for one in of for name in ((one,) if isinstance(one, str) else one)])


class _Prefixed(dict[str, str]):
    """name -> prefix + name, except for the names in `others`."""

    def __init__(self, prefix: str, others: Mapping[str, str]) -> None:
        super().__init__(others)
        self.prefix = prefix

    def __missing__(self, name: str) -> str:
        self[name] = found = self.prefix + name
        return found


def prefixed(ops: Iterable[Op], prefix: str, others: Mapping[str, str]) -> list[Op]:
    """`ops` with `prefix` before every name, except those in `others`, which are replaced as given there."""
    found = _Prefixed(prefix, others)
    return [
        Op(
            name=found[one.name],
            reads=tuple([found[name] for name in one.reads]),
            writes={found[result]: size for result, size in one.writes.items()},
            fuses=tuple([found[name] for name in one.fuses]),
            replaces=tuple([found[name] for name in one.replaces]),
            parts=one.parts,
            is_result=one.is_result,
            wide=frozenset([found[name] for name in one.wide]),
            parameter=one.parameter,
            elementwise=one.elementwise,
            float8=None if one.float8 is None else one.float8._replace(buffer=found[one.float8.buffer]),
        )
        for one in ops
    ]


def recomputed(forward: Sequence[Op], backward: Sequence[Op], kept: set[str]) -> list[Op]:
    """`backward` with the operations of `forward` that it needs and that are not `kept`, each just before its first reader
    (`_functorch/partitioners.py` reordering_to_mimic_autograd_engine)."""
    maker = {name: one for one in forward for name in one.writes if name not in kept}
    place = {one.name: index for index, one in enumerate(forward)}
    ordered: dict[str, Op] = {}
    for one in backward:
        missing, stack = set[str](), [one]
        while stack:
            for name in stack.pop().reads:
                if name in maker and maker[name].name not in ordered and maker[name].name not in missing:
                    missing.add(maker[name].name)
                    stack.append(maker[name])
        for name in sorted(missing, key=place.__getitem__):
            ordered[name] = forward[place[name]]
        ordered[one.name] = one
    return list(ordered.values())


def wanted(ops: Sequence[Op]) -> list[Op]:
    """The operations of `ops` that a result depends on."""
    read: set[str] = set()
    found = []
    for one in reversed(ops):
        if one.is_result or not read.isdisjoint(one.writes):
            found.append(one)
            read.update(one.reads)
    return found[::-1]
