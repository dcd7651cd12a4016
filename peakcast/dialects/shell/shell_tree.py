"""The syntax tree of a script by tree-sitter's grammar of bash, and the texts of its nodes."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from peakcast.core.errors import SpecError

Node = Any
"""A `tree_sitter.Node`."""
_QUOTED_PATTERN = re.compile(r"""(\$\{\w+//?)(['"])([^'"{}]*)\2(?=[/}])""")
"""A quoted pattern in `${NAME/'/'/_}`, with which the grammar (tree-sitter-bash 0.25) gives up the rest of the script."""


def tree_of(text: str) -> Node:
    """The syntax tree of a script. Raises: SpecError if the packages that parse it are not installed."""
    try:
        import tree_sitter
        import tree_sitter_bash
    except ImportError as error:
        raise SpecError(
            "a shell script is read with the packages tree-sitter and tree-sitter-bash, which are not installed; install "
            "them, or give the configuration itself."
        ) from error
    parser = tree_sitter.Parser(tree_sitter.Language(tree_sitter_bash.language()))
    readable = _QUOTED_PATTERN.sub(lambda found: found[1] + re.sub(r"([/\\])", r"\\\1", found[3]), text)
    return parser.parse(readable.encode(errors="replace")).root_node


def unread_lines(node: Node) -> str:
    """The first lines with something that the grammar does not know, such as "lines 2 to 4"; "" if it knows all."""
    if node.type == "ERROR":
        first, last = node.start_point[0] + 1, node.end_point[0] + 1
        return f"line {first}" if first == last else f"lines {first} to {last}"
    found = (unread_lines(child) for child in node.children if child.has_error)
    return next(filter(None, found), "")


def source_of(node: Node) -> str:
    """A node's text as written in the script."""
    return bytes(node.text).decode(errors="replace")


def named_children(node: Node) -> list[Node]:
    """The named children of a node, without comments."""
    return [child for child in node.named_children if child.type != "comment"]


def joined(nodes: Iterable[Node]) -> Iterator[str]:
    """The texts of `nodes`; those of adjacent nodes without a space are joined."""
    text, end = "", -1
    for node in nodes:
        if text and node.start_byte != end:
            yield text
            text = ""
        text, end = text + source_of(node), node.end_byte
    if text:
        yield text


def command_nodes(node: Node) -> list[Node]:
    """The name and the arguments of a command."""
    left_out = ("variable_assignment", "file_redirect", "herestring_redirect", "heredoc_redirect", "comment")
    return [child for child in node.named_children if child.type not in left_out]


def descendants(node: Node, kind: str) -> list[Node]:
    """The outermost nodes of type `kind` inside a node."""
    return [
        found for child in node.named_children for found in ([child] if child.type == kind else descendants(child, kind))
    ]
