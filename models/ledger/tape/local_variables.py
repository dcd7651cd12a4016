"""What a function's local variables refer to while it runs. Python makes a new tensor before it drops the one that the
variable referred to, and a loop's variables live on into the next iteration. Both decide peaks, so such code is followed
line by line."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field


@dataclass
class Locals:
    """The local variables of a function while it runs. `labels`: one per moment. `lives`: (name, bytes, born, dies) of
    every tensor, counted in moments. `states_made`: the moments at which a first step makes the optimizer states of each
    tensor, in order; empty if they are all made before."""

    labels: list[str] = field(default_factory=list)
    lives: list[tuple[str, int, int, int]] = field(default_factory=list)
    states_made: list[int] = field(default_factory=list)
    _held: dict[str, tuple[int, list[int]]] = field(default_factory=dict)

    def __contains__(self, name: str) -> bool:
        """Whether the variable `name` refers to something."""
        return name in self._held

    def make_states(self) -> None:
        """A first step makes the optimizer states of the next tensor now."""
        self.states_made.append(len(self.labels))

    def let(self, name: str, *sizes: int) -> None:
        """`name = ` new tensors of `sizes` bytes. They exist before those that `name` referred to are freed."""
        moment = len(self.labels)
        self.labels.append(name)
        self._release(name, moment + 1)
        self._held[name] = (moment, list(sizes))

    def free(self, *names: str) -> None:
        """`del name`, or assigning to it something that exists already."""
        for name in names:
            self._release(name, len(self.labels))

    def rename(self, old: str, new: str) -> None:
        """`new = old; del old`: what `new` referred to is freed. If `old` refers to nothing counted here, it is a view of
        another tensor, and `new` then refers to nothing either."""
        self._release(new, len(self.labels))
        if old in self._held:
            self._held[new] = self._held.pop(old)

    def leave(self) -> None:
        """The function returns: all its variables are freed."""
        self.free(*list(self._held))

    def _release(self, name: str, dies: int) -> None:
        born, sizes = self._held.pop(name, (0, []))
        self.lives.extend((name, size, born, dies) for size in sizes)

    def most_bytes(self) -> int:
        """End the function; returns the most bytes that its variables referred to at any moment."""
        self.leave()
        change = [0] * (len(self.labels) + 1)
        for _, size, born, dies in self.lives:
            change[born] += size
            change[dies] -= size
        return max(itertools.accumulate(change), default=0)
