"""The functions behind the doors: every way to ask, and batches that no line can stop."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import peakcast
from peakcast import api
from peakcast.answers.prediction import QUANTITIES, Prediction
from peakcast.core.errors import CalibrationError, CatalogError, PeakcastError, SpecError
from peakcast.doors import answering as answers
from peakcast.doors.questions import question, rank_number
from peakcast.measurements.store import read_csv, write_csv
from peakcast.models.calibration.calibration import UNCALIBRATED

GPU = "H100-80GB"
JOB: dict[str, Any] = {"architecture": "llama-3.2-1b", "sequence_length": 512}
MEGATRON: dict[str, Any] = {
    "arguments": {
        "num-layers": 4,
        "hidden-size": 512,
        "num-attention-heads": 8,
        "micro-batch-size": 1,
        "global-batch-size": 8,
        "seq-length": 512,
        "max-position-embeddings": 512,
        "pipeline-model-parallel-size": 2,
        "bf16": True,
    },
    "num_gpus": 4,
}


# -- predict --------------------------------------------------------------------------------------------------------------


def test_a_job_is_the_same_job_however_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "job.json"
    path.write_text(json.dumps(JOB))
    (tmp_path / "job.yaml").write_text("architecture: llama-3.2-1b\nsequence_length: 512\n")
    job = question(JOB, GPU).job
    ways: list[object] = [job, JOB, {"job": JOB}, path, str(path), tmp_path / "job.yaml"]
    answers = [peakcast.predict(way, GPU) for way in ways]
    assert all(answer == answers[0] for answer in answers)


def test_a_catalog_name_trains_with_every_default() -> None:
    assert peakcast.predict("llama-3.2-1b", GPU) == peakcast.predict({"architecture": "llama-3.2-1b"}, GPU)


def test_bars_enclose_the_point_and_each_quantity_contains_the_one_before() -> None:
    answer = peakcast.predict(JOB, GPU)
    bars = [getattr(answer, quantity) for quantity in QUANTITIES]
    assert all(0 <= bar.lower <= bar.point <= bar.upper for bar in bars)
    assert bars[0].point <= bars[1].point <= bars[2].point
    assert sum(answer.composition.values()) == bars[0].baseline


def test_a_translated_job_says_what_was_assumed_and_widens_for_what_it_cannot_say() -> None:
    plain = peakcast.predict({"megatron": MEGATRON}, GPU)
    unknown = {**MEGATRON, "arguments": {**MEGATRON["arguments"], "no-such-flag-at-all": 3}}
    wider = peakcast.predict({"megatron": unknown}, GPU)
    assert any("no-such-flag-at-all" in sentence for sentence in wider.warnings)
    assert not wider.inside_calibrated_domain
    assert wider.peak_allocated_bytes.point == plain.peak_allocated_bytes.point
    assert wider.peak_allocated_bytes.upper > plain.peak_allocated_bytes.upper
    assert wider.peak_allocated_bytes.lower < plain.peak_allocated_bytes.lower


def test_ranks_are_named_or_numbered() -> None:
    job = question({"megatron": MEGATRON}, GPU).job
    assert [rank_number(rank, job) for rank in (None, "worst", "last", 0, "3")] == [None, None, 3, 0, 3]
    assert peakcast.predict({"megatron": MEGATRON}, GPU, rank="last").rank == 3


@pytest.mark.parametrize("rank", [-1, 4, "first", True, 1.5, "", "99999999999999999999", "²", [0]])
def test_a_rank_that_the_job_does_not_have_is_refused(rank: Any) -> None:
    with pytest.raises(SpecError, match="must be 'worst', 'last' or a number from 0 to 3"):
        peakcast.predict({"megatron": MEGATRON}, GPU, rank=rank)


@pytest.mark.parametrize(
    ("job", "gpu", "error", "words"),
    [
        (JOB, "H100-80G", CatalogError, "did you mean 'H100-80GB'"),
        ("llama-3.1-8", GPU, CatalogError, "did you mean 'llama-3.1-8b'"),
        ("no/such/file.yaml", GPU, SpecError, "cannot be read"),
        ({**JOB, "micro_batch_size": 0}, GPU, SpecError, "micro_batch_size=0 must be at least 1"),
        ({**JOB, "micro_batch_size": float("nan")}, GPU, SpecError, "micro_batch_size=nan must be a whole number"),
        ({**JOB, "micro_batchsize": 1}, GPU, SpecError, "did you mean 'micro_batch_size'"),
        ({**JOB, "parallelism": {"tensor_parallel_size": 7}}, GPU, SpecError, "does not divide num_attention_heads"),
        ({"megatron": {}}, GPU, SpecError, "megatron.arguments is required"),
        ({"megatron": {"argument": {}}}, GPU, SpecError, "did you mean 'arguments'"),
        ({"huggingface": 3}, GPU, SpecError, "must be a mapping"),
        (3, GPU, SpecError, "must be a mapping"),
    ],
)
def test_what_cannot_be_asked_is_refused_in_a_sentence(job: Any, gpu: str, error: type[PeakcastError], words: str) -> None:
    with pytest.raises(error, match=words):
        peakcast.predict(job, gpu)


def test_a_calibration_is_taken_as_a_value_or_by_its_path(tmp_path: Path) -> None:
    path = tmp_path / "none.json"
    UNCALIBRATED.save(path)
    assert peakcast.predict(JOB, GPU, calibration=path) == peakcast.predict(JOB, GPU, calibration=UNCALIBRATED)
    path.write_text("{")
    with pytest.raises(CalibrationError, match=r"none\.json"):
        api.predict(JOB, GPU, calibration=path)


# -- batches --------------------------------------------------------------------------------------------------------------


def ask(*lines: Any) -> list[dict[str, Any]]:
    texts = [line if isinstance(line, (str, bytes)) else json.dumps(line) for line in lines]
    answers = list(peakcast.predict_batch(texts))
    for answer in answers:
        json.dumps(answer, allow_nan=False)
    return answers


def test_a_batch_answers_in_order_what_predict_answers() -> None:
    answers = ask(
        {"id": "a", "gpu": GPU, "job": JOB},
        {"id": 2, "gpu": GPU, "megatron": MEGATRON, "rank": "last"},
        {"gpu": GPU, "huggingface": {"config": "llama-3.2-1b", "training_arguments": {}}},
        {"id": "a", "gpu": GPU, "job": JOB},
    )
    assert [answer["id"] for answer in answers] == ["a", 2, None, "a"]
    alone = Prediction.to_mapping(peakcast.predict(JOB, GPU))  # without what only a single answer says besides
    assert answers[0] == answers[3] == {"id": "a", **alone}
    last = Prediction.to_mapping(peakcast.predict({"megatron": MEGATRON}, GPU, rank="last"))
    assert answers[1] == {"id": 2, **last}
    assert answers[2]["peak_allocated_bytes"]["point"] > 0


def test_processes_share_a_batch_and_answer_in_its_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peakcast.doors.batching.NEIGHBOURS", 4)
    sizes = [4, 1, 3, 2, 4, 6, 5, 1]
    lines = [json.dumps({"id": i, "gpu": GPU, "job": {**JOB, "micro_batch_size": size}}) for i, size in enumerate(sizes)]
    lines[2:2] = ["{", lines[0]]
    assert list(peakcast.predict_batch(lines, processes=2)) == list(peakcast.predict_batch(lines))


@pytest.mark.parametrize(
    ("line", "parameter", "words"),
    [
        ("{", None, "not valid JSON"),
        ("[1]", None, "must be a JSON object"),
        (b"\xff\xfe", None, "not valid JSON"),
        ('{"gpu": "H100-80GB", "job": {"architecture": "gpt2", "micro_batch_size": NaN}}', None, "NaN is not a number"),
        ('{"gpu": "H100-80GB", "job": {"architecture": "gpt2", "micro_batch_size": 1e999}}', None, "too large"),
        ('{"gpu": "H100-80GB", "gpu": "H100-80GB", "job": {}}', None, "appears twice"),
        ("[" * 100_000, None, "nested too deeply"),
        ({"job": JOB}, "gpu", "must be the name of a GPU type"),
        ({"gpu": GPU}, "job", "exactly one of job, megatron, huggingface"),
        ({"gpu": GPU, "job": JOB, "megatron": MEGATRON}, "job and megatron", "exactly one"),
        ({"gpu": GPU, "job": "llama-3.2-1b"}, "job", "must be a mapping"),
        ({"gpu": GPU, "job": None}, "job", "must be a mapping"),
        ({"gpu": GPU, "job": JOB, "ranks": 0}, "ranks", "did you mean 'rank'"),
        ({"gpu": GPU, "job": JOB, "rank": 1}, "rank", "'worst', 'last' or a number from 0 to 0"),
        ({"gpu": "H1000", "job": JOB}, "gpu", "not in the catalog"),
        ({"gpu": GPU, "job": {**JOB, "micro_batch_size": -1}}, "micro_batch_size", "at least 1"),
        ({"gpu": GPU, "job": {**JOB, "parallelism": {"zero_stage": 4}}}, "parallelism.zero_stage", "0, 1, 2 or 3"),
    ],
)
def test_a_bad_line_is_answered_and_stops_nothing(line: Any, parameter: str | None, words: str) -> None:
    good = {"id": "good", "gpu": GPU, "job": JOB}
    before, bad, after = ask(good, line, good)
    assert before == after
    assert "error" not in before
    assert set(bad) == {"id", "error"}
    assert set(bad["error"]) == {"parameter", "value", "message"}
    assert bad["error"]["parameter"] == parameter
    assert words in bad["error"]["message"]


def test_the_id_of_a_bad_question_is_echoed_whatever_it_is() -> None:
    for name in ("x" * 5000, {"a": [1, None]}, 0, False):
        assert ask({"id": name, "gpu": GPU})[0]["id"] == name


def test_a_long_value_is_cut_in_the_refusal() -> None:
    (answer,) = ask({"id": 1, "gpu": "x" * 10_000, "job": JOB})
    assert len(json.dumps(answer["error"]["value"])) < 1000


def test_blank_lines_and_a_byte_order_mark_are_passed_over() -> None:
    assert [answer["id"] for answer in ask(b'\xef\xbb\xbf{"id": 1, "gpu": "?"}', "", " \n", '{"id": 2}')] == [1, 2]


def test_a_fault_of_ours_is_an_answer_too(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(answers, "answer", broken)
    (answer,) = ask({"id": 1, "gpu": GPU, "job": {**JOB, "sequence_length": 640}})
    assert answer["error"]["message"] == "this is a bug in peakcast: ZeroDivisionError: oops"
    from peakcast.doors import batching

    batching._remembered.cache_clear()


def test_processes_change_nothing() -> None:
    lines = [json.dumps({"id": n, "gpu": GPU, "job": {**JOB, "micro_batch_size": n % 3}}) for n in range(9)] + ["{"]
    assert list(peakcast.predict_batch(lines, processes=2)) == list(peakcast.predict_batch(lines))


def test_a_batch_is_lazy_so_that_a_question_can_follow_an_answer() -> None:
    asked = []

    def lines() -> Any:
        for n in range(2):
            asked.append(n)
            yield {"id": n, "gpu": GPU, "job": JOB}

    answers = peakcast.predict_batch(lines())
    assert next(answers)["id"] == 0
    assert asked == [0]


# -- fit, evaluate, report ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rows_of_one_gpu(few_rows: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the few rows of one GPU type: a fit to all takes five seconds."""
    folder = tmp_path_factory.mktemp("datasets")
    write_csv(folder / "few.csv", [row for row in read_csv(few_rows / "few.csv") if row.gpu == "A100-80GB"])
    return folder


