"""The tracer on real CPU tensors: shards, storages emptied in place, module names, and PyTorch's own tracker."""

import copy
from importlib.machinery import ModuleSpec
from types import SimpleNamespace

import pytest

from peakcast import catalog
from peakcast.timelines.timeline import Category, Phase

torch = pytest.importorskip("torch")

from peakcast.collectors.tracing import dtensors  # noqa: E402 needs torch
from peakcast.collectors.tracing.kernel_allocations import kernel_allocations  # noqa: E402 needs torch
from peakcast.collectors.tracing.tracer import Tracer  # noqa: E402 needs torch


def timeline(tracer):
    return tracer.timeline(0, tracer.now)


def test_sizes_are_rounded_to_512_bytes_and_a_view_allocates_nothing():
    with Tracer("cpu") as tracer:
        x = torch.ones(3)
        y = torch.ones(129)
        x.view(3, 1), y[:5]
    assert sorted(timeline(tracer).num_bytes.tolist()) == [512, 1024]


def test_a_tensor_lives_from_its_operation_until_it_is_let_go():
    with Tracer("cpu") as tracer:
        x = torch.ones(256)
        y = x * 2
        del x
        z = y + 1
    assert timeline(tracer).totals.tolist() == [1024, 2048, 2048]
    assert z.numel() == 256


def test_a_storage_emptied_in_place_frees_its_bytes_and_refilled_takes_them_again():
    with Tracer("cpu") as tracer, tracer.watching(torch.nn.Module()):
        gathered, x = torch.ones(1024), torch.ones(128)
        x.mul_(2)
        gathered.untyped_storage().resize_(0)
        x.mul_(2)
        gathered.untyped_storage().resize_(4096)
        x.mul_(2)
    assert timeline(tracer).totals.tolist() == [4096, 4096 + 512, 4096 + 512, 512, 4096 + 512]


INDICES = torch.arange(256)


@pytest.mark.parametrize(
    "select",
    [
        pytest.param(lambda rows: rows.max(dim=-1).values, id="max"),
        pytest.param(lambda rows: rows.topk(2).values, id="topk"),
        pytest.param(lambda rows: rows.gather(1, INDICES[:, None]), id="gather"),
        pytest.param(lambda rows: rows[INDICES[:9]], id="indices"),
        pytest.param(lambda rows: rows[INDICES < 9], id="a mask"),
        pytest.param(lambda rows: rows.index_select(0, INDICES[:9]), id="index_select"),
        pytest.param(lambda rows: rows.take(INDICES), id="take"),
    ],
)
def test_backward_fills_its_zeros_in_place(select):
    """As recorded on GPUs, and as PyTorch's profiler shows without a mode: one tensor of the input's shape in all of
    backward. While a mode is on, autograd fills another one."""
    rows = torch.randn(256, 512, requires_grad=True)
    with Tracer("cpu") as tracer:
        selected = select(rows).sum()
        tracer.phase, begin = Phase.BACKWARD, tracer.now
        selected.backward()
    backward = tracer.timeline(begin, tracer.now)
    assert int((backward.num_bytes == rows.numel() * 4).sum()) == 1
    assert torch.equal(rows.grad, torch.autograd.grad(select(rows).sum(), rows)[0])


