"""Checkpoints that a script opens itself: small tensors have the values of the file, all have its shapes."""

from __future__ import annotations

import pytest
import torch

from peakcast.collectors.dryrun.checkpoints import REAL_BYTES, OpenCheckpoint

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
