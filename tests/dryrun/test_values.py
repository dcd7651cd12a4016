"""What follows from tokens, masks and positions is known; what follows from weights is not."""

from __future__ import annotations

import pytest

import peakcast

LENGTH, BATCH = 512, 4


def training(padding=0, positions=None):
    """A small Llama on rows of which the first has so many tokens of padding."""
    pytest.importorskip("transformers")

    def train():
        import torch
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 1}
        config = LlamaConfig(vocab_size=96, **sizes)
        model = LlamaForCausalLM(config).to("cuda", torch.bfloat16)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        tokens = torch.randint(96, (BATCH, LENGTH))
        mask = torch.ones_like(tokens)
        mask[0, LENGTH - padding :] = 0
        batch = {"input_ids": tokens, "labels": tokens, "attention_mask": mask}
        if positions is not None:
            batch |= {"attention_mask": None, "position_ids": torch.tensor(positions).expand(BATCH, -1)}
        for _ in range(3):
            given = {name: one.to("cuda") for name, one in batch.items() if one is not None}
            model(**given, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    return train


def masks_of(found):
    """How many tensors have a truth value or a bfloat16 for each pair of tokens."""
    pairs = BATCH * LENGTH * LENGTH
    return sum(size in (pairs, 2 * pairs) for size in found.timelines["steady"].num_bytes)


def test_a_mask_is_kept_where_it_has_padding_and_dropped_where_it_has_none():
    without, padded = (peakcast.dryrun(training(padding), "A100-80GB") for padding in (0, 1))
    assert masks_of(without) == 0
    assert masks_of(padded) > 0
    for found in (without, padded):
        assert not [finding for finding in found.answer.findings if finding.code == "value_assumed"]


def test_positions_tell_whether_rows_are_packed():
    one_each, packed = list(range(LENGTH)), [*range(LENGTH // 2), *range(LENGTH // 2)]
    assert masks_of(peakcast.dryrun(training(positions=one_each), "A100-80GB")) == 0
    assert masks_of(peakcast.dryrun(training(positions=packed), "A100-80GB")) > 0


def test_what_is_counted_and_chosen_by_tokens_is_known():
    def train():
        import torch

        model = torch.nn.Embedding(64, 32).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        labels = torch.arange(64)
        labels[::4] = -100
        for _ in range(3):
            moved = labels.cuda()
            kept = moved != -100
            assert kept.sum().item() == 48
            assert moved[kept].shape == (48,)
            assert kept.nonzero().shape == (48, 1)
            assert (~kept & kept).nonzero().view(-1).shape == (0,)
            assert moved.max().tolist() == 63
            assert moved.unique().numpy()[0] == -100
            rows = model(moved[kept])
            assert rows.shape == (48, 32)
            assert rows.sum().item() == 1.0  # of weights nobody knows anything
            rows.sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    found = peakcast.dryrun(train, "A100-80GB")
    (assumed,) = [finding.sentence for finding in found.answer.findings if finding.code == "value_assumed"]
    assert "reads a float32" in assumed


def test_sizes_that_follow_from_unknown_values_are_plausible():
    """As large as they can be, and of what is counted no more bins than are asked for."""

    def train():
        import torch

        model = torch.nn.Linear(8, 8).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            values = model(torch.randn(64, 8, device="cuda"))
            groups = (values[:, 0] > 0).long()
            assert torch.bincount(groups, minlength=8).shape == (8,)
            assert torch.histc(values, bins=10).shape == (10,)
            assert torch.unique(groups).shape == (64,)
            assert [one.shape for one in torch.unique_consecutive(groups, return_counts=True)] == [(64,), (64,)]
            assert torch.unique(values, dim=0).shape == (64, 8)
            assert values.nonzero().shape == (512, 2)
            values.sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    found = peakcast.dryrun(train, "A100-80GB")
    assumed = [finding.sentence for finding in found.answer.findings if finding.code == "value_assumed"]
    assert any("how many bins numbers fill" in sentence for sentence in assumed)


def test_inference_mode_moves_tokens_to_the_gpu_with_another_dtype():
    def train():
        import torch

        tokens = torch.arange(70_000, dtype=torch.int32).to(torch.uint16)
        model = torch.nn.Embedding(70_000, 8, device="cuda")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            model.eval()
            with torch.inference_mode():  # in which operators that are made of others are not taken apart
                model(tokens.to(device="cuda", dtype=torch.int64, non_blocking=True))
            model.train()
            model(tokens[:1024].to(torch.int64).cuda()).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    found = peakcast.dryrun(train, "A100-80GB")
    sizes = {int(size) for size in found.timelines["run"].num_bytes}
    assert {-(-70_000 * 8 // 512) * 512, 1024 * 8} <= sizes  # tokens of an evaluation and of a step, as int64


def test_what_comes_back_from_the_gpu_has_known_values_or_none():
    def train():
        import torch

        model = torch.nn.Embedding(64, 32).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            sizes = torch.tensor([8, 2], device="cuda")[None]
            assert sizes.cpu().tolist() == [[8, 2]]
            assert max(row[1] for row in sizes.to("cpu", torch.int32)) == 2
            loss = model(sizes).sum()
            assert loss.detach().cpu().item() == 1.0
            assert loss.detach().double().cpu().numpy() == 1.0
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()

    found = peakcast.dryrun(train, "A100-80GB")
    assumed = [finding.sentence for finding in found.answer.findings if finding.code == "value_assumed"]
    assert len(assumed) == 2


def test_what_another_rank_broadcasts_is_not_known():
    def train():
        import torch
        import torch.distributed as dist

        dist.init_process_group("nccl")
        ours, theirs, never_sent = (torch.zeros(3, dtype=torch.int64, device="cuda") for _ in range(3))
        dist.broadcast(ours, src=1)
        dist.broadcast(theirs, src=0)
        assert [one[0].item() for one in (ours, theirs, never_sent)] == [0, 1, 0]
        model = torch.nn.Linear(64, 64).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            model(torch.ones(8, 64, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    found = peakcast.dryrun(train, "A100-80GB", rank=1, world_size=2)
    assert [finding.code for finding in found.answer.findings].count("value_assumed") == 1


def test_experts_get_equally_many_tokens_on_every_rank():
    """The counts that ranks tell each other follow from a router whose numbers are not known."""

    def train():
        import torch
        import torch.distributed as dist

        dist.init_process_group("nccl")
        experts, top, tokens = 8, 2, 64
        model = torch.nn.Linear(64, experts).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            logits = model(torch.ones(tokens, 64, device="cuda"))
            chosen = logits.topk(top, dim=1).indices
            counts = torch.zeros_like(logits).int().scatter(1, chosen, 1).bool().sum(0)
            everywhere = torch.empty(4 * experts, dtype=counts.dtype, device="cuda")
            dist.all_gather_into_tensor(everywhere, counts)
            received = torch.empty_like(counts)
            dist.all_to_all_single(received, counts)
            assert everywhere.view(4, experts).sum(0).tolist() == [4 * tokens * top // experts] * experts
            assert received.tolist() == [tokens * top // experts] * experts
            logits.sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    found = peakcast.dryrun(train, "A100-80GB", rank=1, world_size=4)
    said = [one.sentence for one in found.answer.findings if one.code == "value_assumed"]
    assert len(said) == 2  # each of the two lines that read them
    assert all("test_values.py:" in sentence and "equally often" in sentence for sentence in said)


def test_zeros_are_known_until_a_view_of_them_is_written():
    def train():
        import torch

        model = torch.nn.Linear(64, 64).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            made = model(torch.ones(8, 64, device="cuda"))
            zeros = torch.zeros_like(made)
            assert not zeros.any().item()
            zeros[2:4].copy_(made[:2])
            assert (zeros > 0).nonzero().shape == (8 * 64, 2)  # no longer known: all that a mask could choose
            made.sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    assert peakcast.dryrun(train, "A100-80GB").steps == 3


def test_a_context_parallel_job_has_the_length_of_the_whole_sequence():
    def train():
        import torch
        import torch.distributed as dist

        dist.init_process_group("nccl")
        dist.init_device_mesh("cuda", (2, 2), mesh_dim_names=("dp", "cp"))
        model = torch.nn.Sequential(torch.nn.Embedding(96, 64), torch.nn.Linear(64, 96)).cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        tokens = torch.zeros(BATCH, LENGTH, dtype=torch.int64, device="cuda")
        for _ in range(3):
            model(tokens.chunk(2, dim=1)[0]).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    job = peakcast.dryrun(train, "A100-80GB", rank=1, world_size=4).job
    assert (job.parallelism.data_parallel_size, job.parallelism.context_parallel_size) == (2, 2)
    assert (job.micro_batch_size, job.sequence_length) == (BATCH, LENGTH)


def test_small_weights_on_the_cpu_stay_fake_in_another_dtype():
    """As accelerate converts them before FSDP2 shards them; their converted data was real, and no operator took it."""

    def train():
        import torch

        norm = torch.nn.LayerNorm(64, dtype=torch.bfloat16)
        for weight in norm.parameters():
            weight.data = weight.data.to(torch.float32)
        norm.load_state_dict(norm.state_dict())
        norm.cuda()
        optimizer = torch.optim.SGD(norm.parameters())
        for _ in range(3):
            norm(torch.randn(2, 64, device="cuda")).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    assert peakcast.dryrun(train, "H100-80GB").job.precision.parameters == "float32"


def test_known_values_do_not_need_what_zero_init_replaces(monkeypatch):
    torch = pytest.importorskip("torch")
    from peakcast.collectors.tracing.known_values import KnownValuesMode, value_of

    with KnownValuesMode():
        made = torch.ones(4)
    monkeypatch.setattr(torch, "full", lambda *_, **__: pytest.fail("it makes tensors on the GPU"))
    assert value_of(made).tolist() == [1.0] * 4


def test_numbers_are_taken_to_be_finite():
    """A loop that skips a step whose loss or gradients are not finite steps, also where no error is raised, and where there
    are more numbers than values are kept of."""

    def train():
        import torch

        table = torch.nn.Embedding(1025, 2048, device="cuda")
        optimizer = torch.optim.SGD(table.parameters())
        for _ in range(3):
            loss = table(torch.ones(8, dtype=torch.long, device="cuda")).square().mean()
            loss.backward()
            overflows = torch.stack([torch.isnan(one.grad).any() for one in table.parameters()]).any()
            lost = sum(torch.isinf(one.grad).sum().item() for one in table.parameters())
            if not torch.isfinite(loss) or not all(torch.isfinite(one.grad).all() for one in table.parameters()):
                raise SystemExit("skipped")
            if overflows or lost:
                continue
            optimizer.step()
            optimizer.zero_grad()

    assert peakcast.dryrun(train, "A100-80GB").steps == 3
