"""The template of a block whose forward and backward are compiled graphs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import NamedTuple

from peakcast.models.ledger.compiled.graphs_in_turn import Graph
from peakcast.models.ledger.tape.template import GRADIENTS, TEMPORARIES, Row, Template, backward_row, column_fields
from peakcast.timelines.timeline import Category


class Place(NamedTuple):
    """Where a buffer of a network's graph belongs: a block ("embedding", "layers.3", "head"), and its name there."""

    block: str
    name: str


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
    places: Mapping[str, Place] | None = None,
) -> Template:
    """The template of `first` as forward and `second` as backward. `places`: if they are graphs of a network, by name of a
    buffer where it belongs; buffers that are not listed are the head's."""
    rows = [*_given_rows(first, second, given), *_computed_rows(first, second)]
    modules = []
    for row in rows:
        row.dies_without_graph = len(first.order) if row.dies_backward else row.dies
        if places is not None:
            block, row.name = places.get(row.name) or Place("head", row.name)
            modules.append(block)
    return Template(
        **column_fields(rows),
        modules=modules,
        num_forward=len(first.order),
        num_recomputed=len(first.order),
        num_backward=len(second.order),
        forward_labels=first.labels(),
        backward_labels=second.labels(),
        input_bytes=input_bytes,
        keeps_input=True,
        gradient_bytes_at_first_saved=0,
        reads_saved_first="",
        saved_bytes=[],
        loss_from=len(first.order),
        output_gradient_used_until=len(second.order),
    )


def _given_rows(first: Graph, second: Graph, given: Iterable[Given]) -> Iterator[Row]:
    """The rows of the tensors that the graphs are given."""
    for one in given:
        dies = max(second.last_read(one.name), 1) if one.read_again else len(first.order)
        yield Row(
            *(one.name, int(one.category), one.num_bytes, one.born, dies),
            born_backward=one.in_backward,
            dies_backward=one.read_again,
            allocated=False,
        )


def _computed_rows(first: Graph, second: Graph) -> Iterator[Row]:
    """The rows of the tensors that the graphs compute: those of forward live on if backward reads them."""
    lives, _ = first.lives()
    backward, kept_until = second.lives()
    for life in lives:
        kept = life.name in kept_until
        until = kept_until[life.name] if kept else life.dies
        category = int(Category.LOGITS if life.name == "logits" else Category.ACTIVATIONS)
        yield Row(life.name, category, life.num_bytes, life.born, until, dies_backward=kept)
    for life in backward:
        parameter = second.parameters.get(life.name, "")
        category = GRADIENTS if parameter else TEMPORARIES
        yield backward_row(life.name, life.num_bytes, life.born, life.dies, category=category, parameter=parameter)
