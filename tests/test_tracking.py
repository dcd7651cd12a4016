"""The MLflow adapter, on a real SQLite store."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest

from peakcast.catalog import gpu
from peakcast.dialects.common.job_file import job_from_mapping
from peakcast.models.baseline.baseline import baseline
from peakcast.models.calibration.calibration import Calibration, QuantityCalibration
from peakcast.models.calibration.domain import Domain
from peakcast.models.calibration.features import features
from peakcast.models.calibration.intervals import Intervals
from peakcast.models.calibration.residual import Residual
from peakcast.models.calibration.spread import TERMS, Spread
from peakcast.models.evaluation.decisions import Decision, Decisions
from peakcast.models.evaluation.evaluation import Evaluation, Table
from peakcast.models.evaluation.metrics import Floor, Scored, summarise
from peakcast.models.evaluation.promotion import CalibrationComparison, QuantityComparison
from peakcast.models.prediction.predict import predict
from peakcast.tracking import MODEL_NAME, Tracker, slug

pytestmark = [  # mlflow's own
    pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy"),
    pytest.mark.filterwarnings("ignore:.*type hints to the `predict`"),
]

JOB = {
    "architecture": {
        "model_type": "llama",
        "hidden_size": 512,
        "intermediate_size": 1408,
        "num_hidden_layers": 2,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
    },
    "micro_batch_size": 1,
    "sequence_length": 512,
}


AS_IT_IS = Spread.from_mapping({**dict.fromkeys(TERMS, 0.0), "always": 1.0}, "peak_allocated_bytes")
"""The same error is expected of every job: bars are quantiles of the log ratios themselves."""


@pytest.fixture
def tracker(tmp_path, empty_store):
    shutil.copytree(empty_store, tmp_path / "store")
    return Tracker(tmp_path / "store")


@pytest.fixture(scope="module")
def calibration():
    residuals = [0.001 * i for i in range(-15, 15)]
    names = [f"net{i}" for i in range(30)]
    job, device = job_from_mapping(JOB), gpu("H100-80GB")
    row = features(job, device, baseline(job, device, 0))
    quantity = QuantityCalibration(
        residual=Residual().fit([row] * 30, residuals, names, ["huggingface/single"] * 30),
        spread=AS_IT_IS,
        intervals=Intervals().fit(residuals, names, [("huggingface/single", "all")] * 30),
        domain=Domain(gpus=("H100-80GB",)),
        rows_by_gpu={"H100-80GB": 30},
    )
    return Calibration(
        gpu="H100-80GB",
        created="2026-11-21",
        rows_digest="ab" * 32,
        quantities={"peak_allocated_bytes": quantity},
    )


@pytest.fixture(scope="module")
def evaluation():
    cells = tuple(
        Scored(
            key=f"{i:016x}",
            case=f"case {i}",
            source="peakcast",
            gpu="H100-80GB",
            architecture=f"net{i}",
            layout="tp+pp",
            framework="megatron",
            quantity="peak_allocated_bytes",
            measured=1000,
            baseline=980,
            point=1000 + i,
            lower=990,
            upper=1010,
            upper_95=1009,
            weight=1.0,
        )
        for i in range(4)
    )
    summary = summarise(cells)
    table = Table(
        quantity="peak_allocated_bytes",
        held_out="architecture",
        overall=summary,
        cells=cells,
    )
    return Evaluation(
        num_rows=4,
        num_configurations=4,
        left_out={"provenance is traced": 2},
        versions={"torch": ("2.11.0",)},
        rows_digest="cd" * 32,
        tables=(table,),
        floors={"peak_allocated_bytes": Floor(num_configurations=0, median=0, p95=0, worst=0)},
        decisions=(
            Decisions(
                quantity="peak_allocated_bytes",
                total=Decision(capacity_bytes=None, yes_fits=3, uncertain_fits=1),
                by_capacity=(),
                above_upper_95=0.25,
                num_rows=4,
            ),
        ),
    )


def test_an_evaluation_is_a_run_with_a_child_per_gpu_type_and_per_fold(tracker, evaluation, calibration, tmp_path):
    from matplotlib.figure import Figure

    run_id = tracker.log_evaluation(
        evaluation, calibrations=[calibration], parameters={"commit": "abc"}, figures={"errors.png": Figure()}
    )
    run = tracker._client.get_run(run_id)
    assert run.info.status == "FINISHED"
    assert run.data.params["commit"] == "abc"
    assert run.data.params["versions.torch"] == "2.11.0"
    assert run.data.metrics["peak_allocated_bytes.median_error"] == pytest.approx(0.001)
    assert run.data.metrics["peak_allocated_bytes.share_within_target"] == 1
    assert run.data.metrics["peak_allocated_bytes.baseline.median_error"] == pytest.approx(0.02)
    assert run.data.metrics["rows_left_out"] == 2
    assert run.inputs.dataset_inputs[0].dataset.digest == "cd" * 16
    names = {item.path for item in tracker._client.list_artifacts(run_id)}
    assert names == {"evaluation.json", "figures"}
    kept = json.loads((tmp_path / "store" / "artifacts" / run_id / "artifacts" / "evaluation.json").read_text())
    assert kept["num_rows"] == 4
    children = tracker._client.search_runs(
        [run.info.experiment_id], filter_string=f"tags.`mlflow.parentRunId` = '{run_id}'"
    )
    by_name = {child.info.run_name: child for child in children}
    assert set(by_name) == {"H100-80GB", *(f"without net{i}" for i in range(4))}
    of_gpu, of_fold = by_name["H100-80GB"], by_name["without net0"]
    assert of_gpu.data.metrics["architecture.peak_allocated_bytes.p95_error_over_target"] == pytest.approx(0.3)
    assert of_fold.data.metrics["peak_allocated_bytes.coverage_90"] == 1
    assert run.data.metrics["peak_allocated_bytes.coverage.layout.tp_pp"] == 1
    assert run.data.metrics["peak_allocated_bytes.above_upper_95"] == 0.25
    assert [item.path for item in tracker._client.list_artifacts(of_gpu.info.run_id)] == ["calibration.json"]


def compared(old: float, new: float) -> CalibrationComparison:
    of_quantity = QuantityComparison(
        quantity="peak_allocated_bytes",
        num_architectures=9,
        old_error=old,
        new_error=new,
        difference=new - old,
        standard_error=0.001,
    )
    return CalibrationComparison(gpu="H100-80GB", quantities=(of_quantity,), lost=())


def test_a_worse_fit_is_registered_and_not_promoted_and_the_comparison_is_kept(tracker, calibration, tmp_path):
    tracker.log_calibration(calibration)
    tracker.log_calibration(calibration, comparison=compared(0.01, 0.02))
    alias = tracker._client.get_model_version_by_alias(MODEL_NAME, "H100-80GB")
    assert int(alias.version) == 1
    second = tracker._client.get_model_version(MODEL_NAME, "2")
    assert second.tags["promoted"] == "false"
    assert "worse on unseen architectures (allocated 1.00% → 2.00% on 9 architectures)" in second.tags["comparison"]
    kept = tmp_path / "store" / "artifacts" / second.run_id / "artifacts" / "comparison.json"
    assert json.loads(kept.read_text())["promoted"] is False
    tracker.log_calibration(calibration, comparison=compared(0.01, 0.0105))
    assert int(tracker._client.get_model_version_by_alias(MODEL_NAME, "H100-80GB").version) == 3


def test_the_champion_is_what_the_alias_stands_for(tracker, calibration):
    assert tracker.champion("H100-80GB") is None
    tracker.log_calibration(calibration)
    assert tracker.champion("H100-80GB").to_bytes() == calibration.to_bytes()
    assert tracker.champion("A100-80GB") is None


def test_a_calibration_run_says_what_was_learned_from_which_rows(tracker, calibration):
    tracker.log_calibration(calibration)
    version = tracker._client.get_model_version_by_alias(MODEL_NAME, "H100-80GB")
    run = tracker._client.get_run(version.run_id)
    assert run.info.status == "FINISHED"
    assert json.loads(run.data.params["peak_allocated_bytes.rows"]) == {"H100-80GB": 30}
    assert run.data.params["peak_allocated_bytes.regressor"] == "zero"
    dataset = run.inputs.dataset_inputs[0].dataset
    assert (dataset.digest, json.loads(dataset.profile)) == ("ab" * 16, {"num_rows": 30})


def test_a_calibration_is_a_version_of_one_model_with_its_gpu_as_alias(tracker, calibration):
    assert tracker.log_calibration(calibration) == 1
    assert tracker.log_calibration(calibration) == 2
    version = tracker._client.get_model_version_by_alias(MODEL_NAME, "H100-80GB")
    assert (int(version.version), version.tags["rows_digest"]) == (2, "ab" * 32)


def test_the_registered_model_answers_as_predict_does(tracker, calibration):
    import pandas

    tracker.log_calibration(calibration)
    answers = tracker.load("H100-80GB").predict(pandas.DataFrame({"job": [json.dumps(JOB)] * 2}))
    direct = predict(job_from_mapping(JOB), gpu("H100-80GB"), calibration=calibration)
    assert answers["peak_allocated_bytes.point"].tolist() == [direct.peak_allocated_bytes.point] * 2
    assert answers["fits"].tolist() == ["yes", "yes"]


def test_columns_are_jobs_too_and_empty_cells_are_defaults(tracker, calibration):
    import pandas

    tracker.log_calibration(calibration)
    table = pandas.DataFrame(
        {
            "architecture": ["llama-3.2-1b", "qwen2.5-0.5b"],
            "sequence_length": [512, 1024],
            "parallelism.data_parallel_size": [None, 2],
        }
    )
    answers = tracker.load("H100-80GB").predict(table)
    jobs = (
        {"architecture": "llama-3.2-1b", "sequence_length": 512},
        {"architecture": "qwen2.5-0.5b", "sequence_length": 1024, "parallelism": {"data_parallel_size": 2}},
    )
    direct = [predict(job_from_mapping(job), gpu("H100-80GB"), calibration=calibration) for job in jobs]
    assert answers["peak_device_bytes.upper_95"].tolist() == [p.peak_device_bytes.upper_95 for p in direct]


def test_no_pickle_is_stored(tracker, calibration, tmp_path):
    tracker.log_calibration(calibration)
    files = {path.name for path in (tmp_path / "store" / "artifacts").rglob("*") if path.is_file()}
    assert "calibration.json" in files
    assert "model.py" in files
    assert not [name for name in files if name.endswith((".pkl", ".pickle", ".joblib"))]


def test_no_global_run_is_touched(tracker, evaluation, calibration):
    import mlflow

    before = mlflow.get_tracking_uri()
    tracker.log_evaluation(evaluation, calibrations=[calibration])
    assert mlflow.active_run() is None
    assert mlflow.get_tracking_uri() == before


def test_a_failed_run_says_so(tracker, evaluation):
    with pytest.raises(TypeError, match="figure"):
        tracker.log_evaluation(evaluation, figures={"no.png": "not a figure"})
    experiment = tracker._client.get_experiment_by_name("peakcast")
    assert [run.info.status for run in tracker._client.search_runs([experiment.experiment_id])] == ["FAILED"]


def test_a_place_is_needed():
    with pytest.raises(ValueError, match="folder or a uri"):
        Tracker()


def test_aliases_are_slugs():
    assert slug("NVIDIA H100 80GB HBM3 (SXM)") == "NVIDIA-H100-80GB-HBM3-SXM"


def test_importing_the_module_does_not_import_mlflow():
    code = "import sys; import peakcast.tracking; print('mlflow' in sys.modules)"
    found = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert found.stdout.strip() == "False"


# -- several processes, and killed ones -----------------------------------------------------------------------------------

START = """
import sys
from pathlib import Path
from peakcast.models.calibration.calibration import Calibration
from peakcast.tracking import Tracker
tracker = Tracker(Path(sys.argv[1]))
calibration = Calibration(gpu="H100-80GB", created="2026-11-21", rows_digest="")
if sys.argv[2] == "wait":
    with tracker._running("waits") as run:
        print(run, flush=True)
        sys.stdin.read()
print(tracker.log_calibration(calibration))
"""


def started(folder, what):
    command = [sys.executable, "-P", "-W", "ignore", "-c", START, str(folder), what]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.whole
def test_three_trackers_start_together_on_a_store_that_is_not_there(tmp_path):
    processes = [started(tmp_path / "store", "log") for _ in range(3)]
    told = [process.communicate(timeout=180) for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0], told
    assert sorted(int(out.split()[-1]) for out, _ in told) == [1, 2, 3]


def test_a_run_whose_process_was_killed_is_ended_by_the_next(tmp_path, empty_store):
    shutil.copytree(empty_store, tmp_path / "store")
    killed = started(tmp_path / "store", "wait")
    lost = killed.stdout.readline().strip()
    killed.kill()
    killed.communicate()
    tracker = Tracker(tmp_path / "store")
    with Tracker(tmp_path / "store")._running("goes on") as lives:
        tracker._end_abandoned()
        assert [tracker._client.get_run(run).info.status for run in (lost, lives)] == ["KILLED", "RUNNING"]
    assert tracker._client.get_run(lives).info.status == "FINISHED"
