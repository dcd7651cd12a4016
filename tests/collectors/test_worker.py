"""What a cell makes of its readings: the GPU's calls give recorded numbers, the logic around them is the real one."""

from types import SimpleNamespace

import pytest

from peakcast.collectors.machine import probes
from peakcast.collectors.measure import worker
from peakcast.collectors.measure.grid import expand
from peakcast.collectors.measure.recorder import Recorder
from peakcast.core.errors import CollectorError

torch = pytest.importorskip("torch")


class Steps:
    """A training run that does nothing but say when its loss begins."""

    def __init__(self, states):
        self.job = SimpleNamespace(gradient_accumulation_steps=2)  # as the recorder's
        self.optimizer = SimpleNamespace(state=states)
        self.model = SimpleNamespace(config=SimpleNamespace(num_attention_heads=4, hidden_size=64))

    def forward(self, on_loss):
        on_loss()
        return object()

    def backward(self, loss):
        pass

    clip = step = zero_grad = lambda self: None

    def facts(self):
        return {"optimizer": "AdamW"}


@pytest.fixture
def recorder(monkeypatch):
    """A recorder whose allocator readings count up by one for each reading."""
    readings = iter(range(1, 1000))

    def peaks():
        size = next(readings)
        return {"allocated": size, "reserved": size + 10, "active": size, "requested": size}

    for name in ("synchronize", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: None)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 77)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 99)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (5, 100))
    monkeypatch.setattr(torch.cuda, "host_memory_stats", lambda: {"allocated_bytes.peak": 4096})
    monkeypatch.setattr(probes, "allocator_peaks", peaks)
    monkeypatch.setattr(probes, "allocator_counts", lambda: {"num_alloc_retries": 0, "num_ooms": 0})
    monkeypatch.setattr(probes, "attention_backend", lambda *_: "flash")
    monkeypatch.setattr("peakcast.collectors.stacks.build", lambda job, device: Steps({"p": {"exp_avg": 1}}))
    (job,) = expand({"include": [{"architecture": "gpt2", "gradient_accumulation_steps": 2}]})
    made = Recorder(job, "A100-80GB", {})
    made.idle, made.context, made.nvml_peak = 10, 20, 500
    return made


def test_a_row_has_the_peaks_of_all_phases_and_keeps_the_first_step_apart(recorder):
    recorder.run(3)
    row = recorder.row()
    # the build is read first; a step reads forward, loss, backward twice (two micro-batches), clipping and the optimizer
    assert [len(step) for step in recorder.steps] == [5, 5, 5]
    assert row.first_step_peak_allocated_bytes == 1 + 8
    assert row.peak_allocated_bytes == 1 + 3 * 8
    assert row.phase_peaks == {
        "forward": 1 + 16 + 4,  # the later micro-batch's, which is the larger
        "loss": 1 + 16 + 5,
        "backward": 1 + 16 + 6,
        "gradient_clipping": 1 + 16 + 7,
        "optimizer_step": 1 + 16 + 8,
    }
    assert (row.peak_reserved_bytes, row.peak_device_bytes, row.context_bytes) == (35, 490, 20)
    assert (row.steady_allocated_bytes, row.outcome, row.spoiled) == (77, "ok", ())
    host = {name: size for name, size in row.environment["readings"].items() if name.startswith("host_")}
    assert host["host_pinned_bytes"] == 4096
    assert 0 < host["host_resident_before_bytes"] <= host["host_resident_bytes"]
    assert row.counts


def test_out_of_memory_is_an_outcome_with_lower_bounds(recorder, monkeypatch):
    def full(self, loss):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")

    monkeypatch.setattr(Steps, "backward", full)
    with pytest.raises(torch.cuda.OutOfMemoryError) as caught:
        recorder.run(3)
    recorder.out_of_memory(caught.value)
    row = recorder.row()
    assert (row.outcome, row.peak_allocated_bytes, row.steady_allocated_bytes) == ("out_of_memory", 4, None)
    found = row.environment["readings"]["out_of_memory"]
    assert (found["phase"], found["requested_bytes"]) == ("backward", 2 * 2**30)
    assert (found["free_bytes"], found["total_bytes"], found["reserved_bytes"]) == (5, 100, 99)
    assert not row.counts


def test_retries_and_missing_states_spoil_a_row(recorder, monkeypatch):
    monkeypatch.setattr(probes, "allocator_counts", lambda: {"num_alloc_retries": 2, "num_ooms": 0})
    monkeypatch.setattr("peakcast.collectors.stacks.build", lambda job, device: Steps({}))
    recorder.run(3)
    row = recorder.row()
    assert len(row.spoiled) == 2
    assert "its step was skipped" in row.spoiled[0]
    assert "retried 2 times" in row.spoiled[1]
    assert not row.counts


def test_an_unknown_gpu_is_named_with_the_way_out():
    assert worker.gpu_name("NVIDIA H100 80GB HBM3") == "H100-80GB"
    with pytest.raises(CollectorError, match=r"'Voodoo 2' is not in the catalog; name its type with --gpu"):
        worker.gpu_name("Voodoo 2")


class Generation:
    """A generation that only says which forward comes next."""

    model = Steps({}).model

    def generate(self, on_forward):
        for index in range(4):
            on_forward(index)

    def facts(self):
        return {"cache": "DynamicCache"}


def test_a_generation_is_one_phase_whose_prefill_and_decoding_are_read_apart(recorder, monkeypatch):
    monkeypatch.setattr("peakcast.collectors.stacks.build_inference", lambda job, device: Generation())
    recorder.job = recorder.job.replace(task="inference")
    recorder.run(3)
    row = recorder.row()
    assert [list(step) for step in recorder.steps] == [["prefill", "decode"]] * 3
    assert [step["decode"]["allocated"] for step in recorder.steps] == [3, 5, 7]
    assert (row.phase_peaks, row.peak_allocated_bytes, row.steady_allocated_bytes) == ({"forward": 7}, 7, 77)
    assert (row.outcome, row.spoiled, row.environment["cache"]) == ("ok", (), "DynamicCache")
    assert row.counts


@pytest.mark.parametrize("cache", ["dynamic", "static"])
def test_a_real_generation_runs_here_and_decodes_what_was_asked(cache):
    pytest.importorskip("transformers")
    from peakcast.collectors.stacks import build_inference

    inference = {"prompt_length": 5, "new_tokens": 4, "cache": cache}
    cell = {"architecture": {"name": "gpt2", "num_hidden_layers": 1}, "task": "inference", "inference": inference}
    (job,) = expand({"include": [{**cell, "precision.parameters": "float32"}]})
    found, seen, fed = build_inference(job, "cpu"), [], []
    found.model.register_forward_pre_hook(lambda _, args, given: fed.append(given["input_ids"].shape[1]), with_kwargs=True)
    found.generate(seen.append)
    assert seen == [0, 1, 2, 3]
    assert fed == [5, 1, 1, 1]
    assert found.facts()["cache"].lower().startswith(cache)
