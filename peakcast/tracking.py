"""MLflow behind one adapter: evaluations as runs, calibrations as versions of one registered model.

The only module that imports mlflow, and only when a `Tracker` is made. It uses `MlflowClient` with an explicit address, so
it neither reads nor changes MLflow's global active run.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peakcast.answers.prediction import QUANTITIES
from peakcast.core.durable import file_errors, locked
from peakcast.core.errors import CalibrationError, PeakcastError
from peakcast.core.ownership import is_gone, this_process
from peakcast.jobs.spec import canonical_json

if TYPE_CHECKING:
    from peakcast.models.calibration.calibration import Calibration
    from peakcast.models.evaluation.evaluation import Evaluation
    from peakcast.models.evaluation.promotion import CalibrationComparison

MODEL_NAME = "peakcast"
"""The registered model; each GPU type is an alias of one of its versions."""
OWNER = "peakcast.process"
"""Tag of a run with the process that makes it."""
_MODEL_CODE = """\
import mlflow

from peakcast.tracking import served_model

mlflow.models.set_model(served_model())
"""
"""The code that MLflow runs to load the model; it only imports this package, and nothing is pickled."""


class Tracker:
    """Writes to one MLflow store.

    `folder` gets a SQLite database `mlflow.db` and the folder `artifacts`; `uri` is the address of another store or of a
    server, and then `folder` may be None.
    """

    def __init__(self, folder: Path | None = None, *, uri: str | None = None, experiment: str = "peakcast") -> None:
        if folder is None and uri is None:
            raise ValueError("Tracker needs a folder or a uri; give the folder that keeps the database.")
        self.folder = folder
        self.uri = uri or f"sqlite:///{Path(folder or '.').resolve() / 'mlflow.db'}"
        self.experiment = experiment
        client = _mlflow().MlflowClient
        database = Path(self.uri.removeprefix("sqlite:///")).absolute() if self.uri.startswith("sqlite:///") else None
        with _alone(database):  # the first process creates a new database's tables, and no other at the same time
            self._client = client(tracking_uri=self.uri, registry_uri=self.uri)
            if database is not None:
                self._client.search_experiments(max_results=1)

    def log_evaluation(
        self,
        evaluation: Evaluation,
        *,
        calibrations: Sequence[Calibration] = (),
        parameters: Mapping[str, object] | None = None,
        figures: Mapping[str, Any] | None = None,
        name: str = "evaluation",
    ) -> str:
        """One parent run with parameters, the data set's digest and rows, headline metrics, decisions, figures (file name →
        matplotlib figure) and the whole evaluation as JSON. It has a child run per GPU type, with the metrics of every
        split and its calibration of `calibrations` as artefact, and one per fold, with the metrics of the held-out
        architecture. Returns the parent's run id."""
        from peakcast.models.evaluation.tracked import by_fold, by_gpu

        self._end_abandoned()
        with self._running(name) as run_id:
            self._log_parent(run_id, evaluation, parameters or {}, figures or {})
            used = {calibration.gpu: calibration for calibration in calibrations}
            for gpu, values in by_gpu(evaluation).items():
                self._log_child(run_id, gpu, {"gpu": gpu}, values, used.get(gpu))
            for architecture, values in by_fold(evaluation).items():
                self._log_child(run_id, f"without {architecture}", {"held_out": architecture}, values)
        return run_id

    def champion(self, gpu: str) -> Calibration | None:
        """The calibration for which a GPU type's alias stands; None if there is none that this version can read."""
        from peakcast.models.calibration.calibration import load_calibration

        exceptions = _mlflow().exceptions
        try:
            version = self._client.get_model_version_by_alias(MODEL_NAME, slug(gpu))
        except exceptions.MlflowException:  # no such model, or no such alias
            return None
        with tempfile.TemporaryDirectory() as scratch:
            place = f"models/{slug(gpu)}/artifacts/calibration.json"
            try:
                return load_calibration(Path(self._client.download_artifacts(version.run_id, place, scratch)))
            except (CalibrationError, OSError, exceptions.MlflowException):
                return None

    def log_calibration(
        self, calibration: Calibration, *, run_id: str | None = None, comparison: CalibrationComparison | None = None
    ) -> int:
        """Register `calibration` as a new version of the model. Returns the version.

        It gets its GPU type's slug as alias, unless a `comparison` with the calibration in use says that it is worse; the
        comparison is stored as an artefact and in the version's tags. `run_id` is the run that stores the artefacts;
        without it, a run is made.
        """
        if run_id is None:
            self._end_abandoned()
            with self._running(f"calibration {calibration.gpu}") as made:
                return self.log_calibration(calibration, run_id=made, comparison=comparison)
        from peakcast.models.evaluation.tracked import facts_of, num_rows

        self._log_batch(run_id, *facts_of(calibration))
        self._log_dataset(run_id, calibration.rows_digest, num_rows(calibration), "training")
        place = f"models/{slug(calibration.gpu)}"
        with tempfile.TemporaryDirectory() as scratch:
            folder = _save_model(Path(scratch), calibration)
            self._client.log_artifacts(run_id, str(folder), place)
        artefacts = self._client.get_run(run_id).info.artifact_uri
        self._make_registered_model()
        promoted = comparison is None or comparison.promoted
        tags = {"gpu": calibration.gpu, "rows_digest": calibration.rows_digest, "created": calibration.created}
        tags["promoted"] = str(promoted).lower()
        if comparison is not None:
            self._client.log_text(run_id, canonical_json(comparison.to_mapping()), "comparison.json")
            tags["comparison"] = comparison.sentence[:4000]
        version = self._client.create_model_version(
            MODEL_NAME,
            source=f"{artefacts}/{place}",
            run_id=run_id,
            tags=tags,
            description=f"peakcast's calibration for {calibration.gpu}",
        )
        if promoted:
            self._client.set_registered_model_alias(MODEL_NAME, slug(calibration.gpu), version.version)
        return int(version.version)

    def load(self, gpu: str) -> Any:
        """The registered model of a GPU type as a pyfunc: `predict` takes a table with a text column `job` (a job file's
        mapping as JSON) or with the fields of jobs as columns, and returns one row of byte counts per job."""
        version = self._client.get_model_version_by_alias(MODEL_NAME, slug(gpu))
        uri = self._client.get_model_version_download_uri(MODEL_NAME, version.version)
        return _mlflow().pyfunc.load_model(uri)

    # -- parts of a run -----------------------------------------------------------------------------------------------

    def _experiment_id(self) -> str:
        found = self._client.get_experiment_by_name(self.experiment)
        if found is not None:
            return str(found.experiment_id)
        artefacts = (self.folder / "artifacts").resolve().as_uri() if self.folder is not None else None
        with self._perhaps_there():
            return str(self._client.create_experiment(self.experiment, artifact_location=artefacts))
        return self._experiment_id()

    @contextmanager
    def _perhaps_there(self) -> Iterator[None]:
        """A context for making something that another process may have made at the same time; its error is then ignored."""
        try:
            yield
        except _mlflow().exceptions.MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise

    @contextmanager
    def _running(self, name: str, tags: Mapping[str, str] | None = None) -> Iterator[str]:
        """A context of a run, with its id as value. The run ends as finished or failed; if this process is killed within,
        the next process ends it."""
        tags = {OWNER: this_process(), **(tags or {})}
        run_id = str(self._client.create_run(self._experiment_id(), run_name=name, tags=tags).info.run_id)
        try:
            yield run_id
        except BaseException:
            self._client.set_terminated(run_id, status="FAILED")
            raise
        self._client.set_terminated(run_id)

    def _end_abandoned(self) -> None:
        """End runs whose processes were killed; MLflow would show them as running forever."""
        running = self._client.search_runs([self._experiment_id()], "attributes.status = 'RUNNING'", max_results=1000)
        for run in running:
            if is_gone(run.data.tags.get(OWNER, "")):
                self._client.set_terminated(run.info.run_id, status="KILLED")

    def _log_parent(
        self, run_id: str, evaluation: Evaluation, parameters: Mapping[str, object], figures: Mapping[str, Any]
    ) -> None:
        from peakcast.models.evaluation.tracked import TARGET, headline

        told = {
            "num_rows": evaluation.num_rows,
            "num_configurations": evaluation.num_configurations,
            "rows_digest": evaluation.rows_digest,
            "target_error": TARGET,
            **{f"versions.{package}": ", ".join(seen) for package, seen in evaluation.versions.items()},
            **parameters,
        }
        self._log_batch(run_id, headline(evaluation), told)
        self._log_dataset(run_id, evaluation.rows_digest, evaluation.num_rows, "evaluation")
        self._client.log_text(run_id, canonical_json(evaluation.to_mapping()), "evaluation.json")
        for file_name, figure in figures.items():
            self._client.log_figure(run_id, figure, f"figures/{file_name}")

    def _log_dataset(self, run_id: str, digest: str, num_rows: int, context: str) -> None:
        entities = _mlflow().entities
        dataset = entities.Dataset(
            name="datasets",
            digest=digest[:32] or "none",
            source_type="local",
            source=json.dumps({"uri": "datasets/"}),
            profile=json.dumps({"num_rows": num_rows}),
        )
        tags = [entities.InputTag(key="mlflow.data.context", value=context)]
        self._client.log_inputs(run_id, [entities.DatasetInput(dataset=dataset, tags=tags)])

    def _log_child(
        self,
        parent: str,
        name: str,
        told: Mapping[str, str],
        values: Mapping[str, float],
        calibration: Calibration | None = None,
    ) -> None:
        with self._running(name, {"mlflow.parentRunId": parent}) as run_id:
            self._log_batch(run_id, values, told)
            if calibration is not None:
                self._client.log_text(run_id, calibration.to_bytes().decode(), "calibration.json")

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
            with self._perhaps_there():
                self._client.create_registered_model(MODEL_NAME, description="Peak GPU memory; one alias per GPU type.")


