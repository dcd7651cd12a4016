"""The shape of an optimizer's rule: its states per tensor, and its step written down as the library's Python runs it.

A step is a sequence of moments at which local variables take new tensors: a rule follows the source line by line.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from peakcast.models.analytical.local_variables import Locals

FP32 = 4
Sized = tuple[str, int]
"""(name, bytes) of one tensor."""


@dataclass(frozen=True, slots=True)
class TrainedTensor:
    """One tensor that the optimizer updates. `decays`: in the weight-decay group of Hugging Face's two groups.
    `gradient_parts`: how many times as large its gradient is; each operation that takes it copies this rank's part out.
    `sums_gradient`: each such operation adds up what the ranks have, which is a copy too."""

    name: str
    module: str
    shape: tuple[int, ...]
    element_bytes: int
    decays: bool = True
    gradient_parts: int = 1
    sums_gradient: bool = False

    @property
    def copies_gradient(self) -> bool:
        """Whether an operation that takes the gradient makes a tensor of this one's size of it."""
        return self.gradient_parts > 1 or self.sums_gradient

    @property
    def numel(self) -> int:
        size = 1
        for side in self.shape:
            size *= side
        return size

    @property
    def num_bytes(self) -> int:
        return self.numel * self.element_bytes

    @property
    def is_embedding(self) -> bool:
        """Whether it is the weight of an nn.Embedding."""
        return self.module == "embedding" and len(self.shape) == 2


@dataclass(frozen=True, slots=True)
class Options:
    """What a rule may depend on besides the tensor."""

    momentum: float = 0.0
    rank: int = 128
    first_step: bool = False
    trainer: bool = True
    """Whether transformers' Trainer, or who does as it does, makes the optimizer."""


States = Callable[[TrainedTensor, Options], list[Sized]]
Step = Callable[[Locals, Sequence[TrainedTensor], Options], None]


def no_states(tensor: TrainedTensor, options: Options) -> list[Sized]:
    """Nothing is kept."""
    return []


def no_temporaries(run: Locals, group: Sequence[TrainedTensor], options: Options) -> None:
    """Everything happens in place or inside one kernel."""


def copies(*names: str) -> States:
    """One state per name, each like the parameter (`torch.zeros_like(p)`)."""
    return lambda tensor, options: [(name, tensor.num_bytes) for name in names]


@dataclass(frozen=True, slots=True)
class OptimizerRule:
    """One implementation of one optimizer."""

    source: str
    """Where it was read: file and version."""
    states: States = no_states
    """(name, bytes) of what is kept on the device for one tensor."""
    step: Step = no_temporaries
    """Writes down the step over one parameter group."""
    shared: tuple[Sized, ...] = ()
    """States that all tensors share."""
    paged: Callable[[TrainedTensor, Options], int] = lambda tensor, options: 0
    """Bytes kept in managed (host) memory instead: they are not PyTorch's and not on the timeline."""
    built_with_optimizer: bool = False
    """Whether the states exist before the first step."""
    has_states_of_frozen: bool = False
    """Whether it makes states for parameters that do not train, too."""
    takes: Callable[[TrainedTensor], bool] = lambda tensor: True
    """Which tensors it updates; AdamW updates the others."""
    groups: Callable[[Sequence[TrainedTensor]], list[list[TrainedTensor]]] | None = None
    """Parameter groups of its own; None for the framework's."""
    updates_in_backward: Literal["", "one_behind", "at_once"] = ""
    """Whether a gradient is used and released in backward: as soon as the next one is there, or as it comes."""
    update_fp32_copies: Callable[[int], int] = lambda element_bytes: 0
    """How many fp32 tensors of a gradient's shape that update has at once when a gradient's elements have so many bytes."""
