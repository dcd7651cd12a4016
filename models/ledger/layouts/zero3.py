"""ZeRO-3: DeepSpeed 0.19.8 `runtime/zero/stage3.py`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from peakcast.models.ledger.layouts.base import StoredTensor
from peakcast.models.ledger.layouts.zero import (
    BUFFERS,
    GATHERING,
    MAIN_BYTES,
    REDUCING,
    Buckets,
    Partitions,
    ended_bytes,
    made_at,
)
from peakcast.models.ledger.layouts.zero3_fetching import Coordinator
from peakcast.models.ledger.layouts.zero3_modules import ModuleTurns
from peakcast.models.ledger.layouts.zero3_passing import Reduction
from peakcast.models.ledger.layouts.zero3_turns import Turn, within_first
from peakcast.models.ledger.optimizers.rule import TrainedTensor
from peakcast.models.ledger.tape.marks import Mark
from peakcast.models.ledger.tape.step import Run, Step
from peakcast.timelines.timeline import Category, Phase


class Zero3(Partitions):
    """Stage 3: weights are partitioned too, and gathered module by module (`zero3_fetching.py`)."""

    def __init__(
        self,
        tensors: Sequence[StoredTensor],
        *,
        ranks: int,
        element_bytes: int,
        buckets: Buckets,
        packs: bool = True,
        contiguous: bool = True,
        overlaps: bool = True,
        offloads: bool = False,
        offloads_parameters: bool = False,
        biases_first: bool = False,
        transposes: bool = False,
        modules: ModuleTurns,
    ) -> None:
        whole, tensors = [t for t in tensors if not t.sharded], [t for t in tensors if t.sharded]
        super().__init__(
            tensors, ranks=ranks, element_bytes=element_bytes, buckets=buckets, offloads=offloads, biases_first=biases_first
        )
        self._whole = whole
        """Tensors attached to parameters that are not parameters themselves (constants of quantised weights)."""
        self.packs = packs
        self._gathers, self._reduces = (GATHERING, REDUCING) if overlaps else (0, 0)
        """The streams on which weights are gathered and gradients reduced."""
        self.contiguous = contiguous
        """Whether gradients are copied into a bucket; otherwise they wait where backward made them."""
        self.offloads_parameters = offloads_parameters
        self._modules = modules
        matrices = (t for t in tensors if len(t.shape) > 1 and t.module not in ("embedding", "head"))
        self._viewed = {t for t in matrices if transposes and ".lora_" not in t.name}
        self._coordinator: Coordinator | None = None
        self.reference: Zero3 | None = None
        """The layout of a second network (a reference model), which has an engine of its own."""
        self._turns: list[Turn] = []
        self._reductions: dict[int, Reduction] = {}
        self._entered = 0
        self._began = 0
        """The instant at which the network last began to run forward."""
        self._last = True
        self._backward_began: int | None = None
        self._bucket_content: list[tuple[int, int]] = []
        """Gradients that wait to be reduced: (elements, the instant at which it was made)."""
        self._taken = -1, 0
        """An instant, and how many bytes of gradients have been copied into the bucket or reduced in it, one after the
        other."""
        self._half: list[int] = []
        """Handles of the lm_head's gradient of a tied table: autograd adds the embedding's gradient before any hook
        runs."""

    def persists(self, tensor: StoredTensor) -> bool:
        """Whether every rank keeps the whole tensor."""
        return tensor.numel <= self.buckets.persistence

    def partition(self, group: Iterable[StoredTensor]) -> int:
        """Elements of one rank's part; each tensor is padded separately."""
        return sum(-(-t.numel // self.ranks) for t in group)

    def hold_resident(self, step: Step) -> None:
        step.hold_all(((t.name, t.module, t.numel * t.element_bytes) for t in self._whole), Category.PARAMETERS)
        if not self.offloads_parameters:
            flat = sum(self.partition([t]) * t.element_bytes for t in self.trained)  # defragmented, frozen ones are not
            step.hold("partitions", Category.PARAMETERS, flat, 0)
            frozen = ((t.name, t.module, self.partition([t]) * t.element_bytes) for t in self.tensors if not t.trains)
            step.hold_all(frozen, Category.PARAMETERS)
        self.hold_main(step)
        sizes = [self.buckets.reduce * self.element_bytes] * self.buckets.num_reduce
        step.allocate("ipg_bucket", BUFFERS, sizes if self.contiguous else [])
        if not self.offloads:
            size = self.partition(self.trained) * self.element_bytes
            step.allocate("grad_partitions_flat_buffer", Category.GRADIENTS, [size])

    def optimized(self) -> list[TrainedTensor]:
        return [] if self.offloads else self.sub_groups()

    def sub_groups(self) -> list[TrainedTensor]:
        """The groups that the optimizer updates one by one: this rank's parts of whole tensors, a group closing once it has
        reached the size (`_create_fp16_sub_groups`)."""
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
        self._last = last
        self._turns, self._backward_began, self._began = [], None, step.now

    def _play(self, step: Step) -> Coordinator:
        """Play the turns of a micro-batch, or of a forward alone, on the coordinator, and return it."""
        if self._coordinator is None:
            self._coordinator = Coordinator(
                step,
                self.ranks,
                self.buckets,
                self.packs,
                self._gathers,
                self.offloads_parameters,
                viewed=self._viewed,
                unread=set(self._modules.unread),
            )
            if not self.first_step:
                self._coordinator.learn(self._turns)
                small = [t for t in self.tensors if self.persists(t)]
                self._coordinator.available = dict.fromkeys(small, 0)  # gathered again when the last step ended
        self._coordinator.made, self._coordinator.reductions = step.made_bytes(), self._reductions
        self._coordinator.play(self._turns)
        return self._coordinator

    def before_forward(self, step: Step, module: str) -> None:
        self._entered = step.now
        self._began = step.now if module == "embedding" else self._began

    def after_forward(self, step: Step, module: str) -> None:
        if module in self._modules.tensors:  # else it belongs to another network that runs in between
            self._turns += self._turns_of(step, module, self._entered, step.now)

    def before_backward(self, step: Step, module: str) -> None:
        self._backward_began = step.now if self._backward_began is None else self._backward_began

    def after_backward(self, step: Step, run: Run) -> None:
        begins = run.backward_start or 0
        turns = self._turns_of(step, run.module, begins, step.now, backward=True)
        if self._backward_began is not None and run.forward_start >= self._backward_began:  # a recomputation
            ends = run.forward_start + run.template.num_forward
            again = self._turns_of(step, run.module, run.forward_start, ends, again=True)
            stops = run.forward_start + run.template.num_recomputed
            if self.packs and again[-1].ends > stops:  # it stops inside an operation, before the module's release
                again[-1] = replace(again[-1], releases=False)
            kept = run.template.dies[run.template.dies_backward & ~run.template.born_backward]
            if self.packs and len(kept):  # the first operation to free a saved tensor has read it
                turns = within_first(turns, again, begins + int(kept.min()) - 1)
            else:
                turns = [*again, *turns]
            self._hold_last_result(step, run)
        elif run.forward_start < self._began:
            turns = self._without_missing_releases(turns, run.forward_start + run.template.num_forward)
        self._turns += turns
        run.keeps_gradients = False  # each goes into the bucket as soon as it is ready
        template = run.template
        for at, index in self._arrivals(run):
            size, born = int(template.num_bytes[index]), begins + made_at(template, index)
            if self._modules.tied and template.names[index] == "lm_head.weight.grad":
                self._half += step.allocate("lm_head.weight.grad", Category.GRADIENTS, [size], run.module)
                run.gradients_die = step.now  # from then on `_half` holds it
            else:
                self._arrive(step, run, at, size, born)
        if self._half and run.module == "embedding" and not self._modules.between_stacks:
            step.free(self._half)
            (table,) = (t for t in self._modules.tensors["embedding"] if t.name == "embed_tokens.weight")
            summed = template.backward_marks[Mark.TIED_TABLE][0]
            self._arrive(step, run, summed, table.numel * self.gradient_bytes, begins + summed)

    def _arrive(self, step: Step, run: Run, at: int, size: int, born: int) -> None:
        """Put a gradient of `size` bytes, made at instant `born`, into the bucket at instant `at` of its block's backward.
        The bucket is reduced first if the gradient would overfill it."""
        elements, now = size // self.gradient_bytes, (run.backward_start or 0) + at
        if self._taken[0] != now:
            self._taken = now, 0
        if self._bucket_content and sum(n for n, _ in self._bucket_content) + elements > self.buckets.reduce:
            self._reduce(step, now, ended_bytes(run, at))
        self._bucket_content.append((elements, born))
        if self._in_bucket(elements):
            self._taken = now, self._taken[1] + size
            if born < now:
                step.hold("gradient", Category.GRADIENTS, size, born + 1, now + 1, run.module)

    def _in_bucket(self, elements: int) -> bool:
        """Whether a gradient waits in the bucket."""
        return self.contiguous and elements <= self.buckets.reduce

    def _arrivals(self, run: Run) -> list[tuple[int, int]]:
        """(instant of the block's backward, index of the gradient) at which each gradient of a block reaches the bucket.
        Gradients of a leaf module do so when all of it is done, in the optimizer's order (`reduce_leaf_module_grads`)."""
        template, leaf = run.template, f"{self._modules.leaf}."
        inside = [at for at, label in enumerate(template.backward_labels) if label.startswith(leaf)]
        weights = self.in_order(template)
        whole = [bool(self._modules.leaf) and template.names[i].startswith(leaf) for i in weights]
        found = [(max(inside) if waits else made_at(template, i), i) for i, waits in zip(weights, whole, strict=True)]
        if not any(whole):
            return sorted(found, key=lambda one: one[0])
        groups = sorted((t for t in self._modules.tensors[run.module] if t.trains), key=lambda t: not t.decays)
        places = {f"{t.name}.grad": place for place, t in enumerate(groups) if t.name.startswith(leaf)}
        return sorted(found, key=lambda one: (one[0], places.get(template.names[one[1]], -1)))

    def _without_missing_releases(self, turns: list[Turn], ended: int) -> list[Turn]:
        """`turns` without the releases that never happen. Modules that ran forward once more without a graph, after
        `ended`, have lost the count of gradients they wait for (`ds_grads_remaining` in `_post_backward_module_hook`), so
        their weights stay until backward ends."""
        called = {turn.name for turn in self._turns if turn.begins >= ended}
        return [replace(turn, releases=False, stays=True) if turn.name in called else turn for turn in turns]

    def _hold_last_result(self, step: Step, run: Run) -> None:
        """If a recomputation stops early, hold the product of a Linear that it stops in: stage 3's own Linear, a Python
        function, has computed it before it saves a tensor (`zero/linear.py`)."""
        template, at = run.template, run.template.num_recomputed
        label = template.forward_labels[at] if at < template.num_forward else ""
        of_block = self._modules.tensors.get(run.module, ())
        if run.stops_early and any(t.name.removesuffix(".weight") == label for t in of_block):
            size = int(template.num_bytes[~template.born_backward & (template.born == at)].sum())
            now = run.forward_start + at
            step.hold("recomputed.result", Category.ACTIVATIONS, size, now, now + 1, run.module)

    def _turns_of(self, step: Step, module: str, begins: int, ends: int, **passes: bool) -> list[Turn]:
        """The turns of a block whose operations ran from `begins` until before `ends`."""
        return self._modules.turns(module, step.labels[begins:ends], begins, **passes)

    def run_forward_alone(self, step: Step, runs: Iterable[tuple[str, Run]]) -> None:
        """Gather for a network that has only run forward: `runs` are its (module, run)."""
        self._turns = []
        for module, run in runs:
            ends = run.forward_start + run.template.num_forward
            self._turns += self._turns_of(step, module, run.forward_start, ends)
        self._play(step).stay()

    def _reduce(self, step: Step, now: int, gone: int = 0) -> None:
        """`reduce_scatter_coalesced`: several gradients are copied into one tensor. One that is larger than the bucket has
        waited outside it. `gone`: bytes that the operation at `now` has freed."""
        size = sum(-(-elements // self.ranks) * self.ranks for elements, _ in self._bucket_content) * self.element_bytes
        narrower = self.gradient_bytes != self.element_bytes
        if len(self._bucket_content) == 1 and not narrower and size == self._bucket_content[0][0] * self.element_bytes:
            size = 0
        for elements, born in self._bucket_content:
            if not self._in_bucket(elements):
                step.hold("gradient", Category.GRADIENTS, elements * self.gradient_bytes, born + 1, now + 1)
        parts = [-(-elements // self.ranks) for elements, _ in self._bucket_content]
        then = 0
        if self.offloads and self._last:  # besides the part itself, which is copied back from the host (`partition_grads`)
            then = self.norm_in_backward(step, parts, now, more_bytes=self.element_bytes)
        elif self.offloads:
            then = max(parts) * self.element_bytes
        reduction = Reduction(size, then, gone + (self._taken[1] if self._taken[0] == now else 0))
        before = self._reductions.get(now)  # one operation may cause several, one after the other
        if before is None or before.beyond < reduction.beyond:
            self._reductions[now] = reduction
        for elements, _ in self._bucket_content:
            if not self._in_bucket(elements) and self._taken[0] == now:
                self._taken = now, self._taken[1] + elements * self.gradient_bytes
        self._bucket_content.clear()

    def end_backward(self, step: Step) -> None:
        if self._bucket_content:
            self._reduce(step, step.moment("reduce_gradients", Phase.BACKWARD))
        self._play(step).end(step.now)
        for now, reduction in self._reductions.items():
            joined, then = reduction.num_bytes()
            step.hold("reduce_scatter.input", BUFFERS, joined, now, now + 1, stream=self._reduces)
            step.hold("partition_grads", Category.TEMPORARIES, then, now, now + 1, stream=self._reduces)
        self._reductions.clear()

    def clip(self, step: Step) -> None:
        """The optimizer's `step` begins with `_partition_all_parameters`."""
        if self._coordinator is not None:
            self._coordinator.end(step.now, all_of_them=True)
        super().clip(step)

    def release_gradients(self, step: Step) -> None:
        """Besides: small tensors are gathered again after the update (`_post_step`)."""
        super().release_gradients(step)
        small = ((t.name, t.module, t.numel * t.gathered_bytes) for t in self.tensors if self.persists(t))
        if self.ranks > 1:
            step.hold_all(small, Category.PARAMETERS, step.now)
        if self.offloads_parameters:  # this rank's parts are copied to the GPU first, and freed when all are gathered
            parts = ((t.name, t.module, self.partition([t]) * t.element_bytes) for t in self.tensors if self.persists(t))
            step.hold_all(parts, Category.PARAMETERS, step.now, step.now + 1)
            step.moment("gather small tensors", Phase.OPTIMIZER_STEP)