@contextmanager
def _alone(database: Path | None) -> Iterator[None]:
    """A context in which no other process of this machine uses the same SQLite file; creates its folder."""
    if database is None:
        yield
        return
    with file_errors(database, "written"):
        database.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(database.with_name(f".{database.name}.lock"), os.O_RDWR | os.O_CREAT, 0o644)
    try:
        with locked(descriptor):
            yield
    finally:
        os.close(descriptor)


def slug(gpu: str) -> str:
    """The alias of a GPU type: only letters, digits, `-` and `_`, as MLflow requires."""
    return re.sub(r"[^A-Za-z0-9_-]+", "-", gpu).strip("-")


def served_model() -> Any:
    """The pyfunc model that MLflow serves: jobs in, byte counts out, with the calibration that is stored beside it."""
    python_model: Any = _mlflow().pyfunc.PythonModel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it asks for type hints to check data; the signature checks it

        class PeakMemory(python_model):  # type: ignore[misc]
            def load_context(self, context: Any) -> None:
                from peakcast.models.calibration.calibration import load_calibration

                self.calibration = load_calibration(Path(context.artifacts["calibration"]))

            def predict(self, context, model_input, params=None):  # type: ignore[no-untyped-def]
                import pandas  # type: ignore[import-untyped,unused-ignore]

                return pandas.DataFrame(answers(model_input, self.calibration))

    _without_stack_traces()
    return PeakMemory()


