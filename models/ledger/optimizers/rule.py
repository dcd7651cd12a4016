"""What an optimizer's rule consists of: its states for each tensor, and its step, written down as the library's Python runs
it.

A step is a sequence of moments at which local variables are assigned new tensors, so a rule follows the source line by
line.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from peakcast.models.ledger.tape.local_variables import Locals

Sized = tuple[str, int]
"""(name, bytes) of one tensor."""


@dataclass(frozen=True, slots=True)
class TrainedTensor:
    """One tensor that the optimizer updates.

    `name`: as the family's transformers code names it, but without the path of its block, and for the parts that every
    network has by Llama's words: `embed_tokens.weight`, `self_attn.q_proj.weight`, `mlp.c_fc.bias`, `lm_head.weight`.
    `module`: its block, `embedding`, `layers.3` or `head`. `decays`: whether it is in the weight-decay group of Hugging
    Face's two groups. `gradient_parts`: how many times larger its gradient is than the part that this rank updates; each
    operation that reads the gradient copies that part out of it. `sums_gradient`: each such operation sums the ranks'
    partial gradients, which makes a copy too."""

    name: str
    module: str
    shape: tuple[int, ...]
    element_bytes: int
    decays: bool = True
    gradient_parts: int = 1
    sums_gradient: bool = False

    @property
    def copies_gradient(self) -> bool:
        """Whether an operation that reads the gradient makes a copy of this tensor's size."""
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
        """Whether it is the weight of an nn.Embedding, or the vector that FSDP1 leaves of one (`use_orig_params`)."""
        return self.module == "embedding" and self.decays and self.name.endswith(".weight")


@dataclass(frozen=True, slots=True)
class Options:
    """What a rule may depend on besides the tensor; `optimizer_options` (`choice.py`) fills it in from the job."""

    momentum: float = 0.0
    rank: int = 128
    head_elements: int = 1
    """Elements of the weights of one attention head, hidden_size² / num_attention_heads."""
    first_step: bool = False
    decays_gradients: bool = False
    """Whether the first of the parameter groups has coupled weight decay (`Optimizer.decays_gradients`)."""
    trainer: bool = True
    """Whether transformers' Trainer, or a framework that does the same, makes the optimizer."""
    times_kernels_on_copies: bool = False
    """Whether Inductor, which times a kernel's variants when it first runs, gives them copies of what they write, on the
    GPU."""
    keeps_wide_codes: bool = True
    """Whether codes of 4 bits are 8 bytes wide between the kernels of torchao's compiled update."""
    adds_epsilon_in_place: bool = True
    """Whether torch's foreach Adam adds eps to the square roots where they stand."""


States = Callable[[TrainedTensor, Options], list[Sized]]
WriteStep = Callable[[Locals, Sequence[TrainedTensor], Options], None]


def no_states(tensor: TrainedTensor, options: Options) -> list[Sized]:
    """No states."""
    return []


def no_temporaries(run: Locals, group: Sequence[TrainedTensor], options: Options) -> None:
    """A step in place or inside one kernel, without temporaries."""


def copies(*names: str) -> States:
    """States with the given names, each of the parameter's size (`torch.zeros_like(p)`)."""
    return lambda tensor, options: [(name, tensor.num_bytes) for name in names]


@dataclass(frozen=True, slots=True)
class OptimizerRule:
    """One implementation of one optimizer."""

    source: str
    """The file and the version in which it was read."""
    states: States = no_states
    """(name, bytes) of the states on the GPU for one tensor."""
    step: WriteStep = no_temporaries
    """Writes down the step over one parameter group."""
    shared: tuple[Sized, ...] = ()
    """States that all tensors share."""
    paged: Callable[[TrainedTensor, Options], int] = lambda tensor, options: 0
    """Bytes of states in managed (host) memory; PyTorch does not allocate them, so they are not on the timeline."""
    built_with_optimizer: bool = False
    """Whether the states exist before the first step."""
    has_states_of_frozen: bool = False
    """Whether it also makes states for parameters that do not train."""
    takes: Callable[[TrainedTensor], bool] = lambda tensor: True
    """Which tensors it updates; AdamW updates the others."""
    groups: Callable[[Sequence[TrainedTensor]], list[list[TrainedTensor]]] | None = None
    """The optimizer's own parameter groups; None: the framework's, which are two of the Trainer (with and without weight
    decay) and one of a plain loop."""
    updates_in_backward: Literal["", "one_behind", "at_once"] = ""
    """Whether gradients are applied and freed during backward: each when the next one is ready, or at once."""
    update_fp32_copies: Callable[[int], int] = lambda element_bytes: 0
    """How many fp32 tensors of a gradient's shape exist at once during such an update, given the bytes of a gradient's
    element."""
