"""The implementation of `api.search`: decides which question is asked, and about what."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from peakcast.catalog import Device
from peakcast.core.errors import SpecError, near_misses
from peakcast.jobs.spec import TrainingJob
from peakcast.searching.found import Found, Largest
from peakcast.searching.gpu_types import Offers, compare
from peakcast.searching.inverse import MOST, biggest_model, fewest_gpus, largest
from peakcast.searching.search import search

ASKED = ("plans", *MOST, "num_gpus", "model")


def ask(
    job: TrainingJob,
    devices: Sequence[Device],
    find: str,
    prices: Mapping[str, float],
    num_gpus: int | None,
    global_batch_size: int | None,
    options: dict[str, Any],
) -> Found | Largest | Offers:
    """The answer to one search. Raises: SpecError."""
    _refuse_unheard(find, num_gpus, global_batch_size)
    if find not in ASKED:
        hint = near_misses(find, ASKED) or "."
        raise SpecError(f"find={find!r} is not known{hint} Known: {', '.join(ASKED)}.", parameter="find", value=find)
    if job.task != "train" and find not in (*MOST, "model"):
        raise SpecError(
            "task='inference' has no layouts to search; ask for the largest batch or prompt that fits, with find "
            "micro_batch_size or sequence_length.",
            parameter="task",
            value=job.task,
        )
    if len(devices) != 1 or prices:
        return _which_type(job, devices, find, prices, num_gpus, global_batch_size, options)
    (device,) = devices
    if find == "plans":
        return search(job, device, num_gpus or job.parallelism.world_size, global_batch_size, **options)
    if find == "num_gpus":
        return fewest_gpus(job, device, global_batch_size, **options)
    if find == "model" and options["lent"] is not None:
        raise SpecError("find='model' asks about other networks than the recipe's; leave one out.", parameter="find")
    if find == "model":
        return biggest_model(job, device, options["progress"], options["findings"])
    return largest(job, device, find, options["findings"], options["record"], options["lent"])


def _which_type(
    job: TrainingJob,
    devices: Sequence[Device],
    find: str,
    prices: Mapping[str, float],
    num_gpus: int | None,
    global_batch_size: int | None,
    options: dict[str, Any],
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
    return compare(job, devices, prices, num_gpus, global_batch_size, options)


def _refuse_unheard(find: str, num_gpus: int | None, global_batch_size: int | None) -> None:
    """Refuse arguments that an inverse question ignores, because it uses the job's own layout."""
    heard = {"plans": ("num_gpus", "global_batch_size"), "num_gpus": ("global_batch_size",)}.get(find, ())
    for name, value in (("num_gpus", num_gpus), ("global_batch_size", global_batch_size)):
        if value is not None and name not in heard:
            way = (
                "leave it out"
                if find == "num_gpus"
                else "say in the job how it is laid out, such as --data-parallel-size 8 --sharding fsdp2, and leave it out"
            )
            raise SpecError(f"{name}={value} is no part of find={find!r}; {way}.", parameter=name, value=value)
