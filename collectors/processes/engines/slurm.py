"""Cells as jobs of a SLURM cluster, or as processes of this machine if it has no SLURM, by submitit.

A job that is lost (preempted, or its node failed) is submitted again. A job whose cell failed has answered and is not.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any

import submitit

from peakcast.collectors.processes.engines import WORK, CellAnswer, CellQuestion, local

RETRIES = 3
POLL_SECONDS = 0.5
QUEUED_AT_ONCE = 64
"""Most jobs that are submitted and not yet answered; the rest of the grid waits here, not in the scheduler's queue."""


def run(
    questions: Iterable[CellQuestion],
    timeout_seconds: float,
    *,
    work: str = WORK,
    folder: str = "peakcast-jobs",
    cluster: str | None = None,
    **parameters: Any,
) -> Iterator[tuple[CellQuestion, CellAnswer]]:
    """Run cells as jobs whose files go to `folder`. `cluster`: None uses SLURM if it is there and this machine otherwise;
    "local" always uses this machine. `parameters` are submitit's, such as slurm_partition and gpus_per_node."""
    executor = submitit.AutoExecutor(folder=folder, cluster=cluster)
    executor.update_parameters(timeout_min=max(1, -(-int(timeout_seconds) // 60) + 2), **parameters)
    waiting = iter(questions)
    running: dict[Any, tuple[CellQuestion, int]] = {}
    while True:
        while len(running) < QUEUED_AT_ONCE and (question := next(waiting, None)) is not None:
            running[executor.submit(local.one, question, timeout_seconds, work)] = (question, 0)
        if not running:
            return
        done = [job for job in running if job.done()]
        for job in done:
            question, tries = running.pop(job)
            try:
                yield question, job.result()
            except submitit.core.utils.UncompletedJobError as error:
                if tries < RETRIES:
                    running[executor.submit(local.one, question, timeout_seconds, work)] = (question, tries + 1)
                else:
                    yield question, {"reason": f"the job was lost {tries + 1} times: {str(error).splitlines()[0]}"}
            except submitit.core.utils.FailedJobError as error:
                yield question, {"reason": str(error).strip().splitlines()[-1]}
        if not done:
            time.sleep(POLL_SECONDS)
