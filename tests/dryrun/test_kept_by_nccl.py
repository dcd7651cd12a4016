"""A collective whose handle nobody waits for keeps its tensors, until NCCL's watchdog has seen it end."""

from __future__ import annotations

import functools

import pytest

import peakcast

SIZE = 2**14
GRADIENT_BYTES = 2 * SIZE * SIZE


def train(tokens, by_future):
    import torch
    import torch.distributed as dist

    dist.init_process_group("nccl")
    model = torch.nn.Linear(SIZE, SIZE, bias=False, dtype=torch.bfloat16, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    batch = torch.randn(tokens, SIZE, device="cuda", dtype=torch.bfloat16)
    for _ in range(20):
        model(batch).sum().backward()
        handle = dist.all_reduce(model.weight.grad, async_op=True)
        (handle.get_future() if by_future else handle).wait()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()


@functools.cache
@functools.cache
def ran(tokens, by_future=True, torch=None):
    found = peakcast.dryrun(lambda: train(tokens, by_future), "H100-80GB", world_size=8, torch=torch)
    said = [finding.sentence for finding in found.answer.findings if finding.code == "timing_assumed"]
    return found.answer.peak_allocated_bytes, said


# A step's forward and its gradient of the weights are 4 * tokens * SIZE**2 operations, of which an H100 does 494.5e12 in a
# second: 142 ms with 65,536 tokens, 71 ms with half of them. When a step calls its collective, the GPU has surely finished
# only the steps before it, so that 100 ms have passed since the collective two, or three, steps ago.
@pytest.mark.parametrize(("tokens", "steps"), [(65_536, 2), (32_768, 3)])
def test_the_gradients_of_as_many_steps_are_kept_as_the_watchdog_is_late(tokens, steps):
    (kept, said), (let_go, nothing) = ran(tokens), ran(tokens, by_future=False)
    assert kept.point - let_go.point == steps * GRADIENT_BYTES
    assert not nothing
    assert [f"up to {steps} steps are counted, {steps * 512 / 1024:.2f} GiB" in sentence for sentence in said] == [True]
    assert kept.lower <= let_go.point


def test_releases_before_2_8_count_them_as_free_at_once():
    (early, said), (let_go, _) = ran(65_536, torch="2.7"), ran(65_536, by_future=False)
    assert (early.point, said) == (let_go.point, [])
    assert early.point > GRADIENT_BYTES


def gathers(listed):
    import torch
    import torch.distributed as dist

    dist.init_process_group("nccl")
    model = torch.nn.Linear(8, 8, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    whole, part = torch.empty(8, SIZE, SIZE, device="cuda"), torch.empty(SIZE, SIZE, device="cuda")
    for _ in range(3):
        model(torch.randn(8, 8, device="cuda")).sum().backward()
        if listed:
            dist.all_gather(list(whole.unbind()), part)
        else:
            dist.all_gather_into_tensor(whole, part)
        optimizer.step()
        optimizer.zero_grad()


def test_a_list_of_tensors_is_gathered_through_a_copy_of_them_all():
    listed, whole = (
        peakcast.dryrun(functools.partial(gathers, listed), "H100-80GB", world_size=8).answer for listed in (True, False)
    )
    copied = listed.peak_allocated_bytes.point - whole.peak_allocated_bytes.point
    assert copied == pytest.approx(8 * 4 * SIZE * SIZE, rel=1e-5)


def buckets(wait_for_all):
    import torch
    import torch.distributed as dist

    dist.init_process_group("nccl")
    model = torch.nn.Linear(8, 8, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.randn(8, 8, device="cuda")).sum().backward()
        for _ in range(4):
            dist.all_reduce(torch.ones(SIZE, SIZE, device="cuda"))
            if wait_for_all:
                torch.cuda.synchronize()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(("torch", "at_once"), [("2.7", 12), ("2.8", 1)])
def test_before_2_8_a_block_that_nccl_uses_is_not_handed_out_again_until_it_has_finished(torch, at_once):
    """Twelve buckets in turn; the CPU is ahead of the GPU by all of them unless it waits."""
    ahead, waits = (
        peakcast.dryrun(functools.partial(buckets, each), "H100-80GB", world_size=8, torch=torch).answer
        for each in (False, True)
    )
    assert ahead.peak_allocated_bytes.point == waits.peak_allocated_bytes.point
    more = ahead.peak_reserved_bytes.baseline - waits.peak_reserved_bytes.baseline
    assert more == (at_once - 1) * 4 * SIZE * SIZE
