"""Walks written by hand: networks of any depth whose layers each keep one tensor and hand one on."""

from __future__ import annotations

from typing import Any

from peakcast.core.errors import CollectorError
from peakcast.models.recipes.walk import Walk
from peakcast.timelines.timeline import Category, Phase

ACTIVATION, GRADIENT, TEMPORARY = (int(one) for one in (Category.ACTIVATIONS, Category.GRADIENTS, Category.TEMPORARIES))


def mapping(layers: int, batch: int = 2, length: int = 256, *, odd_layer: int | None = None) -> dict[str, Any]:
    """What a worker writes of a network of `layers` blocks: an embedding makes the stream and a table that the last layer
    reads; each block keeps `batch` x `length` x 4 bytes for its backward, makes something in passing and hands a stream on;
    the head makes logits, and backward hands a gradient down and makes one of 1,024 bytes of each block's weight."""
    places = 2 * layers + 1
    stretches: list[list[Any]] = [[[], []] for _ in range(2 * places)]
    entries: list[list[Any]] = []
    stream, last = batch * length * 2, 2 * places - 1

    def operation(stretch: int, label: str) -> list[int]:
        phase = Phase.BACKWARD if stretch >= places else Phase.FORWARD
        stretches[stretch][0].append(label)
        stretches[stretch][1].append(int(phase))
        return [stretch, len(stretches[stretch][0]) - 1]

    def entry(name: str, category: int, size: int, place: int, born: list[int], dies: list[int], gradient: int = 0) -> None:
        handed_on = [born[0], born[1] + 1] if gradient else [-1, 0]
        entries.append([name, category, size, place, *born, *dies, *handed_on, gradient])

    entry("input_ids", int(Category.INPUTS), batch * length * 8, 0, [-1, 0], [-1, 0])
    entry("logits", ACTIVATION, 1000, 0, [-1, 1], [places - 1, 1])
    entry("stream", ACTIVATION, stream, 0, operation(0, "embed"), [1, 2])
    entry("rotary", ACTIVATION, length * 64, 0, operation(0, "rotary"), [2 * layers - 1, 2])
    for layer in range(layers):
        place = 2 * layer + 1
        kept = batch * length * (8 if layer == odd_layer else 4)
        entry("kept", ACTIVATION, kept, place, operation(place, "norm"), [last - place, 1])
        entry("passing", TEMPORARY, 512, place, operation(place, "view"), [place, 2])
        entry(
            "stream",
            ACTIVATION,
            stream,
            place,
            operation(place, "add"),
            [place + 2 if layer < layers - 1 else place + 1, 1],
        )
    entry("logits", ACTIVATION, 1000, places - 1, operation(places - 1, "lm_head"), [-1, 0])
    entry("gradient", TEMPORARY, stream, places - 1, operation(places, "loss"), [places + 1, 1])
    for layer in reversed(range(layers)):
        place = 2 * layer + 1
        below = [last - place + 2, 1] if layer else [last - place, 2]
        made = operation(last - place, "mm")
        entry("w.grad", GRADIENT, 1024, place, made, [-1, 0], 1)
        entry("gradient", TEMPORARY, stream, place, operation(last - place, "add"), below)
    parameters = [["embedding", "table", [10, 4], 2, True]]
    parameters += [[f"layers.{layer}", "w", [16, 32], 2, True] for layer in range(layers)]
    visits: list[list[list[Any]]] = [[] for _ in stretches]
    for layer in range(layers):
        for runs, stretch in (("forward", 2 * layer + 1), ("backward", last - 2 * layer - 1)):
            length = len(stretches[stretch][0])
            visits[stretch] = [[runs, True, "linear", 0, [["", "w"]]], [runs, False, "linear", length, [["", "w"]]]]
    return {
        "num_places": places,
        "stretches": stretches,
        "entries": entries,
        "parameters": parameters,
        "visits": visits,
    }


def walk(layers: int, batch: int = 2, length: int = 256, **more: Any) -> Walk:
    return Walk.read(mapping(layers, batch, length, **more))


class Library:
    """Stands for the worker: walks of a network of `layers` layers, which does something else from `window` on."""

    def __init__(self, layers: int, window: int = 10**9, refuses_from: int = 10**9) -> None:
        self.layers, self.window, self.refuses_from = layers, window, refuses_from
        self.asked: list[tuple[int | None, int, int]] = []

    def __call__(self, layers: int | None, batch: int, length: int, steps: int = 2) -> Walk:
        self.asked.append((layers, batch, length))
        if length >= self.refuses_from:
            raise CollectorError("too long")
        made: dict[str, Any] = mapping(layers or self.layers, batch, length)
        if length > self.window:
            made["stretches"][1][0][0] = "masked"
        return Walk.read(made)
