"""Units: tensors that FSDP gathers and reduces together, and how a network is divided into them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from peakcast.models.ledger.layouts.base import StoredTensor
from peakcast.models.ledger.tape.marks import Mark
from peakcast.models.ledger.tape.step import Run


@dataclass(slots=True, eq=False)
class Unit:
    """Tensors that are gathered and reduced together, and the state of this during the step. A unit equals only itself."""

    name: str
    modules: tuple[str, ...]
    tensors: tuple[StoredTensor, ...]
    stays_after_forward: bool = False
    """Whether it stays gathered after forward."""
    reduces_at_end: bool = False
    """Whether its gradients are reduced only at the end of backward, because none of its inputs has a gradient."""
    fetched_in_vain: bool = False
    """The unit after it prefetches it in backward, although its own backward never runs: its output has no gradient."""
    operation: str = ""
    """The one operation of a block that reads its tensors, for which alone they are gathered; "": the whole block."""
    hook: Mark | None = None
    """The operation whose backward waits for the gather and starts the next prefetch; None: the block's first."""
    sent: list[int] = field(default_factory=list)
    """Handles of an all-gather's output that has not been copied out yet."""
    gathered: list[int] = field(default_factory=list)
    """Handles of the unsharded tensors."""
    gradient: list[int] = field(default_factory=list)
    """Handles of the reduced gradients that wait for the optimizer."""
    runs: list[Run] = field(default_factory=list)
    """Backward runs whose full gradients still exist."""
    accumulated: list[int] = field(default_factory=list)
    """Handles of full gradients of earlier micro-batches that have left the place where backward made them."""
    trained: list[StoredTensor] = field(init=False)
    """Those of its tensors that get a gradient."""

    def __post_init__(self) -> None:
        self.trained = [tensor for tensor in self.tensors if tensor.trains]


def units_by_layer(
    tensors: Iterable[StoredTensor],
    *,
    ends_apart: bool = False,
    adapters_apart: bool = False,
    first_layer_without_gradient: bool = False,
    tied: bool = False,
    norm_apart: bool = False,
) -> list[Unit]:
    """A unit per decoder layer, and one or more for the rest: the root, which is gathered first and stays gathered; or,
    with `ends_apart`, the token table as one unit, final norm and lm_head as another (a single unit if they share the
    table), and a root with what is left. Returned in the order in which their forward ends; the root is last.

    `adapters_apart`: each adapter matrix is a unit of its own. `first_layer_without_gradient`: no input of the first layer
    has a gradient. `tied`: the head uses the table, even if it has no tensor of its own. `norm_apart`: the final norm
    belongs to the root.
    """
    groups: dict[str, list[StoredTensor]] = {}
    for tensor in tensors:
        groups.setdefault(tensor.module, []).append(tensor)
    embedding, head = groups.pop("embedding", []), groups.pop("head", [])
    layers: list[Unit] = []
    for index, (name, group) in enumerate(groups.items()):
        operations = {tensor: tensor.name.removesuffix(".weight") for tensor in group if adapters_apart}
        apart = [tensor for tensor, operation in operations.items() if operation.endswith((".lora_A", ".lora_B"))]
        layers += [Unit(f"{name}.{one.name}", (name,), (one,), operation=operations[one]) for one in apart]
        rest = [tensor for tensor in group if tensor not in apart]
        layers.append(Unit(name, (name,), tuple(rest), reduces_at_end=first_layer_without_gradient and index == 0))
    if not ends_apart:
        root = Unit("root", ("embedding", "head"), (*embedding, *head), stays_after_forward=True, reduces_at_end=True)
        return [*layers, root]
    table = [tensor for tensor in embedding if tensor.name == "embed_tokens.weight"]
    left = [tensor for tensor in embedding if tensor.name != "embed_tokens.weight"]
    # a head without tensors: a pipeline stage that is not the last, or a final norm without weights (OLMo)
    tied = (tied or bool(head)) and not any(tensor.name == "lm_head.weight" for tensor in head)
    if norm_apart:
        left += [tensor for tensor in head if not tensor.name.startswith("lm_head")]
        head = [tensor for tensor in head if tensor.name.startswith("lm_head")]
    if tied:  # gathered for the embedding, whose input has no gradient
        tail = Unit("tail", ("embedding", "head"), (*table, *head), True, reduces_at_end=True, hook=Mark.LM_HEAD)
        units = [*layers, tail]
    else:
        in_vain = first_layer_without_gradient
        first = Unit("embedding", ("embedding",), tuple(table), reduces_at_end=True, fetched_in_vain=in_vain)
        tail = Unit("tail", ("head",), tuple(head), True, hook=Mark.LM_HEAD)
        units = [*([first] if table else []), *layers, *([tail] if head else [])]  # a pipeline stage may lack either
    if left:
        units.append(Unit("root", ("embedding", "head"), tuple(left), stays_after_forward=True, reduces_at_end=True))
    return units
