"""Scripts that ask for the addresses of tensors."""

from __future__ import annotations

import peakcast


def test_storages_have_addresses_of_their_own():
    """TRL's offloading of activations keeps on the GPU what it takes for a tensor that it has seen, or for a parameter."""

    def train():
        import torch

        layer = torch.nn.Linear(64, 64).cuda()
        optimizer = torch.optim.SGD(layer.parameters())
        for _ in range(3):
            rows = torch.randn(8, 64, device="cuda")
            result = layer(rows)
            addresses = {one.untyped_storage().data_ptr() for one in (layer.weight, layer.bias, rows, result)}
            assert len(addresses) == 4
            assert rows[1:].untyped_storage().data_ptr() == rows.untyped_storage().data_ptr()
            result.sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    assert peakcast.dryrun(train, "H100-80GB").steps == 3
