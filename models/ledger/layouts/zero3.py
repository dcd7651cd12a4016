"""ZeRO-3: DeepSpeed 0.19.8 `runtime/zero/stage3.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from peakcast.models.ledger.layouts.base import StoredTensor
from peakcast.models.ledger.layouts.gradient_tensors import lm_head_gradients
from peakcast.models.ledger.layouts.module_tree import BlockKind, block_of, path_of
from peakcast.models.ledger.layouts.zero import (
    BUFFERS,
    GATHERING,
    MAIN_BYTES,
    NORM_ELEMENTS,
    REDUCING,
    Partitions,
    ZeroSettings,
    made_at,
)
from peakcast.models.ledger.layouts.zero3_bucket import Gradient, Zero3Bucket
from peakcast.models.ledger.layouts.zero3_fetching import Coordinator
from peakcast.models.ledger.layouts.zero3_hooks import ModuleTurn, PassDirection, block_operations
from peakcast.models.ledger.layouts.zero3_instants import Instants, Reduction
from peakcast.models.ledger.layouts.zero3_modules import ModuleTurns
from peakcast.models.ledger.layouts.zero3_turns import with_recomputation_inside
from peakcast.models.ledger.layouts.zero3_weights import Weights, Zero3Engine
from peakcast.models.ledger.optimizers.rule import TrainedTensor
from peakcast.models.ledger.tape.marks import Mark
from peakcast.models.ledger.tape.step import BlockRun, Step
from peakcast.timelines.timeline import Category, Phase

Reductions = dict[int, Reduction]
"""For each instant at which the bucket is reduced: the reduction that needs most memory there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Zero3Settings(ZeroSettings):
    """The settings of every stage, and those that only stage 3 uses."""

    packs: bool
    """Whether checkpoints are non-reentrant: as in `Zero3Engine` (`zero3_weights.py`)."""
    overlaps: bool
    """Whether weights are gathered, and gradients reduced, on streams of their own."""
    offloads_parameters: bool
    reassigns: bool
    """As in `Zero3Engine`."""
    views_layers: bool
    """Whether products read the matrices of layers through a view, which autograd keeps: if the network stores them
    transposed (`transposes_weight`), or DeepSpeed has not replaced torch's Linear (`matmul(weight.t())`)."""
    views_head: bool
    """As `views_layers`, of the lm_head."""

    def views(self, tensor: StoredTensor) -> bool:
        """Whether products read `tensor` through a view."""
        if len(tensor.shape) < 2 or tensor.of_adapter or tensor.block is BlockKind.EMBEDDING:
            return False
        return self.views_head if tensor.block is BlockKind.HEAD else self.views_layers


