"""Files from strangers: whatever they hold, reading them runs nothing, fills no memory, and ends in one sentence."""

from __future__ import annotations

import csv
import gzip
import io
import json
import os
import pickle
import subprocess
import sys
import zipfile
from functools import cache
from pathlib import Path

import pytest

from peakcast.core.errors import PeakcastError
from peakcast.dialects.common.job_file import load_job
from peakcast.jobs.spec import TrainingJob
from peakcast.measurements import store
from peakcast.measurements.records import Measurement
from peakcast.measurements.rows import COLUMNS
from peakcast.models.calibration.calibration import load_calibration


class Command:
    """A pickle of this runs a command when it is loaded."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return (os.system, (f"touch {self.mark}",))


@cache
def bombs() -> dict[str, bytes]:
    """50 kB that unpack to 50 MB."""
    unpacked = b"[" * 50_000_000
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("calibration.json", unpacked)
    return {"zip bomb": archive.getvalue(), "gzip bomb": gzip.compress(unpacked, 1)}


def hostile_contents(mark: Path) -> dict[str, bytes]:
    """Contents by what they are; loading any of them the wrong way leaves the file `mark`."""
    return {
        "pickle": pickle.dumps(Command(mark)),
        "yaml tag": f"!!python/object/apply:os.system ['touch {mark}']\n".encode(),
        "yaml bomb": b"a: &a [x,x,x,x,x,x,x,x,x]\n" + b"".join(
            f"{chr(98 + i)}: &{chr(98 + i)} [{','.join('*' + chr(97 + i) for _ in range(9))}]\n".encode() for i in range(9)
        )
        + b"architecture: *j\n",
        **bombs(),
        "python": f"__import__('os').system('touch {mark}')".encode(),
        "json of python": json.dumps({"py/reduce": [{"py/function": "os.system"}, [f"touch {mark}"]]}).encode(),
    }


READERS = {
    "a calibration": ("H100-80GB.json", load_calibration),
    "a table": ("rows.csv", store.read_csv),
    "rows to check against": ("rows.csv", store.read_measurements),
    "a shard to check against": ("rows.jsonl", store.read_measurements),
    "a job as YAML": ("job.yaml", load_job),
    "a job as JSON": ("job.json", load_job),
}


@pytest.mark.parametrize("kind", sorted(hostile_contents(Path("mark"))))
@pytest.mark.parametrize("reader", READERS)
def test_a_hostile_file_is_refused_and_nothing_runs(tmp_path, reader, kind):
    mark = tmp_path / "ran"
    name, read = READERS[reader]
    path = tmp_path / name
    path.write_bytes(hostile_contents(mark)[kind])
    with pytest.raises(PeakcastError):
        read(path)
    assert not mark.exists()


def test_the_pickle_of_these_tests_is_really_hostile(tmp_path):
    pickle.loads(hostile_contents(tmp_path / "ran")["pickle"])
    assert (tmp_path / "ran").exists()


def test_bombs_fill_no_memory(tmp_path):
    """Every reader on every file, in a process of its own whose memory is watched."""
    for kind, content in hostile_contents(tmp_path / "ran").items():
        for name, _ in READERS.values():
            (tmp_path / f"{kind.replace(' ', '-')}-{name}").write_bytes(content)
    code = """
import sys
from pathlib import Path
from peakcast.measurements import store
from peakcast.dialects.common.job_file import load_job
from peakcast.core.errors import PeakcastError
from peakcast.models.calibration.calibration import load_calibration
def most():
    return int(Path("/proc/self/status").read_text().partition("VmHWM:")[2].split()[0])
before = most()
for path in sorted(Path(sys.argv[1]).glob("*-*.*")):
    for read in (load_calibration, store.read_csv, store.read_measurements, load_job):
        try:
            read(path)
        except PeakcastError:
            pass
print(most() - before)
"""
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, str(tmp_path)], capture_output=True, text=True, check=True, timeout=120
    )
    grown_bytes = int(done.stdout) * 1024  # VmHWM is in KiB; ru_maxrss would have the parent's in it
    assert grown_bytes < 100 * 2**20


@pytest.mark.parametrize(
    "formula",
    ["=cmd|' /C calc'!A0", "+1+1", "-2+3", "@SUM(A1)", '=HYPERLINK("http://evil","x")', "\t=1+1", "\r=1+1", "a\n=1+1"],
)
def test_a_formula_never_stands_bare_in_a_table(tmp_path, formula):
    job = TrainingJob(architecture=small())
    row = Measurement(job=job, gpu="H100-80GB", provenance="measured", source="peakcast", case=formula)
    path = tmp_path / "rows.csv"
    store.write_csv(path, [row])
    (kept,) = store.read_csv(path)
    assert kept.case == formula
    with path.open(newline="") as file:
        cells = [cell for line in csv.reader(file) for cell in line]
    assert not [cell for cell in cells if cell[:1] in ("=", "+", "-", "@", "\t", "\r", "\n")]


def test_a_bare_formula_in_a_table_is_refused(tmp_path):
    row = Measurement(job=TrainingJob(architecture=small()), gpu="H100-80GB", provenance="measured", source="peakcast")
    path = tmp_path / "rows.csv"
    store.write_csv(path, [row])
    header, line = path.read_text().splitlines()
    cells = next(csv.reader([line]))
    cells[COLUMNS.index("case")] = "=1+1"
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerow(cells)
    path.write_text(header + "\n" + out.getvalue())
    with pytest.raises(PeakcastError, match="case='=1\\+1' could be run as a spreadsheet formula"):
        store.read_csv(path)


def small():
    from peakcast import catalog

    return catalog.architecture("llama-3.2-1b")