def test_a_fake_storage_emptied_in_place_is_one_of_ours_although_it_says_meta():
    """FSDP frees what it gathered so; overlooked, every gathered weight would stay for ever."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode(), Tracer("cpu") as tracer:
        gathered, x = torch.ones(1024), torch.ones(128)
        gathered.untyped_storage().resize_(0)
        x.mul_(2)
    assert gathered.untyped_storage().device.type == "meta"
    assert timeline(tracer).totals.tolist()[-1] == 512


@pytest.fixture
def mesh():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dtensors.install()
    torch.distributed.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield init_device_mesh("cpu", (4,))
    torch.distributed.destroy_process_group()


def test_of_a_sharded_tensor_the_shard_counts(mesh):
    from torch.distributed.tensor import DTensor, Shard

    with Tracer("cpu") as tracer:
        x = DTensor.from_local(torch.ones(16, 64), mesh, [Shard(0)], run_check=False)
        y = x * 2
        tracer.name([("y", y)], Category.PARAMETERS)
    assert tuple(y.shape) == (64, 64)
    found = timeline(tracer)
    assert sorted(found.num_bytes.tolist()) == [4096, 4096]  # 16 × 64 fp32, not 64 × 64
    assert "y" in found.names


def test_strided_shards_are_asked_for_once_for_all_tensors_of_an_operation():
    from torch.distributed.tensor.placement_types import Shard, _StridedShard

    class Schema:
        def __init__(self, *placements):
            self.asked, self._placements = 0, placements

        @property
        def args_spec(self):
            self.asked += 1
            return [SimpleNamespace(placements=(placement,)) for placement in self._placements]

    propagated = []
    propagate = dtensors._only_if_strided(lambda strategy, schema: propagated.append(strategy))
    plain, strided = Schema(Shard(0), Shard(1)), Schema(Shard(0), _StridedShard(0, split_factor=2))
    for schema, strategy in ((plain, 1), (plain, 2), (strided, 3), (strided, 4), (plain, 5)):
        propagate(strategy, schema)
    assert propagated == [3, 4]
    assert (plain.asked, strided.asked) == (2, 1)


def test_modules_are_named_also_after_a_recomputation_that_stops_early():
    from torch.utils.checkpoint import checkpoint

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.Linear(64, 64)

        def forward(self, x):
            return checkpoint(self.inner, x.sin(), use_reentrant=False).cos()

    model = torch.nn.Sequential(Block(), Block())
    with Tracer("cpu") as tracer, tracer.watching(model):
        tracer.phase = Phase.FORWARD
        loss = model(torch.randn(8, 64)).sum()
        tracer.phase = Phase.BACKWARD
        loss.backward()
        assert tracer.module == ""
    found = timeline(tracer)
    assert {"0", "0.inner", "1", "1.inner"} <= set(found.modules)


def test_it_agrees_with_pytorchs_own_tracker_on_a_whole_network():
    """Within 0.1 % of MemTracker (which rounds no CPU tensors): a Llama of two layers, step two."""
    from torch.distributed._tools.mem_tracker import MemTracker

    from peakcast.collectors.measure.grid import expand
    from peakcast.collectors.stacks import build

    sizes = {"num_hidden_layers": 2, "hidden_size": 512, "intermediate_size": 1024, "vocab_size": 4096}
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}
    cell = {"architecture": {"name": "llama-3.1-8b"} | sizes | heads, "sequence_length": 64}
    (job,) = expand({"include": [cell]})

    def step(training):
        training.backward(training.forward(lambda: None))
        training.clip()
        training.step()
        training.zero_grad()

    training = build(job, "cpu")
    step(training)
    theirs = MemTracker()
    theirs.track_external(training.model, training.optimizer, training.batch["input_ids"])
    with theirs:
        step(training)
    (totals,) = theirs.get_tracker_snapshot("peak").values()
    with Tracer("cpu") as tracer:
        training = build(job, "cpu")
        step(training)
        start = tracer.now
        step(training)
    ours = tracer.timeline(start, tracer.now).peak().num_bytes
    assert ours == pytest.approx(totals["Total"], rel=1e-3)


def test_a_block_that_another_stream_uses_waits_until_the_cpu_knows_that_it_is_done():
    from peakcast.collectors.tracing import fake_streams

    side, event = fake_streams.Stream(), fake_streams.FakeEvent()
    with Tracer("cpu") as tracer:
        waited_for, used = torch.ones(128), torch.ones(128)  # the operations 0 and 1
        tracer.used(waited_for, side.stream_id)
        tracer.used(used, side.stream_id)
        unused, kept = torch.ones(128), torch.ones(128)
        tracer.used(unused, 0)  # its own
        del waited_for, unused  # before 4
        event.record()
        kept.mul_(2)
        del used  # before 5
        event.synchronize()  # knows of what was before 4
        kept.mul_(2)
    steps = timeline(tracer)
    assert steps.dies[:3].tolist() == [4, 5, 4]
    assert steps.reusable[:3].tolist() == [5, len(steps.phases), 4]
    assert kept.numel() == 128


def test_an_event_of_another_stream_tells_only_what_that_stream_has_waited_for():
    """ZeRO-3 waits for its gathers, which wait for nothing, and for reductions, which wait for gradients."""
    from peakcast.collectors.tracing import fake_streams

    computing, gathering, reducing = fake_streams.DEFAULT, fake_streams.Stream(), fake_streams.Stream()
    with Tracer("cpu") as tracer:
        weight = torch.ones(128)
        tracer.used(weight, gathering.stream_id)
        reducing.wait_stream(computing)  # after the operation 0
        kept = torch.ones(128)
        del weight  # before 2
        gathered, reduced = gathering.record_event(), reducing.record_event()
        gathered.synchronize()
        assert [gathered.query(), reduced.query()] == [True, False]
        reduced.synchronize()
        kept.mul_(2)
        assert tracer.finished == 1
        reducing.wait_event(computing.record_event())
        reducing.synchronize()
        kept.mul_(2)
    steps = timeline(tracer)
    assert (steps.dies[0], steps.reusable[0]) == (2, 3)


def test_an_event_that_is_asked_again_and_again_has_happened():
    from peakcast.collectors.tracing import fake_streams

    with Tracer("cpu") as tracer:
        torch.ones(128)
        event = fake_streams.FakeEvent().record()
        answers = [event.query() for _ in range(fake_streams.PATIENCE + 1)]
        assert tracer.finished == tracer.now
    assert answers == [False] * fake_streams.PATIENCE + [True]


def test_only_what_runs_on_the_gpu_is_launched_and_waited_for(monkeypatch):
    """`meta` stands for the GPU here, which is at most two kernels behind."""
    from peakcast.collectors.tracing import blocks_in_use

    monkeypatch.setattr(blocks_in_use, "MOST_LAUNCHES_AHEAD", 2)
    with Tracer("meta") as tracer:
        left = torch.ones(2, 3, device="meta")  # the operation 0
        torch.empty(4, device="meta")  # 1 launches nothing
        assert torch.ones(1).item() == 1.0  # 2 and 3 are the CPU's own
        assert tracer.finished == 0
        right = torch.ones(3, 5, device="meta")  # 4
        assert tracer.finished == 0
        left @ right  # 5
        assert tracer.finished == 4
    assert tracer.operations_between(0, 5) == 0
    assert tracer.operations_between(5, 6) == 2 * 2 * 3 * 5


def test_blocks_are_made_on_the_stream_at_hand_and_their_gradients_on_that_of_the_forward():
    from peakcast.collectors.tracing import fake_streams

    side = fake_streams.Stream(priority=-1)
    weight = torch.ones(128, requires_grad=True)
    with Tracer("cpu") as tracer:
        before = weight * 1
        with fake_streams.on(side):
            aside = before.exp()
        after = aside.sin()
        tracer.phase = Phase.BACKWARD
        after.sum().backward()
    steps = timeline(tracer)
    on_side = {steps.labels[born] for born in steps.born[steps.streams == side.stream_id]}
    # backward of exp multiplies by its result; that of sin multiplies by a cosine, on the first stream
    assert on_side == {"exp.default", "mul.Tensor"}
    assert sorted(set(steps.streams.tolist())) == [0, side.stream_id]


def test_a_weight_that_is_copied_and_its_views_are_one_storage(monkeypatch):
    """Tensor.__deepcopy__ gives a fake weight a storage that its views do not share, and they were counted as well."""
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    from peakcast.collectors.tracing import copied_tensors

    monkeypatch.setattr(FakeTensor, "__deepcopy__", FakeTensor.__deepcopy__)  # as it was, once this test has ended
    copied_tensors.install()
    with FakeTensorMode(), Tracer("cpu") as tracer:
        layer = torch.nn.Linear(64, 32, bias=False)
        copied = copy.deepcopy(layer)
        read = copied.weight.t()
        assert tracer.numbers_of([copied.weight]) == tracer.numbers_of([read])
        assert tracer.numbers_of([copied.weight]).isdisjoint(tracer.numbers_of([layer.weight]))
    assert isinstance(copied.weight, torch.nn.Parameter)
    assert copied.weight.requires_grad


def test_softmax_copies_an_input_that_is_not_contiguous():
    """As its CUDA kernel does: 3 of 4 positions of 2 sequences, 1,024 numbers each, in fp32."""
    with Tracer("cpu") as tracer:
        tracer.gpu = catalog.gpu("H100-80GB")
        logits = torch.zeros(2, 4, 1024)
        logits[:, :-1].log_softmax(-1)
        logits.log_softmax(-1)
    made = tracer.timeline(0, tracer.now)
    copies = [size for name, size in zip(made.names, made.num_bytes.tolist(), strict=True) if name == "contiguous_copy"]
    assert copies == [2 * 3 * 1024 * 4]


def test_safe_softmax_has_a_softmax_and_a_truth_value_for_each_score():
    """fp32 scores of 1 MiB, the result beside them, the softmax that it is selected from, and a byte for each score."""
    scores = torch.empty(256, 1024, device="meta")
    found = kernel_allocations(torch.ops.aten._safe_softmax.default, (scores, -1), scores, catalog.gpu("A100-80GB"))
    assert sum(one.num_bytes for one in found) == (4 + 1) * 256 * 1024


def test_a_stub_of_triton_has_no_members_to_look_through():
    """torch asks for a backend by `in`; without an answer Python would take item after item of a stub, without end."""
    from peakcast.collectors.tracing.triton_stub import _Anything

    assert "cpu" not in _Anything().backends
    assert list(_Anything().backends) == []


def test_packages_derive_kernels_from_a_class_of_the_stub():
    """As fla-core 0.6 does (ops/utils/cache.py `CachedAutotuner`). Torch asks each what it wraps, as long as it is one
    (torch 2.13 _library/triton.py)."""
    from peakcast.collectors.tracing.triton_stub import Finder

    autotuner = Finder(("triton",)).create_module(ModuleSpec("triton.runtime", None)).Autotuner

    class Cached(autotuner):
        def __init__(self, fn, names, **keywords):
            super().__init__(fn, names, **keywords)

    kernel = Cached(Cached("a function", []), ["x"], warmup=None)
    while isinstance(kernel, autotuner):
        kernel = kernel.fn
    assert kernel == "a function"
