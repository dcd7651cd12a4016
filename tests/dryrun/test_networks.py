"""What a dry run takes for the network: functions of tensors, and no module without weights."""

from __future__ import annotations

import pytest

import peakcast

WORDS, WIDTH, BATCH, LENGTH = 4096, 256, 8, 512
"""Of `scripts/functional.py`."""


def test_a_network_of_functions_has_steps_and_a_batch(run_script):
    found = run_script("functional.py")
    assert found.steps == 3
    assert (found.job.micro_batch_size, found.job.sequence_length) == (BATCH, LENGTH)
    assert found.job.gradient_accumulation_steps == 2
    weights = 4 * (WORDS * WIDTH + 2 * 4 * WIDTH * WIDTH)
    states = found.answer.composition["optimizer_states"]
    assert states == pytest.approx(2 * weights, rel=0.001)  # and a count of steps for each
    held = 4 * weights + found.answer.composition["workspaces"]
    logits = 4 * BATCH * LENGTH * WORDS  # in float32, with two gradients of their size
    assert 3 * logits < found.timelines["steady"].peak().num_bytes - held < 3.5 * logits


def test_a_module_without_weights_is_no_network(run_script):
    found = run_script("images.py")
    assert found.job.architecture.name == "Classifier"
    assert (found.job.micro_batch_size, found.job.sequence_length) == (16, 1)  # an image is a row


def test_a_teacher_that_a_wrapper_keeps_in_a_list_has_weights():
    def train():
        import torch
        from torch import nn

        teacher = nn.Sequential(nn.Linear(64, WIDTH), nn.Linear(WIDTH, WIDTH)).cuda().requires_grad_(False)
        student = nn.Linear(64, WIDTH).cuda()

        class Distills(nn.Module):
            def __init__(self):
                super().__init__()
                self.student, self.hidden = student, [teacher]

            def forward(self, rows):
                with torch.no_grad():
                    wanted = self.hidden[0](rows)
                return nn.functional.mse_loss(self.student(rows), wanted)

        network = Distills()
        bucket = torch.empty(1000, WIDTH, device="cuda")
        optimizer = torch.optim.SGD(student.parameters(), lr=0.1)
        for _ in range(3):
            network(torch.ones(8, 64, device="cuda")).backward()
            optimizer.step()
            optimizer.zero_grad()
        assert bucket.is_cuda

    found = peakcast.dryrun(train, "A100-80GB")
    lasting = 4 * 1000 * WIDTH
    assert found.answer.composition["other"] == pytest.approx(lasting, abs=4 * 512)
    assert "inputs" not in found.answer.composition
    held = 4 * (2 * 65 * WIDTH + 257 * WIDTH)
    assert found.answer.composition["parameters"] == pytest.approx(held, abs=4 * 512)
    assert any(name.startswith("Linear.weight") for name in found.timelines["run"].names)
    assert found.answer.steady_state_bytes > held + lasting


def test_products_that_compiled_code_calls_take_a_workspace_as_others_do():
    pytest.importorskip("torch")
    import torch

    from peakcast.collectors.tracing.kernel_allocations import RULES
    from peakcast.collectors.tracing.known_values import label

    for name in ("mm", "bmm", "baddbmm", "addmm"):
        operator = getattr(torch.ops.aten, name)
        assert RULES[label(operator.out)] is RULES[label(operator.default)]


def test_a_loss_that_goes_backward_in_pieces_is_one_micro_batch():
    """torchtitan's `ChunkedCELoss` calls the head of the network for each piece of the hidden states."""

    def train():
        import torch
        from torch import nn

        class Words(nn.Module):
            def __init__(self):
                super().__init__()
                self.table, self.head = nn.Embedding(WORDS, WIDTH), nn.Linear(WIDTH, WORDS)

            def forward(self, tokens):
                return self.table(tokens)

        network = Words().cuda()
        optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
        for _ in range(3):
            tokens = torch.ones(BATCH, LENGTH, dtype=torch.long, device="cuda")
            hidden = network(tokens)
            pieces = [piece.detach().requires_grad_() for piece in hidden.chunk(4, dim=1)]
            for piece, labels in zip(pieces, tokens.chunk(4, dim=1), strict=True):
                nn.functional.cross_entropy(network.head(piece).flatten(0, 1), labels.flatten()).backward()
            hidden.backward(torch.cat([piece.grad for piece in pieces], dim=1))
            optimizer.step()
            optimizer.zero_grad()

    assert peakcast.dryrun(train, "A100-80GB").job.gradient_accumulation_steps == 1