def test_fitting_again_from_equal_rows_leaves_the_file_as_it_is(tmp_path: Path, rows_of_one_gpu: Path) -> None:
    (first,) = api.fit("A100-80GB", datasets=rows_of_one_gpu, output=tmp_path)
    before = first.path.read_bytes()
    first.path.write_bytes(before.replace(f'"created":"{first.calibration.created}"'.encode(), b'"created":"2020-01-01"'))
    (second,) = api.fit("A100-80GB", datasets=rows_of_one_gpu, output=tmp_path)
    assert (first.changed, second.changed) == (True, False)
    assert second.calibration.created == "2020-01-01"
    assert api.predict(JOB, "A100-80GB", calibration=second.path).calibration == "A100-80GB"


def test_a_gpu_type_without_rows_cannot_be_fitted(tmp_path: Path, rows_of_one_gpu: Path) -> None:
    with pytest.raises(CatalogError, match="RTX5090' has no measured rows"):
        api.fit("RTX5090", datasets=rows_of_one_gpu, output=tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_folder_that_cannot_be_written_is_a_sentence(tmp_path: Path, rows_of_one_gpu: Path) -> None:
    (tmp_path / "taken").write_text("")
    with pytest.raises(PeakcastError, match="cannot be written"):
        api.fit("A100-80GB", datasets=rows_of_one_gpu, output=tmp_path / "taken" / "inside")


def test_advice_and_other_gpus_are_computed_when_they_are_read() -> None:
    answer = api.predict({"architecture": "llama-3.2-1b", "sequence_length": 512}, "H100-80GB")
    assert not {"first_to_try", "gpus"} & set(vars(answer))
    assert answer.first_to_try is answer.first_to_try
    assert next(gpu.fits for gpu in answer.gpus if gpu.gpu == "H100-80GB") == answer.fits


def test_advice_begins_at_the_peak_that_is_printed() -> None:
    """The residual adds 27 MiB of kernels' workspaces to what gpt2's tensors need."""
    answer = api.predict("gpt2", "RTX4090")
    printed, steps = answer.peak_allocated_bytes, answer.first_to_try
    assert printed.point != printed.baseline
    assert printed.point - sum(step.saved_bytes for step in steps) == steps[-1].peak_bytes
    assert steps[0].peak_bytes + steps[0].saved_bytes == printed.point


def test_what_is_read_later_rests_on_the_same_timelines() -> None:
    answer = api.predict({"architecture": "llama-3.2-1b", "sequence_length": 512}, "H100-80GB", baseline="ledger")
    again = api.predict({"architecture": "llama-3.2-1b", "sequence_length": 512}, "H100-80GB")
    assert answer.first_to_try == again.first_to_try
