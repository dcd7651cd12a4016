"""The calls of a Python program, with the values of their arguments as far as they follow from the text; nothing is run.

A name has the value that it was last assigned, a field of parsed command line arguments its default, and `torch.bfloat16`
is "bfloat16".
"""

from __future__ import annotations

import ast
import json
import operator
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from peakcast.core.errors import SpecError
from peakcast.dialects.common.text import MAX_SLOW_CHARACTERS

MOST_NESTED = 60
"""Depth up to which nested expressions are evaluated."""
_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Mod: operator.mod,
}  # fmt: skip
_COMPARED: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Is: operator.is_, ast.IsNot: operator.is_not, ast.Gt: operator.gt,
    ast.Lt: operator.lt, ast.In: lambda item, items: item in items, ast.NotIn: lambda item, items: item not in items,
}  # fmt: skip
_HALF = ("is_bfloat16_supported", "is_bf16_supported")
"""Functions that return whether the GPU supports bfloat16, as all GPUs since Ampere do."""
ENUMERATIONS = ("IntervalStrategy", "SaveStrategy", "SchedulerType", "TaskType")
"""Enumerations of transformers and peft, whose members are their own names as texts, in some case."""


class NotGiven(NamedTuple):
    """A value that is only known when the program runs."""

    source: str


class FunctionCall(NamedTuple):
    """One call: the dotted name of the function, its positional arguments, and its keyword arguments."""

    name: str
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]


@dataclass(slots=True)
class Expressions:
    """Evaluates expressions. `keeps_calls`: a call that cannot be evaluated becomes a mapping of its keyword arguments,
    with its name as `_target_` and its positional arguments as `_arguments_`; for a method of the result of another call,
    that call is `_of_`. `follow` is asked first, and returns a call's value or None."""

    keeps_calls: bool = False
    follow: Callable[[FunctionCall], Any] | None = None
    names: dict[str, Any] = field(default_factory=dict)
    fields: dict[str, Any] = field(default_factory=dict)
    """Name -> default, of command line arguments and of fields of dataclasses."""
    depth: int = 0

    def call(self, node: ast.Call) -> FunctionCall:
        keywords: dict[str, Any] = {}
        for keyword in node.keywords:
            value = self.value(keyword.value)
            if keyword.arg is not None:
                keywords[keyword.arg] = value
            elif isinstance(value, dict):
                keywords |= {str(key): each for key, each in value.items()}
        return FunctionCall(call_name(node.func), tuple(self.value(each) for each in node.args), keywords)

    def value(self, node: ast.expr) -> Any:
        """The value of an expression; `NotGiven` if only running the program would give it."""
        self.depth += 1
        try:
            found = self._value(node) if self.depth < MOST_NESTED else _not_given(node)
        except (TypeError, ValueError, ZeroDivisionError, OverflowError, MemoryError):
            found = _not_given(node)
        self.depth -= 1
        return found

    def _value(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name):
            return self.names.get(node.id, _not_given(node))
        if isinstance(node, ast.Attribute):
            if isinstance(node.value, ast.Name) and node.value.id == "torch":
                return node.attr
            if isinstance(node.value, ast.Name) and node.value.id in ENUMERATIONS:
                return node.attr.lower()
            owner = self.names.get(node.value.id) if isinstance(node.value, ast.Name) else None
            if isinstance(owner, dict) and node.attr in owner:
                return owner[node.attr]
            return self.fields.get(node.attr, _not_given(node))
        if isinstance(node, (ast.List, ast.Tuple)):
            return [self.value(each) for each in node.elts]
        if isinstance(node, ast.Dict):
            return {self.value(k) if k else "": self.value(v) for k, v in zip(node.keys, node.values, strict=True)}
        return self._computed(node)

    def _computed(self, node: ast.expr) -> Any:
        if isinstance(node, ast.UnaryOp):
            inner = self.value(node.operand)
            if isinstance(inner, NotGiven):
                return _not_given(node)
            return (not inner) if isinstance(node.op, ast.Not) else -inner if isinstance(node.op, ast.USub) else inner
        if isinstance(node, ast.BinOp) and type(node.op) in _BINARY:
            sides = [self.value(node.left), self.value(node.right)]
            plain = all(isinstance(side, (int, float)) for side in sides)
            return _BINARY[type(node.op)](*sides) if plain else _not_given(node)
        if isinstance(node, ast.IfExp):
            test = self.value(node.test)
            return _not_given(node) if isinstance(test, NotGiven) else self.value(node.body if test else node.orelse)
        if isinstance(node, ast.Call):
            return self._returned(node)
        return self._condition(node) if self.follow is not None else _not_given(node)

    def _condition(self, node: ast.expr) -> Any:
        """The value of a comparison of two values, or of conditions joined by `and` or `or`."""
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _COMPARED:
            sides = self.value(node.left), self.value(node.comparators[0])
            return _not_given(node) if NotGiven in map(type, sides) else _COMPARED[type(node.ops[0])](*sides)
        if isinstance(node, ast.BoolOp):
            decides = isinstance(node.op, ast.Or)
            for each in node.values:
                held = self.value(each)
                if isinstance(held, NotGiven) or bool(held) == decides:
                    return held
            return not decides
        return self._entry(node) if isinstance(node, ast.Subscript) else _not_given(node)

    def _entry(self, node: ast.Subscript) -> Any:
        """The value under a key; of a mapping that is not known, what names the mapping and the key."""
        held, key = self.value(node.value), self.value(node.slice)
        if isinstance(held, dict) and isinstance(key, (str, int)) and key in held:
            return held[key]
        return NotGiven(f"{ast.unparse(node.value)[:60]}.{key}") if isinstance(key, str) else _not_given(node)

    def _returned(self, node: ast.Call) -> Any:
        """The value of a call: the keyword arguments for the construction of an object, or the default for an environment
        variable that is not set."""
        call = self.call(node)
        last = call.name.rpartition(".")[2]
        if last in _HALF:
            return True
        if self.follow is not None:
            if last == "lower" and isinstance(node.func, ast.Attribute) and isinstance(self.value(node.func.value), str):
                return self.value(node.func.value).lower()
            if (followed := self.follow(call)) is not None:
                return followed
        if call.name in ("os.environ.get", "os.getenv") and len(call.arguments) == 2:
            return call.arguments[1]
        if last == "dict" and not call.arguments:
            return dict(call.keywords)
        if self.keeps_calls:
            made = {"_target_": call.name, "_arguments_": list(call.arguments), **call.keywords}
            inner = node.func.value if isinstance(node.func, ast.Attribute) else None
            return made | ({"_of_": self.value(inner)} if isinstance(inner, ast.Call) else {})
        if not call.arguments and (call.keywords or last[:1].isupper()):
            return {"_target_": call.name, **call.keywords}
        return _not_given(node)


