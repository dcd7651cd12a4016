"""Which kernel computes scaled dot product attention, and what is padded before it, as torch's code for a GPU decides."""

from __future__ import annotations

import pytest

import peakcast
from peakcast.core.units import round_up

BATCH, HEADS, LENGTH = 2, 4, 96
FLASH, EFFICIENT = "_scaled_dot_product_flash_attention.default", "_scaled_dot_product_efficient_attention.default"


def attention(*cases, gpu="H100-80GB"):
    """The steady step of a script that attends in each of `cases`: (head_dim, dtype, length of a mask or 0, flash)."""

    def train():
        import torch

        weight = torch.nn.Parameter(torch.ones(1, device="cuda"))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        for _ in range(3):
            for head_dim, dtype, masked, flash in cases:
                torch.backends.cuda.enable_flash_sdp(flash)
                shape = (BATCH, HEADS, masked or LENGTH, head_dim)
                q, k, v = (weight.to(getattr(torch, dtype)).expand(shape).contiguous() for _ in "qkv")
                mask = torch.ones(masked, masked, dtype=torch.bool, device="cuda") if masked else None
                torch.nn.functional.scaled_dot_product_attention(q, k, v, mask).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    return peakcast.dryrun(train, gpu).timelines["steady"]


@pytest.mark.parametrize(
    ("kernels", "gpu", "cases"),
    [
        ({FLASH}, "H100-80GB", [(64, "bfloat16", 0, True), (52, "float16", 0, True)]),
        ({EFFICIENT}, "H100-80GB", [(64, "bfloat16", 0, False), (64, "float32", 0, True), (64, "bfloat16", 96, True)]),
        ({EFFICIENT}, "V100-32GB", [(64, "float16", 0, True)]),
        (set(), "H100-80GB", [(52, "bfloat16", 96, True), (64, "float64", 0, True), (50, "float32", 0, True)]),
    ],
)
def test_the_first_kernel_that_can_and_is_switched_on_computes(kernels, gpu, cases):
    assert {FLASH, EFFICIENT} & set(attention(*cases, gpu=gpu).labels) == kernels


def test_padded_copies_are_made_of_odd_head_dims_and_of_masks_whose_rows_begin_between_multiples_of_eight():
    steady = attention((52, "bfloat16", 0, True), (64, "bfloat16", 100, True), (64, "bfloat16", 96, True))
    padded = [size for name, size in zip(steady.names, steady.num_bytes, strict=True) if name == "constant_pad_nd.default"]
    copies = BATCH * HEADS * LENGTH * 56 * 2  # of 52 columns
    gradients = BATCH * HEADS * LENGTH * 52 * 2
    mask = round_up(100 * 104 * 2, 512)
    assert padded == [copies] * 3 + [gradients] * 3 + [mask]


@pytest.mark.parametrize("flash", [True, pytest.param(False, marks=pytest.mark.whole)])
def test_a_compiled_graph_goes_on_through_attention(flash):
    """With `fullgraph=True` torch.compile refuses code that it has to interrupt."""

    def train():
        import torch

        torch.backends.cuda.enable_flash_sdp(flash)
        attend = torch.compile(torch.nn.functional.scaled_dot_product_attention, fullgraph=True)
        weight = torch.nn.Parameter(torch.ones(1, device="cuda"))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        for _ in range(3):
            q, k, v = (weight.bfloat16().expand(BATCH, HEADS, LENGTH, 64).contiguous() for _ in "qkv")
            attend(q, k, v).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    steady = peakcast.dryrun(train, "H100-80GB").timelines["steady"]
    kernel = FLASH if flash else EFFICIENT
    assert any(kernel.removeprefix("_scaled_dot_product").split(".")[0] in name for name in steady.labels)
