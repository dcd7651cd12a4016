"""A cell of several real ranks: torchrun starts a process for each, and each returns its row.

`run` is the launcher. `python -m peakcast.collectors.processes.gang FOLDER WORK` is a rank: it reads the question in
`FOLDER`, does `WORK` and writes its answer there. When a rank is lost, torchrun ends the others. It starts ranks in
sessions of their own, so each also asks Linux to end it when torchrun ends: a rank that lived on would hold its GPU.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from peakcast.core.errors import CollectorError, PeakcastError
from peakcast.measurements.records import Measurement

QUESTION = "question.json"
LOST = re.compile(r"rank\s*: (\d+) \(local_rank: \d+\)\s*exitcode\s*: (-\d+)")
"""What torchrun prints of a rank that a signal has ended (torch 2.13 distributed/elastic/multiprocessing/errors)."""
ENDED_BY_TORCHRUN = -15
REFUSED = 2
"""Exit code of a rank whose job cannot be run. Its reason is reported rather than the other ranks' complaint that they lost
it."""

RowWithTimelines = tuple[Measurement, "bytes | None"]


def launched() -> bool:
    """Whether torchrun has started this process as a rank."""
    return "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ


def rank(stands_for: int = 0) -> int:
    """This process's rank; for one that represents many ranks, the rank `stands_for`."""
    return int(os.environ["RANK"]) if launched() else stands_for


def local_rank() -> int:
    """The number of this process's GPU on this machine; 0 for a process that runs alone."""
    return int(os.environ["LOCAL_RANK"]) if launched() else 0


def run(question: Mapping[str, Any], num_ranks: int, work: str) -> list[RowWithTimelines]:
    """The rows of all ranks with their timelines, in the order of ranks. If a rank ran out of memory, only the rows of such
    ranks: the others were ended while they waited for it. Raises: CollectorError naming the rank that was lost."""
    with tempfile.TemporaryDirectory(prefix="peakcast-ranks-") as folder:
        (Path(folder) / QUESTION).write_text(json.dumps(question), encoding="utf-8")
        command = [sys.executable, "-P", "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={num_ranks}"]
        done = subprocess.run(
            [*command, "--max-restarts=0", "-m", __spec__.name, folder, work],
            env={**os.environ, "PYTHONSAFEPATH": "1", "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")},
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            check=False,
        )
        return _gathered(Path(folder), num_ranks, done.returncode, done.stderr)


def _gathered(folder: Path, num_ranks: int, code: int, said: str) -> list[RowWithTimelines]:
    from peakcast.measurements.rows import from_row

    answers: dict[int, dict[str, Any]] = {}
    for number in range(num_ranks):
        with contextlib.suppress(FileNotFoundError):
            answers[number] = json.loads((folder / f"{number}.json").read_text(encoding="utf-8"))
    rows = {number: from_row(answer["row"]) for number, answer in answers.items() if "row" in answer}
    full = [number for number, row in rows.items() if row.outcome == "out_of_memory"]
    if full or (code == 0 and len(rows) == num_ranks):
        return [(rows[number], _timelines(folder, number)) for number in full or sorted(rows)]
    killed = [(number, ended) for number, ended in LOST.findall(said) if int(ended) != ENDED_BY_TORCHRUN]
    failed = sorted(answers.items(), key=lambda item: item[1].get("code") != REFUSED)
    if killed and not any(answer.get("code") == REFUSED for answer in answers.values()):
        number, ended = killed[0]
        raise CollectorError(f"rank {number} ended with exit code {ended}; the others of {num_ranks} were ended with it.")
    if failed and "reason" in failed[0][1]:
        raise CollectorError(f"rank {failed[0][0]} of {num_ranks}: {failed[0][1]['reason']}")
    raise CollectorError(f"torchrun ended with exit code {code}; the {num_ranks} ranks gave no answer.")


def _timelines(folder: Path, number: int) -> bytes | None:
    path = folder / f"{number}.timelines"
    return path.read_bytes() if path.exists() else None


def main(arguments: list[str]) -> int:
    """Run one rank's process. Its answer is completely on disk before it ends."""
    from peakcast.collectors.processes.warm_parent import die_with_parent, load
    from peakcast.measurements.rows import to_row

    die_with_parent()
    folder, work = Path(arguments[0]), arguments[1]
    answer: dict[str, Any] = {}
    code = 0
    try:
        made = load(work)(json.loads((folder / QUESTION).read_text(encoding="utf-8")))
        made = made[0] if isinstance(made, list) else made
        row, timelines = made if isinstance(made, tuple) else (made, None)
        answer, code = {"row": to_row(row)}, int(row.outcome != "ok")
        if timelines is not None:
            (folder / f"{rank()}.timelines").write_bytes(timelines)
    except PeakcastError as error:
        answer, code = {"reason": error.message, "code": REFUSED}, REFUSED
    except Exception as error:
        answer, code = {"reason": f"{type(error).__name__}: {error}"[:500]}, 1
    part = folder / f"{rank()}.part"
    part.write_text(json.dumps(answer, allow_nan=False), encoding="utf-8")
    part.rename(folder / f"{rank()}.json")
    sys.stderr.flush()
    os._exit(code)  # tearing the process group down may wait for ranks that are gone


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
