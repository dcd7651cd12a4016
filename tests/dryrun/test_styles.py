"""Styles of training scripts that need more than plain tensors: each is followed, and its bytes counted by hand."""

from __future__ import annotations

import pytest

import peakcast
from peakcast.timelines.timeline import Category


def held(found, category):
    """Bytes of a category in the steady step's peak, without the count of steps that each parameter's state has."""
    steady = found.timelines["steady"]
    return sum(
        size for kind, size in zip(steady.categories, steady.num_bytes, strict=True) if kind == category and size > 512
    )


def test_lazy_modules_have_weights_once_they_have_run():
    def train():
        import torch
        from torch import nn

        model = nn.Sequential(nn.LazyConv2d(64, 3), nn.LazyBatchNorm2d(), nn.Flatten(), nn.LazyLinear(1000, bias=False))
        model(torch.zeros(1, 3, 16, 16))  # on the CPU, where small tensors are real
        model.cuda()
        optimizer = torch.optim.Adam(model.parameters())
        for _ in range(3):
            model(torch.zeros(8, 3, 16, 16, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    found = peakcast.dryrun(train, "A100-80GB")
    matrices = 4 * (64 * 3 * 9 + 64 * 14 * 14 * 1000)
    assert held(found, Category.PARAMETERS) == pytest.approx(matrices, abs=512)
    assert held(found, Category.OPTIMIZER_STATES) == pytest.approx(2 * matrices, abs=1024)
    assert found.job.micro_batch_size == 8


def test_jagged_tensors_take_as_many_bytes_as_they_have_tokens():
    lengths, width = (100, 28, 72), 64

    def train():
        import torch

        model = torch.nn.Embedding(96, width).to("cuda", torch.bfloat16)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            rows = [torch.zeros(length, dtype=torch.int64) for length in lengths]
            given = model(torch.nested.nested_tensor(rows, layout=torch.jagged, device="cuda"))
            q, k, v = (given.unflatten(-1, (2, 32)).transpose(1, 2) * number for number in (1, 2, 3))
            torch.nn.functional.scaled_dot_product_attention(q, k, v).values().sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    found = peakcast.dryrun(train, "A100-80GB")
    steady = found.timelines["steady"]
    assert "_flash_attention_forward.default" in steady.labels
    assert 2 * sum(lengths) * width in steady.num_bytes
    assert (found.job.micro_batch_size, found.job.sequence_length) == (3, sum(lengths) // 3)


def test_gradients_of_functions_belong_to_the_network_that_they_are_called_with():
    def train():
        import torch
        from torch.func import functional_call, grad, vmap

        model = torch.nn.Linear(256, 256).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            weights = {name: one.detach() for name, one in model.named_parameters()}
            inputs = torch.zeros(16, 256, device="cuda")
            each = vmap(grad(lambda w, x: functional_call(model, w, (x,)).sum()), in_dims=(None, 0))(weights, inputs)
            for name, one in model.named_parameters():
                one.grad = each[name].mean(0)
            optimizer.step()
            optimizer.zero_grad()

    steady = peakcast.dryrun(train, "A100-80GB").timelines["steady"]
    assert 4 * 16 * 256 * 256 in steady.num_bytes  # a gradient for each row


def test_a_reset_of_the_peak_hides_what_came_before_it():
    def train():
        import torch
        from torch.distributed.optim import ZeroRedundancyOptimizer  # noqa: F401  (scripts functions with torch.jit)

        model = torch.nn.Linear(1024, 1024).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        del (before := [torch.empty(2**28, device="cuda")])[0]
        assert torch.cuda.max_memory_allocated() > 2**30
        for _ in range(3):
            torch.cuda.reset_peak_memory_stats()
            model(torch.zeros(8, 1024, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            assert torch.cuda.max_memory_allocated() == torch.accelerator.max_memory_allocated() < 2**28
        assert not before

    found = peakcast.dryrun(train, "A100-80GB")
    assert found.answer.peak_allocated_bytes.point > 2**30
    assert [said for said in found.answer.assumptions if "test_styles.py" in said and "resets torch's peak" in said]


def test_backward_by_autograds_engine_is_backward():
    """Megatron-LM asks the engine itself, after it has freed what the last layer put out."""
    rows, width, layers = 4096, 1024, 3

    def train():
        import torch

        model = torch.nn.Sequential(*(torch.nn.Linear(width, width, bias=False) for _ in range(layers))).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        inputs, gradient = torch.ones(2, rows, width, device="cuda")
        for _ in range(3):
            for _ in range(2):
                outputs = model(inputs)
                outputs.data = torch.empty(1, device="cuda")
                torch.autograd.Variable._execution_engine.run_backward(
                    tensors=(outputs,),
                    grad_tensors=(gradient,),
                    keep_graph=False,
                    create_graph=False,
                    inputs=(),
                    allow_unreachable=True,
                    accumulate_grad=True,
                )
            optimizer.step()
            optimizer.zero_grad()

    found = peakcast.dryrun(train, "A100-80GB")
    assert found.job.gradient_accumulation_steps == 2
    assert held(found, Category.ACTIVATIONS) == 2 * (layers - 1) * 4 * rows * width  # of each micro-batch, for backward
    assert held(found, Category.GRADIENTS) == layers * 4 * width * width


def test_generators_of_the_gpu_and_numbers_of_many_tensors():
    def train():
        import torch

        generator = torch.Generator(device="cuda").manual_seed(1)
        assert isinstance(torch.Generator(), torch.Generator)
        assert isinstance(generator, torch.Generator)
        assert generator.device.type == "cuda"
        default = torch.cuda.default_generators[torch.cuda.current_device()]
        default.set_state(default.get_state())
        torch.cuda.set_rng_state(torch.cuda.get_rng_state())
        model = torch.nn.Linear(1024, 1024, bias=False).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            model(torch.randn(8, 1024, device="cuda", generator=generator)).sum().backward()
            norms = [[torch.norm(one.grad) for one in model.parameters()]]
            narrow = model.weight.detach().bfloat16()
            torch.addmm(model.weight.detach(), narrow, narrow, out_dtype=torch.float32)  # its operations are counted
            assert float(torch.norm(torch.tensor(norms))) > 0  # real: it is on the CPU
            optimizer.step()
            optimizer.zero_grad()

    found = peakcast.dryrun(train, "A100-80GB")
    assert held(found, Category.PARAMETERS) == 4 * 1024**2
    assert any(finding.code == "value_assumed" for finding in found.answer.findings)
