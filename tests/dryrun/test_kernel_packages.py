"""Packages of GPU kernels that are absent: stand-ins keep what the kernels keep, and a script is told from a library."""

from __future__ import annotations

import importlib.util
import types

import pytest

import peakcast
from peakcast.collectors.tracing.flash_attention_stub import FUNCTIONS, MORE_FUNCTIONS

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


def test_compiled_code_saves_the_statistics_that_backward_reads():
    torch = pytest.importorskip("torch")
    from torch._functorch import aot_autograd, partitioners

    read = []

    def note(graph, inputs):
        read.append(
            [(node.meta["val"].dtype, tuple(node.meta["val"].shape)) for node in graph.graph.find_nodes(op="placeholder")]
        )
        return aot_autograd.make_boxed_func(graph.forward)

    attend = aot_autograd.aot_function(
        lambda *given: FUNCTIONS["flash_attn_func"](*given).sin(),
        fw_compiler=note,
        bw_compiler=note,
        partition_fn=partitioners.min_cut_rematerialization_partition,
    )
    given = [torch.zeros(2, 8, HEADS, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    attend(*given).sum().backward()
    forward, backward = read
    assert len(forward) == 3
    assert (torch.float32, (2, HEADS, 8)) in backward


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


def test_networks_of_an_older_transformers_get_flash_attention(monkeypatch):
    """Before 4.54 a class method of the networks looks for the package, and raises an error where it is not."""
    if importlib.util.find_spec("flash_attn") is not None:
        pytest.skip("flash_attn is installed: nothing stands in")
    from peakcast.collectors.dryrun.kernel_packages import KernelPackages
    from peakcast.collectors.dryrun.noted import RunFindings
    from peakcast.collectors.tracing import flash_attention_stub

    class PreTrainedModel:
        @classmethod
        def _check_and_enable_flash_attn_2(cls, config, *_, **__):
            raise ImportError("the package flash_attn seems to be not installed.")

    notes, installed = RunFindings(), []
    monkeypatch.setattr(flash_attention_stub, "install", lambda **asked: installed.append(asked))
    KernelPackages(notes)._in_modeling(types.SimpleNamespace(PreTrainedModel=PreTrainedModel))
    config = PreTrainedModel._check_and_enable_flash_attn_2(types.SimpleNamespace(), torch_dtype=None)
    assert config._attn_implementation == "flash_attention_2"
    assert installed == [{"packed": False}]
    assert [finding.sentence for finding in notes.findings] == [
        "the kernels of flash_attention_2 are not here: some that do nothing stood in for them."
    ]


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
