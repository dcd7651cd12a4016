"""Lengths that change from step to step: what is drawn for rows that stand in, and how many steps are followed for it."""

from __future__ import annotations

import random
from collections.abc import Sequence

from peakcast.lengths import NUM_STEPS as CHANGING_STEPS

NUM_STEPS = 3
"""The first makes optimizer states; under torch.compile the second may still compile; the third is steady."""
MOST_STEPS = 5 * CHANGING_STEPS
"""Of a run whose lengths change and that has not come to its longest."""


def drawn(shortest: int, longest: int, count: int) -> list[int]:
    """Lengths of `count` rows, always the same: one in `CHANGING_STEPS` is the longest, others are drawn evenly."""
    source = random.Random(f"{shortest}.{longest}.lengths")
    return [longest if source.randrange(CHANGING_STEPS) == 0 else source.randint(shortest, longest) for _ in range(count)]


class StepLengths:
    """The longest sequence of each step; `asked`: the range that rows which stand in are of, None where all are alike."""

    def __init__(self, asked: Sequence[int] | None = None) -> None:
        self.of_steps: list[int] = []
        self.num_steps = NUM_STEPS
        """As many are enough where all are alike."""
        self._asked = asked
        self._now = 0

    def saw(self, length: int) -> None:
        """The step at hand has a sequence of so many tokens."""
        self._now = max(self._now, length)

    def end_step(self) -> None:
        """The next step begins."""
        self.of_steps.append(self._now)
        self._now = 0

    @property
    def change(self) -> bool:
        """Whether they do."""
        return len(set(self.of_steps)) > 1

    @property
    def enough(self) -> bool:
        """Whether the steps that have ended will do. Where lengths are to change: as many as the allocator's cache
        grows in, and one of them, not the first, is of the longest that there is: what is cut to its length comes twice."""
        ended = len(self.of_steps)
        if self._asked is None or ended < CHANGING_STEPS:
            return ended >= (self.num_steps if self._asked is None else CHANGING_STEPS)
        longest = max(self.of_steps)
        is_longest = longest >= self._asked[1] or self.of_steps.count(longest) > 1
        return ended >= MOST_STEPS or (is_longest and longest in self.of_steps[1:])

    def remark(self) -> str:
        """What a reader should know of them; "" where there is nothing."""
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
