"""Units: tensors that FSDP gathers and reduces together, and which tensors of a network those are."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from peakcast.models.analytical.layouts.base import StoredTensor
from peakcast.models.analytical.step import Run


@dataclass(slots=True, eq=False)
class Unit:
    """Tensors that are gathered and reduced together, and their state as the step goes. A unit equals itself only."""

    name: str
    modules: tuple[str, ...]
    tensors: tuple[StoredTensor, ...]
    stays_after_forward: bool = False
    """Not resharded after forward."""
    reduces_at_end: bool = False
    """Its gradients wait for the end of backward: nothing that enters it has a gradient."""
    fetched_in_vain: bool = False
    """The unit after it fetches it ahead in backward, which never comes to it: what it makes has no gradient."""
    operation: str = ""
    """The one operation of a block that its tensors are for, and are gathered for alone; "": the whole block."""
    hook: str = ""
    """The operation whose backward waits for it to be gathered, and lets the next be fetched; "": the block's first."""
    sent: list[int] = field(default_factory=list)
    """Handles of an all-gather's output that has not been copied out."""
    gathered: list[int] = field(default_factory=list)
    """Handles of the unsharded tensors."""
    gradient: list[int] = field(default_factory=list)
    """Handles of what waits for the optimizer."""
    runs: list[Run] = field(default_factory=list)
    """Backward runs whose full gradients are still there."""
    accumulated: list[int] = field(default_factory=list)
    """Handles of full gradients of earlier micro-batches that are no longer where backward put them."""
    trained: list[StoredTensor] = field(init=False)
    """Its tensors that get a gradient."""

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
    """A unit per decoder layer, and the rest: the root, which is gathered first and stays; or, with `ends_apart`, the token
    table as a unit, final norm and lm_head as another (one for both where they share the table), and the root what is left.
    `adapters_apart`: each adapter matrix is a unit of its own. `first_layer_without_gradient`: no gradient enters it.
    `tied`: the head uses the table, also where it has no tensor of its own. `norm_apart`: the final norm is the root's.

    In the order in which their forward ends; the root is the last.
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
    # without tensors it may be a pipeline's stage that has no end, or a final norm without weights (OLMo)
    tied = (tied or bool(head)) and not any(tensor.name == "lm_head.weight" for tensor in head)
    if norm_apart:
        left += [tensor for tensor in head if not tensor.name.startswith("lm_head")]
        head = [tensor for tensor in head if tensor.name.startswith("lm_head")]
    if tied:  # gathered for the embedding; no input of it has a gradient
        tail = Unit("tail", ("embedding", "head"), (*table, *head), True, reduces_at_end=True, hook="lm_head")
        units = [*layers, tail]
    else:
        in_vain = first_layer_without_gradient
        first = Unit("embedding", ("embedding",), tuple(table), reduces_at_end=True, fetched_in_vain=in_vain)
        tail = Unit("tail", ("head",), tuple(head), True, hook="lm_head")
        units = [*([first] if table else []), *layers, *([tail] if head else [])]  # of a pipeline stage
    if left:
        units.append(Unit("root", ("embedding", "head"), tuple(left), stays_after_forward=True, reduces_at_end=True))
    return units
