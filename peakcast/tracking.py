"""MLflow behind one adapter: evaluations as runs, calibrations as versions of one registered model.

The only module that imports mlflow, and only when a `Tracker` is made. It works through `MlflowClient` with an explicit
address, so it neither reads nor changes MLflow's global active run.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
import time
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peakcast.prediction import QUANTITIES
from peakcast.spec import canonical_json

if TYPE_CHECKING:
    from peakcast.models.calibration import Calibration
    from peakcast.models.evaluation import Evaluation, Table

MODEL_NAME = "peakcast"
"""The registered model; each GPU type is an alias of one of its versions."""
TARGET = 0.01
"""The accuracy aimed at: an absolute error of 1 %."""
_MODEL_CODE = """\
import mlflow

from peakcast.tracking import served_model

mlflow.models.set_model(served_model())
"""
"""What MLflow runs to load the model: code from this package, and nothing pickled."""


class Tracker:
    """Writes to one MLflow store.

    `folder` keeps a SQLite database `mlflow.db` and the folder `artifacts`; `uri` is the address of another
    store or of a server, and then `folder` may be None.
    """

    def __init__(self, folder: Path | None = None, *, uri: str | None = None, experiment: str = "peakcast") -> None:
        if folder is None and uri is None:
            raise ValueError("Tracker needs a folder or a uri; give the folder that keeps the database.")
        self.folder = folder
        self.uri = uri or f"sqlite:///{Path(folder or '.').resolve() / 'mlflow.db'}"
        self.experiment = experiment
        client = _mlflow().MlflowClient
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        self._client = client(tracking_uri=self.uri, registry_uri=self.uri)

    def log_evaluation(
        self,
        evaluation: Evaluation,
        *,
        calibrations: Sequence[Calibration] = (),
        parameters: Mapping[str, object] | None = None,
        figures: Mapping[str, Any] | None = None,
        name: str = "evaluation",
    ) -> str:
        """One parent run with parameters, the data set's digest, headline metrics, figures (file name → matplotlib figure)
        and the whole evaluation as JSON; one child run per quantity with the metrics of every split. `calibrations` are
        registered. Returns the parent's run id.
        """
        experiment = self._experiment_id()
        run = self._client.create_run(experiment, run_name=name)
        run_id = str(run.info.run_id)
        try:
            self._log_parent(run_id, evaluation, parameters or {}, figures or {})
            for quantity in QUANTITIES:
                tables = [table for table in evaluation.tables if table.quantity == quantity]
                if tables:
                    self._log_child(experiment, run_id, quantity, tables)
            for calibration in calibrations:
                self.log_calibration(calibration, run_id=run_id)
        except BaseException:
            self._client.set_terminated(run_id, status="FAILED")
            raise
        self._client.set_terminated(run_id)
        return run_id

    def log_calibration(self, calibration: Calibration, *, run_id: str | None = None) -> int:
        """Register `calibration` as a new version of the model, with its GPU type's slug as alias. Returns the version.

        `run_id` is the run that keeps the artefacts; without one a run is made for it.
        """
        own_run = run_id is None
        if run_id is None:
            run = self._client.create_run(self._experiment_id(), run_name=f"calibration {calibration.gpu}")
            run_id = str(run.info.run_id)
        place = f"models/{slug(calibration.gpu)}"
        with tempfile.TemporaryDirectory() as scratch:
            folder = _save_model(Path(scratch), calibration)
            self._client.log_artifacts(run_id, str(folder), place)
        artefacts = self._client.get_run(run_id).info.artifact_uri
        self._make_registered_model()
        version = self._client.create_model_version(
            MODEL_NAME,
            source=f"{artefacts}/{place}",
            run_id=run_id,
            tags={"gpu": calibration.gpu, "rows_digest": calibration.rows_digest, "created": calibration.created},
            description=f"peakcast's calibration for {calibration.gpu}",
        )
        self._client.set_registered_model_alias(MODEL_NAME, slug(calibration.gpu), version.version)
        if own_run:
            self._client.set_terminated(run_id)
        return int(version.version)

    def load(self, gpu: str) -> Any:
        """The registered model of a GPU type as a pyfunc: `predict` takes a table with a text column `job` (a job file's
        mapping as JSON) and returns one row of byte counts per job."""
        version = self._client.get_model_version_by_alias(MODEL_NAME, slug(gpu))
        uri = self._client.get_model_version_download_uri(MODEL_NAME, version.version)
        return _mlflow().pyfunc.load_model(uri)

    # -- parts of a run -----------------------------------------------------------------------------------------------

    def _experiment_id(self) -> str:
        found = self._client.get_experiment_by_name(self.experiment)
        if found is not None:
            return str(found.experiment_id)
        artefacts = (self.folder / "artifacts").resolve().as_uri() if self.folder is not None else None
        return str(self._client.create_experiment(self.experiment, artifact_location=artefacts))

    def _log_parent(
        self, run_id: str, evaluation: Evaluation, parameters: Mapping[str, object], figures: Mapping[str, Any]
    ) -> None:
        entities = _mlflow().entities
        told = {
            "num_rows": evaluation.num_rows,
            "num_configurations": evaluation.num_configurations,
            "rows_digest": evaluation.rows_digest,
            **{f"versions.{package}": ", ".join(seen) for package, seen in evaluation.versions.items()},
            **parameters,
        }
        headline: dict[str, float] = {"rows_left_out": float(sum(evaluation.left_out.values()))}
        for table in evaluation.tables:
            if table.held_out == "architecture":
                headline.update({f"{table.quantity}.{name}": value for name, value in metrics(table).items()})
        self._log_batch(run_id, headline, told)
        dataset = entities.Dataset(
            name="datasets",
            digest=evaluation.rows_digest[:32],
            source_type="local",
            source=json.dumps({"uri": "datasets/"}),
            profile=json.dumps({"num_rows": evaluation.num_rows}),
        )
        tags = [entities.InputTag(key="mlflow.data.context", value="evaluation")]
        self._client.log_inputs(run_id, [entities.DatasetInput(dataset=dataset, tags=tags)])
        self._client.log_text(run_id, canonical_json(evaluation.to_mapping()), "evaluation.json")
        for file_name, figure in figures.items():
            self._client.log_figure(run_id, figure, f"figures/{file_name}")

    def _log_child(self, experiment: str, parent: str, quantity: str, tables: Sequence[Table]) -> None:
        run = self._client.create_run(experiment, run_name=quantity, tags={"mlflow.parentRunId": parent})
        values = {f"{table.held_out}.{name}": value for table in tables for name, value in metrics(table).items()}
        for table in tables:
            values |= {f"{table.held_out}.coverage.layout.{_safe(k)}": v.coverage for k, v in table.by_layout.items()}
        self._log_batch(run.info.run_id, values, {"quantity": quantity})
        self._client.set_terminated(run.info.run_id)

    def _log_batch(self, run_id: str, values: Mapping[str, float], told: Mapping[str, object]) -> None:
        entities = _mlflow().entities
        now = int(time.time() * 1000)
        self._client.log_batch(
            run_id,
            metrics=[entities.Metric(key, value, now, 0) for key, value in values.items()],
            params=[entities.Param(key, str(value)[:6000]) for key, value in told.items()],
        )

    def _make_registered_model(self) -> None:
        if not self._client.search_registered_models(filter_string=f"name = '{MODEL_NAME}'"):
            self._client.create_registered_model(MODEL_NAME, description="Peak GPU memory; one alias per GPU type.")


def metrics(table: Table) -> dict[str, float]:
    """A table's headline as flat metrics; errors and shares are fractions, the target is an error of TARGET."""
    summary = table.overall
    return {
        "median_error": summary.errors.median,
        "mean_error": summary.errors.mean,
        "p95_error": summary.errors.p95,
        "worst_error": summary.errors.worst,
        "under_predicted": summary.errors.under_predicted,
        "share_within_target": summary.errors.within_one_percent,
        "p95_error_over_target": summary.errors.p95 / TARGET,
        "coverage_90": summary.coverage,
        "upper_coverage_95": summary.upper_coverage,
        "median_half_width": summary.median_half_width,
        "baseline.median_error": summary.baseline_errors.median,
        "baseline.p95_error": summary.baseline_errors.p95,
        "num_configurations": summary.num_configurations,
        "num_architectures": float(summary.num_architectures),
    }


