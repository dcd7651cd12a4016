"""Dry runs of public scripts whose logs print the peaks of their runs, held against what they print.

`python -P -m peakcast.reports.public_scripts [FOLDER [NAME ...]]` dry-runs the scripts in FOLDER, or those of the runs that
are named, and keeps the answers in `reports/dryrun/answers.csv`; then it writes the page, `reports/dryrun/README.md`. The
scripts are not part of this repository: the table of the runs says from where each is fetched to which path below FOLDER.
"""

from __future__ import annotations

import argparse
import csv
import importlib.metadata
import json
import os
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from statistics import median
from typing import Any

from peakcast.core.durable import replace_file
from peakcast.core.units import MIB
from peakcast.measurements.store import datasets_folder
from peakcast.reports.tables import markdown_table

RUNS = Path("published", "sources", "public_scripts.csv")
"""The table of runs, below the folder of the datasets; what its columns are is said in `datasets/README.md`."""
PAGES = Path(__file__).parent / "dryrun"
QUANTITIES = ("allocated", "reserved")
TIMEOUT_SECONDS = 3600
COLUMNS = (
    "run",
    "torch",
    *(f"{name}: {what}" for name in QUANTITIES for what in ("printed, MiB", "dry run", "off", "in bar")),
)


@dataclass(frozen=True, kw_only=True)
class PublicRun:
    """A public run: where its script and its log are, and what the log prints."""

    name: str
    repository: str
    commit: str
    path: str
    script: str
    environment: str
    gpu: str
    num_gpus: int
    torch: str
    allocated_mib: int
    reserved_mib: int | None
    note: str


@dataclass(frozen=True, kw_only=True)
class DryRunPeaks:
    """What a dry run of the script answered: points and 90 % bars, in bytes."""

    name: str
    peakcast: str
    torch: str
    steps: int
    allocated_bytes: int
    allocated_lower_bytes: int
    allocated_upper_bytes: int
    reserved_bytes: int
    reserved_lower_bytes: int
    reserved_upper_bytes: int


def read_runs(path: Path | None = None) -> list[PublicRun]:
    """The runs of the table at `path`, by default the shipped one."""
    rows = _rows(path or datasets_folder() / RUNS)
    return [
        PublicRun(**{**row, **{name: _number(row[name]) for name in ("num_gpus", "allocated_mib", "reserved_mib")}})
        for row in rows
    ]


def read_answers(path: Path = PAGES / "answers.csv") -> dict[str, DryRunPeaks]:
    """Name of a run -> its answer."""
    texts = ("name", "peakcast", "torch")
    found: dict[str, DryRunPeaks] = {}
    for row in _rows(path):
        values: dict[str, Any] = {key: value if key in texts else int(value) for key, value in row.items()}
        found[values["name"]] = DryRunPeaks(**values)
    return found


def dryrun(run: PublicRun, folder: Path) -> DryRunPeaks:
    """Dry-run the script of `run`, in an empty folder, as its log says that it was run."""
    script, *arguments = shlex.split(run.script)
    launcher = ["torchrun", "--standalone", f"--nproc_per_node={run.num_gpus}"]
    command = [sys.executable, "-P", "-m", "peakcast", "dryrun", "--gpu", run.gpu, "--json"]
    command += ["--timeout-seconds", str(TIMEOUT_SECONDS), *(["--torch", run.torch] if run.torch else []), "--", *launcher]
    environment = {**os.environ, **dict(setting.split("=", 1) for setting in run.environment.split())}
    with tempfile.TemporaryDirectory() as empty:
        done = subprocess.run(
            [*command, str((folder / script).resolve()), *arguments],
            cwd=empty,
            env=environment,
            capture_output=True,
            text=True,
            check=False,
        )
    if not done.stdout:
        raise RuntimeError(f"{run.name} cannot be followed: {done.stderr}")
    return _answer(run.name, json.loads(done.stdout))


