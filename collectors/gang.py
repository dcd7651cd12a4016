"""A cell of several real ranks: torchrun starts a process for each, and every one hands back its row.

`run` is the launcher. `python -m peakcast.collectors.gang FOLDER WORK` is a rank: it reads the question in `FOLDER`, does
`WORK` and leaves its answer there. torchrun ends the others when one is lost; it starts ranks in sessions of their own, so
each also asks to be ended with it: a rank left over would hold its GPU.
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

from peakcast.errors import CollectorError, PeakcastError
from peakcast.records import Measurement

QUESTION = "question.json"
LOST = re.compile(r"rank\s*: (\d+) \(local_rank: \d+\)\s*exitcode\s*: (-\d+)")
"""What torchrun says of a rank that a signal has ended (torch 2.13 distributed/elastic/multiprocessing/errors)."""
ENDED_BY_TORCHRUN = -15
REFUSED = 2
"""A rank's exit code where the job cannot be run, which says more than what the others say about having lost it."""

Made = tuple[Measurement, "bytes | None"]


def launched() -> bool:
    """Whether this process is a rank that torchrun has started."""
    return "TORCHELASTIC_RUN_ID" in os.environ and "RANK" in os.environ


def rank(stands_for: int = 0) -> int:
    """This process's rank; of one that stands for many, the one that it stands for."""
    return int(os.environ["RANK"]) if launched() else stands_for


def local_rank() -> int:
    """The GPU of this machine that is this process's; 0 for one that is alone."""
    return int(os.environ["LOCAL_RANK"]) if launched() else 0


def run(question: Mapping[str, Any], num_ranks: int, work: str) -> list[Made]:
    """The rows of all ranks, with their timelines, in the order of ranks. Where one ran out of memory, only such rows: the
    others were ended while they waited for it. Raises: CollectorError naming the rank that was lost."""
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


def _gathered(folder: Path, num_ranks: int, code: int, said: str) -> list[Made]:
    from peakcast.rows import from_row

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
    """One rank's process. Its answer is whole on disk before it ends."""
    from peakcast.collectors.nursery import die_with_parent, load
    from peakcast.rows import to_row

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
