"""Selective recomputation of a part of a layer: the part runs without a graph, its input is saved, and it is recomputed in
backward.

Source: megatron-core 0.16.1 `tensor_parallel/random.py` (`CheckpointFunction`). The part's allocations in forward and in
backward are counted on a tape of their own and become the temporaries of one operation.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from peakcast.models.ledger.tape.tape import Tape, Tensor
from peakcast.models.ledger.tape.template import OUTPUT_GRADIENT, Template

Ints = npt.NDArray[np.int64]


def checkpointed(
    tape: Tape,
    x: Tensor,
    name: str,
    part: Callable[[Tape, Tensor], Tensor],
    first: Callable[[Tape, Tensor], Tensor] | None = None,
) -> Tensor:
    """`part` of `x` as one operation that saves only `x`. Weight gradients are among its temporaries, because Megatron-LM
    adds each to the persistent main gradient at once. `first`: what runs without a graph, if it differs from `part`."""
    return checkpointed_together(tape, [x], name, part, first)


def checkpointed_together(
    tape: Tape,
    inputs: Sequence[Tensor],
    name: str,
    part: Callable[..., Tensor],
    first: Callable[..., Tensor] | None = None,
) -> Tensor:
    """As `checkpointed`, for a `part` that reads several tensors."""
    template, output = _recorded(part, inputs)
    size = output.num_bytes
    forward, backward = _passes(template, output)
    if first is not None:
        forward = _passes(*_recorded(first, inputs))[0]
    return tape.operation(
        name,
        inputs,
        size,
        saves=inputs,
        forward_temporary_bytes=max(0, forward - size),
        # the gradients of the inputs are not temporaries
        backward_temporary_bytes=max(0, backward - sum(x.num_bytes for x in inputs)),
    )


@dataclass(frozen=True, slots=True)
class RecomputationCost:
    """The temporaries, in bytes, of a part whose output is freed after its reader's forward and recomputed when the
    reader's backward begins (megatron-core 0.16.1 `CheckpointWithoutOutput`). They come on top of what the tape counts
    anyway."""

    forward: int
    """In the part's forward, which runs without a graph; the output is not included."""
    reader: int
    """In the reader's backward: the part's temporaries and saved tensors, its output, and the copy of the output into the
    storage that the reader saved."""
    backward: int
    """In the part's own backward; the gradients of its inputs are not included."""


def recomputation_cost(inputs: Sequence[Tensor], part: Callable[..., Tensor]) -> RecomputationCost:
    """The cost of recomputing `part` of `inputs`. The gradient of its output exists as soon as the reader's backward is
    done."""
    template, output = _recorded(part, inputs)
    size = output.num_bytes
    no_graph, with_graph = _lives(template)
    recomputing, backward = with_graph[: template.num_forward], with_graph[template.num_forward :] + size
    after_recomputation = int(recomputing[-1])
    return RecomputationCost(
        forward=int(no_graph.max()) - size,
        reader=max(int(recomputing.max()) - size, after_recomputation + size),
        backward=max(0, int(backward.max(initial=0)) - sum(x.num_bytes for x in inputs)),
    )


def _recorded(part: Callable[..., Tensor], inputs: Sequence[Tensor]) -> tuple[Template, Tensor]:
    """The template of `part` of `inputs` on a tape of its own, and its output."""
    inner = Tape()
    output = part(inner, *(inner.input(x.num_bytes, owned=False) for x in inputs))
    return inner.finish(output), output


def _passes(template: Template, output: Tensor) -> tuple[int, int]:
    """The most bytes of the part without a graph; and of recomputing it and running it backward while its output is held.
    The incoming gradient is left out."""
    no_graph, with_graph = _lives(template)
    entries = zip(template.names, template.dies, template.dies_backward & ~template.born_backward, strict=True)
    kept = max((dies for name, dies, kept in entries if kept and name == output.storage.name), default=0)
    with_graph[template.num_forward + kept :] += output.num_bytes  # until then it is a saved tensor
    return int(no_graph.max(initial=0)), int(with_graph.max(initial=0))


def _lives(template: Template) -> tuple[Ints, Ints]:
    """Bytes at every instant, without a graph and with one, leaving out the incoming gradient."""
    first = template.num_forward
    born = np.where(template.born_backward, first, 0) + template.born
    dies = np.where(template.dies_backward, first, 0) + template.dies
    own = np.array([name != OUTPUT_GRADIENT for name in template.names], dtype=bool)
    instants = np.arange(first + template.num_backward)[:, None]
    with_graph = ((born <= instants) & (instants < dies) & own) @ template.num_bytes
    no_graph = ~template.born_backward & (born <= instants[:first]) & (instants[:first] < template.dies_without_graph)
    return no_graph @ template.num_bytes, with_graph
