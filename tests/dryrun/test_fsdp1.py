"""FSDP1 moves a network to its GPU by itself."""

from __future__ import annotations

import pytest

import peakcast

WIDTH, RANKS = 512, 4


def test_buffers_that_are_real_on_the_cpu_go_with_the_network():
    def train():
        import functools

        import torch
        from torch import distributed, nn
        from torch.distributed.fsdp import FullyShardedDataParallel
        from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy

        class Block(nn.Module):
            def __init__(self):
                super().__init__()
                self.linear = nn.Linear(WIDTH, WIDTH, bias=False)
                self.register_buffer("scale", torch.arange(float(WIDTH)), persistent=False)

            def forward(self, rows):
                return self.linear(rows) * self.scale

        distributed.init_process_group("nccl")
        units = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})
        network = nn.Sequential(Block(), Block())
        network.register_buffer("steps", torch.zeros(1))
        network = FullyShardedDataParallel(network, auto_wrap_policy=units, device_id=torch.cuda.current_device())
        assert {buffer.device.type for buffer in network.buffers()} == {"cuda"}
        optimizer = torch.optim.AdamW(network.parameters())
        for _ in range(3):
            network(torch.ones(8, WIDTH, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    found = peakcast.dryrun(train, "A100-80GB", world_size=RANKS)
    assert found.job.parallelism.sharding == "fsdp1"
    states = 2 * 4 * 2 * WIDTH * WIDTH / RANKS
    assert found.answer.composition["optimizer_states"] == pytest.approx(states, rel=0.01)