def page(runs: Sequence[PublicRun], answers: Mapping[str, DryRunPeaks]) -> str:
    """The Markdown page."""
    answered = [(run, answers[run.name]) for run in runs if run.name in answers]
    lines = [
        "# Dry runs of public scripts\n\n"
        "Each line is a public run whose log prints its peaks, and the answer of `peakcast dryrun` to the same script, "
        "unmodified and without a GPU. Source of the runs: `datasets/published/sources/public_scripts.csv`; written by "
        "`python -P -m peakcast.reports.public_scripts`. Most runs had another release of torch than the dry runs, whose "
        "compiler allocates in another order.\n",
        *(_summary(quantity, answered) for quantity in QUANTITIES),
        "",
        markdown_table(COLUMNS, (_line(run, answer) for run, answer in answered)),
    ]
    notes = [f"- {run.name}: {run.note}" for run, _ in answered if run.note]
    return "\n".join([*lines, *notes]).rstrip("\n") + "\n"


def _summary(quantity: str, answered: Iterable[tuple[PublicRun, DryRunPeaks]]) -> str:
    found = [(_off(quantity, *pair), _holds(quantity, *pair)) for pair in answered if _printed(quantity, pair[0])]
    off = [abs(error) for error, _ in found]
    inside = sum(holds for _, holds in found)
    errors = f"median error {median(off):.2%}, worst {max(off):.1%}"
    return f"- {quantity}: {len(found)} runs, {errors}; {inside} of {len(found)} inside the 90 % bar"


def _line(run: PublicRun, answer: DryRunPeaks) -> list[str]:
    cells = [run.name, run.torch]
    for quantity in QUANTITIES:
        printed = _printed(quantity, run)
        point = f"{getattr(answer, f'{quantity}_bytes') / MIB:,.0f}"
        held = "yes" if printed and _holds(quantity, run, answer) else "no"
        cells += [f"{printed:,}", point, f"{_off(quantity, run, answer):+.2%}", held] if printed else ["–", point, "–", "–"]
    return cells


def _printed(quantity: str, run: PublicRun) -> int | None:
    found: int | None = getattr(run, f"{quantity}_mib")
    return found


def _off(quantity: str, run: PublicRun, answer: DryRunPeaks) -> float:
    """Relative error of the point; logs print whole MiB, rounded down."""
    return float(getattr(answer, f"{quantity}_bytes") / MIB / (_printed(quantity, run) or 1) - 1)


def _holds(quantity: str, run: PublicRun, answer: DryRunPeaks) -> bool:
    printed = (_printed(quantity, run) or 0) * MIB
    lower, upper = getattr(answer, f"{quantity}_lower_bytes"), getattr(answer, f"{quantity}_upper_bytes")
    return bool(lower < printed + MIB and printed <= upper)


def _answer(name: str, found: Mapping[str, Any]) -> DryRunPeaks:
    bars: dict[str, Any] = {
        f"{quantity}{suffix}_bytes": int(found[f"peak_{quantity}_bytes"][key])
        for quantity in QUANTITIES
        for suffix, key in (("", "point"), ("_lower", "lower"), ("_upper", "upper"))
    }
    versions: dict[str, Any] = {package: importlib.metadata.version(package) for package in ("peakcast", "torch")}
    return DryRunPeaks(name=name, **versions, steps=int(found["dryrun"]["steps"]), **bars)


def _rows(path: Path) -> list[dict[str, Any]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def _number(text: str) -> int | None:
    return int(text) if text else None


def _write_answers(answers: Iterable[DryRunPeaks], path: Path) -> None:
    names = [field.name for field in fields(DryRunPeaks)]
    lines = [",".join(names), *(",".join(str(asdict(answer)[name]) for name in names) for answer in answers)]
    replace_file(path, ("\n".join(lines) + "\n").encode())


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", nargs="?", type=Path, help="folder of the fetched scripts")
    parser.add_argument("names", nargs="*", help="beginnings of the names of those runs (default: all of the table)")
    asked = parser.parse_args(arguments)
    runs, answers = read_runs(), read_answers()
    for name in asked.names:
        if not any(run.name.startswith(name) for run in runs):
            parser.error(f"NAME={name!r} begins the name of no run; there are {', '.join(run.name for run in runs)}.")
    for run in runs if asked.folder is not None else ():
        if run.name.startswith(tuple(asked.names) or ""):
            answers[run.name] = dryrun(run, asked.folder)
            _write_answers((answers[one.name] for one in runs if one.name in answers), PAGES / "answers.csv")
    replace_file(PAGES / "README.md", page(runs, answers).encode())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
