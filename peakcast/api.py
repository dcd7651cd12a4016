"""The functions of peakcast. The command line calls them by the same names, with the same arguments.

Heavy libraries are imported inside the functions that need them, so that a prediction starts quickly.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peakcast.catalog import Device
from peakcast.core.extras import need
from peakcast.dialects.common.asked_versions import asked_versions
from peakcast.dialects.megatron_arguments import from_arguments
from peakcast.dialects.translate import ReadOptions
from peakcast.doors.answering import answer, full_answer
from peakcast.doors.batching import predict_batch
from peakcast.doors.calibrating import Checked, Fitted, check, evaluate, fit, report, reproduce
from peakcast.doors.destinations import tracker
from peakcast.doors.dryrunning import dryrun
from peakcast.doors.measuring import collect, collect_constants, import_published, verify
from peakcast.doors.questions import Rank, on_node, question, translation_of

if TYPE_CHECKING:
    from peakcast.answers.explanation import Explanation
    from peakcast.answers.installation import Installation
    from peakcast.answers.prediction import Answer
    from peakcast.dialects.common.translation import Translation
    from peakcast.doors.proposing import Proposed
    from peakcast.doors.recording import Recorded
    from peakcast.doors.replaying import NotReplayed, Replayed
    from peakcast.doors.shipping import Shipment
    from peakcast.jobs.spec import TrainingJob
    from peakcast.models.calibration.calibration import Calibration
    from peakcast.searching.found import Found, Largest
    from peakcast.searching.gpu_types import Offers
    from peakcast.searching.search_settings import Progress

__all__ = [
    "Checked",
    "Fitted",
    "answer",
    "check",
    "collect",
    "collect_constants",
    "doctor",
    "dryrun",
    "evaluate",
    "explain",
    "fit",
    "import_published",
    "megatron",
    "predict",
    "predict_batch",
    "read",
    "record",
    "replay",
    "replay_all",
    "report",
    "reproduce",
    "search",
    "tracker",
    "verify",
    "watch",
    "web",
]


def predict(
    job: object,
    gpu: str | Device,
    rank: Rank = None,
    calibration: Calibration | str | Path | None = None,
    *,
    all_ranks: bool = False,
    host_memory_gib: float | None = None,
    gpus_per_node: int | None = None,
    baseline: str = "auto",
    recipe: str | Path | None = None,
    progress: Progress | None = None,
) -> Answer:
    """The four peaks of one rank of `job` on `gpu`, in bytes, with error bars, and whether it fits.

    `job`: a `TrainingJob`, its mapping, the path of a job file, or the catalog name of an architecture (then with every
    default); a mapping `{"megatron": ...}` or `{"huggingface": ...}`, or a configuration of another project (its file, text
    or mapping), is translated first. `read` takes further files with it. `rank`: a number, "last", or "worst" (None means
    the same). `calibration`: a calibration or its path; None means the shipped one of the GPU type, or of the most similar
    type. The answer also says which GPU types would fit, what to try first and what is not modelled; `all_ranks` adds the
    peaks of every distinct rank. `host_memory_gib`: host memory of a node in GiB, which its `gpus_per_node` (8) ranks
    share; if given, the verdict includes it. `baseline`: "ledger" (the hand-written blocks), "recipe" (recorded from the
    library installed here), "trace" (of the whole step, seconds for each rank), or "auto": the ledger, or a recipe for a
    network of a family that it does not know. `recipe`: the path of a recipe that `dryrun` saved or `record` wrote; `job`
    is then a job with its network (None: the job that was run). `progress` is told what takes long: a recording, a trace.
    Raises: SpecError, CatalogError or CalibrationError naming the parameter, the value, the rule and the way out.
    """
    nodes = {"host_memory_gib": host_memory_gib, "gpus_per_node": gpus_per_node}
    if recipe is None:
        asked = question(job, gpu, rank, **nodes)  # type: ignore[arg-type]
        return full_answer(asked, calibration, all_ranks=all_ranks, baseline=baseline, progress=progress)
    from dataclasses import replace

    from peakcast.doors.recipe_files import read_recipe_file, recipe_from

    kept = read_recipe_file(path := Path(recipe))
    asked = question(kept.job if job is None else job, gpu, rank, **nodes)  # type: ignore[arg-type]
    with recipe_from(kept, path, asked.job) as said:
        found = full_answer(asked, calibration, all_ranks=all_ranks, baseline="recipe")
    return replace(found, assumptions=(said, *found.assumptions))


def read(
    job: object,
    companions: Sequence[str | Path] = (),
    num_gpus: int | None = None,
    model: str | None = None,
    dialect: str | None = None,
    *,
    versions: Mapping[str, Any] | str | None = None,
    container: str | None = None,
    here: bool = False,
) -> Translation:
    """The job that a configuration of another project describes, with the assumptions made in reading it; `predict` accepts
    it.

    `job`: anything that `predict` accepts, or the path of a configuration or launch script, its text, or its mapping. Its
    keys tell which project it belongs to (or `dialect`, a name of `dialects.recognise.DIALECTS`). `companions`: other files
    of the same run; `num_gpus`: of the whole run; `model`: a network to use instead of the named one. `versions`: of
    packages, as a mapping or as a text such as "torch=2.9,transformers=4.45.2"; `container`: the tag of NVIDIA's PyTorch
    image ("26.04") with the versions; `here`: use the versions that are installed here.
    Raises: SpecError or CatalogError naming the parameter, the value, the rule and the way out.
    """
    asked = asked_versions(versions, container, here)
    options = ReadOptions(files=tuple(companions), num_gpus=num_gpus, model=model, dialect=dialect, versions=asked)
    return translation_of(job, options)


def megatron(
    arguments: Sequence[str],
    gpu: str | Device,
    num_gpus: int | None = None,
    rank: Rank = None,
    calibration: Calibration | str | Path | None = None,
    env: Mapping[str, str] | None = None,
    *,
    host_memory_gib: float | None = None,
    gpus_per_node: int | None = None,
    versions: Mapping[str, Any] | str | None = None,
    container: str | None = None,
    here: bool = False,
) -> Answer:
    """`predict` for a Megatron-LM command line: `arguments` are the words after `pretrain_gpt.py`, `env` is its
    environment; `versions`, `container` and `here` as in `read`.

    Raises: SpecError, CatalogError or CalibrationError naming the flag, its value, the rule and the way out.
    """
    asked = from_arguments(arguments, env or {}, num_gpus, asked_versions(versions, container, here))
    return predict(asked, gpu, rank, calibration, host_memory_gib=host_memory_gib, gpus_per_node=gpus_per_node)


def explain(
    job: object = None,
    gpu: str | Device | None = None,
    rank: Rank = None,
    *,
    against: object = None,
    trace: bool = False,
    module: str | None = None,
    recipe: str | Path | None = None,
    picture: Path | None = None,
    snapshot: Path | None = None,
    progress: Callable[[str], None] | None = None,
) -> Explanation:
    """Why one rank of `job` needs its memory: the reason for the peak, the per-layer table, communication, and advice.

    `job`, `rank` and `gpu` as in `predict`; without `gpu`, memory that kernels and libraries allocate is left out.
    `against`: another job to compare with. `trace`: run the real library on fake tensors instead of using the ledger;
    `module`: instead of a job, trace "FILE.py:FUNCTION", whose function returns (model, step). `recipe` as in `predict`.
    `picture` (.png, .svg) and `snapshot` (a pickle for PyTorch's memory viewer) are files to write. `progress` as in
    `predict`.
    Raises: SpecError, CatalogError, CollectorError or RecordError.
    """
    from peakcast.doors.explaining import explanation, write

    options: dict[str, Any] = {"against": against, "trace": trace, "module": module, "recipe": recipe}
    found = explanation(job, gpu, rank, **options, progress=progress)
    return write(found, picture, snapshot)


def replay(
    file: str | Path,
    against: object = None,
    gpu: str | Device | None = None,
    rank: Rank = None,
    *,
    trace: bool = False,
    module: str | None = None,
    output: Path | None = None,
) -> Replayed:
    """Replay the allocator history in `file` through the simulated allocator, and compare the result with what was
    recorded.

    `file`: written by `torch.cuda.memory._dump_snapshot`, or a history of `datasets/published/histories`. `against`: a job,
    as in `predict`, whose timeline is compared with the recorded one (with `trace`, or `module` "FILE.py:FUNCTION", a trace
    instead of the ledger, as in `explain`); `gpu` and `rank` are for that prediction. `output` (.png, .svg): a file for a
    picture of the two.
    Raises: RecordError for a file that cannot be read, and what `explain` raises.
    """
    from peakcast.doors.replaying import replayed

    return replayed(Path(file), against, gpu, rank, trace=trace, module=module, output=output)


def replay_all(files: Iterable[str | Path]) -> Iterator[Replayed | NotReplayed]:
    """Replay each of `files` as `replay` does, one after the other; a folder stands for the recordings in it (*.pickle,
    *.pkl, *.jsonl, each also as .gz). A file that cannot be read gives a `NotReplayed`, and the others are replayed.

    Raises: RecordError if a folder has no recording.
    """
    from peakcast.doors.replaying import all_replayed

    return all_replayed(Path(file) for file in files)


def record(job: object, *, python: str = sys.executable, output: str | Path | None = None) -> Recorded:
    """Record the recipe of the network of `job`, in its regime: what the library allocates, block by block, without a GPU.

    `job` as in `predict`. The recipe is valid for its batch and length, and for all others with which the library does the
    same. `python`: the interpreter of another environment, which only needs the library and torch. `output`: a .json.gz
    file to write in addition to the user's cache.
    Raises: SpecError, or CollectorError when the library cannot run the job on fake tensors.
    """
    from peakcast.doors.recording import recorded

    return recorded(translation_of(job).job, python, Path(output) if output is not None else None)


def record_all(
    folder: str | Path,
    *,
    families: Sequence[str] = (),
    python: str = sys.executable,
    timeout_seconds: float = 1800.0,
    library: str = "transformers",
    progress: Progress | None = None,
) -> Shipment:
    """Record every family of transformers that the ledger does not know, or `families`, in the common regimes, into
    `folder`; with `library` "torchtune", the networks that torchtune has of its own. Existing files are kept, so an
    interrupted recording can be continued. A family takes minutes; `timeout_seconds` is the limit for one regime of it.

    Raises: SpecError, or CollectorError when the library cannot be used.
    """
    from peakcast.core.cores import available_cores
    from peakcast.doors.shipping import record_all as ship

    return ship(Path(folder), families, python, available_cores(), progress, timeout_seconds, library)


def doctor() -> Installation:
    """What is installed here, which GPUs and calibrations are found, and which parts of peakcast work."""
    from peakcast.doors.doctor import doctor as look

    return look()


def search(
    job: object,
    gpu: str | Device | Sequence[str | Device] | None,
    *,
    num_gpus: int | None = None,
    global_batch_size: int | None = None,
    find: str = "plans",
    price: str | Path | Mapping[str, object] | None = None,
    top: int = 20,
    gpus_per_node: int = 8,
    host_memory_gib: float | None = None,
    recipe: str | Path | None = None,
    processes: int = 1,
    progress: Progress | None = None,
) -> Found | Largest | Offers:
    """Which layouts, batches, checkpointing, sharding and offloading let `job` fit on `num_gpus` of `gpu`, the best first.

    `find`: "plans", or an inverse question: the largest "micro_batch_size" or "sequence_length", the fewest "num_gpus", the
    biggest "model" of the catalog. `job` as in `predict`; its own GPUs and batch apply where the arguments give none.
    Several GPU types ("A100-80GB,H100-80GB"), or `price`, what an hour of a GPU costs by type (a mapping, or the path of
    one; without `gpu` it names the types), are compared: the cheapest on which the job surely fits comes first.
    `host_memory_gib`: that of a node, which the verdict includes as in `predict`. `recipe` as in `predict`: it answers for
    all candidates that it covers, and others are left out.
    Raises: SpecError, RecordError or CatalogError naming the parameter, the value, the rule and the way out.
    """
    from dataclasses import replace

    from peakcast.doors.recipe_files import read_recipe_file
    from peakcast.doors.searching import ask
    from peakcast.searching.gpu_types import read_prices
    from peakcast.searching.search_settings import SearchSettings

    prices = read_prices(price)
    named = _gpus(gpu, prices)
    devices = [on_node(device, host_memory_gib, gpus_per_node) for device in dict.fromkeys(named)]
    kept = read_recipe_file(Path(recipe)) if recipe is not None else None
    read = translation_of(kept.job if kept is not None and job is None else job)
    settings = SearchSettings(
        top=top,
        gpus_per_node=gpus_per_node,
        processes=processes,
        progress=progress,
        findings=read.findings,
        record=partial(_record, progress),
        lent=kept.lent() if kept is not None else None,
    )
    found = ask(read.job, devices, find, prices, num_gpus, global_batch_size, settings)
    return replace(found, findings=read.findings)


def _gpus(gpu: str | Device | Sequence[str | Device] | None, prices: Iterable[str]) -> list[Device]:
    """The GPU types that are named, by commas or as a sequence; those that have `prices` if none are."""
    from peakcast import catalog

    types = gpu.split(",") if isinstance(gpu, str) else [gpu] if isinstance(gpu, Device) else list(gpu or prices)
    return [catalog.gpu(name.strip()) if isinstance(name, str) else name for name in types]


def _record(progress: Progress | None, jobs: Iterable[TrainingJob]) -> None:
    """Record the recipes that `jobs` need."""
    from peakcast.doors.recording import ensure_recipes

    ensure_recipes(jobs, 1, (lambda message, *_: progress(message)) if progress else None)


def watch(
    job: object,
    gpu: str | Device | None = None,
    rank: Rank = None,
    *,
    snapshot: str | Path,
    append_to: str | Path | None = None,
) -> Proposed:
    """Compare a recorded run with its prediction, and propose its row for tables of one's own.

    `snapshot`: written in the run by `torch.cuda.memory._dump_snapshot`, or by `peakcast.watch(..., snapshot=...)`, which
    does the same around a run in progress. `job`, `gpu` (None: this machine's) and `rank` as in `predict`. `append_to`: a
    JSON-lines file to which the row is added.
    Raises: RecordError for a file that cannot be read, and what `predict` raises.
    """
    from peakcast.doors.proposing import proposed

    return proposed(Path(snapshot), job, gpu, rank, Path(append_to) if append_to is not None else None)


def web(host: str = "127.0.0.1", port: int = 7860, *, progress: Progress | None = None) -> None:
    """Serve the web page until interrupted, with the accuracy reports if this is a checkout that has them; `progress` is
    called with the address.

    Raises: MissingPackageError, or SpecError when the port cannot be used.
    """
    need("the web page", "gradio", "matplotlib", "jinja2")
    from peakcast.web.server import reports_folder, serve

    serve(host, port, reports_folder(), progress or print)
