"""Which recipes are recorded for the cells of a grid, and in which order."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from peakcast import api
from peakcast.collectors.measure.grid import expand
from peakcast.collectors.measure.recording import FirstStepError, WalkRecorder
from peakcast.commands import cli
from peakcast.core.errors import CollectorError, SpecError
from peakcast.doors import recording
from peakcast.jobs.spec import TrainingJob
from peakcast.models.recipes import shelf
from peakcast.models.recipes.recordable import cannot_be_recorded
from peakcast.models.recipes.regime import regime
from peakcast.timelines.traced import Traced
from peakcast.web.asking import PageState, answered

AROUND_UNITS = {
    "finetuning": {"method": "lora", "rank": 8},
    "activation_checkpointing": {"mode": "full", "use_reentrant": True},
    "parallelism": {"data_parallel_size": 2, "sharding": "fsdp1"},
    "framework_options": {"checkpoints_around_units": True},
}
ZERO2 = {"data_parallel_size": 2, "zero_stage": 2}
UNKNOWN = {"model_type": "minimax_m2", "num_hidden_layers": 4, "hidden_size": 64, "num_local_experts": 4}


def test_cells_that_share_a_recipe_ask_for_it_in_their_order_and_known_families_for_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[TrainingJob] = []
    monkeypatch.setattr(recording, "ensure_recipe", asked.append)
    points = [{"micro_batch_size": 2, "sequence_length": length} for length in (256, 301, 1024)]
    jobs = expand({"include": [{"architecture": one, **point} for one in (UNKNOWN, "gpt2") for point in points]})
    told: list[tuple[str, int, int]] = []
    recording.ensure_recipes(jobs, processes=3, progress=lambda *line: told.append(line))
    assert asked == [job for job in jobs if job.architecture.model_type == "minimax_m2"]
    assert told == [("recipe of minimax_m2", done, 3) for done in range(3)]


def test_a_recording_is_announced_before_it_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    job, told = expand({"include": [{"architecture": UNKNOWN}]})[0], list[str]()
    monkeypatch.delenv("PEAKCAST_RECORD")
    monkeypatch.setattr(recording, "recipe_of", lambda job: None)  # it comes with peakcast
    monkeypatch.setattr(recording, "record_recipe", lambda job: told.append("recorded"))
    recording.ensure_recipe(job, told.append)
    said, last = told
    assert "recording minimax_m2" in said
    assert last == "recorded"


def test_a_network_that_transformers_does_not_have_is_not_recorded_and_not_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its code is on the hub; finding that out by building it twice takes a minute."""
    network = {**UNKNOWN, "model_type": "of_my_own", "auto_map": {"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}}
    job, told = expand({"include": [{"architecture": network}]})[0], list[str]()
    monkeypatch.delenv("PEAKCAST_RECORD")
    monkeypatch.setattr(recording, "record_recipe", lambda job: pytest.fail("recorded"))
    recording.ensure_recipe(job, told.append)
    assert told == []
    assert not recording.only_a_trace_has(job)
    with pytest.raises(SpecError, match="has no model_type='of_my_own', and code from the hub is not run here"):
        api.predict(job, "H100-80GB")


def test_a_network_whose_first_step_took_too_long_is_not_traced_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trace runs two steps of the whole network, which took another five minutes."""
    network = {**UNKNOWN, "model_type": "qwen3_next", "num_hidden_layers": 48}
    job = expand({"include": [{"architecture": network}]})[0]
    monkeypatch.delenv("PEAKCAST_RECORD")
    monkeypatch.setattr(recording, "recipe_of", lambda job: None)
    for error, traced in ((CollectorError("its layers differ"), True), (FirstStepError("it took 300 s"), False)):

        def fails(job: TrainingJob, error: CollectorError = error) -> None:
            raise error

        monkeypatch.setattr(shelf, "_reasons", {})
        monkeypatch.setattr(recording, "record_recipe", fails)
        recording.ensure_recipe(job)
        assert shelf.why_not(job) == str(error).rstrip(".")
        assert recording.only_a_trace_has(job) == traced


def _walk(python: str, times: int) -> None:
    with WalkRecorder(python, 1.0) as recorder, recorder.of(expand({"include": [{"architecture": UNKNOWN}]})[0]) as library:
        for _ in range(times):
            library.walk(None, 1, 256, 1)


def test_only_a_first_step_that_never_came_is_told_apart(tmp_path: Path) -> None:
    """A stand-in for the interpreter answers the job, then so many walks, and no more."""
    for walks, kind in ((0, FirstStepError), (1, CollectorError)):
        python = tmp_path / f"python{walks}"
        answer = 'read line; echo \'{"versions": {}, "defaults": {}, "read": []}\'\n'
        python.write_text("#!/bin/sh\n" + answer * (1 + walks) + "exec sleep 60\n")
        python.chmod(0o755)
        with pytest.raises(CollectorError) as error:
            _walk(str(python), walks + 1)
        assert type(error.value) is kind
        assert "took longer than 1 s" in str(error.value)


def test_explain_says_that_it_records_as_predict_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peakcast.doors.explaining.ensure_recipe", lambda job, progress: progress("recording it"))
    told = list[str]()
    api.explain("gpt2", progress=told.append)
    assert told == ["recording it"]


def test_the_page_does_not_wait_for_a_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peakcast.doors.answering.ensure_recipe", lambda job, progress: progress("recording gpt2"))
    with pytest.raises(SpecError, match="this needs recording gpt2, longer than a page should wait: run `peak"):
        answered(PageState(text="gpt2", gpu="H100-80GB"))


def test_where_nothing_wants_a_recipe_nothing_is_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recording, "ensure_recipe", lambda job: pytest.fail(f"asked for {job.architecture.name}"))
    recording.ensure_recipes(expand({"include": [{"architecture": "gpt2"}]}), processes=1)


def test_a_network_that_cannot_be_recorded_says_what_stands_in_the_way(tmp_path: Path) -> None:
    for more, said in (
        ({"compile": True}, "compiled code has no blocks"),
        ({"framework": "megatron"}, "framework='megatron' is not recorded"),
        ({"finetuning": {"method": "qlora", "rank": 8, "quantization": "int8"}}, "quantization='int8' is not recorded"),
        (AROUND_UNITS, "FSDP1 keeps the inputs of checkpoints around its units"),
        ({"offload": {"optimizer": True}}, "offloaded weights or optimizer states are placed under ZeRO"),
        ({"offload": {"activations": True}, "framework": "deepspeed", "parallelism": ZERO2}, "for layouts other than ZeRO"),
    ):
        with pytest.raises(SpecError, match=f"'gpt2' cannot be recorded: .*{said}"):
            api.record({"architecture": "gpt2", **more})
    with pytest.raises(CollectorError, match="cannot be started: No such file or directory; give the path"):
        api.record("gpt2", python=str(tmp_path / "python"))


def test_a_network_that_cannot_be_recorded_is_traced(monkeypatch: pytest.MonkeyPatch, traced: Callable[..., Any]) -> None:
    def forked(job: TrainingJob, *, rank: int, gpu: str | None, timeout_seconds: float) -> Traced:
        return Traced(**traced(job, rank))  # in a copy of a process that has imported the libraries

    monkeypatch.setattr("peakcast.collectors.tracing.trace.trace_job", forked)
    monkeypatch.delenv(recording.VARIABLE)
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "vocab_size": 128}
    network = {"model_type": "apertus", **sizes, "num_key_value_heads": 2, "num_hidden_layers": 2}
    padded = {"form": "masked", "num_tokens": 100}
    job = {"architecture": network, "micro_batch_size": 2, "sequence_length": 64, "batch": padded}
    answer = api.predict(job, gpu="H100-80GB")
    assert any("traced without a GPU" in sentence for sentence in answer.assumptions)
    assert not any("no family of the ledger" in warning for warning in answer.warnings)


def test_what_a_layout_keeps_on_the_host_changes_no_recording() -> None:
    """Only activations do, which the network's own step offloads."""
    sharded = {"parallelism": {"data_parallel_size": 8, "sharding": "fsdp2"}}
    on_host = {"offload": {"parameters": True, "optimizer": True}, **sharded}
    cells = [{}, on_host, {"offload": {"activations": True}}]
    plain, hosted, activations = expand({"include": [{"architecture": UNKNOWN, **cell} for cell in cells]})
    assert not cannot_be_recorded(hosted)
    assert regime(hosted) == regime(plain) != regime(activations)


def test_search_asks_about_what_recipes_cover() -> None:
    """What comes with peakcast covers no offloaded activations; what a search finds is what `predict` answers."""
    sizes = {"hidden_size": 1536, "num_hidden_layers": 5, "num_attention_heads": 12, "vocab_size": 50257}
    network = {"model_type": "apertus", **sizes, "num_key_value_heads": 4, "intermediate_size": 4096}
    job = {"architecture": network, "micro_batch_size": 2, "sequence_length": 1024}
    found = api.search(job, "H100-80GB", num_gpus=8, global_batch_size=32)
    assert found.plans
    for plan in found.plans:
        assert not plan.job.offload.activations
        assert plan.peak_device_bytes == api.predict(plan.job, "H100-80GB").peak_device_bytes
    assert {plan.job.parallelism.sharding for plan in found.plans} == {"none", "fsdp2"}
    assert {plan.job.activation_checkpointing.mode for plan in found.plans} == {"none", "full"}


def test_search_refuses_a_network_that_nothing_was_recorded_of() -> None:
    nothing = {"model_type": "nothing_like_it", "hidden_size": 64}
    with pytest.raises(SpecError, match="no network of the ledger, and no recipe of it has been recorded; record it first"):
        api.search({"architecture": nothing}, "H100-80GB", num_gpus=8)


def test_another_baseline_is_refused_by_name() -> None:
    with pytest.raises(SpecError, match="baseline='guess' must be one of auto, ledger, recipe, trace"):
        api.predict("gpt2", "H100-80GB", baseline="guess")


def test_a_recipe_that_is_asked_for_and_not_there_widens_the_answer() -> None:
    plain, asked = (api.predict("gpt2", "H100-80GB", baseline=name) for name in ("auto", "recipe"))
    assert any("a recipe of 'gpt2' is asked for, and no recipe of it has been" in warning for warning in asked.warnings)
    assert asked.peak_allocated_bytes.point == plain.peak_allocated_bytes.point
    assert asked.peak_allocated_bytes.upper > plain.peak_allocated_bytes.upper


def test_a_batch_does_not_pass_the_baseline_by(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SpecError, match="--baseline is of a single question; leave it out with --batch"):
        cli.app(["predict", "--batch", "questions.jsonl", "--baseline", "recipe"], standalone_mode=False)
    assert capsys.readouterr().out == ""


def test_the_ledger_has_no_numbers_for_a_network_that_no_file_describes() -> None:
    with pytest.raises(SpecError, match=r"baseline='ledger' has no numbers for model_type='minimax_m2', .* use 'recipe'"):
        api.predict({"architecture": UNKNOWN}, "H100-80GB", baseline="ledger")
