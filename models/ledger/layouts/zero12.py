"""ZeRO-1 and ZeRO-2: DeepSpeed 0.19.8 `runtime/zero/stage_1_and_2.py`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from peakcast.models.ledger.layouts.base import StoredTensor
from peakcast.models.ledger.layouts.gradient_tensors import lm_head_gradients, tensors_of_gradients
from peakcast.models.ledger.layouts.module_tree import BlockKind, block_of
from peakcast.models.ledger.layouts.zero import BUFFERS, MAIN_BYTES, REDUCING, Partitions, ZeroSettings, made_at
from peakcast.models.ledger.layouts.zero12_bucket import Arrival, Zero12Bucket
from peakcast.models.ledger.layouts.zero12_division import Division
from peakcast.models.ledger.optimizers.rule import TrainedTensor
from peakcast.models.ledger.tape.marks import Mark
from peakcast.models.ledger.tape.step import BlockRun, Step
from peakcast.models.ledger.tape.template import Template
from peakcast.timelines.timeline import Category, Phase


class OwnGradients:
    """This rank's reduced gradients, except those that were last copied into its partition (`grads_in_partition`)."""

    def __init__(self) -> None:
        self.copied = False
        """Whether the partition into which this micro-batch's gradients are copied has been made."""
        self.earlier: list[int] = []
        """Handles of earlier micro-batches' gradients, to which the new ones are added when backward ends."""
        self.in_place: dict[bool, list[int]] = {True: [], False: []}
        """Handles of gradients that stay where backward made them, by whether their group has weight decay."""

    def begin_micro_batch(self, *, adds: bool) -> None:
        """`adds`: this micro-batch's gradients in place will be added to those of earlier ones."""
        self.copied = False
        if adds:
            self.earlier = self.in_place[True] + self.in_place[False]
            self.in_place = {True: [], False: []}


class SharedTable:
    """The gradient of a token table that the lm_head shares with the embedding. Autograd adds the two parts before any hook
    runs, so the lm_head's part waits for the embedding's. `two_stacks`: the network is an encoder-decoder, in which the
    embedding of either stack adds a part."""

    def __init__(self, *, two_stacks: bool) -> None:
        self.half: list[int] = []
        """Handles of the lm_head's part."""
        self._two_stacks = two_stacks
        self._between = False
        """Whether the embedding of one stack has added its part and that of the other has not."""

    def is_summed_by(self, run: BlockRun) -> bool:
        """Whether `run`, whose backward has just ended, has added the last part."""
        if not self.half or block_of(run.module) is not BlockKind.EMBEDDING:
            return False
        self._between = self._two_stacks and not self._between
        return not self._between


@dataclass(frozen=True, slots=True, kw_only=True)
class Zero12Settings(ZeroSettings):
    """The settings of every stage, and those that only stages 1 and 2 use."""

    bucket_first: bool
    """Whether the bucket is made before backward begins (`backward_prologue`), and not at the first gradient
    (`setup_buckets`)."""
    clones_large: bool
    """Whether a gradient that is larger than the bucket is cloned if the optimizer is on the host."""
    overflow_bytes: int
    """Bytes per element that looking for infinite elements allocates (`has_inf_or_nan`), one of this rank's gradients after
    the other: in backward if the optimizer is on the host (`copy_grads_in_partition`), else before clipping."""

    returns_wide: bool
    """Whether the host's updated fp32 partition comes to the GPU as it is, to be narrowed there."""


