"""ZeRO-1 and ZeRO-2: DeepSpeed 0.19.8 `runtime/zero/stage_1_and_2.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from peakcast.core.units import round_up
from peakcast.models.allocator.sizes import MIN_BLOCK_BYTES
from peakcast.models.ledger.layouts.base import StoredTensor
from peakcast.models.ledger.layouts.zero import BUFFERS, REDUCING, Buckets, Partitions, ended_bytes, made_at
from peakcast.models.ledger.optimizers.rule import TrainedTensor
from peakcast.models.ledger.tape.marks import Mark
from peakcast.models.ledger.tape.step import Run, Step
from peakcast.timelines.timeline import Category, Phase


@dataclass(frozen=True, slots=True)
class Arrival:
    """A gradient that waits in the bucket or, if it is larger than the bucket, outside it. `born`: the instant it was
    made."""

    tensor: StoredTensor
    born: int


class Slices(NamedTuple):
    """Parts of a tensor that lie in the partitions of `ranks` consecutive ranks from `first` on, `size` elements in
    each."""

    first: int
    size: int
    ranks: int


class Zero12(Partitions):
    """Stages 1 and 2: every rank has all weights in flat buffers, and one partition of main copies and states. `rank`: the
    rank whose partition this is. Source: `reduce_independent_p_g_buckets_and_remove_grads`, `average_tensor`,
    `copy_grads_in_partition`."""

    def __init__(
        self,
        tensors: Sequence[StoredTensor],
        *,
        stage: int,
        ranks: int,
        element_bytes: int,
        buckets: Buckets,
        rank: int = 0,
        round_robin: bool = False,
        contiguous: bool = True,
        offloads: bool = False,
    ) -> None:
        super().__init__(
            tensors, ranks=ranks, element_bytes=element_bytes, buckets=buckets, offloads=offloads, biases_first=True
        )
        self.stage = stage
        self.rank = rank
        self.round_robin = round_robin
        self._overlaps = stage == 1 and buckets.num_reduce > 1
        """Whether stage 1 reduces during the last micro-batch's backward, instead of after it."""
        self._reduces = REDUCING if buckets.num_reduce > 1 else 0
        """The stream on which gradients are reduced."""
        self.contiguous = contiguous
        """Whether gradients are copied into a bucket, and those of this rank's partition into `grads_in_partition`;
        otherwise they stay where backward made them."""
        self._mine: dict[StoredTensor, int] = {}
        """Elements of each tensor that lie in this rank's partition."""
        self._slices: dict[StoredTensor, list[Slices]] = {}
        """The ranks in whose partitions each tensor lies, and how many elements each has."""
        self.owners = self._owners_of_tensors()
        self._bucket: list[int] = []
        self._tied: list[int] = []
        self._two_stacks = any(tensor.of_encoder for tensor in tensors)
        """Whether it is an encoder-decoder, in which both embeddings add to the table's gradient."""
        self._between = False
        self._waiting: list[Arrival] = []
        self._runs: list[Run] = []
        self._earlier: list[int] = []
        self._in_place: dict[bool, list[int]] = {True: [], False: []}
        """By whether their group decays: this rank's gradients that stay where backward made them."""
        self._reduced = False
        self._last = True

    def _owners_of_tensors(self) -> dict[StoredTensor, range]:
        """The ranks in whose partitions each tensor lies; groups are divided without regard to tensors."""
        owners: dict[StoredTensor, range] = {}
        for group in self.groups:
            size, offset = self.partition(group), 0
            for tensor in self._division_order(group):
                owners[tensor] = range(offset // size, (offset + tensor.numel - 1) // size + 1)
                ends = offset + tensor.numel
                first, last = owners[tensor][0], owners[tensor][-1]
                if first == last:
                    slices = [Slices(first, tensor.numel, 1)]
                else:
                    begins = Slices(first, (first + 1) * size - offset, 1)
                    slices = [begins, Slices(first + 1, size, last - first - 1), Slices(last, ends - last * size, 1)]
                self._slices[tensor] = slices
                self._mine[tensor] = max(0, min(ends, (self.rank + 1) * size) - max(offset, self.rank * size))
                offset = ends
        return owners

    def _division_order(self, group: list[StoredTensor]) -> list[StoredTensor]:
        """The tensors of a group in the order in which it is divided; `round_robin_gradients` deals them out to the ranks
        one by one (`_round_robin_reorder`)."""
        if not self.round_robin:
            return group
        return [tensor for rank in range(min(self.ranks, len(group))) for tensor in group[rank :: self.ranks]]

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
        if not self.contiguous and self.stage == 2:  # the new gradients are added to those of earlier micro-batches
            self._earlier = self._in_place[True] + self._in_place[False]
            self._in_place = {True: [], False: []}

    def _joins_gradients(self) -> bool:
        """Besides several tensors: if the last partition is not full, one more tensor, of zeros, fills it
        (`get_flat_partition`)."""
        group = self.groups[self._updated]
        parts = [mine for tensor in group if (mine := self._mine[tensor])]
        return len(parts) > 1 or sum(parts) < self.partition(group)

    def _groups_with_gradients(self) -> int:
        """A rank's partition may lie entirely in a group's padding."""
        return max((n for n, group in enumerate(self.groups, start=1) if any(map(self._mine.get, group))), default=0)

    def _largest_gradient(self) -> int:
        return max(self._mine.values())

    def _arrive(self, step: Step, tensor: StoredTensor, now: int, gone: int, born: int) -> None:
        """A gradient goes into the bucket, which is reduced first if the gradient would overfill it. One larger than the
        bucket waits outside it, in a copy if the optimizer is on the host. `gone`: bytes that the operation at `now`
        frees."""
        if self._waiting and sum(one.tensor.numel for one in self._waiting) + tensor.numel > self.buckets.reduce:
            gone += self._reduce(step, now, gone)
        if self._is_copied(tensor):
            step.hold("gradient.clone", Category.GRADIENTS, tensor.numel * self.element_bytes - gone, now, now + 1)
        self._waiting.append(Arrival(tensor, born))

    def _is_copied(self, tensor: StoredTensor) -> bool:
        """Whether a gradient is cloned when it is ready (`_offload_gradient_safety_enabled`)."""
        return self.offloads and tensor.numel > self.buckets.reduce

    def _reduce(self, step: Step, now: int, gone: int = 0) -> int:
        """Reduce the bucket, after the operation at `now` has freed `gone` bytes. It is copied if it holds parts of
        several ranks in turn. Gradients in this rank's partition are then copied into `grads_in_partition`, which has
        room for the whole of each tensor of which a part lies in the partition. Returns the bytes that are free again at
        that instant."""
        if not self.contiguous:
            self._reduce_in_place(step, now, gone)
            return 0
        owned = any(self.rank in self.owners[one.tensor] for one in self._waiting)
        elements = self._copied()
        copies = elements > 0
        placed = now + 1  # the copy, if any, is freed before gradients are copied into the partition
        free = 0
        if copies:
            free = max(elements * self.element_bytes - gone, 0)
            step.hold("all_reduce.input", BUFFERS, free, now, now + 1, stream=self._reduces)
        for one in self._waiting:
            if one.tensor.numel > self.buckets.reduce:
                size, born, module = one.tensor.numel * self.element_bytes, min(one.born + 1, now), one.tensor.module
                if self._overlaps and self.rank not in self.owners[one.tensor]:  # stage 1 frees it at the end
                    self._bucket += step.allocate("gradient", Category.GRADIENTS, [size], module, born=born)
                else:
                    step.hold("gradient", Category.GRADIENTS, size, born, placed + copies, module)
                    free += size
        if self.offloads and self._last:
            parts = [elements for one in self._waiting if (elements := self._mine[one.tensor])]
            taken = placed if copies else now
            size = self.norm_in_backward(step, parts, taken) - (0 if copies else gone)
            step.hold("norm.to_float64", Category.TEMPORARIES, size, taken, taken + 1)
            free += 0 if copies else max(size, 0)
        self._waiting.clear()
        if owned and not self._reduced and not self.offloads:
            self._reduced = True
            mine = sum(t.numel for t, owners in self.owners.items() if self.rank in owners)
            size = mine * self.element_bytes
            if not copies:
                step.hold("grads_in_partition", Category.GRADIENTS, size - gone, now, placed)
            handles = step.allocate("grads_in_partition", Category.GRADIENTS, [size], born=placed)
            self._earlier, self._partition_gradients = self._partition_gradients, handles
        return free

    def _reduce_in_place(self, step: Step, now: int, gone: int) -> None:
        """`buffered_reduce_fallback`: gradients are flattened into one tensor and copied back to where they are. Stage 2
        then frees those that other ranks update."""
        if len(self._waiting) > 1:
            size = sum(one.tensor.numel for one in self._waiting) * self.element_bytes
            step.hold("all_reduce.input", BUFFERS, size - gone, now, now + 1, stream=self._reduces)
        for one in self._waiting:
            born, size = min(one.born + 1, now), one.tensor.numel * self.element_bytes
            if self.rank not in self.owners[one.tensor] and self.stage == 2:
                step.hold("gradient", Category.GRADIENTS, size, born, now + 1, one.tensor.module)
                continue
            gradient = step.allocate("gradient", Category.GRADIENTS, [size], one.tensor.module, born=born)
            mine = self.rank in self.owners[one.tensor]
            (self._in_place[one.tensor.decays] if mine else self._bucket).extend(gradient)
        self._waiting.clear()

    def before_update(self, step: Step, group: list[TrainedTensor]) -> None:
        super().before_update(step, group)
        step.free(self._in_place[group[0].decays])

    def _copied(self) -> int:
        """Elements of the largest copy. Parts of different ranks are sent together until they fill a bucket; a single part
        is sent from where it is (`average_tensor`, `allreduce_and_scatter`)."""
        slices: list[Slices] = []
        for one in (part for arrival in self._waiting for part in self._slices[arrival.tensor]):
            if slices and slices[-1].ranks == one.ranks == 1 and slices[-1].first == one.first:
                one = one._replace(size=one.size + slices.pop().size)
            slices.append(one)
        largest = together = number = 0
        left = sum(one.ranks for one in slices)
        for _, size, count in slices:
            while count:
                taken = min(count, (self.buckets.reduce - together) // size + 1)
                together, number, count, left = together + taken * size, number + taken, count - taken, left - taken
                if together > self.buckets.reduce or not left:
                    largest = max(largest, together if number > 1 else 0)
                    together = number = 0
        return largest

    def _reduce_now(self, step: Step) -> None:
        """Reduce the bucket outside any block."""
        now = step.moment("reduce_gradients", Phase.BACKWARD)
        step.moment("copy_grads_in_partition", Phase.BACKWARD)
        self._reduce(step, now)

    def after_backward(self, step: Step, run: Run) -> None:
        weights = self.in_order(run.template)
        begin = run.backward_start or 0
        if weights and not self._bucket and self.contiguous:  # `setup_buckets`, at the first gradient
            sizes = [self.buckets.reduce * self.element_bytes] * self.buckets.num_reduce
            made = made_at(run.template, weights[0])  # the bucket is made after the operation's temporaries are freed
            step.hold("ipg_bucket", BUFFERS, sum(sizes) - ended_bytes(run, made), begin + made, begin + made + 1)
            self._bucket = step.allocate("ipg_bucket", BUFFERS, sizes, born=begin + made + 1)
        if self.stage == 2 or (self._overlaps and self._last):  # each gradient goes into the bucket as soon as it is ready
            run.keeps_gradients = False
            added = [one for one in self._runs if one.module == run.module]  # earlier micro-batches' runs, in stage 1
            for earlier in added:
                earlier.gradients_die = begin
                self._runs.remove(earlier)
            left = [t for t in self.trained if t.module == run.module]
            for index in weights:
                name = run.template.names[index].removesuffix(".grad")
                size = int(run.template.num_bytes[index])  # as the allocator rounds it
                alike = [t for t in reversed(left) if round_up(t.numel * self.element_bytes, MIN_BLOCK_BYTES) == size]
                found = [t for t in left if t.name == name] or alike
                at = made_at(run.template, index)
                if found:
                    left.remove(found[0])
                    if added and found[0].numel <= self.buckets.reduce:
                        step.hold("gradient", Category.GRADIENTS, size, begin, begin + at + 1, run.module)
                    born = begin - 1 if added else begin + at
                    self._arrive(step, found[0], begin + at, ended_bytes(run, at), born)
                elif name == "lm_head.weight":  # a tied table: autograd adds the embedding's gradient before any hook runs
                    self._tied += step.allocate("lm_head.weight.grad", Category.GRADIENTS, [size])
                    run.gradients_die = step.now  # from then on `_tied` holds it
            if self._tied and run.module == "embedding":
                self._between = self._two_stacks and not self._between
            if self._tied and run.module == "embedding" and not self._between:
                step.free(self._tied)
                (table,) = (t for t in left if t.name == "embed_tokens.weight")
                at = run.template.backward_marks[Mark.TIED_TABLE][0]
                self._arrive(step, table, begin + at, ended_bytes(run, at), begin + at)
        elif not any(earlier.module == run.module for earlier in self._runs):
            self._runs.append(run)

    def end_backward(self, step: Step) -> None:
        if self.stage == 1 and not self._last:
            return  # full gradients and the bucket wait for the last micro-batch
        if self.stage == 1 and not self._overlaps:
            self._reduce_in_order(step)
        self._reduce_now(step)
        step.free(self._bucket)
        step.free(self._earlier)  # they have been added to the new ones

    def _reduce_in_order(self, step: Step) -> None:
        """Stage 1 sends gradients through the bucket after backward, in the order of parameters."""
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
            if self._is_copied(tensor):
                now, size = step.moment("gradient.clone", Phase.BACKWARD), tensor.numel * self.element_bytes
                step.hold("gradient.clone", Category.GRADIENTS, size, now, now + 1, tensor.module)
            self._waiting.append(Arrival(tensor, step.now))
            copied.append((tensor, step.now))
        for tensor, dies in copied if self.contiguous else ():
            size = tensor.numel * self.element_bytes
            if dies > begins:
                step.hold(f"{tensor.name}.grad", Category.GRADIENTS, size, begins, dies, tensor.module)
