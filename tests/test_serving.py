"""`mlflow models serve` on the registered model: a real server, asked over HTTP."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import pytest

from peakcast.catalog import gpu
from peakcast.core.errors import SpecError
from peakcast.dialects.common.job_file import job_from_mapping
from peakcast.models.calibration.calibration import UNCALIBRATED, Calibration
from peakcast.models.prediction.predict import predict
from peakcast.models.prediction.serving import MAX_JOB_CHARACTERS, answer_row, job_columns, job_mapping
from peakcast.tracking import Tracker

pytestmark = [  # mlflow's own
    pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy"),
    pytest.mark.filterwarnings("ignore:.*type hints to the `predict`"),
]
JOB = {"architecture": "llama-3.2-1b", "sequence_length": 512}
CALIBRATION = Calibration(gpu="H100-80GB", created="2026-11-21", rows_digest="")


# -- rows of a table ------------------------------------------------------------------------------------------------------


def test_a_job_is_json_or_columns():
    assert job_mapping({"job": json.dumps(JOB), "sequence_length": None}) == JOB
    assert job_mapping({"job": float("nan"), **JOB, "optimizer.name": "sgd"}) == {**JOB, "optimizer": {"name": "sgd"}}
    assert job_mapping({"architecture": "llama-3.2-1b", "sequence_length": 512.0}) == JOB
    assert {"architecture", "micro_batch_size", "parallelism.zero_stage"} <= set(job_columns())


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"job": "{"}, "job is not valid JSON"),
        ({"job": "[" * 100_000}, "job is not valid JSON"),
        ({"job": "[1]"}, "must be a mapping as JSON, not list"),
        ({"job": " " * (MAX_JOB_CHARACTERS + 1)}, "more than"),
        ({"sequence_lenght": 5}, "sequence_lenght is no column of a job; did you mean 'sequence_length"),
        ({"job": None}, "the row is empty"),
        ({"job": json.dumps({**JOB, "sequence_length": -1})}, "sequence_length"),
    ],
)
def test_a_bad_row_is_refused_by_name(row, said):
    with pytest.raises(SpecError, match=said):
        answer_row(row, CALIBRATION)


def test_a_request_has_a_time_and_a_length(monkeypatch):
    from peakcast.models.prediction import serving

    monkeypatch.setattr(serving, "REQUEST_SECONDS", 0.3)
    monkeypatch.setattr(serving, "MAX_ROWS", 2)

    def answer_row(row, calibration):
        while not row["sequence_length"]:
            pass
        return {}

    monkeypatch.setattr(serving, "answer_row", answer_row)
    with pytest.raises(SpecError, match=r"row 2: no answer within 0\.3 s"):
        serving.answer_rows([{"sequence_length": 1}, {"sequence_length": 0}], CALIBRATION)
    with pytest.raises(SpecError, match="the table has 3 rows; give from 1 to 2"):
        serving.rows_of([JOB] * 3)


def test_an_empty_cell_is_a_default_and_an_empty_column_is_refused():
    from peakcast.models.prediction.serving import rows_of

    first, second = rows_of([JOB, {"architecture": "gpt2"}])
    assert job_mapping(second) == {"architecture": "gpt2"}
    assert job_mapping(first) == JOB
    with pytest.raises(SpecError, match="sequence_length is empty or NaN in every row"):
        rows_of([{"architecture": "gpt2", "sequence_length": float("nan")}])


def test_who_asks_cannot_name_files_of_the_server(tmp_path):
    from peakcast.core.errors import CatalogError

    config = tmp_path / "config.json"
    config.write_text(json.dumps({"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2}))
    with pytest.raises((CatalogError, SpecError), match="not in the catalog"):
        answer_row({"architecture": str(config)}, CALIBRATION)


# -- the server -----------------------------------------------------------------------------------------------------------


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def ask(port: int, body: bytes) -> tuple[int, dict]:
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/invocations", data=body, headers={"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


@contextmanager
def running(command, environment, folder, port, path):
    """A context in which a server answers at `path`; it and all its processes end with it."""
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        for _ in range(1800):  # a busy machine takes a minute to import MLflow
            try:
                with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=5):
                    break
            except (urllib.error.URLError, OSError):
                assert process.poll() is None, (folder / "log").read_text()[-3000:]
                time.sleep(0.1)
        else:
            raise AssertionError((folder / "log").read_text()[-3000:])
        yield
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(timeout=30)


@pytest.fixture(scope="module", params=["here", pytest.param("as a user starts it", marks=pytest.mark.whole)])
def server(request, tmp_path_factory, empty_store, served):
    """The port of a server of the model; in the whole lane also of the registered one, started as a user would start it,
    which takes ten seconds."""
    if request.param == "here":
        import mlflow.pyfunc
        from mlflow.pyfunc import scoring_server

        from peakcast import tracking

        model = mlflow.pyfunc.load_model(str(tracking._save_model(tmp_path_factory.mktemp("model"), CALIBRATION)))
        with served(scoring_server.init(model)) as port:
            yield port
        return
    folder = tmp_path_factory.mktemp("served") / "store"
    shutil.copytree(empty_store, folder)
    tracker = Tracker(folder)
    tracker.log_calibration(CALIBRATION)
    port = free_port()
    environment = {
        **os.environ,
        "MLFLOW_TRACKING_URI": tracker.uri,
        "MLFLOW_DISABLE_TELEMETRY": "true",
        "PATH": str(Path(sys.executable).parent) + os.pathsep + os.environ["PATH"],
    }
    command = [sys.executable, "-P", "-m", "mlflow", "models", "serve", "-m", "models:/peakcast@H100-80GB"]
    options = ["--env-manager", "local", "--host", "127.0.0.1", "--port", str(port)]
    with running([*command, *options], environment, folder, port, "/ping"):
        yield port


def test_a_served_job_gets_the_answer_of_predict(server):
    body = {"dataframe_split": {"columns": ["job"], "data": [[json.dumps(JOB)]]}}
    code, answer = ask(server, json.dumps(body).encode())
    assert code == 200, answer
    (row,) = answer["predictions"]
    direct = predict(job_from_mapping(JOB), gpu("H100-80GB"), calibration=CALIBRATION)
    assert row["fits"] == direct.fits
    for part, value in direct.peak_device_bytes.to_mapping().items():
        assert row[f"peak_device_bytes.{part}"] == value


def test_a_served_answer_says_what_it_leaves_out_and_rests_on(server):
    job = {"architecture": "gpt2", "sequence_length": 2048}  # it has 1,024 positions
    code, answer = ask(server, json.dumps({"dataframe_records": [{"job": json.dumps(job)}]}).encode())
    assert code == 200, answer
    (row,) = answer["predictions"]
    direct = predict(job_from_mapping(job), gpu("H100-80GB"), calibration=CALIBRATION).to_mapping()
    assert "positions_exceeded" in {finding["code"] for finding in direct["findings"]}
    assert {name: row[name] for name in ("findings", "assumptions")} == {
        name: direct[name] for name in ("findings", "assumptions")
    }


def test_the_registered_signature_names_what_is_answered(tmp_path):
    from peakcast import tracking

    folder = tracking._save_model(tmp_path, CALIBRATION)
    schema = tracking._mlflow().models.get_model_info(str(folder)).signature.outputs
    assert schema.input_names() == list(answer_row(JOB, CALIBRATION))


def test_columns_are_served_too(server):
    records = [JOB, {**JOB, "sequence_length": 1024, "finetuning.method": "lora", "finetuning.rank": 8}]
    code, answer = ask(server, json.dumps({"dataframe_records": records}).encode())
    assert code == 200, answer
    small = predict(job_from_mapping(JOB), gpu("H100-80GB"), calibration=CALIBRATION)
    lora = predict(
        job_from_mapping({**JOB, "sequence_length": 1024, "finetuning": {"method": "lora", "rank": 8}}),
        gpu("H100-80GB"),
        calibration=CALIBRATION,
    )
    points = [row["peak_allocated_bytes.point"] for row in answer["predictions"]]
    assert points == [small.peak_allocated_bytes.point, lora.peak_allocated_bytes.point]


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({"dataframe_records": [{"job": "{"}]}, "row 1: job is not valid JSON"),
        ({"dataframe_records": [JOB, {**JOB, "sequence_length": -5}]}, "row 2: sequence_length=-5"),
        ({"dataframe_records": [{"job": json.dumps({"architecture": "llama-3.1-8"})}]}, "did you mean 'llama-3.1-8b'"),
        ({"dataframe_records": [{"architecture": "/etc/passwd"}]}, "not in the catalog"),
        ({"dataframe_records": [{"seq_length": 131072, "micro_batchsize": 512}]}, "did you mean 'sequence_length'"),
        ({"dataframe_records": [JOB | {"micro_batchsize": 512}]}, "did you mean 'micro_batch_size'"),
        ({"dataframe_records": [JOB, JOB | {"micro_batchsize": 512}]}, "did you mean 'micro_batch_size'"),
        (
            {"dataframe_records": [{"job": json.dumps(JOB), "micro_batch_size": 512}]},
            "micro_batch_size is given together with job",
        ),
        ({"dataframe_split": {"columns": ["job", "job"], "data": [["{}", "{}"]]}}, "column job appears 2 times"),
        ({"dataframe_split": {"columns": [], "data": []}}, "0 rows"),
        ({"dataframe_records": [{}]}, "the row is empty"),
        ({"dataframe_records": [{"job": "{}"}]}, "architecture is required and missing"),
        ({"dataframe_records": []}, "0 rows"),
        ({"dataframe_records": ["gpt2"]}, "0 is no column of a job"),
        ({"dataframe_records": [[1, 2]]}, "0 is no column of a job"),
        ({"dataframe_records": [JOB | {"micro_batch_size": float("nan")}]}, "micro_batch_size is empty or NaN"),
        ({"dataframe_records": [JOB | {"micro_batch_size": float("inf")}]}, "micro_batch_size=inf"),
        ({"dataframe_records": [JOB | {"micro_batch_size": [1]}]}, "micro_batch_size=[1]"),
        ({"dataframe_records": "gpt2"}, "must be a list of records"),
        ({"instances": ["gpt2"]}, "0 is no column of a job"),
        ({"instances": [JOB | {"micro_batchsize": 512}]}, "did you mean 'micro_batch_size'"),
        ({"inputs": "gpt2"}, "no table of jobs"),
        ({"inputs": {"micro_batchsize": [512]}}, "did you mean 'micro_batch_size'"),
        ([{}], "Received a list"),
        ("gpt2", "Received unexpected input type"),
        (float("nan"), "Received unexpected input type"),
        ({"dataframe_records": [{"job": "[" * 100_000}]}, "nested too deeply"),
        ({"nothing": 1}, "dataframe_split"),
    ],
)
def test_bad_input_gets_400_and_a_reason(server, body, said):
    code, answer = ask(server, json.dumps(body).encode())
    assert code == 400
    assert said in json.dumps(answer).replace('\\"', '"')
    assert "stack_trace" not in answer
    assert "Traceback" not in json.dumps(answer)


def test_what_is_no_json_gets_400(server):
    code, answer = ask(server, b"\x80\x04not json")
    assert code == 400
    assert answer["error_code"] == "BAD_REQUEST"
    assert "stack_trace" not in answer


def test_the_uncalibrated_baseline_is_what_this_server_answers_with():
    """The served calibration has no quantities: its points are the baselines."""
    answer = predict(job_from_mapping(JOB), gpu("H100-80GB"), calibration=UNCALIBRATED)
    assert answer.peak_device_bytes.point == answer.peak_device_bytes.baseline


# -- a store on a server --------------------------------------------------------------------------------------------------


@pytest.mark.whole  # MLflow's client finds the store by its address; test_tracking.py does the same with a file
def test_a_server_by_its_address_does_what_a_file_does(tmp_path, empty_store):
    shutil.copytree(empty_store, tmp_path / "store")
    port = free_port()
    scripts = str(Path(sys.executable).parent) + os.pathsep + os.environ["PATH"]
    environment = {**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true", "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    command = [sys.executable, "-P", "-m", "mlflow", "server", "--workers", "1", "--host", "127.0.0.1", "--port", str(port)]
    store = ["--backend-store-uri", f"sqlite:///{tmp_path}/store/mlflow.db"]
    kept = ["--artifacts-destination", str(tmp_path / "kept")]
    with running([*command, *store, *kept], {**environment, "PATH": scripts}, tmp_path, port, "/health"):
        tracker = Tracker(uri=f"http://127.0.0.1:{port}")
        assert tracker.champion("H100-80GB") is None
        assert tracker.log_calibration(CALIBRATION) == 1
        assert tracker.champion("H100-80GB").to_bytes() == CALIBRATION.to_bytes()
        assert list((tmp_path / "kept").rglob("calibration.json"))
