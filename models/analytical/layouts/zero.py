"""DeepSpeed ZeRO: flat partitions with fp32 main copies, and the buckets in which gradients are reduced.

Read from DeepSpeed 0.19.8 `runtime/zero/stage_1_and_2.py`, `stage3.py`, `partitioned_param_coordinator.py` and
`config.py`. Compared with traces on real CPU tensors (`collectors/grids/agreement-deepspeed.yaml`). Sizes of buckets are in
elements, as there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from peakcast.models.analytical.layouts.base import Layout, StoredTensor
from peakcast.models.analytical.layouts.zero3_fetching import Coordinator, Turn, turns_of
from peakcast.models.analytical.optimizer_rules.rule import TrainedTensor
from peakcast.models.analytical.step import Run, Step
from peakcast.timeline import Category, Phase
from peakcast.units import round_up

BUFFERS = Category.COMMUNICATION_BUFFERS
MAIN_BYTES = 4
"""The main copy and its gradient are fp32, also for an fp32 network (`single_partition_of_fp32_groups`)."""
NORM_BYTES = 8
"""`get_norm_dtype`: each gradient is converted to fp64 for its norm."""
SENDING_ALIGNMENT = 2
"""`nccl_start_alignment_factor`: a partition is a multiple of this many elements."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Buckets:
    """`zero_optimization`'s sizes, in elements."""

    reduce: int
    num_reduce: int
    """2 with `overlap_comm`."""
    prefetch: int
    persistence: int
    reuse: int
    """`stage3_max_reuse_distance`."""
    live: int
    """`stage3_max_live_parameters`."""
    sub_group: int
    """Stage 3 updates at most about so many elements of a rank at a time."""


class Partitions(Layout):
    """What the stages share: main copies, their gradients in the optimizer's step, and norms."""

    holds_main_parameters = True

    def __init__(self, tensors: Sequence[StoredTensor], *, ranks: int, buckets: Buckets, offloads: bool) -> None:
        super().__init__(tensors)
        self.ranks = ranks
        self.buckets = buckets
        self.offloads = offloads
        self.trained = [t for t in tensors if t.trains]
        self.element_bytes = self.trained[0].element_bytes
        self.groups = [group for group in (self._group(decays=True), self._group(decays=False)) if group]
        self._partition_gradients: list[int] = []
        self._wide: list[int] = []

    def _group(self, *, decays: bool) -> list[StoredTensor]:
        """The Trainer's two groups: with and without weight decay."""
        return [t for t in self.trained if t.decays == decays]

    def partition(self, group: Iterable[StoredTensor]) -> int:
        """Elements of one rank's part of a group."""
        return round_up(sum(t.numel for t in group), SENDING_ALIGNMENT * self.ranks) // self.ranks

    def hold_main(self, step: Step) -> None:
        """The fp32 partitions."""
        for index, group in enumerate(self.groups):
            if not self.offloads:
                size = self.partition(group) * MAIN_BYTES
                step.hold(f"fp32_partition.{index}", Category.MAIN_PARAMETERS, size, 0, module="optimizer")

    def optimized(self) -> list[TrainedTensor]:
        """Nothing on the GPU when the optimizer is offloaded."""
        if self.offloads:
            return []
        return [
            TrainedTensor(f"partition.{index}", "optimizer", (self.partition(group),), MAIN_BYTES, group[0].decays)
            for index, group in enumerate(self.groups)
        ]

    def _largest_gradient(self) -> int:
        """Elements of the largest piece of a gradient that a rank may hold."""
        return max(min(t.numel, self.partition(group)) for group in self.groups for t in group)

    def clip(self, step: Step) -> None:
        size = 0 if self.offloads else self._largest_gradient() * NORM_BYTES
        norm = step.allocate("norm.to_float64", Category.TEMPORARIES, [size])
        step.moment("scaled_global_norm", Phase.GRADIENT_CLIPPING)
        step.free(norm)

    def update_groups(self, trained: list[TrainedTensor], *, by_decay: bool) -> list[list[TrainedTensor]]:
        """One flat partition at a time."""
        return [[tensor] for tensor in trained]

    def before_update(self, step: Step, group: list[TrainedTensor]) -> None:
        """The partition's gradients are flattened, then widened."""
        flat = step.allocate("partition.flat_gradient", Category.GRADIENTS, [t.numel * self.element_bytes for t in group])
        step.moment("flatten", Phase.OPTIMIZER_STEP)
        self._wide = step.allocate("fp32_partition.grad", Category.GRADIENTS, [t.num_bytes for t in group])
        step.moment("to_float32", Phase.OPTIMIZER_STEP)
        step.free(flat)

    def after_update(self, step: Step) -> None:
        step.free(self._wide)

    def release_gradients(self, step: Step) -> None:
        step.free(self._partition_gradients)


