"""When the operations of one Megatron-LM rank first run: what a library makes once exists from then on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

RECOMPUTED_PROJECTIONS = {
    "mlp": {"linear_fc2": 0, "linear_fc1": 1},
    "shared_experts": {"shared_experts.linear_fc2": 0, "shared_experts.linear_fc1": 1},
}
"""Projections in recomputed parts of a layer, by part; each part is one operation of the template. The number is 1 for a
projection that comes after the part's peak, which in FP8 is that of its first projection."""


@dataclass(slots=True)
class FirstRuns:
    """Instants of a rank's step. `float8`: projections multiply in FP8."""

    float8: bool
    product: int = 0
    """The backward thread's first matrix product; 0 before there is one."""
    backward: dict[str, int] = field(default_factory=dict)
    """By label: the operation's first backward."""
    recomputed: dict[int, int] = field(default_factory=dict)
    """By layer: the first recomputation of a checkpointed layer, or of its feed-forward."""

    def note_product(self, instant: int) -> None:
        """A matrix product runs backward."""
        self.product = self.product or instant

    def note_backward(self, instants: Mapping[str, int], start: int) -> None:
        """A block runs backward from `start` on. `instants`: by label, of its backward."""
        if not instants.keys() - self.backward:
            return
        ran = {label: start + at for label, at in instants.items()}
        after = 0 if self.float8 else 1
        for part, projections in RECOMPUTED_PROJECTIONS.items():
            ran |= {label: ran[part] + late * after for label, late in projections.items()} if part in ran else {}
        self.backward = ran | self.backward

    def note_recomputed(self, layer: int, instant: int) -> None:
        """A layer, or its feed-forward, is recomputed."""
        self.recomputed.setdefault(layer, instant)
