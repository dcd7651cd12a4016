"""Reads the commands of a launch script without running any. tree-sitter parses it into commands, conditions and loops.
What only running could give (`$(...)`, the exit status of a command) is left out, with a sentence for the user.

Source of the rules: the Bash manual, "Shell Commands", "Shell Parameters", "Bash Conditional Expressions".
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from peakcast.core.errors import SpecError
from peakcast.dialects.common.translation import words as names
from peakcast.dialects.shell.conditions import ends_with_error, holds, is_condition
from peakcast.dialects.shell.nested import script_to_run, text_to_run
from peakcast.dialects.shell.printed import folder_of, printed, prints
from peakcast.dialects.shell.shell_expansion import MAX_CHARACTERS as MAX_CHARACTERS
from peakcast.dialects.shell.shell_expansion import MOST_NESTED, Variables
from peakcast.dialects.shell.shell_tree import (
    Node,
    command_nodes,
    descendants,
    joined,
    named_children,
    source_of,
    tree_of,
    unread_lines,
)
from peakcast.dialects.shell.slurm import slurm_variables
from peakcast.dialects.shell.values import is_whole

MOST_STEPS = 20_000  # statements that are followed, including repetitions in loops and functions
MOST_BLOCKS = 40
"""Depth up to which nested blocks, functions and conditions are followed."""
_WITHOUT_EFFECT = names(": echo printf mkdir cd set unset exit return module true wait sleep")
_VARIABLE = re.compile(r'"?\$\{?([A-Za-z_]\w*)\}?"?')
LEFT_OUT = "is something that is not understood as bash; it is left out, and may take commands with it."
"""How a note ends on lines that the grammar does not know."""


@dataclass(frozen=True, slots=True)
class ShellCommand:
    """One command of a script: its words, and the exported variables that it sees."""

    words: tuple[str, ...]
    env: Mapping[str, str]


@dataclass(slots=True)
class Script:
    """The commands of a script, in order, and sentences on what was not followed."""

    commands: list[ShellCommand] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)
    """Name of a file that the script writes from a here-document -> its text."""
    unset: dict[str, str] = field(default_factory=dict)
    """Flag whose value is a variable that nothing sets -> the variable's name."""


def read_script(
    text: str,
    arguments: Sequence[str] = (),
    sourced: Callable[[str], str | None] = lambda name: None,
    where: str = "",
) -> Script:
    """The commands that `text`, in the file `where`, would run with `arguments`, as far as they can be known without
    running any. `sourced` returns the text of a file that the script reads with `source` or runs with bash, by its path
    from the script's own folder, or None if the file is not available. Raises: SpecError."""
    if len(text) > MAX_CHARACTERS:
        raise SpecError(f"the script has {len(text):,} characters; a launch script is not that long.")
    reader = _ScriptReader(sourced)
    reader.variables.give(arguments)
    reader.variables.variables |= slurm_variables(text)
    reader.read(text, where)
    if reader.variables.missed_arguments and not arguments:
        reader.script.notes.append(
            "The script is read without arguments, so what it takes from $1 and the like counts as empty; a file with the "
            "command that runs it (bash FILE ...) gives them."
        )
    return reader.script


class _LoopLeftError(Exception):
    """Raised by `break` and `continue`, to leave a turn of a loop."""