@dataclass(frozen=True, slots=True)
class Arrival:
    """A gradient that waits in the bucket, or beside it when it is larger."""

    tensor: StoredTensor
    born: int


class Zero12(Partitions):
    """Stages 1 and 2: every rank has all weights in flat buffers, one partition of main copies and states.

    `rank`: which partition this one owns. Source: `reduce_independent_p_g_buckets_and_remove_grads`, `average_tensor`,
    `copy_grads_in_partition`.
    """

    def __init__(
        self,
        tensors: Sequence[StoredTensor],
        *,
        stage: int,
        ranks: int,
        buckets: Buckets,
        rank: int = 0,
        offloads: bool = False,
    ) -> None:
        super().__init__(tensors, ranks=ranks, buckets=buckets, offloads=offloads)
        self.stage = stage
        self.rank = rank
        self._owners = self._owners_of_tensors()
        self._bucket: list[int] = []
        self._waiting: list[Arrival] = []
        self._runs: list[Run] = []
        self._earlier: list[int] = []
        self._reduced = False
        self._last = True

    def _owners_of_tensors(self) -> dict[StoredTensor, range]:
        """The ranks whose partitions a tensor lies in: groups are cut without regard to tensors."""
        owners: dict[StoredTensor, range] = {}
        for group in self.groups:
            size, offset = self.partition(group), 0
            for tensor in group:
                owners[tensor] = range(offset // size, (offset + tensor.numel - 1) // size + 1)
                offset += tensor.numel
        return owners

    def hold_resident(self, step: Step) -> None:
        frozen = ((t.name, t.module, t.numel * t.element_bytes) for t in self.tensors if not t.trains)
        step.hold_all(frozen, Category.PARAMETERS)
        for index, group in enumerate(self.groups):
            size = self.partition(group) * self.ranks * self.element_bytes
            step.hold(f"bit16_group_flat.{index}", Category.PARAMETERS, size, 0)
        self.hold_main(step)
        if self.offloads:  # temp_grad_buffer_for_gpu_offload
            largest = max(t.numel for t in self.trained) * self.element_bytes
            step.hold("offload_gradient_buffer", BUFFERS, largest, 0)

    def begin_micro_batch(self, step: Step, *, first: bool, last: bool) -> None:
        self._last = last
        self._reduced = False

    def _arrive(self, step: Step, tensor: StoredTensor, now: int, gone: int) -> None:
        """The gradient goes into the bucket, which is emptied first when it would be too full."""
        if self._waiting and sum(one.tensor.numel for one in self._waiting) + tensor.numel > self.buckets.reduce:
            self._reduce(step, now, gone)
        self._waiting.append(Arrival(tensor, now))

    def _reduce(self, step: Step, now: int, gone: int = 0) -> None:
        """The bucket is reduced, when the operation at `now` has let go of `gone` bytes: in a copy where it holds parts of several ranks in turn. What lies in this rank's
        partition is then copied into `grads_in_partition`, which has room for all of every tensor that lies in it in part."""
        parts = [owner for one in self._waiting for owner in self._owners[one.tensor]]
        elements = sum(one.tensor.numel for one in self._waiting)
        copies = any(part != parts[0] for part in parts)
        placed = now + 1  # the copy, if any, is gone when gradients are put in their place
        if copies:
            step.hold("all_reduce.input", BUFFERS, elements * self.element_bytes - gone, now, now + 1)
        for one in self._waiting:
            if one.tensor.numel > self.buckets.reduce:
                size = one.tensor.numel * self.element_bytes
                step.hold("gradient", Category.GRADIENTS, size, min(one.born + 1, now), placed + copies, one.tensor.module)
        self._waiting.clear()
        if self.rank in parts and not self._reduced and not self.offloads:
            self._reduced = True
            mine = sum(t.numel for t, owners in self._owners.items() if self.rank in owners)
            size = mine * self.element_bytes
            if not copies:
                step.hold("grads_in_partition", Category.GRADIENTS, size - gone, now, placed)
            handles = step.allocate("grads_in_partition", Category.GRADIENTS, [size], born=placed)
            self._earlier, self._partition_gradients = self._partition_gradients, handles

    def _reduce_now(self, step: Step) -> None:
        now = step.moment("reduce_gradients", Phase.BACKWARD)
        step.moment("copy_grads_in_partition", Phase.BACKWARD)
        self._reduce(step, now)

    def after_backward(self, step: Step, run: Run) -> None:
        weights = run.template.weight_gradient.nonzero()[0].tolist()
        begin = run.backward_start or 0
        if weights and not self._bucket:  # `setup_buckets`, at the first gradient
            sizes = [self.buckets.reduce * self.element_bytes] * self.buckets.num_reduce
            first = begin + int(run.template.born[weights].min())
            self._bucket = step.allocate("ipg_bucket", BUFFERS, sizes, born=first)
        if self.stage == 2:  # each gradient goes into the bucket as soon as it is there
            run.keeps_gradients = False
            left = [t for t in self.trained if t.module == run.module]
            for index in sorted(weights, key=lambda index: int(run.template.born[index])):
                name = run.template.names[index].removesuffix(".grad")
                numel = int(run.template.num_bytes[index]) // self.element_bytes
                found = [t for t in left if t.name == name] or [t for t in reversed(left) if t.numel == numel]
                at = int(run.template.born[index])
                if found:
                    left.remove(found[0])
                    ends = run.template.dies_backward & (run.template.dies == at + 1) & ~run.template.weight_gradient
                    self._arrive(step, found[0], begin + at, int(run.template.num_bytes[ends].sum()))
        elif not any(earlier.module == run.module for earlier in self._runs):
            self._runs.append(run)

    def end_backward(self, step: Step) -> None:
        if self.stage == 1 and not self._last:
            return  # full gradients and the bucket wait for the last micro-batch
        if self.stage == 1:
            self._reduce_in_order(step)
        self._reduce_now(step)
        step.free(self._bucket)
        step.free(self._earlier)  # added to the first micro-batch's

    def _reduce_in_order(self, step: Step) -> None:
        """Stage 1 sends gradients through the bucket in the order of parameters when backward is over."""
        begins = step.now
        for run in self._runs:
            run.gradients_die = begins
        self._runs.clear()
        copied: list[tuple[StoredTensor, int]] = []
        filled = 0
        for tensor in (tensor for group in self.groups for tensor in group):
            if filled and filled + tensor.numel > self.buckets.reduce:
                self._reduce_now(step)
                filled = 0
            filled += tensor.numel
            self._waiting.append(Arrival(tensor, step.now))
            copied.append((tensor, step.now))
        for tensor, dies in copied:
            size = tensor.numel * self.element_bytes
            if dies > begins:
                step.hold(f"{tensor.name}.grad", Category.GRADIENTS, size, begins, dies, tensor.module)


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
