"""The implementation of `api.search`: decides which question is asked, and about what."""

from __future__ import annotations

from typing import Any

from peakcast.catalog import Device
from peakcast.errors import SpecError, near_misses
from peakcast.searching.found import Found, Largest
from peakcast.searching.inverse import MOST, biggest_model, fewest_gpus, largest
from peakcast.searching.search import search
from peakcast.spec import TrainingJob

ASKED = ("plans", *MOST, "num_gpus", "model")


def ask(
    job: TrainingJob,
    device: Device,
    find: str,
    num_gpus: int | None,
    global_batch_size: int | None,
    options: dict[str, Any],
) -> Found | Largest:
    """The answer to one search. Raises: SpecError."""
    _refuse_unheard(find, num_gpus, global_batch_size)
    if find not in ASKED:
        hint = near_misses(find, ASKED) or "."
        raise SpecError(f"find={find!r} is no question{hint} Known: {', '.join(ASKED)}.", parameter="find", value=find)
    if job.task != "train":
        raise SpecError("task='inference' has no layouts to search; ask `predict`.", parameter="task", value=job.task)
    if find == "plans":
        return search(job, device, num_gpus or job.parallelism.world_size, global_batch_size, **options)
    if find == "num_gpus":
        return fewest_gpus(job, device, global_batch_size, **options)
    if find == "model" and options["lent"] is not None:
        raise SpecError("find='model' asks about other networks than the recipe's; leave one out.", parameter="find")
    if find == "model":
        return biggest_model(job, device, options["progress"], options["findings"])
    return largest(job, device, find, options["findings"], options["record"], options["lent"])


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
