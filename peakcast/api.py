"""The functions behind every door: the command line calls these by the same names, with the same arguments.

Heavy libraries are imported inside the functions that need them, so that asking for a prediction stays quick.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peakcast.answers import answer, full_answer
from peakcast.batch import predict_batch
from peakcast.calibrating import Checked, Fitted, check, evaluate, fit, report, reproduce
from peakcast.dialects.asked_versions import asked_versions
from peakcast.dialects.recognise import Beside, from_arguments
from peakcast.dryrunning import dryrun
from peakcast.extras import need
from peakcast.measuring import collect, collect_constants, import_published, verify
from peakcast.places import tracker
from peakcast.questions import Rank, on_node, question, translation_of

if TYPE_CHECKING:
    from peakcast.catalog import Device
    from peakcast.dialects.translation import Translation
    from peakcast.explanation import Explanation
    from peakcast.installation import Installation
    from peakcast.models.calibration import Calibration
    from peakcast.prediction import Answer
    from peakcast.proposing import Proposed
    from peakcast.recording import Recorded
    from peakcast.replaying import Replayed
    from peakcast.searching.found import Found, Largest
    from peakcast.searching.search import Progress
    from peakcast.shipping import Shipment
    from peakcast.spec import TrainingJob

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
) -> Answer:
    """The four peaks of one rank of `job` on `gpu`, in bytes, with error bars, and whether it fits.

    `job`: a `TrainingJob`, its mapping, the path of a job file, or the catalog name of an architecture (every default then
    holds); a mapping `{"megatron": ...}` or `{"huggingface": ...}` is translated first, and so is a configuration of
    another project (its file, text or mapping; `read` takes more beside it).
    `rank`: a number, "last", or "worst" (None means the same). `calibration`: one, or the path of one; None takes the
    shipped one of the GPU type, else its nearest relative's. The answer also says which GPU types would fit, what to try
    first and what is not modelled; `all_ranks` adds the peaks of every distinct rank. `host_memory_gib` is the host memory
    of a node, in GiB, which its `gpus_per_node` (8) ranks share and the verdict then weighs. `baseline`: "ledger" (the
    hand-written blocks), "recipe" (recorded from the library installed here), "trace" (of the whole step, seconds for each
    rank), or "auto": the ledger, and a recipe for a network of a family that it does not know. `recipe`: the path of one
    that `dryrun` kept or `record` wrote, of whose network `job` then is (None: as it ran).
    Raises: SpecError, CatalogError or CalibrationError naming the parameter, the value, the rule and the way out.
    """
    nodes = {"host_memory_gib": host_memory_gib, "gpus_per_node": gpus_per_node}
    if recipe is None:
        asked = question(job, gpu, rank, **nodes)  # type: ignore[arg-type]
        return full_answer(asked, calibration, all_ranks=all_ranks, baseline=baseline)
    from dataclasses import replace

    from peakcast.kept import read_kept, recipe_from

    kept = read_kept(path := Path(recipe))
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
    """The job that a configuration of another project describes, with what reading it took for granted; `predict` takes it.

    `job`: all that `predict` takes, the path of a configuration or launch script, its text, or its mapping; what it is, its
    keys tell (or `dialect`, a name of `dialects.recognise.DIALECTS`). `companions`: other files that belong to it;
    `num_gpus`: of the whole run; `model`: the network instead of the one named. `versions`: of packages, as a mapping or as
    a text such as "torch=2.9,transformers=4.45.2"; `container`: the tag of NVIDIA's PyTorch image ("26.04"), whose versions
    hold; `here`: those that are installed here.
    Raises: SpecError or CatalogError naming the parameter, the value, the rule and the way out.
    """
    asked = asked_versions(versions, container, here)
    beside = Beside(files=tuple(companions), num_gpus=num_gpus, model=model, dialect=dialect, versions=asked)
    return translation_of(job, beside)


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
    """`predict` for a Megatron-LM command line: `arguments` are what stands after `pretrain_gpt.py`, `env` its environment;
    `versions`, `container` and `here` as in `read`.

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
) -> Explanation:
    """Why one rank of `job` needs what it needs: the peak's reason, the per-layer table, communication, advice by bytes.

    `job`, `rank` and `gpu` as in `predict`; without `gpu`, what kernels and libraries allocate is left out. `against`:
    another job to compare with. `trace`: run the real library on fake tensors instead of asking the ledger; `module`: trace
    "FILE.py:FUNCTION" instead of a job, whose function returns (model, step). `recipe` as in `predict`. `picture` (.png,
    .svg) and `snapshot` (a pickle for PyTorch's memory viewer) are files to write.
    Raises: SpecError, CatalogError, CollectorError or RecordError.
    """
    from peakcast.explaining.door import explanation, write

    found = explanation(job, gpu, rank, against=against, trace=trace, module=module, recipe=recipe)
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
    """The allocator history in `file`, replayed through the simulated allocator: does it do what was recorded?

    `file`: what `torch.cuda.memory._dump_snapshot` wrote, or a history of `datasets/published/histories`. `against`: a job,
    as in `predict`, whose timeline is laid beside the recorded one (`trace`, or `module` "FILE.py:FUNCTION": a trace
    instead of the ledger, as in `explain`); `gpu` and `rank` are of that prediction. `output` (.png, .svg) draws the two.
    Raises: RecordError for a file that cannot be read, and what `explain` raises.
    """
    from peakcast.replaying import replayed

    return replayed(Path(file), against, gpu, rank, trace=trace, module=module, output=output)


