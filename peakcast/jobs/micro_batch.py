"""`Batch`: the form of a micro-batch, and the rules for its lengths."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from peakcast.core.errors import SpecError
from peakcast.core.fields import require_not_negative, require_positive, unsaid

MOST_TOKENS = 2**36
"""Most tokens of a micro-batch: far more than were ever run, and few enough that their bytes fit into 64 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """The form of a micro-batch of `micro_batch_size` sequences."""

    form: Literal["rows", "masked", "padding_free"] = "rows"
    """`rows`: full rows of `sequence_length`, for which attention needs only the causal mask. `masked`: rows in which
    attention must leave something out, padding or the other sequences of a packed row. `padding_free`: all sequences in one
    row without padding, told apart by their positions (transformers' DataCollatorWithFlattening, trl's padding_free)."""
    num_tokens: int | None = None
    """Tokens of a micro-batch without padding; null means micro_batch_size × sequence_length, the largest possible
    number."""
    shortest_sequence: int | None = unsaid(None)
    """If lengths change from step to step: tokens of the shortest sequence; `sequence_length` is the longest. null means
    that every step has the same lengths."""
    seed: int = unsaid(0)
    """Seed with which lengths are drawn (`lengths.py`)."""

    def __post_init__(self) -> None:
        require_positive(self, "num_tokens", "shortest_sequence", where="batch.")
        require_not_negative(self, "seed", where="batch.")


def check_batch(batch: Batch, micro_batch_size: int, sequence_length: int) -> None:
    """Refuse a micro-batch that does not exist in practice, or whose lengths contradict each other. Raises: SpecError."""
    tokens, longest = micro_batch_size * sequence_length, max(micro_batch_size, sequence_length)
    if tokens > MOST_TOKENS:
        name = "sequence_length" if longest == sequence_length else "micro_batch_size"
        raise SpecError(
            f"{name}={longest} makes micro_batch_size × sequence_length={tokens:,} tokens and must leave them at most "
            f"{MOST_TOKENS:,}; lower it.",
            parameter=name,
            value=longest,
        )
    _check_num_tokens(batch, tokens)
    _check_lengths(batch, sequence_length)


def _check_num_tokens(batch: Batch, most: int) -> None:
    asked = batch.num_tokens
    if asked is not None and (asked > most or batch.form == "rows"):
        rule = (
            f"exceeds micro_batch_size × sequence_length={most}; raise one of them"
            if asked > most
            else "needs rows with padding, or none; set batch.form to masked or padding_free"
        )
        raise SpecError(f"batch.num_tokens={asked} {rule}.", parameter="batch.num_tokens", value=asked)


def _check_lengths(batch: Batch, sequence_length: int) -> None:
    shortest = batch.shortest_sequence
    if shortest is None and batch.seed:
        raise SpecError(
            f"batch.seed={batch.seed} draws the lengths that batch.shortest_sequence asks for; give it or leave the "
            "seed out.",
            parameter="batch.seed",
            value=batch.seed,
        )
    if shortest is not None and (shortest > sequence_length or batch.num_tokens is not None):
        rule = (
            f"exceeds sequence_length={sequence_length}, the longest; lower it"
            if shortest > sequence_length
            else f"draws how many tokens a step has, and batch.num_tokens={batch.num_tokens} fixes it; leave one out"
        )
        raise SpecError(f"batch.shortest_sequence={shortest} {rule}.", parameter="batch.shortest_sequence", value=shortest)
