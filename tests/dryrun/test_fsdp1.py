"""FSDP1 moves a network to its GPU by itself."""

from __future__ import annotations

import functools

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


def train_sharded(compiles):
    import functools

    import torch
    from torch import distributed, nn
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision

    distributed.init_process_group("nccl")
    half = MixedPrecision(param_dtype=torch.bfloat16)
    sharded = functools.partial(FullyShardedDataParallel, mixed_precision=half, device_id=torch.cuda.current_device())
    network = sharded(nn.Sequential(nn.Linear(WIDTH, WIDTH), sharded(nn.Linear(WIDTH, WIDTH))))
    step = torch.compile(network, backend="eager") if compiles else network
    optimizer = torch.optim.AdamW(network.parameters())
    for _ in range(3):
        step(torch.ones(8, WIDTH, device="cuda")).sum().backward()
        optimizer.step()
        optimizer.zero_grad()


def test_units_that_are_compiled_gather_as_others_do():
    """Its own frames are not compiled, nor is `record_stream`, which has none; what stands in for that has one."""
    peaks = [
        peakcast.dryrun(functools.partial(train_sharded, compiles), "A100-80GB", world_size=RANKS).answer
        for compiles in (True, False)
    ]
    assert len({peak.peak_allocated_bytes.baseline for peak in peaks}) == 1


def test_weights_of_which_a_rank_has_a_flat_part_are_described_whole():
    def train():
        import torch
        from torch import distributed, nn
        from torch.distributed.fsdp import FullyShardedDataParallel

        distributed.init_process_group("nccl")
        network = nn.Sequential(nn.Embedding(1000, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1000))
        network = FullyShardedDataParallel(network, use_orig_params=True, device_id=torch.cuda.current_device())
        optimizer = torch.optim.AdamW(network.parameters())
        for _ in range(3):
            network(torch.ones(8, 16, device="cuda", dtype=torch.long)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    job = peakcast.dryrun(train, "A100-80GB", rank=RANKS - 1, world_size=RANKS).job
    assert job.architecture.name == "Sequential"
    assert (job.architecture.vocab_size, job.architecture.hidden_size) == (1000, WIDTH)
