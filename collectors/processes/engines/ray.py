"""Cells on the machines of a Ray cluster. A worker that is lost is replaced and its cell run again; see docs.ray.io."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from typing import Any

# Set before ray is imported: nothing is reported, and no token file is written for a cluster on this machine alone.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
if "RAY_ADDRESS" not in os.environ:
    os.environ.setdefault("RAY_AUTH_MODE", "disabled")

import ray

from peakcast.collectors.processes.engines import WORK, CellAnswer, CellQuestion, local
from peakcast.core.errors import NO_GPU, CollectorError

RETRIES = 3
"""How often a cell is run again after its worker died. A cell that raised an exception has answered and is not run
again."""


def run(
    questions: Iterable[CellQuestion],
    timeout_seconds: float,
    *,
    work: str = WORK,
    address: str | None = None,
    num_gpus: float = 1,
    num_cpus: float = 1,
) -> Iterator[tuple[CellQuestion, CellAnswer]]:
    """Cells as Ray tasks that need `num_gpus` GPUs and `num_cpus` cores each, on the cluster at `address` (None: the one
    that RAY_ADDRESS names, else one started on this machine)."""
    started = not ray.is_initialized()
    if started:
        ray.init(address=address, include_dashboard=False, log_to_driver=False)
    try:
        _check_gpus(float(num_gpus))
        needs: dict[str, Any] = {"num_gpus": float(num_gpus), "num_cpus": float(num_cpus), "max_retries": RETRIES}
        cell = ray.remote(**needs)(local.one)
        yield from _answers(cell, iter(questions), timeout_seconds, work, _places(float(num_gpus), float(num_cpus)))
    finally:
        if started:
            ray.shutdown()


def _check_gpus(num_gpus: float) -> None:
    """Refuse to wait for GPUs that the cluster will not have. Raises: CollectorError."""
    there = float(ray.cluster_resources().get("GPU", 0))
    if num_gpus > there:
        raise CollectorError(
            f"{NO_GPU}: a cell needs num_gpus={num_gpus:g} and the Ray cluster has {there:g}; trace instead (--trace), or "
            "give --engine-set num_gpus=0.",
            parameter="num_gpus",
            value=num_gpus,
        )


def _places(num_gpus: float, num_cpus: float) -> int:
    """Number of cells that the cluster can run at a time."""
    resources = ray.cluster_resources()
    places = [resources.get("CPU", 1) / num_cpus] if num_cpus else []
    places += [resources.get("GPU", 0) / num_gpus] if num_gpus else []
    return max(1, int(min(places, default=1)))


def _answers(
    cell: Any, waiting: Iterator[CellQuestion], timeout_seconds: float, work: str, places: int
) -> Iterator[tuple[CellQuestion, CellAnswer]]:
    running: dict[Any, CellQuestion] = {}
    while True:
        while len(running) < places and (question := next(waiting, None)) is not None:
            running[cell.remote(question, timeout_seconds, work)] = question
        if not running:
            return
        (done, *_), _ = ray.wait(list(running), num_returns=1)
        question = running.pop(done)
        try:
            yield question, ray.get(done)
        except ray.exceptions.RayError as error:
            yield question, {"reason": f"the worker was lost {RETRIES + 1} times: {type(error).__name__}"}