def answers(table: Any, calibration: Calibration) -> list[dict[str, Any]]:
    """`serving.answer_rows` of the rows of a table. If it is not a table of jobs, the error is MLflow's own, for which its
    server answers HTTP 400 with the reason; a bug here gives 500."""
    from peakcast.models.prediction.serving import answer_rows, rows_of

    exceptions = _mlflow().exceptions
    try:
        return answer_rows(rows_of(table), calibration)
    except PeakcastError as error:
        raise exceptions.MlflowException.invalid_parameter_value(error.message) from error
    except Exception as error:
        raise exceptions.MlflowException(f"this is a bug in peakcast: {type(error).__name__}: {error}") from error


def _without_stack_traces() -> None:
    """Make this process's server answer with reasons only: MLflow adds the place in its code where an error was raised
    (3.17 `exceptions.py` serialize_as_json)."""
    exception: Any = _mlflow().exceptions.MlflowException
    serialize = exception.serialize_as_json

    def told(self: Any) -> str:
        self.json_kwargs.pop("stack_trace", None)
        text: str = serialize(self)
        return text

    exception.serialize_as_json = told


def _save_model(scratch: Path, calibration: Calibration) -> Path:
    """The folder of the model in MLflow's form, new under `scratch`."""
    mlflow = _mlflow()
    code, data, folder = scratch / "model.py", scratch / "calibration.json", scratch / "model"
    code.write_text(_MODEL_CODE, encoding="utf-8")
    calibration.save(data)
    # no schema of inputs: MLflow would drop columns that it does not have, so a misspelt one would silently get its default
    signature = mlflow.models.ModelSignature(outputs=_outputs(mlflow.types))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it asks for an example and type hints; `serving.rows_of` checks inputs
        mlflow.pyfunc.save_model(
            path=str(folder),
            python_model=str(code),
            artifacts={"calibration": str(data)},
            pip_requirements=["peakcast"],
            signature=signature,
        )
    return folder


def _outputs(types: Any) -> Any:
    """The schema of `serving.answer_row`'s result."""
    from peakcast.models.prediction.serving import PREDICTED_PARTS

    schema, text = types.schema, types.DataType.string
    columns = [types.ColSpec(text, "fits")]
    for quantity in QUANTITIES:
        columns += [types.ColSpec("long", f"{quantity}.{part}") for part in PREDICTED_PARTS]
        columns.append(types.ColSpec(text, f"{quantity}.rests_on"))
    finding = schema.Object([schema.Property(name, text) for name in ("code", "parameter", "direction", "sentence")])
    columns += [types.ColSpec(schema.Array(finding), "findings"), types.ColSpec(schema.Array(text), "assumptions")]
    return types.Schema(columns)


def _mlflow() -> Any:
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it warns about type hints of its own
        import mlflow
        import mlflow.exceptions
        import mlflow.models
        import mlflow.pyfunc
        import mlflow.pyfunc.utils.data_validation as validation
        import mlflow.types
        import mlflow.types.schema

    # MLflow resets warning filters and then asks for type hints each time the model is loaded; the signature checks data
    validation.color_warning = lambda *_, **__: None  # type: ignore[attr-defined]
    return mlflow