class _ScriptReader:
    """Visits a script's tree, and keeps its variables and functions."""

    def __init__(self, sourced: Callable[[str], str | None]) -> None:
        self.script = Script()
        self.variables = Variables(self.script.notes, self._substituted)
        self.exported: set[str] = set()
        self.functions: dict[str, Node] = {}
        self._sourced = sourced
        self._texts, self._blocks, self._steps = 0, 0, 0

    def read(self, text: str, where: str | None = None) -> None:
        """Follow the statements of `text`; `where` is its file, if it has one of its own."""
        self._texts += 1
        if self._texts > MOST_NESTED:
            raise SpecError("the script runs text inside text too deeply to be a launch script.")
        before = self.variables.value("BASH_SOURCE")
        self.variables.variables["BASH_SOURCE"] = before if where is None else where
        tree = tree_of(text)
        if where is not None and (lines := unread_lines(tree)):
            self.script.notes.append(f"In {lines} of {where or 'the script'} {LEFT_OUT}")
        self._follow(named_children(tree))
        self.variables.variables["BASH_SOURCE"] = before
        self._texts -= 1

    # -- statements ---------------------------------------------------------------------------------------------------

    def _follow(self, nodes: Iterable[Node]) -> None:
        """Follow a sequence of statements."""
        self._blocks += 1
        if self._blocks > MOST_BLOCKS:
            raise SpecError(f"the script has more than {MOST_BLOCKS} blocks inside one another; a launch script has not.")
        for node in nodes:
            self._steps += 1
            if self._steps > MOST_STEPS:
                raise SpecError(f"the script runs more than {MOST_STEPS:,} statements; a launch script does not.")
            step = getattr(self, f"_{node.type}", None)
            if step is not None:
                step(node)
            elif node.type in ("c_style_for_statement", "unset_command"):
                self._not_followed(node)
        self._blocks -= 1

    def _inside(self, node: Node) -> None:
        self._follow(named_children(node))

    _pipeline = _subshell = _ERROR = _do_group = _else_clause = _inside

    def _not_followed(self, node: Node) -> None:
        self.script.notes.append(f"The script's {' '.join(source_of(node).split())[:60]!r} is not followed.")

    def _compound_statement(self, node: Node) -> None:
        if not source_of(node).startswith("(("):
            self._inside(node)
        elif not self.variables.assign(source_of(node)[2:-2]):
            self._not_followed(node)

    def _list(self, node: Node) -> None:
        """Follow `a && b` or `a || b`, assuming that every command succeeds."""
        left, right = named_children(node)[0], named_children(node)[-1]
        if is_condition(left):
            answer = self._holds(left)
        else:
            self._follow([left])
            answer = left.type != "list" or not any(map(is_condition, left.named_children)) or self._holds(left)
        if answer == any(child.type == "&&" for child in node.children):
            self._follow([right])

    def _if_statement(self, node: Node) -> None:
        branches = [node, *(child for child in node.named_children if child.type == "elif_clause")]
        for branch in branches:
            then = next((index for index, child in enumerate(branch.children) if child.type == "then"), None)
            if then is None:
                continue
            asked = [child for child in branch.children[1:then] if child.is_named and child.type != "comment"]
            body = [child for child in branch.children[then + 1 :] if child.is_named and not child.type.endswith("_clause")]
            others = [child for child in node.named_children if child.type == "else_clause"]
            if asked and self._chosen(asked[-1], body, others):
                self._follow(body)
                return
        self._follow(child for child in node.named_children if child.type == "else_clause")

    def _chosen(self, condition: Node, body: list[Node], others: list[Node]) -> bool:
        """Whether `condition` holds, so that `body` runs. A condition that is not known is decided such that the script
        does not end with an error."""
        known = len(self.script.notes)
        answer = self._holds(condition)
        fails = [ends_with_error(nodes) for nodes in (body, others)]
        if len(self.script.notes) == known or fails[0] == fails[1]:
            return answer
        del self.script.notes[known:]
        shown, how = " ".join(source_of(condition).split())[:60], "not holding" if fails[0] else "holding"
        self.script.notes.append(
            f"The script's condition {shown!r} is not known; it is treated as {how}, as else the script ends with an error."
        )
        return not fails[0]

    def _for_statement(self, node: Node) -> None:
        if node.children[0].type == "select":
            self._not_followed(node)
            return
        name, *values = named_children(node)
        body = next((child for child in values if child.type in ("do_group", "compound_statement")), None)
        words = self._words([child for child in values if child is not body])
        if not any(child.type == "in" for child in node.children):
            words = self.variables.items("@")
        for word in words:
            self.variables.variables[source_of(name)] = word
            if body is None or not self._turn(body):
                break

    def _while_statement(self, node: Node) -> None:
        condition, body = named_children(node)[0], named_children(node)[-1]
        until = node.children[0].type == "until"
        if not (is_condition(condition) or condition.type == "list" or source_of(condition) in ("true", ":")):
            self._not_followed(node)
            return
        endless = source_of(condition) in ("true", ":")
        before: dict[str, str | list[str]] | None = None
        while (endless or self._holds(condition)) != until and self.variables.variables != before:
            before = dict(self.variables.variables)  # a repetition that changes none waits for other programs
            if not self._turn(body):
                break
            self._steps += 1

    def _turn(self, body: Node) -> bool:
        """Follow one turn of a loop. Returns whether another turn may follow."""
        blocks, before = self._blocks, self._steps
        try:
            self._follow([body])
        except _LoopLeftError as left:
            self._blocks = blocks
            return str(left) == "continue"
        return self._steps > before

    def _case_statement(self, node: Node) -> None:
        value, *items = named_children(node)
        text = self._text(value)
        for item in items:
            ends = next(index for index, child in enumerate(item.children) if child.type == ")")
            if any(fnmatchcase(text, self._text(pattern)) for pattern in item.children[:ends] if pattern.is_named):
                self._follow(child for child in item.children[ends + 1 :] if child.is_named)
                return

    def _function_definition(self, node: Node) -> None:
        name, *rest = named_children(node)
        self.functions[source_of(name)] = rest[-1]

    # -- variables ----------------------------------------------------------------------------------------------------

    def _variable_assignment(self, node: Node) -> None:
        name, value = self._assigned(node)
        self.variables.variables[name] = value

    def _variable_assignments(self, node: Node) -> None:
        self._inside(node)

    def _assigned(self, node: Node) -> tuple[str, str | list[str]]:
        """(name of the variable in an assignment, its value afterwards)."""
        name, *values = named_children(node)
        appends = any(child.type == "+=" for child in node.children)
        key = source_of(name)
        if values and values[0].type == "array":
            items = self.variables.give_items(key, self._words(named_children(values[0])))
            return key, [*(self.variables.items(key) if appends else []), *items]
        written = source_of(node).partition("=")[2]
        text = " ".join(self.variables.expand(written, split=False))
        if name.type == "subscript":
            key = " ".join(self.variables.expand(key, split=False))
        return key, (self.variables.value(key) if appends else "") + text

    def _declaration_command(self, node: Node) -> None:
        exports = node.children[0].type == "export" or any(source_of(child) == "-x" for child in node.children)
        for child in named_children(node):
            text = source_of(child)
            if child.type == "variable_assignment":
                self._variable_assignment(child)
            elif child.type in ("concatenation", "string", "raw_string"):  # export "NAME=value"
                text = self._text(child)
                key, equals, value = text.partition("=")
                self.variables.variables |= {key: value} if equals else {}
            name = re.match(r"\w+", text)
            if exports and name is not None:
                self.exported.add(name[0])

    # -- commands -----------------------------------------------------------------------------------------------------

    def _redirected_statement(self, node: Node) -> None:
        """Follow a command with redirections. The text of a here-document is written to a file by `cat`, or to a variable
        by `read`."""
        body, *others = named_children(node)
        document = next((other for other in others if other.type == "heredoc_redirect"), None)
        text = None if document is None else self._document(document)
        words = self._words(command_nodes(body)) if text is not None and body.type == "command" else []
        if text is not None and words[:1] == ["read"] and len(words) > 1:
            self.variables.variables[words[-1]] = text
        elif text is not None and [word.rsplit("/", 1)[-1] for word in words] in (["sbatch"], ["bash"], ["sh"]):
            self.read(text)
        elif text is not None and words[:1] in (["cat"], ["tee"]):
            for target in descendants(node, "file_redirect"):
                self.script.files[self._text(named_children(target)[-1])] = text
            for word in words[1:] if words[0] == "tee" else ():
                self.script.files[word] = text
        elif body.type != "heredoc_redirect":
            self._follow([body])

    def _document(self, node: Node) -> str:
        """The text of a here-document; its variables are expanded unless the delimiter is quoted."""
        start = next((source_of(child) for child in node.children if child.type == "heredoc_start"), "")
        text = "".join(source_of(child) for child in node.children if child.type == "heredoc_body")
        if start[:1] in ("'", '"', "\\"):
            return text
        return " ".join(self.variables.expand('"' + re.sub(r'(["`])', r"\\\1", text) + '"', split=False))

    def _command(self, node: Node) -> None:
        prefix = dict(self._assigned(child) for child in node.children if child.type == "variable_assignment")
        given = next((child for child in node.children if child.type == "herestring_redirect"), None)
        if given is not None and (words := self._words(command_nodes(node)))[:1] == ["read"]:
            return self.variables.read_words(words[1:], self._text(named_children(given)[-1]))
        self._run(self._words(command_nodes(node)), {key: _as_text(value) for key, value in prefix.items()})

    def _run(self, words: list[str], prefix: dict[str, str]) -> None:
        """Follow a command that the script starts, with the variable assignments before it."""
        if not words:
            self.variables.variables.update(prefix)
        elif words[0] in ("break", "continue"):
            raise _LoopLeftError(words[0])
        elif words[0] == "shift":
            left, count = self.variables.items("@"), words[1] if words[1:] else "1"
            if is_whole(count) and 0 <= int(count) <= len(left):
                self.variables.give(left[int(count) :])
        elif words[:2] == ["set", "--"]:
            self.variables.give(words[2:])
        elif words[0] == "let":
            for expression in words[1:]:
                self.variables.assign(expression)
        elif words[0] in ("source", "."):
            text = self._sourced(words[1]) if len(words) > 1 else None
            if text is None:
                self.script.notes.append(f"The script's {' '.join(words)[:60]!r} is not followed.")
            else:
                self.read(text, words[1])
        elif words[0] in self.functions:
            arguments = self.variables.items("@")
            self.variables.give(words[1:])
            self._follow([self.functions[words[0]]])
            self.variables.give(arguments)
        elif words[0] not in _WITHOUT_EFFECT:
            self._start(words, prefix)

    def _start(self, words: list[str], prefix: dict[str, str]) -> None:
        env = {name: self.variables.value(name) for name in sorted(self.exported)} | prefix
        self.script.commands.append(ShellCommand(tuple(words), env))
        text, script = text_to_run(words), script_to_run(words)
        if script and (written := self._sourced(script[0])) is not None:
            self._run_script(written, script, prefix)
        elif text is not None:
            exported = self.exported
            self.exported = exported | set(prefix)
            self.variables.variables.update(prefix)
            self.read(text)
            self.exported = exported

    def _run_script(self, text: str, words: list[str], prefix: dict[str, str]) -> None:
        """Follow the script `text` that is run by `words`, in a shell of its own, which sees what is exported."""
        variables, exported = self.variables.variables, self.exported
        self.exported = exported | set(prefix)
        self.variables.variables = {**{name: variables[name] for name in exported if name in variables}, **prefix}
        self.variables.give(words[1:])
        self.read(text, words[0])
        self.variables.variables, self.exported = variables, exported

    # -- conditions ---------------------------------------------------------------------------------------------------

    def _holds(self, node: Node) -> bool:
        return holds(node, self._text, self.variables.calculation, self.script.notes)

    # -- words --------------------------------------------------------------------------------------------------------

    def _words(self, nodes: Iterable[Node]) -> list[str]:
        """The words that nodes expand to; adjacent nodes without a space are one word."""
        texts = list(joined(nodes))
        for flag, text in itertools.pairwise(texts):
            name = _VARIABLE.fullmatch(text)
            if flag.startswith("-") and name is not None and name[1] not in self.variables.variables:
                self.script.unset[flag.lstrip("-")] = name[1]
        return [word for text in texts for word in self.variables.expand(text)]

    def _text(self, node: Node) -> str:
        return " ".join(self.variables.expand(source_of(node), split=False))

    def _substituted(self, text: str) -> str | None:
        """The output of `$(...)` for commands that only print: `echo`, `expr`, `cat` with a here-document, those that take
        a path apart or change a text; None for all others. The script's own folder is `.`, from which `source` searches."""
        if (folder := folder_of(text)) is not None:
            return " ".join(self.variables.expand(folder, split=False)) or "."
        nodes = named_children(tree_of(text))
        if len(nodes) != 1:
            return None
        commands = nodes if nodes[0].type == "command" else named_children(nodes[0]) if nodes[0].type == "pipeline" else []
        if commands and all(command.type == "command" for command in commands) and prints(text.split()[0]):
            return printed([self._words(command_nodes(command)) for command in commands])
        documents = descendants(nodes[0], "heredoc_redirect")
        if nodes[0].type == "redirected_statement" and text.split()[:1] == ["cat"] and documents:
            return self._document(documents[0]).rstrip("\n")
        return None


def _as_text(value: str | list[str]) -> str:
    return value if isinstance(value, str) else " ".join(value)