def record(job: object, *, python: str = sys.executable, output: str | Path | None = None) -> Recorded:
    """Record the recipe of the network of `job`, in its regime: what the library allocates, block by block, without a GPU.

    `job` as in `predict`; its batch and length are covered, and all for which the library does the same. `python`: the
    interpreter of another environment, which needs the library and torch only. `output`: a .json.gz file to write beside
    the user's cache. Raises: SpecError, or CollectorError when the library cannot run the job on fake tensors.
    """
    from peakcast.recording import recorded

    return recorded(translation_of(job).job, python, Path(output) if output is not None else None)


def record_all(
    folder: str | Path,
    *,
    families: Sequence[str] = (),
    python: str = sys.executable,
    progress: Progress | None = None,
) -> Shipment:
    """Record every family of transformers that the ledger does not know, or `families`, in the regimes that people use,
    into `folder`; what is there already stays, so that it goes on where it was interrupted. A family takes minutes.

    Raises: SpecError, or CollectorError when the library cannot be asked.
    """
    from peakcast.cores import available_cores
    from peakcast.shipping import record_all as ship

    return ship(Path(folder), families, python, available_cores(), progress)


def doctor() -> Installation:
    """What is installed here, which GPUs and calibrations are found, and what of peakcast works with them."""
    from peakcast.doctor import doctor as look

    return look()


def search(
    job: object,
    gpu: str | Device,
    *,
    num_gpus: int | None = None,
    global_batch_size: int | None = None,
    find: str = "plans",
    top: int = 20,
    gpus_per_node: int = 8,
    host_memory_gib: float | None = None,
    recipe: str | Path | None = None,
    processes: int = 1,
    progress: Progress | None = None,
) -> Found | Largest:
    """Which layouts, batches, checkpointing, sharding and offloading let `job` fit on `num_gpus` of `gpu`, the best first.

    `find`: "plans", or an inverse question: the largest "micro_batch_size" or "sequence_length", the fewest "num_gpus", the
    biggest "model" of the catalog. `job` as in `predict`; what it says of GPUs and batch stands where no argument does.
    `host_memory_gib`: that of a node, weighed as in `predict`. `recipe` as in `predict`: it answers for all candidates that
    it covers, and others are left out.
    Raises: SpecError, RecordError or CatalogError naming the parameter, the value, the rule and the way out.
    """
    from dataclasses import replace

    from peakcast import catalog
    from peakcast.kept import read_kept
    from peakcast.searching.door import ask

    device = on_node(catalog.gpu(gpu) if isinstance(gpu, str) else gpu, host_memory_gib, gpus_per_node)
    kept = read_kept(Path(recipe)) if recipe is not None else None
    read = translation_of(kept.job if kept is not None and job is None else job)
    options: dict[str, Any] = {"top": top, "gpus_per_node": gpus_per_node, "processes": processes, "progress": progress}
    options |= {"findings": read.findings, "record": partial(_record, progress)}
    options |= {"lent": kept.lent() if kept is not None else None}
    found = ask(read.job, device, find, num_gpus, global_batch_size, options)
    return replace(found, findings=read.findings)


def _record(progress: Progress | None, jobs: Iterable[TrainingJob]) -> None:
    """Record the recipes that `jobs` want."""
    from peakcast.recording import ensure_recipes

    ensure_recipes(jobs, 1, (lambda message, *_: progress(message)) if progress else None)


def watch(
    job: object,
    gpu: str | Device | None = None,
    rank: Rank = None,
    *,
    snapshot: str | Path,
    append_to: str | Path | None = None,
) -> Proposed:
    """A run that was recorded, beside its prediction, and the row for one's own tables that it makes.

    `snapshot`: what `torch.cuda.memory._dump_snapshot` wrote in it, or `peakcast.watch(..., snapshot=...)`, which does the
    same around a run that is under way. `job`, `gpu` (None: the one at hand) and `rank` as in `predict`. `append_to`: a
    JSON-lines file that the row is added to.
    Raises: RecordError for a file that cannot be read, and what `predict` raises.
    """
    from peakcast.proposing import proposed

    return proposed(Path(snapshot), job, gpu, rank, Path(append_to) if append_to is not None else None)


def web(host: str = "127.0.0.1", port: int = 7860, *, progress: Progress | None = None) -> None:
    """Serve the web page until interrupted, with the accuracy reports beside it where this is a checkout that has them;
    `progress` is told the address.

    Raises: MissingPackageError, or SpecError when the port cannot be had.
    """
    need("the web page", "gradio", "matplotlib", "jinja2")
    from peakcast.web.server import reports_folder, serve

    serve(host, port, reports_folder(), progress or print)
