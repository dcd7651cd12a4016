"""Evaluates Python functions that make a configuration, statement by statement, without running them: those of torchtitan's
registries, and of the recipes of Megatron-Bridge and NeMo 2."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from peakcast.core.errors import SpecError, near_misses
from peakcast.dialects.python.calls import Expressions, NotGiven, call_name, parsed, plain_value

NO_VALUES: Mapping[str, Any] = {}
MOST_CALLS = 20
"""Depth up to which calls between these functions are followed."""


class FunctionTable:
    """The functions of Python `sources`. `makes` matches the names of the classes whose objects are configurations."""

    def __init__(self, sources: Sequence[str], where: str, makes: re.Pattern[str]) -> None:
        self.where, self._makes = where, makes
        self.functions: dict[str, ast.FunctionDef] = {}
        self.notes: list[str] = []
        """Sentences about statements that could not be evaluated without running them."""
        self.constants: dict[str, Any] = {}
        """Names that all functions see, with their values."""
        self._depth = 0
        for source in sources:
            body = parsed(source, where).body
            self.functions |= {each.name: each for each in body if isinstance(each, ast.FunctionDef)}

    def names(self) -> list[str]:
        """The functions whose return annotation names a configuration class."""
        return [name for name, each in self.functions.items() if each.returns and "Config" in ast.unparse(each.returns)]

    def config(self, name: str) -> dict[str, Any]:
        """The configuration that a function returns; objects become mappings whose `_target_` is the name of the class.
        Raises: SpecError."""
        if name not in self.functions:
            near = near_misses(name, self.names())
            raise SpecError(f"config={name!r} is no function of {self.where}{near}".rstrip("?") + ".", parameter="config")
        value: dict[str, Any] = plain_value(self._made_by(name))
        return value

    def expressions(self) -> Expressions:
        """What evaluates the expressions of one function."""
        return Expressions(keeps_calls=True)

    def _made_by(self, name: str, arguments: Sequence[Any] = (), keywords: Mapping[str, Any] = NO_VALUES) -> dict[str, Any]:
        self._depth += 1
        if self._depth > MOST_CALLS:
            raise SpecError(f"{self.where} has functions that call one another without end.")
        function = self.functions[name]
        known = self.expressions()
        known.names |= self.constants
        defaults = function.args.defaults
        for argument, default in zip(function.args.args[len(function.args.args) - len(defaults) :], defaults, strict=True):
            known.names[argument.arg] = known.value(default)
        for argument, given in zip(function.args.kwonlyargs, function.args.kw_defaults, strict=True):
            known.names[argument.arg] = known.value(given) if given is not None else NotGiven(argument.arg)
        known.names |= {argument.arg: given for argument, given in zip(function.args.args, arguments, strict=False)}
        known.names |= keywords
        found = self._followed(function.body, known, {})
        self._depth -= 1
        if found is None:
            raise SpecError(f"{name} of {self.where} returns no configuration that can be read without running it.")
        return found

    def _followed(
        self, statements: Iterable[ast.stmt], known: Expressions, made: dict[str, dict[str, Any]]
    ) -> dict[str, Any] | None:
        """The value of the first `return` among the statements, None if there is none. `made`: name -> the configuration
        assigned to it."""
        for statement in statements:
            if isinstance(statement, ast.Return) and statement.value is not None:
                named = statement.value.id if isinstance(statement.value, ast.Name) else ""
                assigned = known.names.get(named)
                return made.get(named) or (assigned if isinstance(assigned, dict) else self._made(statement.value, known))
            if isinstance(statement, ast.If):
                condition = known.value(statement.test)
                if isinstance(condition, NotGiven):
                    self._note(statement)
                elif (found := self._followed(statement.body if condition else statement.orelse, known, made)) is not None:
                    return found
            elif isinstance(statement, (ast.Assign, ast.AnnAssign)):
                self._assign(statement, known, made)
            elif isinstance(statement, (ast.For, ast.While, ast.With, ast.Try, ast.AugAssign)) or (
                isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call)
            ):
                self._note(statement)
        return None

    def _assign(self, statement: ast.Assign | ast.AnnAssign, known: Expressions, made: dict[str, dict[str, Any]]) -> None:
        target = statement.targets[0] if isinstance(statement, ast.Assign) else statement.target
        if statement.value is None:
            return
        if isinstance(target, ast.Name):
            config = self._made(statement.value, known)
            if config is not None:
                made[target.id] = config
            known.names[target.id] = config if config is not None else known.value(statement.value)
            return
        first, *path = attribute_path(target) or [""]
        if first in made:
            set_at(made[first], path, known.value(statement.value))
        elif first in known.names and isinstance(known.names[first], dict):
            set_at(known.names[first], path, known.value(statement.value))

    def _note(self, statement: ast.stmt) -> None:
        shown = " ".join(ast.unparse(statement).split())[:60]
        self.notes.append(f"The statement {shown!r} of {self.where} is not followed; what it changes is left out.")

    def _made(self, node: ast.expr, known: Expressions) -> dict[str, Any] | None:
        """The configuration that an expression makes, by the constructor of a configuration class or by a call of another
        of the functions."""
        if known.follow is not None:
            followed = known.value(node)
            return followed if isinstance(followed, dict) else None
        called = call_name(node.func) if isinstance(node, ast.Call) else ""
        if called in self.functions and "Config" in ast.unparse(self.functions[called].returns or ast.Name("")):
            return self._made_by(called)
        if self._makes.fullmatch(called):
            value = known.value(node)
            return dict(value) if isinstance(value, dict) else None
        return None


def without_targets(value: Any) -> Any:
    """`value` without the `_target_` of its mappings."""
    if isinstance(value, dict):
        return {key: without_targets(each) for key, each in value.items() if key not in ("_target_", "_arguments_", "_of_")}
    return [without_targets(each) for each in value] if isinstance(value, list) else value


def attribute_path(node: ast.expr) -> list[str]:
    """The names of an attribute such as `config.training.steps`, in order; empty for any other target."""
    if isinstance(node, ast.Attribute):
        inner = attribute_path(node.value)
        return [*inner, node.attr] if inner else []
    return [node.id] if isinstance(node, ast.Name) else []


def set_at(values: dict[str, Any], path: list[str], value: Any) -> None:
    for name in path[:-1]:
        inner = values.get(name)
        if not isinstance(inner, dict):
            inner = values[name] = {}
        values = inner
    if path:
        values[path[-1]] = value
