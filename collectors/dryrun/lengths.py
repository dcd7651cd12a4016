"""Lengths that change from step to step: how lengths of synthetic rows are drawn, and how many steps are followed."""

from __future__ import annotations

import random
from collections.abc import Sequence

from peakcast.jobs.lengths import CHANGING_STEPS

NUM_STEPS = 3
"""The first makes optimizer states; under torch.compile the second may still compile; the third is steady."""
MOST_STEPS = 5 * CHANGING_STEPS
"""Most steps of a run whose lengths change and that has not yet had its longest sequence."""
DEFAULT_LENGTH = 4096
"""Tokens of a synthetic row without `--length`; collators cut rows to their configured length."""


def of_rows(asked: Sequence[int] | None) -> tuple[int, int]:
    """Tokens of the shortest and the longest synthetic row."""
    shortest, longest = asked or (DEFAULT_LENGTH, DEFAULT_LENGTH)
    return shortest, longest


def drawn(shortest: int, longest: int, count: int) -> list[int]:
    """Lengths of `count` rows, the same at every call: one in `CHANGING_STEPS` is the longest, the others are drawn
    uniformly."""
    source = random.Random(f"{shortest}.{longest}.lengths")
    return [longest if source.randrange(CHANGING_STEPS) == 0 else source.randint(shortest, longest) for _ in range(count)]


class StepLengths:
    """The longest sequence of each step; `asked`: the range of synthetic rows' lengths, None if all have the same."""

    def __init__(self, asked: Sequence[int] | None = None) -> None:
        self.of_steps: list[int] = []
        self.num_steps = NUM_STEPS
        """Number of steps that are enough if all lengths are equal."""
        self._asked = asked
        self._now = 0

    def saw(self, length: int) -> None:
        """Note a sequence of `length` tokens in the current step."""
        self._now = max(self._now, length)

    def end_step(self) -> None:
        """Note that the next step begins."""
        self.of_steps.append(self._now)
        self._now = 0

    @property
    def change(self) -> bool:
        """Whether lengths change."""
        return len(set(self.of_steps)) > 1

    @property
    def enough(self) -> bool:
        """Whether enough steps have ended. If lengths are to change: as many as the allocator's cache needs to grow, of
        which one, not the first, has the longest possible sequences. If sequences are cut to a maximal length, that length
        occurs twice."""
        ended = len(self.of_steps)
        if self._asked is None or ended < CHANGING_STEPS:
            return ended >= (self.num_steps if self._asked is None else CHANGING_STEPS)
        longest = max(self.of_steps)
        is_longest = longest >= self._asked[1] or self.of_steps.count(longest) > 1
        return ended >= MOST_STEPS or (is_longest and longest in self.of_steps[1:])

    def remark(self) -> str:
        """A sentence about the lengths for the user; "" if there is nothing to say."""
        if self._asked is not None and not self.change:
            return (
                f"every step had sequences of {max(self.of_steps, default=0):,} tokens, whatever --lengths says: the "
                "script packs or pads its rows, or makes them itself."
            )
        if self._asked is None and self.change:
            seen = ", ".join(f"{length:,}" for length in self.of_steps)
            return (
                f"the longest sequence of each step had {seen} tokens: the peaks are those of these steps, and longer "
                "ones need more; --lengths SHORTEST..LONGEST follows more steps, of rows that stand in."
            )
        return ""


def growth(batches: Sequence[int]) -> str:
    """A sentence about the tokens of each step's batch, if they follow a schedule on which they still grew; "" if not."""
    sizes = sorted(set(batches))
    if len(sizes) < 2 or list(batches) != sorted(batches) or len(sizes) == len(batches):
        return ""
    return (
        f"batches grew from {sizes[0]:,} to {sizes[-1]:,} tokens in the {len(batches)} steps that were followed; where "
        "they grow further, that needs more."
    )
