"""The implementation of `api.search`: decides which question is asked, and about what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from peakcast.catalog import Device
from peakcast.core.errors import SpecError, near_misses
from peakcast.jobs.spec import TrainingJob
from peakcast.searching.found import Found, Largest
from peakcast.searching.gpu_types import Offers, compare
from peakcast.searching.inverse import MOST, biggest_model, fewest_gpus, largest
from peakcast.searching.search import search
from peakcast.searching.search_settings import SearchSettings

ASKED = ("plans", *MOST, "num_gpus", "model")


def ask(
    job: TrainingJob,
    devices: Sequence[Device],
    find: str,
    prices: Mapping[str, float],
    num_gpus: int | None,
    global_batch_size: int | None,
    settings: SearchSettings,
) -> Found | Largest | Offers:
    """The answer to one search. Raises: SpecError."""
    if find not in ASKED:
        hint = near_misses(find, ASKED) or "."
        raise SpecError(f"find={find!r} is not known{hint} Known: {', '.join(ASKED)}.", parameter="find", value=find)
    _refuse_unheard(find, num_gpus, global_batch_size, job)
    _refuse_layouts_of_generation(job, devices, find, prices)
    if len(devices) != 1 or prices:
        return _which_type(job, devices, find, prices, num_gpus, global_batch_size, settings)
    (device,) = devices
    if find == "plans":
        return search(job, device, num_gpus or job.parallelism.world_size, global_batch_size, settings)
    if find == "num_gpus":
        return fewest_gpus(job, device, global_batch_size, settings)
    if find == "model" and settings.lent is not None:
        raise SpecError("find='model' asks about other networks than the recipe's; leave one out.", parameter="find")
    if find == "model":
        return biggest_model(job, device, settings)
    return largest(job, device, find, settings)


def _refuse_layouts_of_generation(
    job: TrainingJob, devices: Sequence[Device], find: str, prices: Mapping[str, float]
) -> None:
    """Refuse to rank layouts, or GPU types, of a generation: a plan's time is that of a training step."""
    if job.task == "train":
        return
    if find == "plans":
        raise SpecError(
            "task='inference' has no layouts to search; ask for the fewest GPUs that hold it, with find num_gpus, or for "
            "the largest batch or prompt that fits, with find micro_batch_size or sequence_length.",
            parameter="task",
            value=job.task,
        )
    if len(devices) > 1 or prices:
        raise SpecError(
            "task='inference' is searched for one GPU type at a time and without prices, because the speed of generation "
            "is not estimated; give one --gpu.",
            parameter="task",
            value=job.task,
        )


def _which_type(
    job: TrainingJob,
    devices: Sequence[Device],
    find: str,
    prices: Mapping[str, float],
    num_gpus: int | None,
    global_batch_size: int | None,
    settings: SearchSettings,
) -> Offers:
    """Several GPU types, or prices: which one to take."""
    if not devices:
        raise SpecError("gpu is required and missing; give a GPU type, such as H100-80GB, or several.", parameter="gpu")
    if find not in ("plans", "num_gpus"):
        raise SpecError(
            f"find={find!r} asks about one GPU type; give one, and no prices, or leave find out.",
            parameter="find",
            value=find,
        )
    return compare(job, devices, prices, num_gpus, global_batch_size, settings)


def _refuse_unheard(find: str, num_gpus: int | None, global_batch_size: int | None, job: TrainingJob) -> None:
    """Refuse arguments that an inverse question ignores: it keeps the job's own layout and batch, or finds them itself."""
    here = job.parallelism.world_size
    if find == "num_gpus" and num_gpus is not None:
        sentence = f"find='num_gpus' looks for the number of GPUs itself; leave num_gpus={num_gpus} out."
        raise SpecError(sentence, parameter="num_gpus", value=num_gpus)
    if find == "num_gpus" and job.task == "inference" and global_batch_size is not None:
        sentence = f"global_batch_size={global_batch_size} is of training; a generation has micro_batch_size: leave it out."
        raise SpecError(sentence, parameter="global_batch_size", value=global_batch_size)
    if find in ("plans", "num_gpus"):
        return
    if num_gpus not in (None, here):
        sentence = (
            f"find={find!r} keeps the job's own layout, of {here} GPU{'s' * (here > 1)}, and not num_gpus={num_gpus}; give "
            f"the layout instead, such as --data-parallel-size {num_gpus} --sharding fsdp2."
        )
        raise SpecError(sentence, parameter="num_gpus", value=num_gpus)
    if global_batch_size is not None:
        sentence = f"find={find!r} keeps the job's own batch, and not global_batch_size={global_batch_size}; leave it out."
        raise SpecError(sentence, parameter="global_batch_size", value=global_batch_size)
