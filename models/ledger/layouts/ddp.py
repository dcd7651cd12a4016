"""DistributedDataParallel: every rank holds everything, and the reducer's buckets are a second set of gradients.

Source: torch 2.13 `csrc/distributed/c10d/reducer.cpp` (`initialize_buckets`, `compute_bucket_assignment_by_size`) and
`nn/parallel/distributed.py`; over tensor parallelism `distributed/tensor/parallel/ddp.py`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from peakcast.core.units import MIB
from peakcast.models.ledger.layouts.base import Layout, StoredTensor
from peakcast.models.ledger.layouts.gradient_tensors import lm_head_gradients
from peakcast.models.ledger.layouts.module_tree import LM_HEAD, BlockKind, block_of
from peakcast.models.ledger.layouts.pipeline import Turn
from peakcast.models.ledger.tape.step import BlockRun, Step
from peakcast.timelines.timeline import Category, Phase

FIRST_BUCKET_BYTES = MIB
"""`_DEFAULT_FIRST_BUCKET_BYTES`: the first bucket is small, so that communication starts early."""


class DDP(Layout):
    """`bucket_bytes`: the size from which a bucket is full. `views`: `gradient_as_bucket_view`, with which gradients are
    views of the buckets once they have been reduced. `waits`: micro-batches before the last do not reduce. `split`:
    parameters are local parts of tensor-parallel ones."""

    def __init__(
        self,
        tensors: Sequence[StoredTensor],
        *,
        bucket_bytes: int,
        views: bool,
        waits: bool = False,
        split: bool = False,
        outputs: Sequence[int] = (),
    ) -> None:
        super().__init__(tensors)
        self.bucket_bytes = bucket_bytes
        self.views = views
        self.waits = waits
        self.split = split
        self.outputs = tuple(outputs)
        """Bytes of the tensors that the model returns, its logits first, if they are cloned (`_DDPSink`, with
        `find_unused_parameters`)."""
        self._waiting: dict[str, list[BlockRun]] = {}
        """By module, backward runs whose gradients have not been reduced yet."""
        self._late: list[BlockRun] = []
        """Backward runs whose gradients have not reached the parameters: parameters are turned into DTensors before the
        forward, so the backward of that runs after everything else (`_reconstruct_dtensor`)."""
        self._last = True
        table = [t for t in tensors if t.is_token_table and t.trains]
        shared = not any(t.is_lm_head for t in tensors)
        self._shared_bytes = sum(t.numel * t.element_bytes for t in table) if shared and not split else 0
        """Bytes of a table that the lm_head shares: autograd adds up both gradients before the reducer gets one."""
        self._of_head: list[int] = []

    def hold_resident(self, step: Step) -> None:
        super().hold_resident(step)
        sizes = [t.numel * t.element_bytes for t in reversed(self.tensors) if t.trains]
        buckets = ((f"bucket.{i}", "", size) for i, size in enumerate(bucket_sizes(sizes, self.bucket_bytes)))
        step.hold_all(buckets, Category.COMMUNICATION_BUFFERS)

    def begin_micro_batch(self, step: Step, *, first: bool, last: bool) -> None:
        self._last = last

    def begin_turns(self) -> None:
        """`no_sync` for every backward but a stage's last (`pipelining/stage.py` backward_maybe_with_nosync)."""
        self.waits = True

    def before_turn(self, step: Step, turns: Sequence[Turn]) -> None:
        self._last = not any(later.chunk == turns[0].chunk for later in turns[1:])

    def after_forward(self, step: Step, module: str) -> None:
        has_loss = step.phases[-1] == Phase.LOSS  # an encoder's last block has none
        if block_of(module) is BlockKind.HEAD and has_loss and self.outputs:
            logits, *others = self.outputs
            cloned = step.allocate("outputs.logits", Category.LOGITS, [logits, logits], module)
            cloned += step.allocate("outputs", Category.ACTIVATIONS, others, module)
            step.moment("ddp_sink.clone", Phase.LOSS)
            step.free(cloned)

    def after_backward(self, step: Step, run: BlockRun) -> None:
        if self.split:
            self._late.append(run)
        elif self.views:
            self._wait_for_other_end(step, run)
            self._copy_into_bucket(run, step.now)

    def end_backward(self, step: Step) -> None:
        if not self._late:
            return
        last = self._late[-1]
        begins = (last.backward_start or 0) + last.template.num_backward - 1  # this rank's rows of the table's gradient
        table = block_of(last.module) is BlockKind.EMBEDDING
        arrive = begins if table else step.now - 1
        for run in self._late:
            if self.views:
                self._copy_into_bucket(run, arrive)
            if not run.keeps_gradients and not (table and run is last):
                run.gradients_die = arrive
        self._late.clear()

    def _copy_into_bucket(self, run: BlockRun, now: int) -> None:
        """With `views`: copy each gradient into its bucket when it is ready, unless this micro-batch does not reduce."""
        if self.waits and not self._last:
            if run.keeps_gradients:  # else added in place to the existing gradients
                self._waiting.setdefault(run.module, []).append(run)
            return
        for earlier in self._waiting.pop(run.module, []):
            earlier.gradients_die = now
        run.keeps_gradients = False

    def _wait_for_other_end(self, step: Step, run: BlockRun) -> None:
        """Keep the lm_head's gradient of a tied table until the embedding's is ready."""
        if block_of(run.module) is BlockKind.HEAD and run.keeps_gradients and not (self.waits and not self._last):
            made, begins = lm_head_gradients(run.template), run.backward_start or 0
            born = [begins + int(run.template.dies[index]) for index in made]  # then autograd keeps it
            name, sizes, since = f"{LM_HEAD}.weight.grad", [self._shared_bytes] * len(born), min(born, default=step.now)
            self._of_head = step.allocate(name, Category.TEMPORARIES, sizes, "head", born=since)
        elif block_of(run.module) is BlockKind.EMBEDDING:
            step.free(self._of_head)


def bucket_sizes(sizes: Iterable[int], bucket_bytes: int, first_bytes: int = FIRST_BUCKET_BYTES) -> list[int]:
    """Bytes of each bucket, for gradients of `sizes` bytes in the order in which they are ready. A bucket closes when it
    has reached its size, so it may exceed that by almost one gradient."""
    buckets, filled, full_at = [], 0, first_bytes
    for size in sizes:
        filled += size
        if filled >= full_at:
            buckets.append(filled)
            filled, full_at = 0, bucket_bytes
    return [*buckets, filled] if filled else buckets