def slug(gpu: str) -> str:
    """The alias of a GPU type: letters, digits, `-` and `_` only, as MLflow asks."""
    return re.sub(r"[^A-Za-z0-9_-]+", "-", gpu).strip("-")


def served_model() -> Any:
    """The pyfunc model that MLflow serves: jobs in, byte counts out, with the calibration that lies beside it."""
    python_model: Any = _mlflow().pyfunc.PythonModel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it wants type hints to check data by; the signature does that

        class PeakMemory(python_model):  # type: ignore[misc]
            def load_context(self, context: Any) -> None:
                from peakcast.models.calibration import load_calibration

                self.calibration = load_calibration(Path(context.artifacts["calibration"]))

            def predict(self, context, model_input, params=None):  # type: ignore[no-untyped-def]
                import pandas  # type: ignore[import-untyped,unused-ignore]

                return pandas.DataFrame([answer(job, self.calibration) for job in model_input["job"]])

    return PeakMemory()


def answer(job: str, calibration: Calibration) -> dict[str, Any]:
    """One row of the served model: `fits` and, for each quantity, `<quantity>.point`, `.lower`, `.upper`, `.upper_95`."""
    from peakcast import catalog
    from peakcast.dialects.job_file import job_from_mapping
    from peakcast.models.predict import predict

    prediction = predict(job_from_mapping(json.loads(job)), catalog.gpu(calibration.gpu), calibration=calibration)
    row: dict[str, Any] = {"fits": prediction.fits}
    for quantity in QUANTITIES:
        interval = getattr(prediction, quantity)
        row |= {f"{quantity}.{name}": value for name, value in interval.to_mapping().items()}
    return row


