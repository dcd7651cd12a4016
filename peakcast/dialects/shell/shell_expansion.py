"""Expands the words of a shell script: quotes, variables, arrays, defaults, whole-number arithmetic; nothing is run.

Source of the rules: the Bash manual, "Shell Expansions".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from peakcast.core.errors import SpecError
from peakcast.dialects.shell.text_changes import changed
from peakcast.dialects.shell.values import calculated

MAX_CHARACTERS = 2**18
MOST_WORDS = 20_000
"""Most words that the expansions of one script may produce."""
MOST_NESTED = 8
"""Depth up to which nested shell texts (`bash -c`), and nested defaults of variables, are followed."""
NAME = r"[A-Za-z_]\w*"
_PARAMETER = re.compile(rf"([#!]?)({NAME}|[0-9]+|[@*])(?:\[([^\]]*)\])?(?:(:?[-=+?])(.*)|([#%/,^:].*))?", re.DOTALL)


class Variables:
    """A script's variables and arrays, and the expansion of words that name them.

    `substituted` returns the output of the command in `$(...)` if that is known without running it, else None.
    """

    def __init__(self, notes: list[str], substituted: Callable[[str], str | None]) -> None:
        self.variables: dict[str, str | list[str]] = {}
        self.notes, self._substituted = notes, substituted
        self.words_made = 0
        self.defaults_open = 0
        self.missed_arguments = False
        """Whether the script takes an argument ($1, ...) that it is not given."""

    def give(self, arguments: Sequence[str]) -> None:
        """Set `$1`, `$2` and so on."""
        for name in [name for name in self.variables if name.isdecimal()]:
            del self.variables[name]
        self.variables.update({str(number): word for number, word in enumerate(arguments, 1)})
        self.variables |= {"@": list(arguments), "*": list(arguments), "#": str(len(arguments))}

    def items(self, name: str) -> list[str]:
        """The items of an array; [text] for a variable with a text, and [] for a variable that is not set."""
        value = self.variables.get(name, [])
        return value if isinstance(value, list) else [value]

    def value(self, name: str) -> str:
        name = "BASH_SOURCE" if name == "0" else name
        self.missed_arguments |= name.isdecimal() and name not in self.variables
        value = self.variables.get(name, "")
        return value if isinstance(value, str) else (value[0] if value else "")

    def expand(self, word: str, *, split: bool = True) -> list[str]:
        """The words that `word` expands to: quotes removed, variables replaced by their values, unquoted values split at
        spaces."""
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
                pieces = _pieces(values, several=several, quoted=quoted, split=split)
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
            raise SpecError(f"the script expands to more than {MOST_WORDS:,} words; a launch script does not.")
        return out

    def _expansion(self, word: str, start: int) -> tuple[list[str], bool, int]:
        """(values of the expansion at `start`, whether it is a whole array, the position where it ends)."""
        if word.startswith("$((", start):
            end = closing(word, start + 3, "(", ")")
            return [self._arithmetic(word[start + 3 : end])], False, end + 2
        if word[start] == "`" or word.startswith("$(", start):
            end = closing(word, start + 1, "`", "`") if word[start] == "`" else closing(word, start + 2, "(", ")")
            known = self._substituted(word[start + (1 if word[start] == "`" else 2) : end])
            if known is None:
                self.notes.append(f"The script's {word[start : end + 1][:60]!r} is not run; it counts as empty.")
            return [known or ""], False, end + 1
        if word.startswith("${", start):
            end = closing(word, start + 2, "{", "}")
            values, several = self._parameter(word[start + 2 : end])
            return values, several, end + 1
        match = re.compile(rf"\$({NAME}|[0-9@*#?$!-])").match(word, start)
        if match is None:
            return ["$"], False, start + 1
        if match[1] in "@*":
            return list(self.variables[match[1]]), match[1] == "@", match.end()
        return [self.value(match[1])], False, match.end()

    def _parameter(self, inside: str) -> tuple[list[str], bool]:
        """(values of `${...}`, whether it is a whole array): a variable, the items of an array, their number, or a
        default."""
        match = _PARAMETER.fullmatch(inside)
        if match is None:
            self.notes.append(f"The script's '${{{inside[:40]}}}' is not followed.")
            return [""], False
        count, name, index, rule, other, change = match.groups()
        value = self.variables.get(name)
        items = value if isinstance(value, list) else [] if value is None else [value]
        if count == "!":
            keys = self._keys(name) or [str(number) for number in range(len(items))]
            return (keys, True) if index in ("@", "*") else ([self.value(self.value(name))], False)
        if index and index not in ("@", "*"):
            index = " ".join(self.expand(index, split=False))
            items = [self.value(f"{name}[{index}]")] if f"{name}[{index}]" in self.variables else self._item(items, index)
            index = ""
        if count:
            return [str(len(items) if index else len(self.value(name)))], False
        if index in ("@", "*"):
            return list(items), True
        if name in ("@", "*") and not rule:
            since = re.fullmatch(r":\s*(\d{1,6})", change or "")
            return items[max(0, int(since[1]) - 1) :] if since else items, name == "@"
        text = items[0] if items else ""
        if rule and rule[-1] in "-=" and not (text if rule[0] == ":" else items):
            text = self._default(other)
            if rule[-1] == "=":
                self.variables[name] = text
        elif rule and rule[-1] == "+":
            text = self._default(other) if text else ""
        elif change:
            text = self._changed(text, change, inside, name)
        return [text], False

    def _keys(self, name: str) -> list[str]:
        """The keys of the associative array `name`; empty for another variable."""
        return [key[len(name) + 1 : -1] for key in self.variables if key.startswith(f"{name}[")]

    def _item(self, items: list[str], index: str) -> list[str]:
        """The item of an array at `index`, which may be arithmetic; none if that has no value."""
        number = self.calculation(index)
        return items[number : number + 1] if number is not None and 0 <= number < len(items) else []

    def give_items(self, name: str, words: Sequence[str]) -> list[str]:
        """Set the items of an associative array, if the `words` in its brackets are `[key]=value`. Returns its items."""
        pairs = [re.fullmatch(r"\[(.+?)\]=(.*)", word, re.DOTALL) for word in words]
        keyed = {f"{name}[{pair[1]}]": pair[2] for pair in pairs if pair}
        self.variables |= keyed
        return list(keyed.values()) if len(keyed) == len(words) else list(words)

    def read_words(self, names: Sequence[str], text: str) -> None:
        """What `read` does with `text`: a word for each variable, the rest for the last one. `-a`: all in one array."""
        variables = [name for name in names if re.fullmatch(NAME, name)]
        if any(re.fullmatch(r"-\w*a", name) for name in names):
            self.variables |= {name: text.split() for name in variables[:1]}
        else:
            words = text.split(None, max(0, len(variables) - 1))
            self.variables |= dict(zip(variables, [*words, *[""] * len(variables)], strict=False))

    def _changed(self, text: str, change: str, inside: str, name: str) -> str:
        """`text` as `change` in `${inside}` leaves it; as it is, with a note, if that is not followed."""
        pattern = " ".join(self.expand(f'"{change}"', split=False)) if "$" in change and '"' not in change else change
        other = changed(text, pattern)
        if other is None:
            self.notes.append(f"The script's '${{{inside[:40]}}}' is treated as ${{{name}}}.")
        return text if other is None else other

    def _default(self, words: str) -> str:
        """The expansion of a variable's default."""
        self.defaults_open += 1
        if self.defaults_open > MOST_NESTED:
            raise SpecError(f"the script has more than {MOST_NESTED} defaults of variables inside one another.")
        text = " ".join(self.expand(words, split=False))
        self.defaults_open -= 1
        return text

    def calculation(self, expression: str) -> int | None:
        """The value of the inside of `((...))`; None if it is not whole-number arithmetic."""
        if re.search(r"\$\{\W|\$\{\w+[^\w}]|\$\(", expression):  # ${GPUS:-8}, ${#GPUS[@]}, $(...)
            expression = " ".join(self.expand(f'"{expression}"', split=False))
        names = re.compile(rf"\$?\{{?({NAME})\}}?")
        return calculated(names.sub(lambda match: self.value(match[1]) or "0", expression))

    def assign(self, expression: str) -> bool:
        """Set the variable in `name = arithmetic`, the inside of `((...))`; returns whether that is what it is."""
        match = re.fullmatch(rf"\s*({NAME})\s*([-+*/]?)=(?!=)(.+)", expression, re.DOTALL)
        value = None if match is None else self.calculation(f"{match[1]}{match[2]}({match[3]})" if match[2] else match[3])
        if match is not None and value is not None:
            self.variables[match[1]] = str(value)
        return value is not None

    def _arithmetic(self, expression: str) -> str:
        """The value of `$((...))` as text; "" if it is not whole-number arithmetic."""
        value = self.calculation(expression)
        if value is None:
            self.notes.append(f"The script's $(({expression[:40]})) is not followed.")
        return "" if value is None else str(value)


def closing(text: str, start: int, opening: str, closing: str) -> int:
    """Position of the bracket that closes the one opened before `start`; the end of `text` if there is none."""
    depth, position = 1, start
    while position < len(text):
        if text[position] == closing:
            depth -= 1
        elif text[position] == opening:
            depth += 1
        if depth == 0:
            return position
        position += 2 if text[position] == "\\" else 1
    return len(text)


def _pieces(values: list[str], *, several: bool, quoted: bool, split: bool) -> list[str]:
    """The parts of words that an expansion with `values` produces."""
    if several and quoted and split:  # "${array[@]}": each item becomes a separate word
        return values
    return [" ".join(values)] if quoted or not split else " ".join(values).split()
