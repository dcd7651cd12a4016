"""Which kernel computes scaled dot product attention, and what is padded before it, as torch's own code on a GPU decides."""

from __future__ import annotations

import pytest

import peakcast

BATCH, HEADS, LENGTH = 2, 4, 96


def saved_by(head_dim, dtype="bfloat16", mask=None, gpu="H100-80GB", flash=True, length=LENGTH):
    """(labels of the operators of a step, its timeline) of attention on tensors that a parameter is multiplied into."""

    def train():
        import torch

        torch.backends.cuda.enable_flash_sdp(flash)
        weight = torch.nn.Parameter(torch.ones(1, device="cuda", dtype=getattr(torch, dtype)))
        optimizer = torch.optim.SGD([weight], lr=0.1)
        for _ in range(3):
            q, k, v = (weight * torch.ones(BATCH, HEADS, length, head_dim, device="cuda", dtype=weight.dtype) for _ in "qkv")
            given = None if mask is None else torch.ones(length, length, dtype=torch.bool, device="cuda")
            torch.nn.functional.scaled_dot_product_attention(q, k, v, given).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    steady = peakcast.dryrun(train, gpu).timelines["steady"]
    return set(steady.labels), steady


@pytest.mark.parametrize(
    ("kernel", "settings"),
    [
        ("flash", {"head_dim": 64}),
        ("flash", {"head_dim": 52}),
        ("efficient", {"head_dim": 64, "flash": False}),
        ("efficient", {"head_dim": 64, "gpu": "V100-32GB", "dtype": "float16"}),
        ("efficient", {"head_dim": 64, "mask": True}),
        (None, {"head_dim": 52, "mask": True}),
        (None, {"head_dim": 64, "dtype": "float64"}),
    ],
)
def test_the_first_kernel_that_can_and_is_switched_on_computes(kernel, settings):
    labels, _ = saved_by(**settings)
    used = {name for name in ("flash", "efficient") if f"_scaled_dot_product_{name}_attention.default" in labels}
    assert used == ({kernel} if kernel else set())


def test_flash_attention_saves_padded_copies_of_queries_keys_and_values():
    _, steady = saved_by(52)
    padded = 2 * BATCH * HEADS * LENGTH * 56  # 52 columns become 56
    kept = [size for name, size in zip(steady.names, steady.num_bytes, strict=True) if name == "constant_pad_nd.default"]
    assert kept.count(padded) >= 3


def test_rows_of_a_mask_are_padded_to_multiples_of_eight():
    for length, copies in ((96, 0), (100, 1)):
        _, steady = saved_by(64, mask=True, length=length)
        assert steady.names.count("constant_pad_nd.default") == copies
