"""The template of a block whose forward and backward are compiled graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from peakcast.models.allocator.sizes import MIN_BLOCK_BYTES
from peakcast.models.ledger.compiled.graphs_in_turn import Graph
from peakcast.models.ledger.tape.template import Template
from peakcast.timelines.timeline import Category


@dataclass(frozen=True, slots=True)
class Given:
    """A tensor that comes from outside and is freed after its last reader in backward."""

    name: str
    category: Category
    num_bytes: int
    in_backward: bool
    """Whether it comes during backward (else during forward)."""
    born: int = 0
    """The instant at which it comes."""
    read_again: bool = True
    """Whether backward reads it; else it is freed when forward ends."""


def compiled_template(
    first: Graph,
    second: Graph,
    given: Iterable[Given],
    *,
    input_bytes: int = 0,
    module_of: Callable[[str], tuple[str, str]] | None = None,
) -> Template:
    """The template of `first` as forward and `second` as backward. `module_of`: splits an operation's name into (module,
    own name)."""
    lives, _ = first.lives()
    backward, kept_until = second.lives()
    passing = int(Category.TEMPORARIES)
    rows: list[tuple[str, int, int, int, bool, int, bool, bool]] = [
        (one.name, int(one.category), one.num_bytes, one.born, one.in_backward, dies, one.read_again, False)
        for one in given
        for dies in (max(second.last_read(one.name), 1) if one.read_again else len(first.order),)
    ]
    for life in lives:
        kept = life.name in kept_until
        until = kept_until[life.name] if kept else life.dies
        category = Category.LOGITS if life.name == "logits" else Category.ACTIVATIONS
        rows.append((life.name, int(category), life.num_bytes, life.born, False, until, kept, False))
    for life in backward:
        trained = life.name.endswith((".weight.grad", ".bias.grad"))
        category_of = int(Category.GRADIENTS) if trained else passing
        rows.append((life.name, category_of, life.num_bytes, life.born, True, life.dies, True, trained))
    names, categories, sizes, born, born_backward, dies, dies_backward, trains = zip(*rows, strict=True)
    split = [module_of(name) for name in names] if module_of else []
    return Template(
        names=[name for _, name in split] or list(names),
        modules=[module for module, _ in split],
        categories=np.array(categories, dtype=np.int8),
        num_bytes=-(-np.array(sizes, dtype=np.int64) // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES,
        born=np.array(born, dtype=np.int64),
        dies=np.array(dies, dtype=np.int64),
        born_backward=np.array(born_backward, dtype=bool),
        dies_backward=np.array(dies_backward, dtype=bool),
        weight_gradient=np.array(trains, dtype=bool),
        dies_without_graph=np.where(dies_backward, len(first.order), dies).astype(np.int64),
        cached=np.zeros(len(names), dtype=bool),
        num_forward=len(first.order),
        num_recomputed=len(first.order),
        num_backward=len(second.order),
        forward_labels=first.labels(),
        backward_labels=second.labels(),
        input_bytes=input_bytes,
        keeps_input=True,
        asks_late_bytes=0,
        saved_bytes=[],
        loss_from=len(first.order),
        added_to_handed_in=len(second.order),
    )
