"""Checkpoints that a script opens itself: small tensors have the values of the file, all have its shapes."""

from __future__ import annotations

import pytest
import torch

import peakcast
from peakcast.collectors.dryrun.checkpoints import REAL_BYTES, OpenCheckpoint

WIDTH = 4096
safetensors = pytest.importorskip("safetensors.torch")


@pytest.fixture
def tensors():
    return {
        "norm": torch.arange(5, dtype=torch.bfloat16),
        "matrix": torch.zeros(REAL_BYTES, 3),
        "mask": torch.tensor([True, False]),
        "none": torch.zeros(0, 4),
        "scale": torch.tensor(2.5),
    }


def test_tensors_are_those_that_were_saved(tensors, tmp_path):
    path = tmp_path / "model.safetensors"
    safetensors.save_file(tensors, path, metadata={"format": "pt"})
    with OpenCheckpoint(path, "cpu") as opened, safetensors.safe_open(path, framework="pt") as real:
        assert opened.metadata() == real.metadata() == {"format": "pt"}
        assert opened.keys() == sorted(real.keys())
        assert opened.offset_keys() == list(real.offset_keys())
        for name, saved in tensors.items():
            read = opened.get_tensor(name)
            assert (read.shape, read.dtype) == (saved.shape, saved.dtype)
            assert opened.get_slice(name).get_shape() == list(real.get_slice(name).get_shape())
            if name != "matrix":
                assert torch.equal(read, saved)
        assert opened.get_slice("norm")[1:3].tolist() == [1, 2]
        assert opened.get_slice("matrix")[:2].shape == (2, 3)


def test_a_file_without_a_header_has_no_tensors(tmp_path):
    (tmp_path / "empty.safetensors").write_bytes(b"")
    assert OpenCheckpoint(tmp_path / "empty.safetensors", "cpu").keys() == []


@pytest.mark.whole
def test_a_file_without_values_lies_where_a_run_would_load_it(tmp_path, of_tensors):
    """It has the shapes of a network of any size in a few hundred bytes."""
    with torch.device("meta"):
        torch.save({"model": torch.nn.Linear(WIDTH, WIDTH, bias=False).state_dict(), "step": 3}, tmp_path / "weights.pth")
    assert (tmp_path / "weights.pth").stat().st_size < 2**12
    path, width = str(tmp_path / "weights.pth"), WIDTH

    def train():
        import torch

        held = torch.load(path, map_location="cuda")
        model = torch.nn.Linear(width, width, bias=False).cuda()
        model.load_state_dict(held["model"])
        optimizer = torch.optim.SGD(model.parameters(), lr=1 / held["step"])
        for _ in range(3):
            model(torch.ones(1, width, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    found = peakcast.dryrun(train, "H100-80GB").timelines["steady"]
    # what the file has, the network and its gradients
    assert of_tensors(found).peak().num_bytes == pytest.approx(3 * 4 * WIDTH**2, rel=0.02)
