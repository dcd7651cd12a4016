"""What compiled code asks about the GPU."""

from __future__ import annotations

import peakcast


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