class _ProgramReader(ast.NodeVisitor):
    """Visits the statements of a program in the order of its text."""

    def __init__(self) -> None:
        self.calls: list[FunctionCall] = []
        self.known = Expressions()

    def visit_If(self, node: ast.If) -> None:
        """Leave out the statements under `if False:`, with which notebooks disable cells."""
        condition = self.known.value(node.test)
        for statement in [] if condition is False else node.body:
            self.visit(statement)
        for statement in [] if condition is True else node.orelse:
            self.visit(statement)

    def visit_Assign(self, node: ast.Assign) -> None:
        """Keep the value that a name is assigned."""
        self.visit(node.value)
        for target in node.targets:
            if isinstance(target, ast.Name):
                self.known.names[target.id] = self.known.value(node.value)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        """Keep the value of an annotated name, such as the default of a dataclass's field."""
        given: ast.expr | None = node.value
        if isinstance(given, ast.Call) and call_name(given.func).endswith("field"):
            given = next((keyword.value for keyword in given.keywords if keyword.arg == "default"), None)
        if isinstance(node.target, ast.Name) and given is not None:
            self.known.fields[node.target.id] = self.known.names[node.target.id] = self.known.value(given)

    def visit_Call(self, node: ast.Call) -> None:
        """Keep the call, after the calls in its arguments."""
        self.generic_visit(node)
        call = self.known.call(node)
        if call.name.endswith("add_argument") and call.arguments and "default" in call.keywords:
            name = str(call.arguments[-1]).lstrip("-").replace("-", "_")
            self.known.fields[name] = call.keywords["default"]
        self.calls.append(call)


def parsed(source: str, where: str) -> ast.Module:
    """The syntax tree of a Python program. Raises: SpecError if it is not valid Python, or too long for a program that
    configures a run."""
    if len(source) > MAX_SLOW_CHARACTERS:
        raise SpecError(f"{where} has {len(source):,} characters; a training script is not that long.")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about literals and escapes in the user's program
            return ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise SpecError(f"{where} is not valid Python: {' '.join(str(error).split())}.") from error


def calls_of(source: str, where: str) -> list[FunctionCall]:
    """The calls of a Python program, or of a notebook's cells without their shell lines, in the order of the text.

    Raises: SpecError if it is not valid Python.
    """
    lines = ("" if line.lstrip()[:1] in ("!", "%") else line for line in source.split("\n"))
    tree = parsed("\n".join(lines), where)
    reader = _ProgramReader()
    try:
        reader.visit(tree)
    except RecursionError as error:
        raise SpecError(f"{where} has expressions inside one another too deeply to be a training script.") from error
    return reader.calls


def plain_value(value: Any) -> Any:
    """`value` as the value of a configuration: `NotGiven` values are left out, at every depth."""
    if isinstance(value, Mapping):
        return {str(key): plain_value(each) for key, each in value.items() if not isinstance(each, NotGiven)}
    if isinstance(value, (list, tuple)):
        return [plain_value(each) for each in value if not isinstance(each, NotGiven)]
    return value if isinstance(value, (bool, int, float, str)) or value is None else json.dumps(str(value))


def call_name(node: ast.expr) -> str:
    """The dotted name of the called function; "" if it has none."""
    if isinstance(node, ast.Attribute):
        return f"{call_name(node.value)}.{node.attr}".lstrip(".")
    return node.id if isinstance(node, ast.Name) else ""


def _not_given(node: ast.expr) -> NotGiven:
    return NotGiven(ast.unparse(node)[:60])
