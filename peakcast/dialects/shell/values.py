"""Evaluates a launch script's tests and arithmetic. Source of the rules: the Bash manual, "Bash Conditional Expressions"
and "Shell Arithmetic"."""

from __future__ import annotations

import ast
import operator as operators
import re


def tested(words: list[str]) -> bool | None:
    """Whether a test with these words is true; None if only running the script could tell."""
    if len(words) == 1:
        return bool(words[0])
    if len(words) == 2 and words[0] in ("-z", "-n"):
        return bool(words[1]) == (words[0] == "-n")
    if len(words) == 3:
        left, operator, right = words
        if operator in ("==", "=", "!="):
            return (left == right) == (operator != "!=")
        if operator in ("-eq", "-ne", "-gt", "-ge", "-lt", "-le") and is_whole(left) and is_whole(right):
            a, b = int(left), int(right)
            return {"-eq": a == b, "-ne": a != b, "-gt": a > b, "-ge": a >= b, "-lt": a < b, "-le": a <= b}[operator]
    return None


def is_whole(text: str) -> bool:
    """Whether `text` is a whole number of at most 18 digits."""
    return re.fullmatch(r"-?\d{1,18}", text) is not None


def calculated(expression: str) -> int | None:
    """The value of whole-number arithmetic with + - * / %, comparisons, `&&`, `||`, `a ? b : c` and brackets; None for any
    other."""
    known = {
        ast.Add: operators.add, ast.Sub: operators.sub, ast.Mult: operators.mul, ast.Div: operators.floordiv,
        ast.FloorDiv: operators.floordiv, ast.Mod: operators.mod, ast.Gt: operators.gt, ast.GtE: operators.ge,
        ast.Lt: operators.lt, ast.LtE: operators.le, ast.Eq: operators.eq, ast.NotEq: operators.ne,
    }  # fmt: skip

    def value(node: ast.AST) -> int:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node.value
        if isinstance(node, ast.BinOp) and type(node.op) in known:
            result: int = known[type(node.op)](value(node.left), value(node.right))
            return result
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -value(node.operand)
        if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in known:
            return int(known[type(node.ops[0])](value(node.left), value(node.comparators[0])))
        if isinstance(node, ast.BoolOp):
            values = [value(each) != 0 for each in node.values]
            return int(all(values) if isinstance(node.op, ast.And) else any(values))
        if isinstance(node, ast.IfExp):
            return value(node.body if value(node.test) else node.orelse)
        raise ValueError

    if len(expression) > 200 or not re.fullmatch(r"[\d\s+*/%()<>=!?:&|-]*", expression):
        return None
    expression = expression.replace("&&", " and ").replace("||", " or ")
    expression = re.sub(r"^([^?:]*)\?([^?:]*):([^?:]*)$", r"(\2) if (\1) else (\3)", expression)
    try:
        return value(ast.parse(expression.strip(), mode="eval").body)
    except (ValueError, SyntaxError, ZeroDivisionError, RecursionError, MemoryError):
        return None
