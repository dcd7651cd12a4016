"""The functions behind every door: the command line calls these by the same names, with the same arguments.

Heavy libraries are imported inside the functions that need them, so that asking for a prediction stays quick.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peakcast.answers import answer, full_answer
from peakcast.batch import predict_batch
from peakcast.dialects.recognise import Beside, from_arguments
from peakcast.errors import CalibrationError, CatalogError, RecordError, SpecError, near_misses
from peakcast.places import calibration_folder, checkout_folder, explained, tracker
from peakcast.questions import Rank, question, translation_of

if TYPE_CHECKING:
    from peakcast.catalog import Device
    from peakcast.collectors.runner import Summary
    from peakcast.dialects.translation import Translation
    from peakcast.explanation import Explanation
    from peakcast.installation import Installation
    from peakcast.models.agreement import Agreement
    from peakcast.models.calibration import Calibration
    from peakcast.models.checking import Check
    from peakcast.models.evaluation import Evaluation
    from peakcast.prediction import Answer
    from peakcast.records import Measurement
    from peakcast.searching.found import Found, Largest
    from peakcast.spec import TrainingJob
    from peakcast.tracking import Tracker

__all__ = [
    "Checked",
    "Fitted",
    "answer",
    "check",
    "collect",
    "doctor",
    "evaluate",
    "explain",
    "fit",
    "import_published",
    "megatron",
    "predict",
    "predict_batch",
    "read",
    "report",
    "reproduce",
    "search",
    "tracker",
    "verify",
    "web",
]

SELECTIONS = ("grid", "informative")
UNNAMED_GPU = "A100-80GB"
"""What cells are compared on when the GPU type is not named: only their order depends on it."""

Progress = Callable[[str], None]
"""Told what is being worked on, in a few words."""


def predict(
    job: object,
    gpu: str | Device,
    rank: Rank = None,
    calibration: Calibration | str | Path | None = None,
    *,
    all_ranks: bool = False,
) -> Answer:
    """The four peaks of one rank of `job` on `gpu`, in bytes, with error bars, and whether it fits.

    `job`: a `TrainingJob`, its mapping, the path of a job file, or the catalog name of an architecture (every default then
    holds); a mapping `{"megatron": ...}` or `{"huggingface": ...}` is translated first, and so is a configuration of
    another project (its file, text or mapping; `read` takes more beside it).
    `rank`: a number, "last", or "worst" (None means the same). `calibration`: one, or the path of one; None takes the
    shipped one of the GPU type, else its nearest relative's. The answer also says which GPU types would fit, what to try
    first and what is not modelled; `all_ranks` adds the peaks of every distinct rank.
    Raises: SpecError, CatalogError or CalibrationError naming the parameter, the value, the rule and the way out.
    """
    return full_answer(question(job, gpu, rank), calibration, all_ranks=all_ranks)


def read(
    job: object,
    companions: Sequence[str | Path] = (),
    num_gpus: int | None = None,
    model: str | None = None,
    dialect: str | None = None,
) -> Translation:
    """The job that a configuration of another project describes, with what reading it took for granted; `predict` takes it.

    `job`: all that `predict` takes, the path of a configuration or launch script, its text, or its mapping; what it is, its
    keys tell (or `dialect`, a name of `dialects.recognise.DIALECTS`). `companions`: other files that belong to it;
    `num_gpus`: of the whole run; `model`: the network instead of the one named.
    Raises: SpecError or CatalogError naming the parameter, the value, the rule and the way out.
    """
    return translation_of(job, Beside(files=tuple(companions), num_gpus=num_gpus, model=model, dialect=dialect))


def megatron(
    arguments: Sequence[str],
    gpu: str | Device,
    num_gpus: int | None = None,
    rank: Rank = None,
    calibration: Calibration | str | Path | None = None,
    env: Mapping[str, str] | None = None,
) -> Answer:
    """`predict` for a Megatron-LM command line: `arguments` are what stands after `pretrain_gpt.py`, `env` its environment.

    Raises: SpecError, CatalogError or CalibrationError naming the flag, its value, the rule and the way out.
    """
    return predict(from_arguments(arguments, env or {}, num_gpus), gpu, rank, calibration)


def explain(
    job: object = None,
    gpu: str | Device | None = None,
    rank: Rank = None,
    *,
    against: object = None,
    trace: bool = False,
    module: str | None = None,
    picture: Path | None = None,
    snapshot: Path | None = None,
) -> Explanation:
    """Why one rank of `job` needs what it needs: the peak's reason, the per-layer table, communication, advice by bytes.

    `job`, `rank` and `gpu` as in `predict`; without `gpu`, what kernels and libraries allocate is left out. `against`:
    another job to compare with. `trace`: run the real library on fake tensors instead of asking the ledger; `module`: trace
    "FILE.py:FUNCTION" instead of a job, whose function returns (model, step). `picture` (.png, .svg) and `snapshot` (a
    pickle for PyTorch's memory viewer) are files to write.
    Raises: SpecError, CatalogError, CollectorError or RecordError.
    """
    from peakcast.explaining.door import explanation, write

    found = explanation(job, gpu, rank, against=against, trace=trace, module=module)
    return write(found, picture, snapshot)


def doctor() -> Installation:
    """What is installed here, which GPUs and calibrations are found, and what of peakcast works with them."""
    from peakcast.doctor import doctor as look

    return look()


# -- calibration and accuracy ---------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """A calibration and the file it was written to."""

    gpu: str
    calibration: Calibration
    path: Path
    changed: bool
    """Whether the file differs from what stood there before."""
    version: int = 0
    """Of the registered model, 0 where nothing was registered."""
    promoted: bool = True
    """Whether the GPU type's alias in the registry stands for this version."""
    comparison: str = ""
    """What the comparison with the registered calibration before says; "" where there was none."""


def fit(
    gpu: str | None = None,
    *,
    datasets: Path | None = None,
    output: Path | None = None,
    tracker: Tracker | None = None,
    progress: Progress | None = None,
) -> list[Fitted]:
    """Fit and write the calibration of `gpu` (None: of every GPU type that has rows) from the tables in `datasets`.

    Written to `output`/<gpu>.json, by default where `predict` finds it. Equal rows leave a file as it is, with its date.
    `tracker` registers each, and moves the GPU type's alias to it unless it is worse on unseen architectures than the one
    that the alias stood for.
    Raises: RecordError, CatalogError or CalibrationError.
    """
    from peakcast.models.calibration import calibrations
    from peakcast.models.fit import fit_prepared
    from peakcast.models.promotion import compare
    from peakcast.models.samples import prepare

    rows = _rows(datasets)
    prepared = prepare(rows)
    folder = Path(output) if output is not None else calibration_folder()
    fitted = []
    for name in _gpu_types(rows, gpu):
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
    """How accurate the predictor is on architectures, layouts and GPU types that it was not fitted on (DESIGN section 6).

    `gpu` asks that this GPU type has rows; every row takes part all the same, since GPU types learn from each other.
    `new_hardware` adds how the error on each GPU type falls with rows of its own; `calibrations` are kept beside what is
    tracked.
    """
    from peakcast.models.evaluation import SPLITS
    from peakcast.models.evaluation import evaluate as evaluate_rows

    rows = _rows(datasets)
    _gpu_types(rows, gpu)
    if progress:
        progress(f"evaluating {len(rows):,} rows, each predicted without its group")
    evaluation = evaluate_rows(rows, splits=tuple(splits or SPLITS), new_hardware=new_hardware)
    if tracker:
        from peakcast.reports.plots import figures

        tracker.log_evaluation(evaluation, calibrations=calibrations, figures=figures(evaluation))
    return evaluation


@dataclass(frozen=True, kw_only=True)
class Checked:
    """What measurements say about the calibrations that answer them, and the rows that say nothing, by reason."""

    checks: tuple[Check, ...]
    left_out: dict[str, int]


def check(
    against: Path, gpu: str | None = None, *, calibration: Calibration | str | Path | None = None
) -> Checked:
    """Whether the calibrations still hold on the measurements in `against` (a table or a shard), of `gpu` when given.

    `calibration`: one, or the path of one, to be checked instead of the one that `predict` takes for each GPU type.
    Raises: RecordError when the file is no table of measurements or has no row that counts.
    """
    from peakcast.models.calibration import calibration_for, load_calibration
    from peakcast.models.checking import check as check_samples
    from peakcast.models.samples import prepare
    from peakcast.prediction import QUANTITIES
    from peakcast.store import read_measurements

    rows = read_measurements(Path(against))
    if gpu is not None:
        rows = [row for row in rows if row.gpu == _gpu_types(rows, gpu)[0]]
    prepared = prepare(rows)
    if not prepared.samples:
        reasons = "; ".join(f"{count} × {reason}" for reason, count in prepared.left_out.items()) or "it is empty"
        raise RecordError(f"{against} has no row that counts ({reasons}); measure some with `peakcast collect`.")
    fixed = load_calibration(Path(calibration)) if isinstance(calibration, (str, Path)) else calibration
    checks = check_samples(prepared.samples, lambda sample: fixed or calibration_for(sample.device)[0], QUANTITIES)
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
    """
    from peakcast.reports.render import write_index, write_report

    evaluation = evaluation or evaluate(gpu, datasets=datasets, new_hardware=True, progress=progress)
    folder = Path(output) if output is not None else checkout_folder("reports")
    names = sorted({name for table in evaluation.tables for name in table.by_gpu})
    written: list[Path] = []
    with explained(folder):
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
    """Fit every GPU type, evaluate on what was held out, write all reports: everything published, from the rows.

    With `output`, calibrations go to `output`/calibration and reports to `output`/reports, and nothing else is touched.
    """
    places = {"output": output / "calibration"} if output else {}
    fitted = fit(None, datasets=datasets, tracker=tracker, progress=progress, **places)
    calibrations = [item.calibration for item in fitted]
    evaluation = evaluate(
        None, datasets=datasets, new_hardware=True, calibrations=calibrations, tracker=tracker, progress=progress
    )
    reports = output / "reports" if output else None
    return fitted, evaluation, report(None, output=reports, evaluation=evaluation, progress=progress)


def collect(
    grid: str | Path | Iterable[TrainingJob],
    shard: Path,
    *,
    budget_minutes: float | None = None,
    trace: bool = False,
    timeout_seconds: float = 600,
    gpu: str | None = None,
    processes: int | None = None,
    select: str = "grid",
    engine: str = "local",
    engine_options: Mapping[str, Any] | None = None,
    history: bool = False,
    ranks: str = "auto",
    repeats: int = 1,
    plot: Path | None = None,
    progress: Progress | None = None,
) -> Summary:
    """Measure the cells of `grid` that `shard` does not have yet, each in a process of its own. Returns a summary.

    `trace` needs no GPU. `select`: "grid" takes cells in the grid's order, "informative" first those that tell most about
    the others, given what the tables in `datasets/` and `shard` have. `history` keeps each run's timelines beside the
    shard. `ranks`: "auto" runs a job of several ranks with all of them where there are GPUs enough. `repeats`: each cell
    so many times, for the noise. `plot`: a picture (.png or .svg) of measured against predicted, drawn again as rows come.
    See `peakcast.collectors.runner.collect`.
    """
    from peakcast.collected import Collected, telling_time
    from peakcast.collectors.runner import collect as run

    collected = Collected(plot)
    summary = run(
        _selected(grid, shard, gpu, select),
        shard,
        budget_minutes=budget_minutes,
        trace=trace,
        timeout_seconds=timeout_seconds,
        gpu=gpu,
        processes=processes,
        engine=engine,
        engine_options=engine_options,
        history=history,
        ranks=ranks,
        repeats=repeats,
        progress=telling_time(progress) if progress else None,
        on_row=collected.add,
    )
    collected.finish()
    summary.errors = collected.table()
    return summary


def _selected(
    grid: str | Path | Iterable[TrainingJob], shard: Path, gpu: str | None, select: str
) -> str | Path | Iterable[TrainingJob]:
    if select not in SELECTIONS:
        raise SpecError(f"select={select!r} must be one of {', '.join(SELECTIONS)}.", parameter="select", value=select)
    if select == "grid":
        return grid
    from peakcast import catalog
    from peakcast.collectors.grid import load_grid
    from peakcast.models.samples import prepare
    from peakcast.models.selection import most_informative, point, point_of
    from peakcast.store import load, read_shard

    jobs = load_grid(grid) if isinstance(grid, (str, Path)) else list(grid)
    rows = [*load(None), *(read_shard(shard)[0] if shard.exists() else ())]
    device = catalog.gpu(gpu or UNNAMED_GPU)
    measured = [point_of(sample) for sample in prepare(rows).samples]
    return [jobs[index] for index in most_informative([point(job, device) for job in jobs], measured)]


def verify(
    grid: str | Path,
    shard: Path,
    *,
    output: Path | None = None,
    processes: int | None = None,
    progress: Progress | None = None,
) -> list[Agreement]:
    """Trace the cells of `grid` that `shard` does not have yet, and lay the ledger beside every trace, in the grid's order.

    `output`: a folder for ledger.md, a page with every cell. Needs torch and the stacks of the grid, but no GPU.
    Raises: CollectorError for a bad grid, RecordError when a file cannot be written.
    """
    from peakcast.collected import telling_time
    from peakcast.collectors.grid import load_grid
    from peakcast.collectors.runner import cell_identity, ranks_to_trace
    from peakcast.collectors.runner import collect as run
    from peakcast.models.agreement import agreements
    from peakcast.store import read_shard

    jobs = load_grid(grid)
    run(jobs, shard, trace=True, processes=processes, progress=telling_time(progress) if progress else None)
    rows = {cell_identity(row.job, row.rank): row for row in read_shard(shard)[0] if row.provenance == "traced"}
    names = (cell_identity(job, rank) for job in jobs for rank in ranks_to_trace(job))
    cells = agreements(rows[name] for name in names if name in rows)
    if output is not None:
        from peakcast.durable import replace_file
        from peakcast.reports.agreement import agreement_markdown

        replace_file(output / "ledger.md", agreement_markdown(cells, Path(grid).stem).encode())
    return cells


def search(
    job: object,
    gpu: str | Device,
    *,
    num_gpus: int | None = None,
    global_batch_size: int | None = None,
    find: str = "plans",
    top: int = 20,
    gpus_per_node: int = 8,
    processes: int = 1,
    progress: Progress | None = None,
) -> Found | Largest:
    """Which layouts, batches, checkpointing, sharding and offloading let `job` fit on `num_gpus` of `gpu`, the best first.

    `find`: "plans", or an inverse question: the largest "micro_batch_size" or "sequence_length", the fewest "num_gpus", the
    biggest "model" of the catalog. `job` as in `predict`; what it says of GPUs and batch stands where no argument does.
    Raises: SpecError or CatalogError naming the parameter, the value, the rule and the way out.
    """
    from peakcast import catalog
    from peakcast.searching.door import ask

    device = catalog.gpu(gpu) if isinstance(gpu, str) else gpu
    asked = translation_of(job).job
    options = {"top": top, "gpus_per_node": gpus_per_node, "processes": processes, "progress": progress}
    return ask(asked, device, find, num_gpus, global_batch_size, options)


def web(host: str = "127.0.0.1", port: int = 7860, *, progress: Progress | None = None) -> None:
    """Serve the web page until interrupted, with the accuracy reports beside it where this is a checkout that has them;
    `progress` is told the address.

    Raises: SpecError when Gradio is not installed or the port cannot be had.
    """
    try:
        from peakcast.web.server import reports_folder, serve
    except ImportError as error:
        raise SpecError(
            f"the web page needs a package that is not installed ({error}); install it with: pip install 'peakcast[web]'."
        ) from error
    serve(host, port, reports_folder(), progress or print)


def import_published(sources: Path | None = None, output: Path | None = None) -> dict[str, int]:
    """Write the tables of what others published from the files in `sources` to `output`; rows by GPU type.

    Raises: RecordError when a source is missing or damaged, or `output` cannot be written.
    """
    from collections import Counter

    from peakcast.collectors.published.__main__ import import_published as run
    from peakcast.store import SOURCES_FOLDER, datasets_folder

    published = datasets_folder() / "published"
    rows = run(sources or published / SOURCES_FOLDER, output or published)
    return dict(sorted(Counter(row.gpu for row in rows).items()))


# -- rows and files ------------------------------------------------------------------------------------------------------


def _rows(datasets: Path | None) -> list[Measurement]:
    from peakcast.store import load

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
    """Write `calibration` unless the file at `path` says the same but for its date; which one stands, and if it changed."""
    from peakcast.models.calibration import load_calibration

    if path.is_file():
        try:
            before = load_calibration(path)
        except CalibrationError:
            before = None
        if before is not None and replace(calibration, created=before.created).to_bytes() == path.read_bytes():
            return before, False
    with explained(path):
        calibration.save(path)
    return calibration, True
