"""Offloaded tensors that come back to the GPU a layer before their own layer's backward.

The tensors of the layer whose backward comes first of all stay on the GPU. But each group of operations that has run
backward has the next group reloaded, those of that layer too: so the reloads are a whole layer ahead, in the order of
backward, into the next chunk if that has run forward. In the first step nothing stays, and nothing comes back early.

Source: megatron-core 0.16.1 `pipeline_parallel/fine_grained_activation_offload.py` (`post_warmup_callback`,
`should_bulk_offload`, `bulk_reload`, `pre_reload_last_layer`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

from peakcast.models.ledger.tape.marks import Mark
from peakcast.models.ledger.tape.step import BlockRun, Step
from peakcast.timelines.timeline import Category


@dataclass(slots=True)
class ReloadsAhead:
    """Which tensors are back before their own layer's backward, and for how long."""

    _before: dict[bool, BlockRun] = field(default_factory=dict)
    """The layer that ran backward last or, where halves of layers run, the last half with attention and the last
    without."""
    _lives: list[tuple[str, int, int, int]] = field(default_factory=list)
    """(module, bytes, born, dies) of each."""

    def ran_backward(self, run: BlockRun, forward_end: int) -> None:
        """Layer `run` has been placed backward. `forward_end`: the instant at which the forward of its chunk had ended."""
        attends = Mark.ATTENTION_ADD in run.template.forward_marks
        before = self._before.get(attends)
        self._before[attends] = run
        if before is None:
            return
        for one in run.template.reloads:
            done = before.template.in_backward.get(one.last, before.template.num_backward - 1)
            born, dies = (before.backward_start or 0) + done + 1, (run.backward_start or 0) + one.back
            if forward_end <= born < dies:
                self._lives += [(run.module, size, born, dies) for size in one.num_bytes]

    def hold(self, step: Step) -> None:
        """Add them to a step after the first."""
        for module, size, born, dies in self._lives:
            step.hold("reloaded", Category.ACTIVATIONS, size, born, dies, module)
