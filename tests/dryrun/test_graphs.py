"""CUDA graphs have a pool of memory of their own, and `torch.cuda.empty_cache` gives the allocator's cache back."""

from __future__ import annotations

import pytest

import peakcast
from peakcast.core.units import GIB, MIB
from peakcast.models.allocator.replay import replay
from peakcast.timelines.timeline import EMPTIED, Category, Entry, Phase, Timeline

SIZE = 512 * MIB


def trained(before, *, in_step=lambda: None):
    """The dry run of a small training loop that calls `before` after its first step, and `in_step` in each later one."""

    def train():
        import torch

        model = torch.nn.Linear(64, 64).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for number in range(5):
            if number == 1:  # libraries have their workspaces by now
                graphs = before()  # noqa: F841  # they live as long as the run
            if number > 0:
                in_step()
            model(torch.randn(8, 64, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    return peakcast.dryrun(train, "H100-80GB").answer


def scratch():
    import torch

    torch.empty(SIZE, dtype=torch.uint8, device="cuda")


def captured(pool=None):
    import torch

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        scratch()
    return graph


def in_one_pool():
    import torch

    pool = torch.cuda.graph_pool_handle()
    return captured(pool), captured(pool)


def in_two_pools():
    return captured(), captured()


@pytest.mark.parametrize(("before", "pools"), [(scratch, 0), (captured, 1), (in_one_pool, 1), (in_two_pools, 2)])
def test_what_a_graph_was_captured_with_is_used_by_nothing_else(before, pools):
    answer = trained(before, in_step=scratch)
    assert answer.peak_reserved_bytes.point == pytest.approx((1 + pools) * SIZE, abs=100 * MIB)
    assert answer.peak_allocated_bytes.point == pytest.approx(SIZE, abs=100 * MIB)
    assert any("captures a CUDA graph" in one.sentence for one in answer.found) == (pools > 0)


def test_a_step_that_is_captured_is_followed_and_a_loop_of_replays_ends():
    def train():
        import torch

        model = torch.nn.Linear(4096, 4096).cuda()
        optimizer = torch.optim.AdamW(model.parameters(), capturable=True)
        inputs = torch.randn(8, 4096, device="cuda")

        def step():
            model(inputs).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(3):
            step()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        while True:
            graph.replay()

    found = peakcast.dryrun(train, "H100-80GB", timeout_seconds=120)
    assert found.steps == 4
    weights = 4 * (4096 * 4096 + 4096)
    assert found.answer.peak_reserved_bytes.point > found.answer.peak_allocated_bytes.point
    assert found.timelines["steady"].peak().num_bytes > 4 * weights


def test_graphed_callables_keep_their_gradients_between_steps(of_tensors):
    """The graph of the backward writes gradients into tensors that stay, and `.grad` is the same memory."""

    def train(*, graphed):
        import torch

        model = torch.nn.Linear(4096, 4096).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        inputs = torch.randn(8, 4096, device="cuda", requires_grad=True)
        run = torch.cuda.make_graphed_callables(model, (inputs,)) if graphed else model
        for _ in range(5):
            run(torch.randn(8, 4096, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    with_graphs, without = (
        peakcast.dryrun(lambda graphed=graphed: train(graphed=graphed), "H100-80GB").timelines["steady"]
        for graphed in (True, False)
    )
    weights = 4 * (4096 * 4096 + 4096)
    assert with_graphs.composition(0)[Category.PARAMETERS] == without.composition(0)[Category.PARAMETERS] == weights
    assert of_tensors(with_graphs).peak().num_bytes == pytest.approx(of_tensors(without).peak().num_bytes, rel=0.01)
    more = sum(of_tensors(with_graphs).composition(0).values()) - sum(of_tensors(without).composition(0).values())
    assert more == pytest.approx(weights, rel=0.01)


def test_an_emptied_cache_has_room_for_what_does_not_fit_its_blocks():
    entries = [
        Entry("first", Category.TEMPORARIES, 100 * MIB, 0, 1),
        Entry("second", Category.TEMPORARIES, 200 * MIB, 3, 4),
    ]
    phases = [Phase.FORWARD] * 5
    labels = ["", "", EMPTIED, "", ""]
    assert replay(Timeline.from_entries(entries, phases)).peak_reserved_bytes == 300 * MIB
    assert replay(Timeline.from_entries(entries, phases, labels)).peak_reserved_bytes == 200 * MIB


def test_a_script_that_empties_the_cache_reserves_less():
    import torch

    def load():
        half = torch.empty(2 * GIB, dtype=torch.uint8, device="cuda")
        del half

    def load_and_empty():
        load()
        torch.cuda.empty_cache()

    def large():
        torch.empty(3 * GIB, dtype=torch.uint8, device="cuda")

    kept, emptied = (trained(before, in_step=large).peak_reserved_bytes.point for before in (load, load_and_empty))
    assert kept - emptied == pytest.approx(2 * GIB, abs=100 * MIB)
