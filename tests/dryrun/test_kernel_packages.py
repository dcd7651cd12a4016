"""Packages of GPU kernels that are absent: stand-ins keep what the kernels keep, and a script is told from a library."""

from __future__ import annotations

import importlib.util

import pytest

import peakcast
from peakcast.collectors.tracing.flash_attention_stub import MORE_FUNCTIONS

WIDTH, HEADS, TOKENS, SEQUENCES = 256, 4, 4096, 4
QUERIES = 2 * WIDTH * TOKENS


@pytest.mark.whole
def test_flash_attention_of_the_hub_and_ones_own_kernels_in_compiled_code(run_script):
    if any(importlib.util.find_spec(package) is not None for package in ("kernels", "triton")):
        pytest.skip("kernels or triton is installed: nothing stands in")
    found = run_script("flash_kernels.py")
    assert found.steps == 4  # all of its loop: a graph was compiled within the last four
    assert {"triton", "kernels"} <= {finding.sentence.split()[0] for finding in found.answer.findings}
    steady = found.timelines["steady"]
    made = sorted(int(size) for name, size in zip(steady.names, steady.num_bytes, strict=True) if name.startswith("flash"))
    # the output, its statistics and the state of the random numbers; three gradients; an accumulator, 128 rows more for
    # each sequence, of heads of 64 elements in fp32, and row sums
    rows = TOKENS + 128 * SEQUENCES
    forward, backward = [QUERIES, 4 * HEADS * TOKENS, 512], [QUERIES] * 3
    assert made == sorted([*forward, *backward, 4 * rows * WIDTH, 4 * rows * HEADS])


@pytest.mark.whole
def test_ones_own_kernel_with_descriptors_writes_a_tensor_of_the_compiled_graph(run_script):
    pytest.importorskip("triton")
    steady = run_script("own_kernels.py").timelines["steady"]
    made = [int(size) for name, size in zip(steady.names, steady.num_bytes, strict=True) if name == "product_kernel"]
    assert made == [2 * 8192 * 1024]


def test_queries_keys_and_values_in_one_tensor_have_one_gradient():
    torch = pytest.importorskip("torch")
    packed = torch.zeros(2, 8, 3, HEADS, 64, dtype=torch.bfloat16, requires_grad=True)
    output = MORE_FUNCTIONS["flash_attn_qkvpacked_func"](packed, causal=True)
    assert output.shape == (2, 8, HEADS, 64)
    output.sum().backward()
    assert packed.grad.shape == packed.shape


def test_only_the_scripts_own_imports_are_answered(tmp_path, monkeypatch):
    """Else a library that looks whether flash attention is there would take it unasked."""
    from peakcast.collectors.dryrun.kernel_packages import KernelPackages
    from peakcast.collectors.dryrun.noted import RunFindings

    monkeypatch.chdir(tmp_path)
    packages = KernelPackages(RunFindings())

    def looks(module, file):
        names = {"__name__": module, "packages": packages}
        exec(compile("found = packages.find_spec('flash_attn', None)", file, "exec"), names)
        return names["found"]

    assert looks("transformers.utils", str(importlib.util.find_spec("numpy").origin)) is None
    assert looks("__main__", str(tmp_path / "train.py")) is not None
    assert looks("model", str(tmp_path / "model.py")) is not None
    assert packages.find_spec("numpy", None) is None


def test_kernels_that_a_script_compiles_do_nothing_as_functions_and_as_operators():
    def train():
        import torch
        from torch.utils.cpp_extension import load

        functions = load(name="own_functions", sources=["kernel.cu"])
        load(name="own_operators", sources=["kernel.cu"], is_python_module=False)
        model = torch.nn.Linear(64, 64).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            given = model(torch.randn(16, 64, device="cuda"))
            out = torch.empty_like(given)
            functions.forward(given, out)
            torch.ops.own_operators.forward(given, out)
            (given + out).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    assert peakcast.dryrun(train, "A100-80GB").steps == 3