class Zero3(Partitions):
    """Stage 3: weights are partitioned too, and gathered module by module (`zero3_fetching.py`)."""

    def __init__(self, tensors: Sequence[StoredTensor], settings: Zero3Settings, modules: ModuleTurns) -> None:
        whole, tensors = [t for t in tensors if not t.sharded], [t for t in tensors if t.sharded]
        super().__init__(tensors, settings)
        self._whole = whole
        """Tensors that belong to a parameter without being one, such as the constants of quantised weights. Each rank has
        all of them."""
        self.packs, self.reassigns = settings.packs, settings.reassigns
        self._gathers, self._reduces = (GATHERING, REDUCING) if settings.overlaps else (0, 0)
        self.offloads_parameters = settings.offloads_parameters
        self._modules = modules
        self._viewed = {tensor for tensor in tensors if settings.views(tensor)}
        """The matrices that products read through a view."""
        self._coordinators: dict[bool, Coordinator] = {}
        """By whether the step is the training's first."""
        self.reference: Zero3 | None = None
        """The layout of a second network (a reference model), which has an engine of its own."""
        self._turns: list[ModuleTurn] = []
        """The module runs of this micro-batch so far, in order."""
        self._reductions: Reductions = {}
        self._ran_last: BlockRun | None = None
        """The run whose forward ended last."""
        self._began = 0
        """The instant at which the network last began to run forward."""
        self._last = True
        self._backward_began: int | None = None
        self._bucket = Zero3Bucket(
            ranks=self.ranks,
            size=self.buckets.reduce,
            copies=self.contiguous,
            made_bytes=self.gradient_bytes,
            sent_bytes=self.element_bytes,
        )
        self._half: list[int] = []
        """Handles of the lm_head's gradient of a tied table: autograd adds the embedding's gradient before any hook
        runs."""

    def persists(self, tensor: StoredTensor) -> bool:
        """Whether every rank keeps the whole tensor."""
        return tensor.numel <= self.buckets.persistence

    def partition(self, group: Iterable[StoredTensor]) -> int:
        """Elements of one rank's part; each tensor is padded separately."""
        return sum(self.part(t) for t in group)

    def part(self, tensor: StoredTensor) -> int:
        """Elements of one rank's part of a tensor."""
        return -(-tensor.numel // self.ranks)

    def build(self, step: Step) -> None:
        """The engine is made: it empties the cache when it has joined the partitions (`defragment`), and makes the buffers
        of gradients last."""
        self._hold_partitions(step)
        step.moment("defragment", Phase.INIT)
        for index in range(len(self.groups)):
            self.build_main(step, index)
        self.build_gradients(step, [max(part.numel for part in self.sub_groups())])

    def hold_resident(self, step: Step) -> None:
        self._hold_partitions(step)
        self.hold_main(step)
        sizes = [self.buckets.reduce * self.element_bytes] * self.buckets.num_reduce
        step.allocate("ipg_bucket", BUFFERS, sizes if self.contiguous else [])
        if not self.offloads:
            size = self.partition(self.trained) * self.element_bytes
            step.allocate("grad_partitions_flat_buffer", Category.GRADIENTS, [size])

    def _hold_partitions(self, step: Step) -> None:
        """Hold this rank's parts of all weights."""
        step.hold_all(((t.name, t.module, t.numel * t.element_bytes) for t in self._whole), Category.PARAMETERS)
        if not self.offloads_parameters:
            flat = sum(self.part(t) * t.element_bytes for t in self.trained)  # defragmented, frozen ones are not
            step.hold("partitions", Category.PARAMETERS, flat, 0)
            frozen = ((t.name, t.module, self.part(t) * t.element_bytes) for t in self.tensors if not t.trains)
            step.hold_all(frozen, Category.PARAMETERS)

    def optimized(self) -> list[TrainedTensor]:
        return [] if self.offloads else self.sub_groups()

    def sub_groups(self) -> list[TrainedTensor]:
        """The groups that the optimizer updates one by one: this rank's parts of whole tensors, a group closing once it has
        reached the size (`_create_fp16_sub_groups`)."""
        parts: list[TrainedTensor] = []
        for group in self.groups:
            filled = 0
            for tensor in group:
                filled += self.part(tensor)
                if filled >= self.buckets.sub_group or tensor is group[-1]:
                    name = f"sub_group.{len(parts)}"
                    parts.append(TrainedTensor(name, "optimizer", (filled,), MAIN_BYTES, tensor.decays))
                    filled = 0
        return parts

    def _largest_gradient(self) -> int:
        return max(self.part(t) for t in self.trained)

    def begin_micro_batch(self, step: Step, *, first: bool, last: bool) -> None:
        self._last = last
        self._turns, self._backward_began, self._began = [], None, step.now

    def _play(self, step: Step, then: Callable[[Step, Weights, Reductions], None]) -> None:
        """Have the coordinator gather and release weights for the turns so far, those of a micro-batch or of a forward
        alone, and `then` hold what follows from that, given the weights and the turns' reductions."""
        turns, made, reductions = tuple(self._turns), step.made_bytes(), self._reductions
        self._reductions = {}

        def play(step: Step, first: bool) -> None:
            if first not in self._coordinators:
                self._coordinators[first] = self._coordinator(step, turns, first=first)
            coordinator, instants = self._coordinators[first], Instants(made, _copied(reductions), step.now)
            coordinator.weights.step = step
            coordinator.play(turns, instants)
            then(step, coordinator.weights, instants.reductions)

        if self.first_step is None:
            step.differs(play)
        else:
            play(step, self.first_step)

    def _coordinator(self, step: Step, turns: Sequence[ModuleTurn], *, first: bool) -> Coordinator:
        """A coordinator at the beginning of a step."""
        engine = Zero3Engine(
            ranks=self.ranks,
            sizes=self.buckets,
            packs=self.packs,
            reassigns=self.reassigns,
            stream=self._gathers,
            from_host=self.offloads_parameters,
        )
        made = Coordinator(step, engine, viewed=self._viewed, unread=self._modules.unread)
        if not first:
            made.learn(turns)
            small = [t for t in self.tensors if self.persists(t)]
            made.weights.available = dict.fromkeys(small, 0)  # gathered again when the last step ended
        return made

    # -- modules that run -------------------------------------------------------------------------------------------------

    def before_forward(self, step: Step, module: str) -> None:
        self._began = step.now if block_of(module) is BlockKind.EMBEDDING else self._began

    def while_forward(self, step: Step, run: BlockRun) -> None:
        self._ran_last = run

    def after_forward(self, step: Step, module: str) -> None:
        if module in self._modules.tensors and self._ran_last is not None:  # else it belongs to another network
            self._turns += self._modules.turns(block_operations(self._ran_last, module, PassDirection.FORWARD))

    def before_backward(self, step: Step, module: str) -> None:
        self._backward_began = step.now if self._backward_began is None else self._backward_began

    def after_backward(self, step: Step, run: BlockRun) -> None:
        turns = self._modules.turns(block_operations(run, run.module, PassDirection.BACKWARD))
        if self._backward_began is not None and run.forward_start >= self._backward_began:
            turns = self._with_recomputation(turns, run)
            self._hold_last_result(step, run)
        elif run.forward_start < self._began:
            turns = self._without_missing_releases(turns, run.forward_start + run.template.num_forward)
        self._turns += turns
        run.keeps_gradients = False  # each goes into the bucket as soon as it is ready
        self._collect_gradients(step, run)

    def _with_recomputation(self, turns: list[ModuleTurn], run: BlockRun) -> list[ModuleTurn]:
        """The turns of a backward together with those of its recomputation. A reentrant checkpoint recomputes before that
        backward; a non-reentrant one inside it, when an operation first asks for a saved tensor."""
        again = self._modules.turns(block_operations(run, run.module, PassDirection.RECOMPUTATION))
        if not self.packs:
            return [*again, *turns]
        template = run.template
        if again[-1].ends > run.forward_start + template.num_recomputed:
            again[-1] = again[-1].unreleased()  # it stops inside an operation, before the module's release
        kept = template.dies[template.dies_backward & ~template.born_backward]
        if not len(kept):  # nothing asks for a saved tensor
            return [*again, *turns]
        return with_recomputation_inside(turns, again, (run.backward_start or 0) + int(kept.min()) - 1)

    def _without_missing_releases(self, turns: list[ModuleTurn], ended: int) -> list[ModuleTurn]:
        """`turns` without the releases that never happen. Modules that ran forward once more without a graph, after
        `ended`, have lost the count of gradients they wait for (`ds_grads_remaining` in `_post_backward_module_hook`), so
        their weights are released only when backward ends."""
        called = {turn.name for turn in self._turns if turn.begins >= ended}
        return [turn.never_ending() if turn.name in called else turn for turn in turns]

    def _hold_last_result(self, step: Step, run: BlockRun) -> None:
        """If a recomputation stops early, inside a Linear, hold that Linear's product: stage 3's own Linear, which is a
        Python function, computes it before it saves a tensor (`zero/linear.py`)."""
        template, at = run.template, run.template.num_recomputed
        if not run.stops_early or at >= template.num_forward:
            return
        stopped_in = path_of(template.forward_labels[at])
        if any(t.path == stopped_in and not t.quantized for t in self._modules.tensors.get(run.module, ())):
            size = int(template.num_bytes[~template.born_backward & (template.born == at)].sum())
            now = run.forward_start + at
            step.hold("recomputed.result", Category.ACTIVATIONS, size, now, now + 1, run.module)

    def run_forward_alone(self, step: Step, runs: Iterable[tuple[str, BlockRun]]) -> None:
        """Gather the weights of a network that has only run forward. `runs`: (module, run) of its blocks."""
        ran = (block_operations(run, module, PassDirection.FORWARD) for module, run in runs)
        self._turns = [turn for operations in ran for turn in self._modules.turns(operations)]
        self._play(step, lambda _, weights, reductions: weights.keep_small_tensors())

    # -- gradients --------------------------------------------------------------------------------------------------------

    def _collect_gradients(self, step: Step, run: BlockRun) -> None:
        """Put the gradients of a block's backward into the bucket. That of a tied table waits until both parts exist:
        autograd adds them before any hook runs."""
        template, begins = run.template, run.backward_start or 0
        tied = lm_head_gradients(template) if self._modules.tied else []
        for at, index in self._arrivals(run):
            size, born = int(template.num_bytes[index]), begins + made_at(template, index)
            if index in tied:
                self._half += step.allocate(template.names[index], Category.GRADIENTS, [size], run.module)
                run.gradients_die = step.now  # from then on `_half` holds it
            else:
                self._arrive(step, run, at, Gradient(size // self.gradient_bytes, born))
        if self._half and block_of(run.module) is BlockKind.EMBEDDING and not self._modules.between_stacks:
            step.free(self._half)
            (table,) = (t for t in self._modules.tensors[run.module] if t.is_token_table)
            summed = template.backward_marks[Mark.TIED_TABLE][0]
            self._arrive(step, run, summed, Gradient(table.numel, begins + summed))

    def _arrive(self, step: Step, run: BlockRun, at: int, gradient: Gradient) -> None:
        """Put a gradient into the bucket at instant `at` of its block's backward. The bucket is reduced first if the
        gradient would overfill it."""
        now = (run.backward_start or 0) + at
        self._bucket.begin_instant(now)
        if self._bucket.overflows_with(gradient):
            self._reduce(step, now, self.ended_bytes(run, at))
        if self._bucket.add(gradient) and gradient.born < now:
            size = gradient.elements * self.gradient_bytes
            step.hold("gradient", Category.GRADIENTS, size, gradient.born + 1, now + 1, run.module)

    def _arrivals(self, run: BlockRun) -> list[tuple[int, int]]:
        """(instant of the block's backward, index in the template) of each gradient of a block, as they reach the bucket.
        Those of a leaf module do so when all of the module is done, in the optimizer's order
        (`reduce_leaf_module_grads`)."""
        template = run.template
        found = [(made_at(template, index), index) for index in self.in_order(template)]
        of_leaf = {index for _, index in found if self._is_in_leaf(template.names[index])}
        if not of_leaf:
            return found
        done = max(at for at, label in enumerate(template.backward_labels) if self._is_in_leaf(label))
        groups = sorted((t for t in self._modules.tensors[run.module] if t.trains), key=lambda t: not t.decays)
        places = {f"{t.name}.grad": place for place, t in enumerate(groups) if self._is_in_leaf(t.name)}
        found = [(done if index in of_leaf else at, index) for at, index in found]
        return sorted(found, key=lambda one: (one[0], places.get(template.names[one[1]], -1)))

    def _is_in_leaf(self, name: str) -> bool:
        """Whether an operation or a tensor belongs to the leaf module, which DeepSpeed treats as one with all modules
        inside it."""
        path, leaf = path_of(name), self._modules.leaf
        return bool(leaf) and path.outermost == leaf

    def _reduce(self, step: Step, now: int, gone: int = 0) -> None:
        """Reduce the bucket after the operation at `now`, which has freed `gone` bytes."""
        bucket, then = self._bucket, 0
        for gradient in bucket.outside():
            size = gradient.elements * self.gradient_bytes
            step.hold("gradient", Category.GRADIENTS, size, gradient.born + 1, now + 1)
        if self.offloads and self._last:  # besides the part itself, which is copied back from the host (`partition_grads`)
            more, chunk = self.element_bytes, NORM_ELEMENTS
            then = self.norm_in_backward(step, bucket.parts(), now, more_bytes=more, at_a_time=chunk)
        elif self.offloads:
            then = max(bucket.parts()) * self.element_bytes
        reduction, before = bucket.reduction(now, then, gone), self._reductions.get(now)
        if before is None or before.beyond < reduction.beyond:  # one operation may cause several, one after the other
            self._reductions[now] = reduction
        bucket.empty(now)

    def end_backward(self, step: Step) -> None:
        if self._bucket.content:
            self._reduce(step, step.moment("reduce_gradients", Phase.BACKWARD))
        self._play(step, self._end_micro_batch)

    def _end_micro_batch(self, step: Step, weights: Weights, reductions: Reductions) -> None:
        """Release what is still gathered, and hold what reducing gradients has allocated."""
        weights.release_rest(step.now, small_too=False)
        for now, reduction in reductions.items():
            joined, then = reduction.num_bytes()
            step.hold("reduce_scatter.input", BUFFERS, joined, now, now + 1, stream=self._reduces)
            step.hold("partition_grads", Category.TEMPORARIES, then, now, now + 1, stream=self._reduces)

    # -- optimizer --------------------------------------------------------------------------------------------------------

    def clip(self, step: Step) -> None:
        """The optimizer's `step` begins with `_partition_all_parameters`."""
        if (coordinator := self._coordinators.get(bool(self.first_step))) is not None:
            coordinator.weights.on(step).release_rest(step.now, small_too=True)
        super().clip(step)

    def _overflow_check(self) -> tuple[list[int], int]:
        """`isinf` of the buffer of all this rank's gradients, on the stream that reduces them. It makes their absolute
        values and a truth value each (torch `native/TensorCompare.cpp` isinf)."""
        elements = self.partition(self.trained)
        return [elements * self.element_bytes, elements], self._reduces

    def release_gradients(self, step: Step) -> None:
        """Also gathers the small tensors again, which have been updated (`_post_step`)."""
        super().release_gradients(step)
        small = ((t.name, t.module, t.numel * t.gathered_bytes) for t in self.tensors if self.persists(t))
        if self.ranks > 1:
            step.hold_all(small, Category.PARAMETERS, step.now)
        if self.offloads_parameters:  # this rank's parts are copied to the GPU first, and freed when all are gathered
            parts = ((t.name, t.module, self.part(t) * t.element_bytes) for t in self.tensors if self.persists(t))
            step.hold_all(parts, Category.PARAMETERS, step.now, step.now + 1)
            step.moment("gather small tensors", Phase.OPTIMIZER_STEP)


def _copied(reductions: Reductions) -> Reductions:
    """Copies, which playing the turns may change."""
    return {instant: replace(reduction) for instant, reduction in reductions.items()}
