"""Reads in a script what a counter of its loop decides, and where the loop ends."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

REPORTS = re.compile(
    r"print|log|info|debug|warn|write|save|scalar|postfix|describ|wandb|append|format|(^|_)lr(_|$)|learning_rate", re.I
)
"""Names of functions and variables that a counter may go to without a tensor's size following from it: what is printed and
saved, and learning rates."""
PLAIN = (
    ast.Name, ast.Attribute, ast.Subscript, ast.Constant, ast.BinOp, ast.UnaryOp, ast.operator, ast.unaryop,
    ast.expr_context,
)  # fmt: skip
PLAIN_FUNCTIONS = ("int", "len", "max", "min", "round")
"""Parts of an expression that can be evaluated without running the script's functions."""


@dataclass
class CounterUses:
    """The uses of one counter."""

    lines: list[int] = field(default_factory=list)
    """Lines where something else than a report, a learning rate or a period follows from it."""
    ends: list[ast.expr] = field(default_factory=list)
    """What it is compared with, or counts to, where the loop ends."""
    thresholds: list[ast.expr] = field(default_factory=list)
    """What it is compared with elsewhere."""
    turns: list[int] = field(default_factory=list)
    """Lines of conditions on it below which more is done than to report."""
    cuts: bool = False
    """Whether data is cut by it (`tokens[position : position + length]`), so that it cannot go beyond the data."""


def uses_of(name: str, tree: ast.Module, lines: Sequence[int], *, is_field: bool = False) -> CounterUses:
    """The uses of a variable called `name` in a file whose functions are at `lines` now; `is_field`: of attributes and keys
    of that name."""
    found = CounterUses()
    for node, around in _walk(tree, ()):
        if isinstance(node, ast.For) and name in _names(node.target) and _is_at(node, lines) and not is_field:
            found.ends += _counted_to(node.iter)
        elif _is(node, name, is_field=is_field) and isinstance(getattr(node, "ctx", None), ast.Load):
            _note(node, around, name, lines, found)
    return found


def is_plain(expression: ast.expr) -> bool:
    """Whether an expression can be evaluated without running any of the script's functions."""
    called = {one.func for one in ast.walk(expression) if isinstance(one, ast.Call)}
    if not all(isinstance(one, ast.Name) and one.id in PLAIN_FUNCTIONS for one in called):
        return False
    return all(isinstance(part, (*PLAIN, ast.Call)) for part in ast.walk(expression))


def _walk(node: ast.AST, around: tuple[ast.AST, ...]) -> Iterator[tuple[ast.AST, tuple[ast.AST, ...]]]:
    """Each node of a tree with those that it is in, the innermost first."""
    for child in ast.iter_child_nodes(node):
        yield child, (node, *around)
        yield from _walk(child, (node, *around))


def _is(node: ast.AST, name: str, *, is_field: bool) -> bool:
    if not is_field:
        return isinstance(node, ast.Name) and node.id == name
    if isinstance(node, ast.Subscript):
        return isinstance(node.slice, ast.Constant) and node.slice.value == name
    return isinstance(node, ast.Attribute) and node.attr == name


def _names(node: ast.AST) -> set[str]:
    return {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}


def _counted_to(iterated: ast.expr) -> list[ast.expr]:
    """The ends of the ranges in what a loop goes through (`tqdm(range(n))`)."""
    calls = [one for one in ast.walk(iterated) if isinstance(one, ast.Call)]
    ranges = [one.args for one in calls if isinstance(one.func, ast.Name) and one.func.id in ("range", "trange")]
    return [arguments[min(1, len(arguments) - 1)] for arguments in ranges if arguments]


def _note(node: ast.AST, around: tuple[ast.AST, ...], name: str, lines: Sequence[int], found: CounterUses) -> None:
    """Add one use of the counter at `node`."""
    inner, ends = node, _ends_loop(around, lines)
    for outer in around:
        if isinstance(outer, ast.Call) and inner is outer.func:
            return  # a method of that name
        if isinstance(outer, ast.Slice):
            found.cuts = True
        if isinstance(outer, ast.Compare):
            others = [one for one in (outer.left, *outer.comparators) if one is not inner]
            (found.ends if ends else found.thresholds).extend(others)
            if ends:
                return
            if _turns(next(one for one in around if isinstance(one, ast.stmt))):
                found.turns.append(node.lineno)  # type: ignore[attr-defined]
        if _does_not_count(outer, inner, name):
            return
        if isinstance(outer, ast.stmt):
            break
        inner = outer
    found.lines.append(node.lineno)  # type: ignore[attr-defined]


def _turns(statement: ast.stmt) -> bool:
    """Whether a statement is a condition below which more is done than to report, to save or to go on."""
    if not isinstance(statement, ast.If):
        return False
    calls = (one.value for one in statement.body if isinstance(one, ast.Expr) and isinstance(one.value, ast.Call))
    reports = sum(REPORTS.search(_last_name(call.func)) is not None for call in calls)
    return reports + sum(isinstance(one, ast.Pass | ast.Continue) for one in statement.body) < len(statement.body)


def targets_at(tree: ast.Module, lines: Sequence[int]) -> list[str]:
    """The variables of the loops that run where a file's functions are at `lines`."""
    loops = (node for node in ast.walk(tree) if isinstance(node, ast.For) and _is_at(node, lines))
    return [name for loop in loops for name in sorted(_names(loop.target))]


def _does_not_count(outer: ast.AST, inner: ast.AST, name: str) -> bool:
    """Whether no size can follow from what `inner`, a part of `outer`, says: a report, a learning rate, a period, or the
    counter's own next value."""
    if isinstance(outer, ast.BinOp):
        return isinstance(outer.op, ast.Mod) and inner is outer.left
    if isinstance(outer, ast.Call):
        return REPORTS.search(_last_name(outer.func)) is not None
    if isinstance(outer, ast.Assign | ast.AnnAssign | ast.AugAssign):
        targets = outer.targets if isinstance(outer, ast.Assign) else [outer.target]
        return any(_last_name(one) == name or REPORTS.search(_last_name(one)) is not None for one in targets)
    return isinstance(outer, ast.FormattedValue)


def _last_name(node: ast.AST) -> str:
    if isinstance(node, ast.Subscript):
        return str(node.slice.value) if isinstance(node.slice, ast.Constant) else _last_name(node.value)
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _is_at(node: ast.AST, lines: Sequence[int]) -> bool:
    """Whether one of the `lines` is within `node`."""
    return any(node.lineno <= line <= node.end_lineno for line in lines)  # type: ignore[attr-defined]


def _ends_loop(around: Sequence[ast.AST], lines: Sequence[int]) -> bool:
    """Whether the statement that a condition is in ends a loop that runs, or says that a step is the last one."""
    statement = next((one for one in around if isinstance(one, ast.stmt)), None)
    if not any(isinstance(one, ast.For | ast.While) and _is_at(one, lines) for one in around):
        return False
    leaves = isinstance(statement, ast.If) and any(isinstance(one, ast.Break | ast.Return) for one in statement.body)
    return leaves or isinstance(statement, ast.While | ast.Assign)