class Zero12(Partitions):
    """Stages 1 and 2: every rank has all weights in flat buffers, and one partition of main copies and states. `rank`: the
    rank whose partition this is. Source: `reduce_independent_p_g_buckets_and_remove_grads`, `average_tensor`,
    `copy_grads_in_partition`."""

    def __init__(
        self, tensors: Sequence[StoredTensor], settings: Zero12Settings, *, stage: int, rank: int, round_robin: bool
    ) -> None:
        super().__init__(tensors, settings)
        self.stage = stage
        self._bucket_first, self._clones = settings.bucket_first, settings.offloads and settings.clones_large
        self._overflow_bytes, self._returns_wide = settings.overflow_bytes, settings.returns_wide
        self.rank = rank
        two_buckets = self.buckets.num_reduce > 1
        self._overlaps = stage == 1 and two_buckets
        """Whether stage 1 reduces during the last micro-batch's backward, instead of after it."""
        self._reduces = REDUCING if two_buckets else 0
        """The number of the stream on which gradients are reduced."""
        sizes = ((group, self.partition(group)) for group in self.groups)
        self.division = Division(sizes, ranks=self.ranks, rank=rank, round_robin=round_robin)
        self._bucket = Zero12Bucket(self.buckets.reduce, self.division)
        self._own = OwnGradients()
        self._until_reduced: list[int] = []
        """Handles of the bucket itself, and of gradients that are freed together with it."""
        self._table = SharedTable(two_stacks=any(tensor.of_encoder for tensor in tensors))
        self._unreduced: dict[str, BlockRun] = {}
        """Stage 1: by block, the first micro-batch's run, whose gradients those of later ones are added to."""
        self._last = True
        self._trained_of: dict[str, list[StoredTensor]] = {}
        """The tensors of each block that train."""
        for tensor in self.trained:
            self._trained_of.setdefault(tensor.module, []).append(tensor)
        self._places: dict[tuple[int, tuple[str, ...]], dict[int, int]] = {}
        """For a template, by its id and the names of its block's tensors: the place, among those tensors, of the one that
        each gradient belongs to."""

    def build(self, step: Step) -> None:
        """The engine is made: each group's weights go to the host, the cache is emptied, and they come back as one
        tensor."""
        self._hold_frozen(step)
        for index in range(len(self.groups)):
            self._hold_flat(step, index, born=step.now)
            step.moment("flatten", Phase.INIT)
            self.build_main(step, index)
        self.build_gradients(step, map(self.partition, self.groups))

    def _hold_frozen(self, step: Step) -> None:
        frozen = ((t.name, t.module, t.numel * t.element_bytes) for t in self.tensors if not t.trains)
        step.hold_all(frozen, Category.PARAMETERS)

    def _hold_flat(self, step: Step, index: int, *, born: int) -> None:
        """Hold the flat weights of a group."""
        size = self.partition(self.groups[index]) * self.ranks * self.element_bytes
        step.hold(f"bit16_group_flat.{index}", Category.PARAMETERS, size, born)

    def hold_resident(self, step: Step) -> None:
        self._hold_frozen(step)
        for index in range(len(self.groups)):
            self._hold_flat(step, index, born=0)
        self.hold_main(step)
        if self.offloads:  # temp_grad_buffer_for_gpu_offload
            largest = max(t.numel for t in self.trained) * self.element_bytes
            step.hold("offload_gradient_buffer", BUFFERS, largest, 0)

    def begin_micro_batch(self, step: Step, *, first: bool, last: bool) -> None:
        self._last = last
        self._own.begin_micro_batch(adds=not self.contiguous and self.stage == 2)

    def _joins_gradients(self) -> bool:
        """Whether the group's gradients are joined to one tensor: if there are several, or if they do not fill the
        partition, in which case a tensor of zeros is joined to them (`get_flat_partition`)."""
        group = self.groups[self._updated]
        parts = [mine for tensor in group if (mine := self.division.of(tensor).mine)]
        return len(parts) > 1 or sum(parts) < self.partition(group)

    def _groups_with_gradients(self) -> int:
        """The number of groups up to the last in which this rank has a part of a tensor; of the others it has only
        padding."""
        mine = [any(self.division.of(tensor).mine for tensor in group) for group in self.groups]
        return max((number for number, has_any in enumerate(mine, start=1) if has_any), default=0)

    def _largest_gradient(self) -> int:
        return self.division.most_of_mine()

    # -- a gradient is ready ----------------------------------------------------------------------------------------------

    def before_backward(self, step: Step, module: str) -> None:
        if self._bucket_first and not self._until_reduced:
            self._until_reduced = step.allocate("ipg_bucket", BUFFERS, self._bucket_bytes())

    def after_backward(self, step: Step, run: BlockRun) -> None:
        self._set_up_bucket(step, run)
        if self._reduces_in_backward():
            run.keeps_gradients = False
            self._collect(step, run)
        else:
            self._unreduced.setdefault(run.module, run)

    def _reduces_in_backward(self) -> bool:
        """Whether each gradient of this micro-batch goes into the bucket as soon as it is ready: always in stage 2; in
        stage 1 with `overlap_comm`, in the last micro-batch."""
        return self.stage == 2 or (self._overlaps and self._last)

    def _set_up_bucket(self, step: Step, run: BlockRun) -> None:
        """`setup_buckets`: the bucket is made at the first gradient, after the operation's temporaries are freed."""
        weights, sizes = self.in_order(run.template), self._bucket_bytes()
        if not weights or self._until_reduced or not sizes:
            return
        made = made_at(run.template, weights[0])
        now = (run.backward_start or 0) + made
        step.hold("ipg_bucket", BUFFERS, sum(sizes) - self.ended_bytes(run, made), now, now + 1)
        self._until_reduced = step.allocate("ipg_bucket", BUFFERS, sizes, born=now + 1)

    def _bucket_bytes(self) -> list[int]:
        """Bytes of the buffers that make up the bucket; none if gradients wait where they are."""
        return [self.buckets.reduce * self.element_bytes] * self.buckets.num_reduce if self.contiguous else []

    def _collect(self, step: Step, run: BlockRun) -> None:
        """Put the gradients of a block's backward into the bucket. If earlier micro-batches have left theirs, the new ones
        were added to them."""
        template, begin = run.template, run.backward_start or 0
        earlier = self._unreduced.pop(run.module, None)
        if earlier is not None:
            earlier.gradients_die = begin
        tensors, of_lm_head = self._tensors_of(run.module, template), lm_head_gradients(template)
        for index in self.in_order(template):
            at, size, tensor = made_at(template, index), int(template.num_bytes[index]), tensors.get(index)
            if tensor is None:
                if index in of_lm_head:  # a tied table's, which is the embedding's
                    self._table.half += step.allocate(template.names[index], Category.GRADIENTS, [size])
                    run.gradients_die = step.now  # from then on `half` holds it
                continue
            if earlier is not None and self._bucket.has_room_for(tensor):
                step.hold("gradient", Category.GRADIENTS, size, begin, begin + at + 1, run.module)
            born, gone = begin + at, self.ended_bytes(run, at)
            if earlier is not None:  # what has been added to it is freed before the hook runs
                born, gone = begin - 1, gone + size
            self._arrive(step, tensor, begin + at, gone, born)
        if self._table.is_summed_by(run):
            step.free(self._table.half)
            (table,) = (t for t in self.trained if t.is_token_table)
            at = template.backward_marks[Mark.TIED_TABLE][0]
            self._arrive(step, table, begin + at, self.ended_bytes(run, at), begin + at)

    def _tensors_of(self, module: str, template: Template) -> dict[int, StoredTensor]:
        """By index of a gradient in `template`, the tensor that it belongs to."""
        of_block = self._trained_of.get(module, [])
        key = id(template), tuple(tensor.name for tensor in of_block)
        if key not in self._places:
            self._places[key] = tensors_of_gradients(template, self.in_order(template), of_block)
        return {index: of_block[place] for index, place in self._places[key].items()}

    def _arrive(self, step: Step, tensor: StoredTensor, now: int, gone: int, born: int) -> None:
        """Put a gradient into the bucket, which is reduced first if the gradient would overfill it. A gradient larger than
        the bucket waits outside it, in a copy if the optimizer is on the host. `gone`: bytes that the operation at `now`
        frees; `born`: the instant at which the gradient was made."""
        if self._bucket.overflows_with(tensor):
            gone += self._reduce(step, now, gone)
        if self._is_cloned(tensor):
            step.hold("gradient.clone", Category.GRADIENTS, tensor.numel * self.element_bytes - gone, now, now + 1)
        self._bucket.add(tensor, born)

    def _is_cloned(self, tensor: StoredTensor) -> bool:
        """Whether a gradient is cloned when it is ready (`_offload_gradient_safety_enabled`)."""
        return self._clones and not self._bucket.has_room_for(tensor)

    # -- the bucket is reduced --------------------------------------------------------------------------------------------

    def _reduce(self, step: Step, now: int, gone: int = 0) -> int:
        """Reduce the bucket, after the operation at `now` has freed `gone` bytes. It is copied if it holds parts of
        several ranks in turn. Returns the bytes that are free again at that instant."""
        copied = self._bucket.copied_elements() if self.contiguous else 0
        content = self._bucket.empty()
        if not self.contiguous:
            self._reduce_in_place(step, content, now, gone)
            return 0
        free = max(copied * self.element_bytes - gone, 0) if copied else 0
        step.hold("all_reduce.input", BUFFERS, free, now, now + 1, stream=self._reduces)
        outside = [one for one in content if not self._bucket.has_room_for(one.tensor)]
        dies = now + 2 if copied else now + 1  # the copy, if any, is freed before gradients go where they belong
        free += sum(self._free_outside(step, one, now, dies) for one in outside)
        if self.offloads and self._last:
            mine = [(one.tensor.numel, part) for one in content if (part := self.division.of(one.tensor).mine)]
            at = now + 1 if copied else now
            size = self.norm_in_backward(step, [part for _, part in mine], at)
            looked = max((whole * self._overflow_bytes for whole, _ in mine), default=0)  # after the norm
            size = max(size, looked) - (0 if copied else gone)
            step.hold("norm.to_float64", Category.TEMPORARIES, size, at, at + 1)
            free += 0 if copied else max(size, 0)
        if not self.offloads and any(self.division.is_mine(one.tensor) for one in content):
            self._copy_own_partition(step, now, 0 if copied else gone, follows_copy=copied > 0)
        return free

    def _free_outside(self, step: Step, one: Arrival, now: int, dies: int) -> int:
        """Free a gradient that has waited outside the bucket. Two kinds stay until backward ends: under stage 1 with
        `overlap_comm`, those that other ranks update; with the optimizer on the host, those of this rank in all
        micro-batches but the last, because they are added up on the host and only the last one's is removed from its
        parameter (`copy_grads_in_partition`). Returns the bytes that are free at once."""
        size, born, module = one.tensor.numel * self.element_bytes, min(one.born + 1, now), one.tensor.module
        mine = self.division.is_mine(one.tensor)
        if (self.offloads and not self._last) if mine else self._overlaps:
            self._until_reduced += step.allocate("gradient", Category.GRADIENTS, [size], module, born=born)
            return 0
        step.hold("gradient", Category.GRADIENTS, size, born, dies, module)
        return size

    def _copy_own_partition(self, step: Step, now: int, gone: int, *, follows_copy: bool) -> None:
        """`copy_grads_in_partition`: at the first of this rank's gradients, make `grads_in_partition`, which has room for
        the whole of each tensor of which a part lies in the partition."""
        if self._own.copied:
            return
        self._own.copied = True
        size = sum(tensor.numel for tensor in self.division.my_tensors()) * self.element_bytes
        if not follows_copy:
            step.hold("grads_in_partition", Category.GRADIENTS, size - gone, now, now + 1)
        handles = step.allocate("grads_in_partition", Category.GRADIENTS, [size], born=now + 1)
        self._own.earlier, self._partition_gradients = self._partition_gradients, handles

    def _reduce_in_place(self, step: Step, content: Sequence[Arrival], now: int, gone: int) -> None:
        """`buffered_reduce_fallback`: gradients are flattened into one tensor and copied back to where they are. Stage 2
        then frees those that other ranks update."""
        if len(content) > 1:
            size = sum(one.tensor.numel for one in content) * self.element_bytes
            step.hold("all_reduce.input", BUFFERS, size - gone, now, now + 1, stream=self._reduces)
        for one in content:
            born, size = min(one.born + 1, now), one.tensor.numel * self.element_bytes
            mine = self.division.is_mine(one.tensor)
            if not mine and self.stage == 2:
                step.hold("gradient", Category.GRADIENTS, size, born, now + 1, one.tensor.module)
                continue
            gradient = step.allocate("gradient", Category.GRADIENTS, [size], one.tensor.module, born=born)
            (self._own.in_place[one.tensor.decays] if mine else self._until_reduced).extend(gradient)

    def _reduce_now(self, step: Step) -> None:
        """Reduce the bucket outside any block."""
        now = step.moment("reduce_gradients", Phase.BACKWARD)
        step.moment("copy_grads_in_partition", Phase.BACKWARD)
        self._reduce(step, now)

    # -- backward ends ----------------------------------------------------------------------------------------------------

    def end_backward(self, step: Step) -> None:
        if self.stage == 1 and not self._last:
            return  # full gradients and the bucket wait for the last micro-batch
        if self.stage == 1 and not self._overlaps:
            self._reduce_in_order(step)
        self._reduce_now(step)
        step.free(self._until_reduced)
        step.free(self._own.earlier)  # they have been added to the new ones

    def _reduce_in_order(self, step: Step) -> None:
        """Stage 1 sends gradients through the bucket after backward, in the order of parameters."""
        begins = step.now
        for run in self._unreduced.values():
            run.gradients_die = begins
        self._unreduced.clear()
        copied: list[tuple[StoredTensor, int]] = []
        for tensor in (tensor for group in self.groups for tensor in group):
            if self._bucket.overflows_with(tensor):
                self._reduce_now(step)
            if self._is_cloned(tensor):
                now, size = step.moment("gradient.clone", Phase.BACKWARD), tensor.numel * self.element_bytes
                step.hold("gradient.clone", Category.GRADIENTS, size, now, now + 1, tensor.module)
            self._bucket.add(tensor, step.now)
            copied.append((tensor, step.now))
        for tensor, dies in copied if self.contiguous else ():
            size = tensor.numel * self.element_bytes
            if dies > begins:
                step.hold(f"{tensor.name}.grad", Category.GRADIENTS, size, begins, dies, tensor.module)

    # -- optimizer --------------------------------------------------------------------------------------------------------

    def _overflow_check(self) -> tuple[list[int], int]:
        return [self._largest_gradient() * self._overflow_bytes], 0

    def before_update(self, step: Step, group: list[TrainedTensor]) -> None:
        super().before_update(step, group)
        step.free(self._own.in_place[group[0].decays].copy())

    def release_gradients(self, step: Step) -> None:
        """Where the host returns its partitions in fp32, they are on the GPU one after the other."""
        super().release_gradients(step)
        for group in self.groups if self.offloads and self._returns_wide else ():
            now = step.moment("partition.returned", Phase.OPTIMIZER_STEP)
            step.hold("partition.returned", Category.TEMPORARIES, self.partition(group) * MAIN_BYTES, now, now + 1)
