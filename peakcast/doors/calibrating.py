"""Calibrations and their accuracy: the implementation of `fit`, `evaluate`, `check`, `report` and `reproduce`.

Heavy libraries are imported inside the functions that need them, as in all such modules.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from peakcast.core.errors import CalibrationError, CatalogError, RecordError, near_misses
from peakcast.core.extras import need
from peakcast.doors.destinations import calibration_folder, checkout_folder, output_errors

if TYPE_CHECKING:
    from peakcast.measurements.records import Measurement
    from peakcast.models.calibration.calibration import Calibration
    from peakcast.models.calibration.samples import Samples
    from peakcast.models.evaluation.checking import Check
    from peakcast.models.evaluation.evaluation import Evaluation
    from peakcast.searching.search_settings import Progress
    from peakcast.tracking import Tracker

FITTING, DRAWING = ("sklearn", "scipy"), ("matplotlib", "jinja2")
"""FITTING are the packages that a fit needs, DRAWING those that write reports."""


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """A calibration and the file it was written to."""

    gpu: str
    calibration: Calibration
    path: Path
    changed: bool
    """Whether the file was changed."""
    version: int = 0
    """Version of the registered model; 0 if none was registered."""
    promoted: bool = True
    """Whether the GPU type's alias in the registry now stands for this version."""
    comparison: str = ""
    """Result of the comparison with the calibration that was registered before, in words; "" if there was none."""


def fit(
    gpu: str | None = None,
    *,
    datasets: Path | None = None,
    output: Path | None = None,
    tracker: Tracker | None = None,
    progress: Progress | None = None,
) -> list[Fitted]:
    """Fit and write the calibration of `gpu` (None: of every GPU type that has rows) from the tables in `datasets`. Returns
    one `Fitted` for each.

    Written to `output`/<gpu>.json, by default where `predict` looks. If the rows are the same as before, the file keeps its
    content and its date. `tracker` registers each calibration, and moves the GPU type's alias to it unless it is worse on
    unseen architectures than the one that has the alias.
    Raises: MissingPackageError, RecordError, CatalogError or CalibrationError.
    """
    need("fitting a calibration", *FITTING)
    from peakcast.models.calibration.samples import prepare

    rows = _rows(datasets, gpu)
    names = _gpu_types(rows, gpu)
    folder = _made(Path(output) if output is not None else calibration_folder())
    return _fitted(prepare(rows), names, folder, tracker, progress)


def _fitted(
    prepared: Samples, names: Iterable[str], folder: Path, tracker: Tracker | None, progress: Progress | None
) -> list[Fitted]:
    """Fit each GPU type in `names` from the prepared rows, and write the calibrations to `folder`."""
    from peakcast.models.calibration.calibration import calibrations
    from peakcast.models.calibration.fit import fit_prepared
    from peakcast.models.evaluation.promotion import compare

    fitted = []
    for name in names:
        if progress:
            progress(f"fitting {name}")
        calibration = fit_prepared(prepared, name, created=datetime.datetime.now(datetime.UTC).date().isoformat())
        calibration, changed = _save(calibration, folder / f"{name}.json")
        done = Fitted(gpu=name, calibration=calibration, path=folder / f"{name}.json", changed=changed)
        if tracker:
            before = tracker.champion(name)
            comparison = compare(calibration, before, prepared.samples) if before else None
            done = replace(
                done,
                version=tracker.log_calibration(calibration, comparison=comparison),
                promoted=comparison is None or comparison.promoted,
                comparison=comparison.sentence if comparison else "",
            )
        fitted.append(done)
    calibrations.cache_clear()
    return fitted


def evaluate(
    gpu: str | None = None,
    *,
    datasets: Path | None = None,
    splits: Sequence[str] | None = None,
    new_hardware: bool = False,
    calibrations: Sequence[Calibration] = (),
    tracker: Tracker | None = None,
    progress: Progress | None = None,
) -> Evaluation:
    """How accurate the predictor is on architectures, layouts and GPU types that it was not fitted on.

    `gpu` must have rows; every row is used all the same, since GPU types learn from each other. `new_hardware` also
    computes how the error on each GPU type falls with rows of its own; `calibrations` are stored with what is tracked.
    Raises: MissingPackageError, RecordError or CatalogError.
    """
    need("judging the predictor", *FITTING, *(DRAWING if tracker else ()))
    from peakcast.models.calibration.samples import prepare
    from peakcast.models.evaluation.evaluation import SPLITS

    rows = _rows(datasets, gpu)
    _gpu_types(rows, gpu)
    if progress:
        progress(f"evaluating {len(rows):,} rows, each predicted without its group")
    return _evaluated(prepare(rows), tuple(splits or SPLITS), calibrations, tracker, new_hardware=new_hardware)


def _evaluated(
    prepared: Samples,
    splits: Sequence[str],
    calibrations: Sequence[Calibration],
    tracker: Tracker | None,
    *,
    new_hardware: bool,
) -> Evaluation:
    from peakcast.models.evaluation.evaluation import evaluate_prepared

    evaluation = evaluate_prepared(prepared, splits=splits, new_hardware=new_hardware)
    if tracker:
        from peakcast.reports.plots import figures

        tracker.log_evaluation(evaluation, calibrations=calibrations, figures=figures(evaluation))
    return evaluation


@dataclass(frozen=True, kw_only=True)
class Checked:
    """The result of testing calibrations on measurements: what the measurements say, and the rows that could not be used,
    by reason."""

    checks: tuple[Check, ...]
    left_out: dict[str, int]


