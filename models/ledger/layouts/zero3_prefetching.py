"""What ZeRO-3 gathers ahead: the next weights in the order that it knows, until they fill a bucket.

Source: DeepSpeed 0.19.8 `runtime/zero/partitioned_param_coordinator.py` (`_fetch_sub_module_impl`,
`__most_recent_step_id_param_fetched_for`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from peakcast.models.ledger.layouts.base import StoredTensor
from peakcast.models.ledger.layouts.zero3_order import Order
from peakcast.models.ledger.layouts.zero3_weights import Weights


class Prefetcher:
    """The queue of weights that modules still to come will read (`__param_queue`)."""

    def __init__(self) -> None:
        self._queue: deque[tuple[StoredTensor, int]] = deque()
        self._next_use: dict[StoredTensor, int] = {}
        """The turn for which each tensor was last taken off the queue."""

    def begin(self, order: Order) -> None:
        """Fill the queue: the network begins to run forward."""
        self._queue = deque((t, index) for index, turn in enumerate(order.known or ()) for t in turn.tensors)
        self._next_use.clear()

    def run_ahead(self, mine: Sequence[StoredTensor], at: int, weights: Weights, now: int) -> None:
        """Take the tensors of turn `at` off the queue, and gather the next ones."""
        queue, next_use = self._queue, self._next_use
        fresh = {t for t in mine if next_use.get(t, -1) < at}
        while queue and fresh:
            tensor, turn = queue.popleft()
            next_use[tensor] = turn
            fresh.discard(tensor)
        sizes = weights.engine.sizes
        if queue and (most := min(sizes.live - weights.elements, sizes.prefetch)) > 0:
            weights.gather(self._next(most, weights), now)

    def _next(self, most: int, weights: Weights) -> list[StoredTensor]:
        """The next tensors that are missing, until they have `most` elements."""
        queue, next_use, available, gathers = self._queue, self._next_use, weights.available, weights.gathers
        ahead, filled = dict[StoredTensor, None](), 0
        while queue and filled < most:
            tensor, turn = queue.popleft()
            before = next_use.get(tensor, -1)
            next_use[tensor] = turn if turn > before else before
            if tensor not in available and tensor not in gathers and tensor not in ahead:
                ahead[tensor] = None
                filled += tensor.numel
        return list(ahead)

    def is_queued_beyond(self, tensor: StoredTensor, at: int) -> bool:
        """Whether the tensor has been taken off the queue for a turn after `at`."""
        return self._next_use.get(tensor, -1) > at
