"""The door inside a training script. There is no GPU here: the GPU's readings are recorded ones, the Trainer is real."""

import pytest

import peakcast
from peakcast.collectors.machine import probes
from peakcast.collectors.stacks.steps import observing
from peakcast.core.errors import CatalogError, SpecError
from peakcast.core.units import GIB
from peakcast.measurements import store

JOB = {"architecture": "gpt2", "micro_batch_size": 2, "sequence_length": 256}
NOTHING_TO_COMPARE = "peakcast: nothing to compare; the run used no GPU that can be read"


@pytest.fixture
def gpu(monkeypatch):
    """A GPU that reports `readings`, which the test may change."""
    readings = {"allocated": 2 * GIB, "reserved": 3 * GIB, "active": 2 * GIB, "requested": 2 * GIB}
    counts = {"num_alloc_retries": 0, "num_ooms": 0}
    monkeypatch.setattr(observing.Observation, "gpu_name", staticmethod(lambda: "NVIDIA H100 80GB HBM3"))
    monkeypatch.setattr("torch.cuda.reset_peak_memory_stats", lambda: None)
    monkeypatch.setattr(probes, "allocator_peaks", lambda: dict(readings))
    monkeypatch.setattr(probes, "allocator_counts", lambda: dict(counts))
    monkeypatch.setattr(probes, "cuda_environment", lambda: {"gpu_name": "NVIDIA H100 80GB HBM3"})
    return readings, counts


def test_a_run_is_compared_with_its_prediction_and_kept_where_asked(gpu, tmp_path):
    readings, _ = gpu
    lines, shard = [], tmp_path / "mine.jsonl"
    with peakcast.watch(JOB, append_to=shard, say=lines.append) as watch:
        assert len(lines) == 1  # said before the first step
        readings["allocated"] = watch.prediction.peak_allocated_bytes.point
    assert lines[0].startswith("peakcast: fits on H100-80GB; allocated peak ")
    assert lines[1].endswith("+0.0 %, inside the bar")
    assert "reserved peak 3.00 GiB measured" in lines[2]
    ((row,), bad) = store.read_shard(shard)
    assert bad == []
    assert (row.gpu, row.provenance, row.source, row.spoiled) == ("H100-80GB", "measured", "local", ())
    assert row.peak_allocated_bytes == watch.prediction.peak_allocated_bytes.point
    assert row.counts


def test_a_measurement_outside_the_bar_is_said_loudly_and_nothing_is_kept_unasked(gpu, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    lines = []
    gpu[0]["allocated"] = 70 * GIB
    with peakcast.watch(JOB, say=lines.append):
        pass
    assert "OUTSIDE the bar" in lines[1]
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_failed_leaves_no_row_and_retries_mark_one(gpu, tmp_path):
    shard = tmp_path / "mine.jsonl"
    with pytest.raises(ZeroDivisionError), peakcast.watch(JOB, append_to=shard, say=lambda line: None):
        raise ZeroDivisionError
    assert not shard.exists()
    lines = []
    with peakcast.watch(JOB, append_to=shard, say=lines.append):
        gpu[1]["num_alloc_retries"] = 3
    ((row,), _) = store.read_shard(shard)
    assert not row.counts
    assert "marked: the allocator gave memory back and retried 3 times." in lines[-1]


def test_without_a_gpu_one_must_be_named_and_there_is_nothing_to_compare(monkeypatch):
    monkeypatch.setattr(observing.Observation, "gpu_name", staticmethod(lambda: None))
    with pytest.raises(SpecError, match="gpu is required where there is no GPU"):
        peakcast.watch(JOB)
    with pytest.raises(CatalogError, match="did you mean"):
        peakcast.watch(JOB, "H100-80G")
    lines = []
    with peakcast.watch(JOB, "H100-80GB", say=lines.append):
        pass
    assert lines[-1] == NOTHING_TO_COMPARE


def test_a_real_trainer_is_predicted_before_its_first_step_from_what_it_was_given(tmp_path):
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    if torch.cuda.is_available():
        pytest.skip("on a machine with a GPU the run is measured")
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(num_hidden_layers=2, vocab_size=64, **shape)
    lengths = [16, 24, 8]
    rows = [{"input_ids": torch.arange(n), "labels": torch.arange(n)} for n in lengths]
    arguments = transformers.TrainingArguments(
        str(tmp_path), max_steps=3, per_device_train_batch_size=1, report_to=[], use_cpu=True, disable_tqdm=True
    )
    lines = []
    callback = peakcast.trainer_callback("A100-80GB", say=lines.append)
    model = transformers.AutoModelForCausalLM.from_config(config)
    trainer = transformers.Trainer(model, arguments, train_dataset=rows, callbacks=[callback])
    trainer.train()
    job = callback._listener._watch.question.job
    assert (job.architecture.num_hidden_layers, job.architecture.hidden_size) == (2, 32)
    assert (job.micro_batch_size, job.sequence_length) == (1, 24)  # the largest batch that was seen
    assert (job.precision.parameters, job.optimizer.name) == ("float32", "adamw")
    assert callback._listener._watch.question.translation.unknown == ()
    assert lines[-1] == NOTHING_TO_COMPARE
    assert 2 <= len(lines) <= 4  # a prediction for each larger batch, then the end


def test_a_fault_of_the_callback_is_said_and_never_stops_the_run():
    lines = []
    callback = peakcast.trainer_callback("H100-80GB", say=lines.append)
    facts = {"training_arguments": {"optim": 3}, "config": {"model_type": "none"}, "peft": None, "arguments_class": dict}
    callback._listener.begins(facts)
    callback._listener.sees(2, 16)
    callback._listener.ends(5)
    assert len(lines) == 1
    assert lines[0].startswith("peakcast: ")


def test_a_batch_of_trls_is_two_sequences_for_each_sample_of_dpo():
    lines = []
    callback = peakcast.trainer_callback("H100-80GB", say=lines.append)
    kind = type("DPOConfig", (), {"__module__": "trl.trainer.dpo_config"})
    arguments = {"bf16": True, "gradient_checkpointing": True, "beta": 0.1}
    facts = {"training_arguments": arguments, "config": "llama-3.2-1b", "num_gpus": 1, "arguments_class": kind}
    callback._listener.begins(facts)
    callback._listener.sees(4, 96)  # the forward of two samples, chosen and rejected together
    job = callback._listener._watch.question.job
    assert (job.loss.kind, job.micro_batch_size, job.sequence_length) == ("dpo", 4, 96)