def check(against: Path, gpu: str | None = None, *, calibration: Calibration | str | Path | None = None) -> Checked:
    """Whether the calibrations still hold on the measurements in `against` (a table or a shard), of `gpu` if given.

    `calibration`: a calibration or its path, tested instead of the one that `predict` uses for each GPU type.
    Raises: RecordError when the file is not a table of measurements or has no row that counts.
    """
    from peakcast.answers.prediction import QUANTITIES
    from peakcast.measurements.store import read_measurements
    from peakcast.models.calibration.calibration import calibration_for, load_calibration
    from peakcast.models.calibration.samples import prepare
    from peakcast.models.evaluation.checking import check as check_samples

    rows = read_measurements(Path(against))
    if gpu is not None:
        (name,) = _gpu_types(rows, gpu)
        rows = [row for row in rows if row.gpu == name]
    prepared = prepare(rows)
    if not prepared.samples:
        reasons = "; ".join(f"{count} × {reason}" for reason, count in prepared.left_out.items()) or "it is empty"
        raise RecordError(f"{against} has no row that counts ({reasons}); measure some with `peakcast collect`.")
    fixed = load_calibration(Path(calibration)) if isinstance(calibration, (str, Path)) else calibration
    checks = check_samples(prepared.samples, lambda sample: fixed or calibration_for(sample.device), QUANTITIES)
    return Checked(checks=checks, left_out=prepared.left_out)


def report(
    gpu: str | None = None,
    *,
    datasets: Path | None = None,
    output: Path | None = None,
    evaluation: Evaluation | None = None,
    progress: Progress | None = None,
) -> list[Path]:
    """Write the accuracy report of `gpu` (None: of every GPU type that has rows), and the page that lists them all.

    HTML, Markdown and CSV in `output`/<gpu>/, by default in the checkout's `reports/`. The same rows give the same bytes.
    Raises: MissingPackageError, RecordError or CatalogError.
    """
    need("an accuracy report", *(() if evaluation else FITTING), *DRAWING)
    from peakcast.reports.render import write_index, write_report

    folder = _made(Path(output) if output is not None else checkout_folder("reports"))
    evaluation = evaluation or evaluate(gpu, datasets=datasets, new_hardware=True, progress=progress)
    names = sorted({name for table in evaluation.tables for name in table.by_gpu})
    written: list[Path] = []
    with output_errors(folder):
        for name in names if gpu is None else [gpu]:
            if progress:
                progress(f"writing the report of {name}")
            written += write_report(evaluation, name, folder)
        written += write_index(evaluation, folder)
    return written


def reproduce(
    *,
    datasets: Path | None = None,
    output: Path | None = None,
    tracker: Tracker | None = None,
    progress: Progress | None = None,
) -> tuple[list[Fitted], Evaluation, list[Path]]:
    """Fit every GPU type, evaluate on what was held out, and write all reports: everything published, from the rows.

    With `output`, calibrations go to `output`/calibration and reports to `output`/reports, and no other file is changed.
    Raises: MissingPackageError, RecordError or CatalogError.
    """
    need("reproducing what is published", *FITTING, *DRAWING)
    from peakcast.models.calibration.samples import prepare
    from peakcast.models.evaluation.evaluation import SPLITS

    rows = _rows(datasets)
    folder = _made(output / "calibration" if output else calibration_folder())
    if progress:
        progress(f"preparing {len(rows):,} rows: the baseline of each")
    prepared = prepare(rows)
    fitted = _fitted(prepared, _gpu_types(rows, None), folder, tracker, progress)
    if progress:
        progress("evaluating, each row predicted without its group")
    evaluation = _evaluated(prepared, tuple(SPLITS), [item.calibration for item in fitted], tracker, new_hardware=True)
    reports = output / "reports" if output else None
    return fitted, evaluation, report(None, output=reports, evaluation=evaluation, progress=progress)


# -- rows and files ------------------------------------------------------------------------------------------------------


def _made(folder: Path) -> Path:
    """`folder`, created now, so that a folder that cannot be written is reported before minutes are spent."""
    with output_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
    return folder


def _rows(datasets: Path | None, gpu: str | None = None) -> list[Measurement]:
    """All rows. That `gpu` is no GPU type is said before thousands of them are read."""
    from peakcast import catalog
    from peakcast.measurements.store import load

    if gpu is not None:
        catalog.gpu(gpu)
    rows = load(datasets)
    if not rows:
        raise RecordError("no table has a row; collect some with `peakcast collect`, or name another folder.")
    return rows


def _gpu_types(rows: Iterable[Measurement], gpu: str | None) -> list[str]:
    known = sorted({row.gpu for row in rows})
    if gpu is None:
        return known
    from peakcast import catalog

    name = catalog.gpu(gpu).name
    if name not in known:
        raise CatalogError(
            f"gpu={gpu!r} has no measured rows{near_misses(gpu, known) or '; measured: ' + ', '.join(known)}",
            parameter="gpu",
            value=gpu,
        )
    return [name]


def _save(calibration: Calibration, path: Path) -> tuple[Calibration, bool]:
    """Write `calibration` unless the file at `path` differs only in its date. Returns the calibration in the file, and
    whether it changed."""
    from peakcast.models.calibration.calibration import load_calibration

    if path.is_file():
        try:
            before = load_calibration(path)
        except CalibrationError:
            before = None
        if before is not None and replace(calibration, created=before.created).to_bytes() == path.read_bytes():
            return before, False
    with output_errors(path):
        calibration.save(path)
    return calibration, True
