"""Which modules a step enters and leaves, forward, backward and for checkpointing."""

from __future__ import annotations

import pytest

from peakcast.timelines.timeline import Phase

torch = pytest.importorskip("torch")


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.drop, self.down = torch.nn.Linear(4, 8), torch.nn.Dropout(0.0), torch.nn.Linear(8, 4)

    def forward(self, x):
        assert self.down.weight.dtype is torch.float32  # as peft reads an adapter's dtype
        return self.down(self.drop(self.up(x)))


class Network(torch.nn.Module):
    """`reentrant`: of the checkpoint around its block; None for no checkpoint."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.embed = torch.nn.Linear(4, 4)
        self.layers = torch.nn.ModuleList([Block()])
        self.reentrant = reentrant

    def forward(self, x):
        x = self.embed(x)
        if self.reentrant is None:
            return self.layers[0](x)
        return torch.utils.checkpoint.checkpoint(self.layers[0], x, use_reentrant=self.reentrant)


def visited(reentrant: bool | None) -> tuple[list[str], dict[str, list[str]]]:
    """What is entered (+) and left (-), forward apart, and by module the weights that it reads."""
    from peakcast.collectors.tracing.stretches import StretchTracer

    network, tracer = Network(reentrant), StretchTracer()
    with tracer, tracer.watching(network), tracer.following(network), torch.autograd.set_multithreading_enabled(False):
        tracer.phase = Phase.FORWARD
        tracer.micro_batch_begins()
        loss = network(torch.ones(2, 4)).sum()
        tracer.phase = Phase.BACKWARD
        tracer.backward_begins()
        loss.backward()
    seen = [
        ("" if one.runs == "backward" else f"{one.runs} ") + "-+"[one.enters] + one.module.removeprefix("layers.0.")
        for one in tracer.visits.seen
        if one.module
    ]
    return seen, {module: list(weights) for module, weights in tracer.visits.weights.items()}


FORWARD = ["+up", "-up", "+drop", "-drop", "+down", "-down"]
BACKWARD = ["+down", "-down", "+drop", "-drop", "+up", "-up"]


def test_backward_comes_to_modules_in_the_other_order_those_without_operations_too() -> None:
    seen, weights = visited(None)
    block = ["+layers.0", *FORWARD, "-layers.0"]
    assert seen[: len(block) + 2] == [f"forward {one}" for one in ["+embed", "-embed", *block]]
    assert seen[len(block) + 2 :] == ["+layers.0", *BACKWARD, "-layers.0", "+embed"]  # whose input has no gradient
    assert weights["layers.0"] == ["layers.0.down.weight"]
    assert weights["layers.0.up"] == ["layers.0.up.weight", "layers.0.up.bias"]


def test_a_checkpoint_computes_again_inside_the_module_that_asks_for_it() -> None:
    seen, _ = visited(False)
    backward = seen[len(FORWARD) + 4 :]
    again = [one for one in backward if one.startswith("again")]
    assert again[: len(FORWARD)] == [f"again {one}" for one in ["+layers.0", *FORWARD[:-1]]]
    assert backward.index("+down") < backward.index(again[0]) < backward.index(again[-1]) < backward.index("-down")
    assert [one for one in backward if not one.startswith("again")] == ["+layers.0", *BACKWARD, "-layers.0", "+embed"]


def test_a_reentrant_checkpoint_computes_again_before_backward_enters_its_block() -> None:
    seen, _ = visited(True)
    backward = seen[len(FORWARD) + 4 :]
    assert backward[: len(FORWARD) + 2] == [f"again {one}" for one in ["+layers.0", *FORWARD, "-layers.0"]]
    assert backward[len(FORWARD) + 2 :] == ["+layers.0", *BACKWARD, "-layers.0", "+embed"]
