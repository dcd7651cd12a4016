"""A launch script's commands, read and never run: variables, arrays, simple conditions, continued lines.

What bash would need to run something for ($(...), loops, functions) is left out and said. Source of the rules: the Bash
manual, "Shell Expansions" and "Bash Conditional Expressions".
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from peakcast.dialects.shell_values import calculated, is_whole, tested
from peakcast.dialects.shell_words import MOST_WORDS, closing, pieces_of, statements, tokens
from peakcast.errors import SpecError

MAX_CHARACTERS = 2**18
MOST_NESTED = 8
"""Texts that a script has run inside one another, and defaults of variables inside one another."""
_NAME = r"[A-Za-z_]\w*"
_ASSIGNMENT = re.compile(rf"({_NAME})(\+?)=(.*)", re.DOTALL)
_PARAMETER = re.compile(rf"(#?)({_NAME}|[0-9]+|[@*])(?:\[([^\]]*)\])?(?:(:?[-=+?])(.*)|([#%/,^:].*))?", re.DOTALL)
_RESERVED = ("for", "while", "until", "case", "select", "function", "{")
WRITES = "peakcast-writes"
"""The command that stands for `cat > FILE << EOF` while a script is read."""
_HERE_DOCUMENT = re.compile(
    r"""^[ \t]*cat[ \t]*(?:>[ \t]*(?P<file>[^\s<>]+)[ \t]*)?<<-?[ \t]*(?P<quote>['"]?)(?P<end>\w+)(?P=quote)"""
    r"""[ \t]*(?:>[ \t]*(?P<later>[^\s<>]+)[ \t]*)?$""",
    re.MULTILINE,
)
_ENDS = {"for": "done", "while": "done", "until": "done", "select": "done", "case": "esac", "function": "}", "{": "}"}


@dataclass(frozen=True, slots=True)
class Command:
    """One command of a script: its words, and the exported variables that it sees."""

    words: tuple[str, ...]
    env: Mapping[str, str]


@dataclass(slots=True)
class Script:
    """The commands of a script, in order, and sentences on what was not followed."""

    commands: list[Command] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    files: dict[str, str] = field(default_factory=dict)
    """Files that it writes from here-documents: by the name that it gives them."""


def read_script(text: str, arguments: Sequence[str] = ()) -> Script:
    """The commands that `text` would run with `arguments`, as far as they can be known without running any. Raises:
    SpecError."""
    if len(text) > MAX_CHARACTERS:
        raise SpecError(f"the script has {len(text):,} characters; a launch script is not that long.")
    reader = _Reader()
    reader.give(arguments)
    reader.read(text)
    return reader.script


def _documents_as_commands(text: str) -> str:
    """`text` with each here-document that is written to a file as one command, whose last word is what it holds."""
    parts: list[str] = []
    position = 0
    while (opened := _HERE_DOCUMENT.search(text, position)) is not None:
        closed = re.compile(rf"^\t*{opened['end']}[ \t]*$", re.MULTILINE).search(text, opened.end())
        if closed is None:  # it goes on to the end, and so would all that follow
            break
        name, body = opened["file"] or opened["later"], text[opened.end() + 1 : closed.start()]
        if not name:
            written = text[opened.start() : closed.end()]
        elif opened["quote"]:
            written = f"{WRITES} {name} '" + body.replace("'", "'\\''") + "'"
        else:
            written = f'{WRITES} {name} "' + re.sub(r'(["`])', r"\\\1", body) + '"'
        parts += [text[position : opened.start()], written]
        position = closed.end()
    return "".join([*parts, text[position:]])


class _Reader:
    """Walks a script's statements and keeps its variables."""

    def __init__(self) -> None:
        self.script = Script()
        self.variables: dict[str, str | list[str]] = {}
        self.exported: set[str] = set()
        self.words_made = 0
        self.depth = 0
        self.defaults_open = 0

    def give(self, arguments: Sequence[str]) -> None:
        """These are `$1`, `$2` and so on from now on."""
        for name in [name for name in self.variables if name.isdecimal()]:
            del self.variables[name]
        self.variables.update({str(number): word for number, word in enumerate(arguments, 1)})
        self.variables |= {"@": list(arguments), "*": list(arguments), "#": str(len(arguments))}

    def read(self, text: str) -> None:
        """Follow the statements of `text`."""
        self.depth += 1
        if self.depth > MOST_NESTED:
            raise SpecError("the script runs text inside text too deeply to be a launch script.")
        branches: list[list[bool]] = []  # of each open `if`: is this branch taken, was any before
        skipping: list[str] = []  # the words that end what is passed over
        for words in statements(_documents_as_commands(text)):
            if skipping:
                first = words[words[0] in ("do", "then", "else") and len(words) > 1]
                if first == skipping[-1]:
                    skipping.pop()
                elif first in _RESERVED:
                    skipping.append(_ENDS[first])
                continue
            words = self._branched(words, branches)
            if not words or not self._taken(branches):
                continue
            if words[0] in _RESERVED or re.fullmatch(rf"{_NAME}\(\)", words[0]):
                what = words[0] if words[0] in _RESERVED else "function"
                self.script.notes.append(f"The script's {' '.join(words)[:60]!r} is not followed.")
                if _ENDS[what] not in words[1:]:
                    skipping.append(_ENDS[what])
                continue
            while words and words[0] in ("[", "[["):  # `[[ test ]] && command`
                joint = next((index for index, word in enumerate(words) if word in ("&&", "||")), len(words) - 1)
                follows = self._test(words[:joint]) == (words[joint] == "&&")
                words = words[joint + 1 :] if follows else []
            if words:
                self._statement(words)
        self.depth -= 1

    def _branched(self, words: list[str], branches: list[list[bool]]) -> list[str]:
        """What is left of a statement after the words of `if` before it, which open, change and close `branches`."""
        while words and words[0] in ("if", "elif", "then", "else", "fi", "time", "exec", "!", "do"):
            word, words = words[0], words[1:]
            if word == "if":
                branches.append([False, not self._taken(branches)])
                branches[-1][0] = self._condition(words) if self._taken(branches[:-1]) else False
                words = []
            elif word == "elif" and branches:
                branches[-1][1] |= branches[-1][0]
                branches[-1][0] = not branches[-1][1] and self._condition(words)
                words = []
            elif word == "else" and branches:
                branches[-1][0] = not (branches[-1][0] or branches[-1][1])
            elif word == "fi" and branches:
                branches.pop()
        return words

    def _taken(self, branches: list[list[bool]]) -> bool:
        return all(taken for taken, _ in branches)

    def _statement(self, raw: list[str]) -> None:
        prefix, raw = self._assigned(raw)
        if not raw:
            self.variables.update(prefix)
        elif raw[0] in ("export", "declare", "local", "readonly", "typeset"):
            exports = raw[0] == "export" or "-x" in raw
            for word in raw[1:]:
                if _ASSIGNMENT.fullmatch(word) is not None:
                    self._statement([word])
                if exports and not word.startswith("-"):
                    self.exported.add(word.partition("=")[0].rstrip("+"))
        elif raw[0] == WRITES and len(raw) == 3:
            name, body = (" ".join(self._expand(word, split=False)) for word in raw[1:])
            self.script.files[name] = body
        else:
            self._run([item for word in raw for item in self._expand(word)], prefix)

    def _assigned(self, raw: list[str]) -> tuple[dict[str, str], list[str]]:
        """The texts that the assignments before a command give, and the command; arrays are there at once."""
        prefix: dict[str, str] = {}
        while raw and (match := _ASSIGNMENT.fullmatch(raw[0])):
            name, plus, value = match.groups()
            raw = raw[1:]
            if value.startswith("("):
                items = [item for word in tokens(value[1:-1]) for item in self._expand(word)]
                old = self.variables.get(name, []) if plus else []
                self.variables[name] = [*(old if isinstance(old, list) else [old]), *items]
            else:
                old_text = self._value(name) if plus else ""
                prefix[name] = old_text + " ".join(self._expand(value, split=False))
        return prefix, raw

    def _run(self, words: list[str], prefix: dict[str, str]) -> None:
        """A command that the script starts, with the variables set before it."""
        if words[:1] == ["shift"]:
            left, count = list(self.variables["@"]), words[1] if words[1:] else "1"
            if is_whole(count) and 0 <= int(count) <= len(left):
                self.give(left[int(count) :])
            return
        if words[:1] in (["source"], ["."]):
            self.script.notes.append(f"The script's {' '.join(words)[:60]!r} is not followed.")
        if not words or words[0] in (":", "set", "cd", "echo", "mkdir", "source", ".", "unset", "exit", "module"):
            return
        env = {name: self._value(name) for name in sorted(self.exported)} | prefix
        self.script.commands.append(Command(tuple(words), env))
        text = _text_to_run(words)
        if text is not None:
            exported = self.exported
            self.exported = exported | set(prefix)
            self.variables.update(prefix)
            self.read(text)
            self.exported = exported

    # -- conditions ---------------------------------------------------------------------------------------------------

    def _condition(self, words: list[str]) -> bool:
        """Whether a condition holds: comparisons of texts and numbers joined by && and ||; anything else counts as no."""
        truth, joined = False, "||"
        part: list[str] = []
        for word in [*words, "||"]:
            if word not in ("&&", "||"):
                part.append(word)
                continue
            if joined == "||" or truth:
                value = self._test(part)
                truth = value if joined == "&&" else truth or value
            part, joined = [], word
        return truth

    def _test(self, words: list[str]) -> bool:
        shown = " ".join(words)
        if len(words) > 2 and words[0] in ("[", "[[") and words[-1] in ("]", "]]"):
            inner = [" ".join(self._expand(word, split=False)) for word in words[1:-1]]
            negated = inner[0] == "!"
            inner = inner[negated:]
            known = tested(inner)
            if known is not None:
                return known != negated
        self.script.notes.append(f"The script's condition {shown[:60]!r} is not known; it is taken as not holding.")
        return False

    # -- expansion ----------------------------------------------------------------------------------------------------

    def _value(self, name: str) -> str:
        value = self.variables.get(name, "")
        return value if isinstance(value, str) else (value[0] if value else "")

    def _expand(self, word: str, *, split: bool = True) -> list[str]:
        """The words that `word` stands for: quotes removed, variables put in, unquoted ones split at spaces."""
        out: list[str] = []
        current: str | None = None
        position, quoted, nothing = 0, False, False
        while position < len(word):
            character = word[position]
            if character == "\\" and position + 1 < len(word):
                follower = word[position + 1]
                if follower != "\n":
                    current = (current or "") + (follower if not quoted or follower in '$`"\\' else "\\" + follower)
                position += 2
            elif character == "'" and not quoted:
                end = word.find("'", position + 1)
                end = len(word) if end < 0 else end
                current = (current or "") + word[position + 1 : end]
                position = end + 1
            elif character == '"':
                quoted, current, position = not quoted, current or "", position + 1
            elif character in "$`":
                values, several, position = self._expansion(word, position)
                pieces = pieces_of(values, several=several, quoted=quoted, split=split)
                nothing |= several and quoted and not pieces
                for index, piece in enumerate(pieces):
                    if index:
                        out.append(current or "")
                        current = None
                    current = (current or "") + piece
            else:
                current, position = (current or "") + character, position + 1
            if len(current or "") > MAX_CHARACTERS:
                raise SpecError("a variable of the script grows too long for a launch script.")
        out += [current] if current or (current is not None and not nothing) else []
        self.words_made += len(out)
        if self.words_made > MOST_WORDS:
            raise SpecError(f"the script stands for more than {MOST_WORDS:,} words; a launch script does not.")
        return out

    def _expansion(self, word: str, start: int) -> tuple[list[str], bool, int]:
        """What the expansion at `start` gives, whether it is a whole array, and where it ends."""
        if word.startswith("$((", start):
            end = word.find("))", start)
            end = len(word) if end < 0 else end
            return [self._arithmetic(word[start + 3 : end])], False, end + 2
        if word[start] == "`" or word.startswith("$(", start):
            end = closing(word, start + 1, "`", "`") if word[start] == "`" else closing(word, start + 2, "(", ")")
            self.script.notes.append(f"The script's {word[start : end + 1][:60]!r} is not run; it counts as empty.")
            return [""], False, end + 1
        if word.startswith("${", start):
            end = closing(word, start + 2, "{", "}")
            values, several = self._parameter(word[start + 2 : end])
            return values, several, end + 1
        match = re.compile(rf"\$({_NAME}|[0-9@*#?$!-])").match(word, start)
        if match is None:
            return ["$"], False, start + 1
        if match[1] in "@*":
            return list(self.variables[match[1]]), match[1] == "@", match.end()
        return [self._value(match[1])], False, match.end()

    def _parameter(self, inside: str) -> tuple[list[str], bool]:
        """`${...}`: a variable, an array's items, their number, or a default."""
        match = _PARAMETER.fullmatch(inside)
        if match is None:
            self.script.notes.append(f"The script's '${{{inside[:40]}}}' is not followed.")
            return [""], False
        count, name, index, rule, other, change = match.groups()
        value = self.variables.get(name)
        items = value if isinstance(value, list) else [] if value is None else [value]
        if count:
            return [str(len(items) if index else len(self._value(name)))], False
        if index in ("@", "*"):
            return list(items), True
        if name in ("@", "*") and not rule:
            since = re.fullmatch(r":\s*(\d{1,6})", change or "")
            return items[max(0, int(since[1]) - 1) :] if since else items, name == "@"
        if index and index.isdecimal() and len(index) < 6:
            items = items[int(index) : int(index) + 1]
        text = items[0] if items else ""
        if rule and rule[-1] in "-=" and not (text if rule[0] == ":" else items):
            text = self._default(other)
            if rule[-1] == "=":
                self.variables[name] = text
        elif rule and rule[-1] == "+":
            text = self._default(other) if text else ""
        elif change:
            self.script.notes.append(f"The script's '${{{inside[:40]}}}' is taken as ${{{name}}}.")
        return [text], False

    def _default(self, words: str) -> str:
        """What stands in a variable's place."""
        self.defaults_open += 1
        if self.defaults_open > MOST_NESTED:
            raise SpecError(f"the script has more than {MOST_NESTED} defaults of variables inside one another.")
        text = " ".join(self._expand(words, split=False))
        self.defaults_open -= 1
        return text

    def _arithmetic(self, expression: str) -> str:
        """The whole number that `$((...))` gives, "" where it is not plain arithmetic."""
        names = re.compile(rf"\$?\{{?({_NAME})\}}?")
        plain = names.sub(lambda match: self._value(match[1]) or "0", expression)
        value = calculated(plain)
        if value is None:
            self.script.notes.append(f"The script's $(({expression[:40]})) is not followed.")
        return "" if value is None else str(value)


def _text_to_run(words: list[str]) -> str | None:
    """The text that a command has a shell run: `eval ...`, `bash -c "..."`, also behind `srun` and the like."""
    if words[0] == "eval":
        return " ".join(words[1:])
    for index, word in enumerate(words[:-1]):
        if word in ("-c", "-lc") and index and words[index - 1].rsplit("/", 1)[-1] in ("bash", "sh"):
            return words[index + 1]
    return None
