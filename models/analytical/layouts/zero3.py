"""ZeRO-3: DeepSpeed 0.19.8 `runtime/zero/stage3.py`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from peakcast.models.analytical.layouts.base import StoredTensor
from peakcast.models.analytical.layouts.zero import BUFFERS, MAIN_BYTES, Buckets, Partitions
from peakcast.models.analytical.layouts.zero3_fetching import Coordinator, Turn, turns_of
from peakcast.models.analytical.optimizer_rules.rule import TrainedTensor
from peakcast.models.analytical.step import Run, Step
from peakcast.timeline import Category, Phase


class Zero3(Partitions):
    """Stage 3: weights are partitioned too, and fetched module by module (`zero3_fetching`)."""

    def __init__(
        self,
        tensors: Sequence[StoredTensor],
        *,
        ranks: int,
        buckets: Buckets,
        offloads: bool = False,
        offloads_parameters: bool = False,
    ) -> None:
        super().__init__(tensors, ranks=ranks, buckets=buckets, offloads=offloads)
        self.offloads_parameters = offloads_parameters
        self._of_module: dict[str, list[StoredTensor]] = {}
        for tensor in tensors:
            self._of_module.setdefault(tensor.module, []).append(tensor)
        table = [t for t in self._of_module.get("embedding", []) if t.name == "embed_tokens.weight"]
        self._tied = not any(t.name == "lm_head.weight" for t in tensors)
        if self._tied:
            self._of_module.setdefault("head", []).extend(replace(t, name="lm_head.weight") for t in table)
        self._coordinator: Coordinator | None = None
        self._turns: list[Turn] = []
        self._knows_order = False
        self._entered = 0
        self._turned: int | None = None
        self._filled: list[tuple[int, int]] = []
        """Of the gradients that wait to be reduced: elements, and the instant at which each was born."""

    def _persists(self, tensor: StoredTensor) -> bool:
        return tensor.numel <= self.buckets.persistence

    def partition(self, group: Iterable[StoredTensor]) -> int:
        """Elements of one rank's part: each tensor is padded by itself."""
        return sum(-(-t.numel // self.ranks) for t in group)

    def hold_resident(self, step: Step) -> None:
        if not self.offloads_parameters:
            step.hold("partitions", Category.PARAMETERS, self.partition(self.tensors) * self.element_bytes, 0)
        self.hold_main(step)
        sizes = [self.buckets.reduce * self.element_bytes] * self.buckets.num_reduce
        step.allocate("ipg_bucket", BUFFERS, sizes)
        if not self.offloads:
            size = self.partition(self.trained) * self.element_bytes
            step.allocate("grad_partitions_flat_buffer", Category.GRADIENTS, [size])

    def optimized(self) -> list[TrainedTensor]:
        """Sub-groups: whole tensors' parts, closed when they have reached the size (`_create_fp16_sub_groups`)."""
        if self.offloads:
            return []
        parts: list[TrainedTensor] = []
        for group in self.groups:
            filled = 0
            for tensor in group:
                filled += self.partition([tensor])
                if filled >= self.buckets.sub_group or tensor is group[-1]:
                    name = f"sub_group.{len(parts)}"
                    parts.append(TrainedTensor(name, "optimizer", (filled,), MAIN_BYTES, tensor.decays))
                    filled = 0
        return parts

    def _largest_gradient(self) -> int:
        return max(self.partition([t]) for t in self.trained)

    def begin_micro_batch(self, step: Step, *, first: bool, last: bool) -> None:
        self._knows_order = not (first and self.first_step)
        self._turns, self._turned = [], None
        if self._coordinator is None:
            sizes = self.buckets
            self._coordinator = Coordinator(step, self.ranks, sizes.prefetch, sizes.reuse, sizes.live, sizes.persistence)
            if not self.first_step:  # gathered again when the last step ended
                self._coordinator.available = {t: 0 for t in self.tensors if self._persists(t)}

    def before_forward(self, step: Step, module: str) -> None:
        self._entered = step.now

    def after_forward(self, step: Step, module: str) -> None:
        self._take_turns(step, module, self._entered, step.now)

    def before_backward(self, step: Step, module: str) -> None:
        self._turned = step.now if self._turned is None else self._turned

    def after_backward(self, step: Step, run: Run) -> None:
        begins = run.backward_start or 0
        if self._turned is not None and run.forward_start >= self._turned:  # computed again
            self._take_turns(step, run.module, run.forward_start, run.forward_start + run.template.num_forward)
        self._take_turns(step, run.module, begins, step.now, releases=run.module != "embedding")
        run.keeps_gradients = False  # each goes into the bucket as soon as it is there
        weights = run.template.weight_gradient.nonzero()[0]
        for index in sorted(weights.tolist(), key=lambda i: int(run.template.born[i])):
            elements = int(run.template.num_bytes[index]) // self.element_bytes
            now = begins + int(run.template.born[index])
            if self._filled and sum(n for n, _ in self._filled) + elements > self.buckets.reduce:
                self._reduce(step, now)
            self._filled.append((elements, now))

    def _take_turns(self, step: Step, module: str, begins: int, ends: int, *, releases: bool = True) -> None:
        turns = turns_of(step.labels[begins:ends], begins, self._of_module.get(module, []))
        if self._tied:  # the lm_head's is the table itself
            table = {t.name: t for t in self._of_module["embedding"]}["embed_tokens.weight"]
            turns = [
                replace(turn, tensors=tuple(table if t.name == "lm_head.weight" else t for t in turn.tensors))
                for turn in turns
            ]
        self._turns += turns if releases else [replace(turn, releases=False) for turn in turns]

    def _reduce(self, step: Step, now: int) -> None:
        """`reduce_scatter_coalesced`: several gradients are copied into one tensor, and one larger than the bucket has
        waited outside it."""
        size = sum(-(-elements // self.ranks) * self.ranks for elements, _ in self._filled) * self.element_bytes
        if len(self._filled) > 1 or size != self._filled[0][0] * self.element_bytes:
            step.hold("reduce_scatter.input", BUFFERS, size, now, now + 1)
        for elements, born in self._filled:
            if elements > self.buckets.reduce:
                step.hold("gradient", Category.GRADIENTS, elements * self.element_bytes, born + 1, now + 1)
        self._filled.clear()

    def end_backward(self, step: Step) -> None:
        if self._filled:
            self._reduce(step, step.moment("reduce_gradients", Phase.BACKWARD))
        if self._coordinator is not None:
            self._coordinator.play(self._turns, knows_order=self._knows_order)
            self._coordinator.end(step.now)

    def release_gradients(self, step: Step) -> None:
        if self._coordinator is not None:
            for tensor, born in self._coordinator.available.items():
                step.hold(tensor.name, Category.PARAMETERS, tensor.numel * self.element_bytes, born, module=tensor.module)
