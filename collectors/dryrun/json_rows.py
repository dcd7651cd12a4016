"""Lines of JSON in the place of a `*.jsonl` that does not exist, with the keys that training data usually has."""

from __future__ import annotations

import json

from peakcast.collectors.dryrun.lengths import drawn

NUM_LINES = 512
WHOLE = ("text", "content", "story", "document")
"""Keys whose value is a whole sequence."""
HALVES = (
    *("prompt", "completion", "instruction", "output", "question", "answer", "query", "response", "source", "target"),
    *("problem", "solution", "chosen", "rejected"),
)
"""Keys of which two together are a sequence."""
TURNS = ("messages", "conversations", "conversation")
"""Keys with the turns of a conversation. Sources of the keys: the datasets of TRL's documentation ("Dataset formats"),
Stanford Alpaca's, and ShareGPT's."""
ROLES = (("user", "human"), ("assistant", "gpt"))
"""Role of a turn -> its name in ShareGPT's form."""


def lines(shortest: int, longest: int) -> str:
    """`NUM_LINES` lines, whose sequences have `shortest` to `longest` words."""
    return "".join(json.dumps(_row(length)) + "\n" for length in drawn(shortest, longest, NUM_LINES))


def _row(length: int) -> dict[str, object]:
    half = _words(length // 2)
    turns = [{"role": role, "content": half, "from": other, "value": half} for role, other in ROLES]
    whole, halves = dict.fromkeys(WHOLE, _words(length)), dict.fromkeys(HALVES, half)
    return {**whole, **halves, "input": "", **dict.fromkeys(TURNS, turns)}


def _words(count: int) -> str:
    return " ".join(["word"] * max(1, count))
