"""A collective that is waited for by its future keeps its tensors for longer in a run, which is said."""

from __future__ import annotations

import pytest

import peakcast


def train(by_future):
    import torch
    import torch.distributed as dist

    dist.init_process_group("nccl")
    model = torch.nn.Linear(64, 64).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        model(torch.randn(8, 64, device="cuda")).sum().backward()
        handles = [dist.all_reduce(parameter.grad, async_op=True) for parameter in model.parameters()]
        for waited in [handle.get_future() for handle in handles] if by_future else handles:
            waited.wait()
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize("by_future", [True, False])
def test_a_future_is_said_once(by_future):
    answer = peakcast.dryrun(lambda: train(by_future), "H100-80GB", world_size=8)
    said = [finding for finding in answer.answer.findings if "by its future" in finding.sentence]
    assert [finding.direction for finding in said] == ["more"] * by_future
