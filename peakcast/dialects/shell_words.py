"""A shell script's statements as words with their quotes and expansions still as written; nothing is put in or run."""

from __future__ import annotations

import re

from peakcast.errors import SpecError

MOST_WORDS = 20_000
"""Words that a script may have, and that its expansions may give."""
_OPERATORS = ("&&", "||", ";;", ";", "|", "&")
_REDIRECTION = re.compile(r"<<-?\s*['\"\\]?(\w+)['\"]?|(?:&>>?|>>|>&?|<)\s*(?:&?\d|[^\s;|&]*)")


def closing(text: str, start: int, opening: str, closing: str) -> int:
    """Where the bracket that was opened before `start` closes; the end of `text` where it never does."""
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


def tokens(text: str) -> list[str]:
    """The words of an array's inside, quotes kept, comments and line ends dropped."""
    return [word for statement in statements(text) for word in statement]


def statements(text: str) -> list[list[str]]:
    """The statements of `text`, each a list of words with their quotes and expansions as written.

    `&&` and `||` stay inside a statement that begins with `if`, `elif` or a test, and end any other.
    """
    found: list[list[str]] = [[]]
    words = _words(text)
    if len(words) > MOST_WORDS:
        raise SpecError(f"the script has more than {MOST_WORDS:,} words; a launch script does not.")
    for word in words:
        statement = found[-1]
        if word in ("&&", "||") and statement and statement[0] in ("if", "elif", "[", "[["):
            statement.append(word)
        elif word == "\n" or word in _OPERATORS:
            found.append([])
        elif word in ("then", "else", "do", "fi") and statement:
            found.append([word])
        else:
            statement.append(word)
    return [statement for statement in found if statement]


def _separated(text: str, position: int, words: list[str], documents: list[str]) -> int:
    """Where the comment, space or operator at `position` ends. An operator is one of `words`; after the end of a line come
    the here-documents that the line has begun, of which `documents` has the last lines."""
    character = text[position]
    if character == "#":
        end = text.find("\n", position)
        return len(text) if end < 0 else end
    if character in " \t\r":
        return position + 1
    operator = next((op for op in _OPERATORS if text.startswith(op, position)), "\n")
    words.append(operator)
    end = position + len(operator)
    if character == "\n":
        for delimiter in documents:
            found = re.compile(rf"^\t*{re.escape(delimiter)}\s*$", re.MULTILINE).search(text, end)
            end = found.end() if found else len(text)
        documents.clear()
    return end


def _words(text: str) -> list[str]:
    """Words, operators and line ends of `text`; comments, redirections and here-documents are dropped."""
    words: list[str] = []
    current: str | None = None
    position = 0
    documents: list[str] = []
    while position < len(text):
        character = text[position]
        if character == "\\" and text[position + 1 : position + 2] == "\n":
            position += 2
            # bash joins the lines; scripts put a comment behind a `\` or a space between, and mean two words
            continue
        if character in "'\"`":
            end = _quote_end(text, position)
        elif character == "$" and text[position + 1 : position + 2] in ("(", "{"):
            opening = text[position + 1]
            end = closing(text, position + 2, opening, {"(": ")", "{": "}"}[opening]) + 1
        elif character == "(" and current is not None and current.endswith("="):
            end = _array_end(text, position + 1) + 1
        elif character == "\\":
            end = position + 2
        elif character in " \t\r\n;&|" or (character == "#" and current is None):
            if current is not None:
                words.append(current)
                current = None
            position = _separated(text, position, words, documents)
            continue
        elif match := _REDIRECTION.match(text, position) if current is None or current in "12&" else None:
            current = None
            if match[1]:
                documents.append(match[1])
            position = match.end()
            continue
        else:
            end = position + 1
        current = (current or "") + text[position:end]
        position = end
    if current is not None:
        words.append(current)
    return words


def _quote_end(text: str, start: int) -> int:
    position = start + 1
    while position < len(text) and text[position] != text[start]:
        position += 2 if text[position] == "\\" and text[start] != "'" else 1
    return min(position + 1, len(text))


def _array_end(text: str, start: int) -> int:
    """Where the array that was opened before `start` closes: the next `)` outside quotes, comments and `$(`."""
    position = start
    while position < len(text) and text[position] != ")":
        if text[position] in "'\"":
            position = _quote_end(text, position)
        elif text[position] == "#" and text[position - 1] in " \t\n(":
            end = text.find("\n", position)
            position = len(text) if end < 0 else end
        elif text.startswith("$(", position):
            position = closing(text, position + 2, "(", ")") + 1
        else:
            position += 1
    return position


def pieces_of(values: list[str], *, several: bool, quoted: bool, split: bool) -> list[str]:
    """The parts of words that an expansion gives."""
    if several and quoted and split:  # "${array[@]}": each item a word of its own
        return values
    return [" ".join(values)] if quoted or not split else " ".join(values).split()