def _save_model(scratch: Path, calibration: Calibration) -> Path:
    """The model as MLflow keeps it, in a new folder under `scratch`."""
    mlflow = _mlflow()
    types = mlflow.types
    code, data, folder = scratch / "model.py", scratch / "calibration.json", scratch / "model"
    code.write_text(_MODEL_CODE, encoding="utf-8")
    calibration.save(data)
    parts = ("baseline", "point", "lower", "upper", "upper_95")
    names = [f"{quantity}.{part}" for quantity in QUANTITIES for part in parts]
    outputs = [types.ColSpec("string", "fits"), *(types.ColSpec("long", name) for name in names)]
    signature = mlflow.models.ModelSignature(
        inputs=types.Schema([types.ColSpec("string", "job")]), outputs=types.Schema(outputs)
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it asks for an input example and type hints, which the signature makes needless
        mlflow.pyfunc.save_model(
            path=str(folder),
            python_model=str(code),
            artifacts={"calibration": str(data)},
            pip_requirements=["peakcast"],
            signature=signature,
        )
    return folder


def _safe(name: str) -> str:
    """A metric name part: MLflow takes letters, digits, `_-. :/` only."""
    return re.sub(r"[^\w\-. :/]", "_", name)


def _mlflow() -> Any:
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns about type hints of its own
        import mlflow
        import mlflow.models
        import mlflow.pyfunc
        import mlflow.pyfunc.utils.data_validation as validation
        import mlflow.types

    # it resets warning filters and then asks for type hints to check data by each time our model is loaded; the
    # signature does that
    validation.color_warning = lambda *_, **__: None
    return mlflow
