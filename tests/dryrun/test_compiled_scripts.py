"""What compiled scripts ask of torch and of the GPU."""

from __future__ import annotations

import pytest

import peakcast
from peakcast.timelines.timeline import Category


@pytest.mark.whole
def test_compiled_code_may_ask_about_the_gpu():
    def train():
        import torch

        class Network(torch.nn.Linear):
            def forward(self, inputs):
                rows = torch.cuda.get_device_properties("cuda").multi_processor_count
                partial = torch.rand(rows, 64, device=inputs.device) @ inputs  # a row for each, as kernels have them
                return super().forward(inputs) + partial.sum(0) if torch.cuda.is_available() else inputs

        model = Network(1024, 1024).cuda()
        network = torch.compile(model, dynamic=False, fullgraph=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            network(torch.randn(64, 1024, device="cuda")).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    found = peakcast.dryrun(train, "H100-80GB")
    assert 132 * 1024 * 4 in set(found.timelines["run"].num_bytes)


@pytest.mark.whole
def test_modes_that_time_kernels_or_record_graphs_compile_as_others_do():
    def train():
        import torch
        import torch.distributed as dist
        import triton
        from torch.library import triton_op, wrap_triton

        @triton.jit
        def copied(source, target, count):
            triton.language.store(target, triton.language.load(source))

        def copy(source):
            target = torch.empty_like(source)
            wrap_triton(copied)[(1,)](source, target, source.numel())
            return target

        copy.__annotations__ = {"source": torch.Tensor, "return": torch.Tensor}
        copy = triton_op("scripts::copied", mutates_args={})(copy)

        class Network(torch.nn.Linear):
            def forward(self, inputs):
                return super().forward(copy(inputs))

        torch._inductor.config.max_autotune = True
        first, second = Network(1024, 1024).cuda(), torch.nn.Linear(1024, 1024).cuda()
        wrapped = torch.nn.parallel.DistributedDataParallel(second, static_graph=True)
        steps = torch.compile(first), torch.compile(wrapped, mode="reduce-overhead")
        optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
        for _ in range(3):
            inputs = torch.randn(64, 1024, device="cuda")
            for step in steps:
                inputs = step(inputs)
            inputs.square().mean().backward()
            with dist._coalescing_manager(device=torch.device("cuda", 0), async_ops=True) as sent:
                for parameter in first.parameters():
                    dist.all_reduce(parameter.grad)
            sent.wait()
            optimizer.step()
            optimizer.zero_grad()

    found = peakcast.dryrun(lambda: _in_group(train), "H100-80GB", world_size=8)
    assert found.timelines["steady"].composition(0)[Category.PARAMETERS] == 2 * 4 * (1024**2 + 1024)
    assert sum("asks torch.compile for CUDA graphs" in one.sentence for one in found.answer.findings) == 1


def _in_group(train):
    import torch.distributed as dist

    dist.init_process_group("nccl")
    train()


def test_a_rank_keeps_its_gpu_when_it_has_compiled():
    """DeepSpeed's ZeRO-3 compares where weights are with the current device; importing it compiles."""

    def train():
        import torch

        model = torch.compile(torch.nn.Linear(64, 64).cuda())
        optimizer = torch.optim.SGD(model.parameters())
        for _ in range(3):
            model(torch.ones(8, 64, device="cuda")).sum().backward()
            optimizer.step()
            assert (torch.cuda.current_device(), torch.cuda.device_count()) == (3, 4)

    assert peakcast.dryrun(train, "H100-80GB", rank=3, world_size=4).steps == 3
