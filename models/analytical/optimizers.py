"""Optimizers: what each keeps per parameter and what its step allocates on top. A table; one row per implementation.

Sources: torch 2.11 `torch/optim/*.py` read and traced (where-memory-goes D). Sizes follow each parameter's own dtype.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from peakcast.errors import SpecError
from peakcast.spec import Optimizer


@dataclass(frozen=True, slots=True)
class TrainedTensor:
    """One tensor that the optimizer updates. `decays`: in the weight-decay group of Hugging Face's two groups."""

    name: str
    module: str
    shape: tuple[int, ...]
    element_bytes: int
    decays: bool = True

    @property
    def numel(self) -> int:
        size = 1
        for side in self.shape:
            size *= side
        return size

    @property
    def num_bytes(self) -> int:
        return self.numel * self.element_bytes

    def sharded(self, shards: int) -> TrainedTensor:
        """One rank's part when its rows are split over `shards` ranks."""
        if shards == 1:
            return self
        rows, *rest = self.shape or (1,)
        return replace(self, shape=(-(-rows // shards), *rest))


@dataclass(frozen=True, slots=True)
class OptimizerRule:
    """States (name, bytes) of one tensor, and the temporaries of the step over one parameter group."""

    states: Callable[[TrainedTensor], list[tuple[str, int]]]
    temporaries: Callable[[Sequence[TrainedTensor]], list[tuple[str, int]]]


def _copies(*names: str) -> Callable[[TrainedTensor], list[tuple[str, int]]]:
    return lambda tensor: [(name, tensor.num_bytes) for name in names]


def _fused_adam_states(tensor: TrainedTensor) -> list[tuple[str, int]]:
    return [("exp_avg", tensor.num_bytes), ("exp_avg_sq", tensor.num_bytes), ("step", 4)]  # step is a device tensor


def _factored_states(tensor: TrainedTensor) -> list[tuple[str, int]]:
    if len(tensor.shape) < 2:
        return [("variance", tensor.num_bytes)]
    rows, columns = tensor.shape[-2], tensor.shape[-1]
    return [("row_var", rows * tensor.element_bytes), ("col_var", columns * tensor.element_bytes)]


def _none(_: object) -> list[tuple[str, int]]:
    return []


def _foreach_copy(name: str) -> Callable[[Sequence[TrainedTensor]], list[tuple[str, int]]]:
    return lambda group: [(name, tensor.num_bytes) for tensor in group]


def _of_the_largest(name: str, copies: int) -> Callable[[Sequence[TrainedTensor]], list[tuple[str, int]]]:
    return lambda group: [(name, max(t.num_bytes for t in group))] * copies if group else []


def _adam_in_turn(group: Sequence[TrainedTensor]) -> list[tuple[str, int]]:
    """_single_tensor_adam makes a square root and its quotient for one tensor while the loop variable still holds the
    quotient of the tensor before: the most of size[i - 1] + 2 · size[i]."""
    sizes = [0, *(tensor.num_bytes for tensor in group)]
    before, size = max(itertools.pairwise(sizes), key=lambda pair: pair[0] + 2 * pair[1], default=(0, 0))
    return [("denominator_before", before), ("square_root", size), ("denominator", size)]


RULES: dict[tuple[str, str], OptimizerRule] = {
    ("adamw", "fused"): OptimizerRule(_fused_adam_states, _none),
    # _multi_tensor_adam: exp_avg_sq_sqrt = torch._foreach_sqrt(exp_avg_sqs), one more copy of the group until step() ends
    ("adamw", "foreach"): OptimizerRule(_copies("exp_avg", "exp_avg_sq"), _foreach_copy("exp_avg_sq_sqrt")),
    ("adamw", "loop"): OptimizerRule(_copies("exp_avg", "exp_avg_sq"), _adam_in_turn),
    ("sgd", "fused"): OptimizerRule(_none, _none),
    ("sgd", "foreach"): OptimizerRule(_none, _none),
    ("sgd", "loop"): OptimizerRule(_none, _none),
    ("sgd_momentum", "fused"): OptimizerRule(_copies("momentum_buffer"), _none),
    ("sgd_momentum", "foreach"): OptimizerRule(_copies("momentum_buffer"), _none),
    ("sgd_momentum", "loop"): OptimizerRule(_copies("momentum_buffer"), _of_the_largest("update", 1)),
    ("lion", "loop"): OptimizerRule(_copies("exp_avg"), _of_the_largest("update", 1)),
    ("adafactor", "foreach"): OptimizerRule(_factored_states, _foreach_copy("update")),
    ("adafactor", "loop"): OptimizerRule(_factored_states, _of_the_largest("update", 1)),
    # Newton-Schulz in bf16 and the Nesterov update of one matrix
    ("muon", "loop"): OptimizerRule(_copies("momentum_buffer"), _of_the_largest("newton_schulz", 2)),
}
_SINGLE_IMPLEMENTATION = {"lion": "loop", "muon": "loop"}


def optimizer_rule(optimizer: Optimizer) -> OptimizerRule:
    """The rule of `optimizer`. Raises: SpecError when it is not modelled yet, naming those that are."""
    name = {"adam": "adamw", "sgd": "sgd_momentum" if optimizer.momentum else "sgd"}.get(optimizer.name, optimizer.name)
    rule = RULES.get((name, _SINGLE_IMPLEMENTATION.get(name, optimizer.implementation)))
    if rule is None:
        known = ", ".join(sorted({f"{n}/{i}" for n, i in RULES}))
        raise SpecError(
            f"optimizer.name={optimizer.name!r} with implementation={optimizer.implementation!r} is not modelled yet; "
            f"modelled: {known}.",
            parameter="optimizer.name",
            value=optimizer.name,
        )
    return rule
