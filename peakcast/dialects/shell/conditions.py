"""Evaluates a script's conditions, and tells which branch ends the script with an error.

Source of the rules: the Bash manual, "Conditional Constructs" and "Bash Conditional Expressions".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase

from peakcast.dialects.shell.shell_tree import Node, command_nodes, source_of
from peakcast.dialects.shell.values import is_whole, tested

_BRACKETS = ("[", "[[", "]", "]]", "(", ")")


def is_condition(node: Node) -> bool:
    """Whether `node` is a test, `[ ... ]` or `(( ... ))`, or the opposite of one."""
    return node.type in ("test_command", "negated_command") or source_of(node).startswith("((")


def holds(node: Node, text: Callable[[Node], str], calculation: Callable[[str], int | None], notes: list[str]) -> bool:
    """Whether a condition holds. Comparisons of texts and numbers, and combinations of these, are evaluated; anything else
    counts as false, with a sentence for the user. `text`: the text of a node, expanded; `calculation`: the value of
    arithmetic."""
    inner = [child for child in node.children if child.type not in _BRACKETS]
    kinds = [child.type for child in inner]
    if source_of(node).startswith("(("):
        number = calculation(source_of(node)[2:-2])
        known = None if number is None else number != 0
        return _said(known, node, notes)
    if node.type in ("test_command", "parenthesized_expression") and len(inner) == 1:
        return holds(inner[0], text, calculation, notes)
    if kinds[:1] == ["!"] and len(inner) == 2:
        return not holds(inner[1], text, calculation, notes)
    if len(inner) == 3 and kinds[1] in ("&&", "||"):
        parts = (holds(part, text, calculation, notes) for part in inner[::2])
        return all(parts) if kinds[1] == "&&" else any(parts)
    words = [text(child) for child in inner] if node.type.endswith("_expression") else [text(node)]
    known = None
    if len(words) == 3 and kinds[2] in ("extglob_pattern", "regex") and words[1] in ("==", "=", "!="):
        known = fnmatchcase(words[0], words[2]) == (words[1] != "!=")
    elif node.type.endswith("_expression") or (node.parent is not None and node.parent.type == "test_command"):
        known = tested(words)
    return _said(known, node, notes)


def _said(known: bool | None, node: Node, notes: list[str]) -> bool:
    """`known`; false, with a sentence about the condition `node`, where it is not known."""
    if known is None:
        shown = " ".join(source_of(node).split())[:60]
        notes.append(f"The script's condition {shown!r} is not known; it is treated as not holding.")
    return bool(known)


def ends_with_error(nodes: Sequence[Node]) -> bool:
    """Whether one of the statements `nodes`, of a branch, is `exit` with a status other than 0."""
    for node in nodes:
        words = [source_of(part) for part in command_nodes(node)] if node.type == "command" else []
        if words[:1] == ["exit"] and len(words) == 2 and is_whole(words[1]) and int(words[1]) != 0:
            return True
        if node.type == "else_clause" and ends_with_error(node.named_children):
            return True
    return False
