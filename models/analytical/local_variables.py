"""What a function's local variables hold as it runs: Python makes a new tensor before it lets go of what the variable held,
and a loop's variables live into its next turn. That decides peaks, so such code is followed line by line."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field


@dataclass
class Locals:
    """The local variables of a function while it runs. `lives`: (name, bytes, born, dies) over the moments of `labels`.
    `states_made`: where a first step makes each tensor's states, in turn; empty when all are made before."""

    labels: list[str] = field(default_factory=list)
    lives: list[tuple[str, int, int, int]] = field(default_factory=list)
    states_made: list[int] = field(default_factory=list)
    _held: dict[str, tuple[int, list[int]]] = field(default_factory=dict)

    def __contains__(self, name: str) -> bool:
        """Whether `name` holds something."""
        return name in self._held

    def make_states(self) -> None:
        """Here a first step makes the states of the tensor whose turn it is."""
        self.states_made.append(len(self.labels))

    def let(self, name: str, *sizes: int) -> None:
        """`name = ` new tensors of `sizes` bytes: they exist before what `name` held is let go."""
        moment = len(self.labels)
        self.labels.append(name)
        self._release(name, moment + 1)
        self._held[name] = (moment, list(sizes))

    def free(self, *names: str) -> None:
        """`del name`, or its assignment to something that exists already."""
        for name in names:
            self._release(name, len(self.labels))

    def rename(self, old: str, new: str) -> None:
        """`new = old; del old`: what `new` held is let go. Nothing that `old` holds: it is a view of something else."""
        self._release(new, len(self.labels))
        if old in self._held:
            self._held[new] = self._held.pop(old)

    def leave(self) -> None:
        """The function returns."""
        self.free(*list(self._held))

    def _release(self, name: str, dies: int) -> None:
        born, sizes = self._held.pop(name, (0, []))
        self.lives.extend((name, size, born, dies) for size in sizes)

    def most_bytes(self) -> int:
        """The function returns; the most bytes that its variables held at any moment."""
        self.leave()
        change = [0] * (len(self.labels) + 1)
        for _, size, born, dies in self.lives:
            change[born] += size
            change[dies] -= size
        return max(itertools.accumulate(change), default=0)
