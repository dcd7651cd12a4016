"""Packages of GPU kernels that are absent: stand-ins keep what the kernels keep, and a script is told from a library."""

from __future__ import annotations

import importlib.util

import pytest

from peakcast.collectors.tracing.flash_attention_stub import MORE_FUNCTIONS

WIDTH, HEADS, TOKENS, SEQUENCES = 256, 4, 4096, 4
QUERIES = 2 * WIDTH * TOKENS


@pytest.mark.whole
def test_flash_attention_of_the_hub_and_ones_own_kernels_in_compiled_code(run_script):
    if any(importlib.util.find_spec(package) is not None for package in ("kernels", "triton")):
        pytest.skip("kernels or triton is installed: nothing stands in")
    found = run_script("flash_kernels.py")
    assert found.steps == 3
    assert {"triton", "kernels"} <= {finding.sentence.split()[0] for finding in found.answer.findings}
    steady = found.timelines["steady"]
    made = sorted(int(size) for name, size in zip(steady.names, steady.num_bytes, strict=True) if name.startswith("flash"))
    # the output, its statistics and the state of the random numbers; three gradients; an accumulator, 128 rows more for
    # each sequence, of heads of 64 elements in fp32, and row sums
    rows = TOKENS + 128 * SEQUENCES
    forward, backward = [QUERIES, 4 * HEADS * TOKENS, 512], [QUERIES] * 3
    assert made == sorted([*forward, *backward, 4 * rows * WIDTH, 4 * rows * HEADS])


def test_queries_keys_and_values_in_one_tensor_have_one_gradient():
    torch = pytest.importorskip("torch")
    packed = torch.zeros(2, 8, 3, HEADS, 64, dtype=torch.bfloat16, requires_grad=True)
    output = MORE_FUNCTIONS["flash_attn_qkvpacked_func"](packed, causal=True)
    assert output.shape == (2, 8, HEADS, 64)
    output.sum().backward()
    assert packed.grad.shape == packed.shape


def test_a_library_that_looks_for_flash_attention_finds_none(tmp_path):
    """As transformers looks whether it is there: only the script's own imports are answered."""
    import peakcast

    if importlib.util.find_spec("flash_attn") is not None:
        pytest.skip("flash_attn is installed")

    def train():
        import importlib.util

        import torch

        assert importlib.util.find_spec("flash_attn") is None or __name__ != "transformers"
        model = torch.nn.Linear(64, 64).cuda()
        optimizer = torch.optim.SGD(model.parameters())
        for _ in range(3):
            model(torch.randn(4, 64, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    found = peakcast.dryrun(train, "H100-80GB")
    assert not any("flash_attn" in finding.sentence for finding in found.answer.findings)
