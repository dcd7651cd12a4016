"""What a script starts ends with it and writes nothing outside, whatever happens to the command."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import pytest

from peakcast.collectors.dryrun.confined import confine

STARTER = """
import os, subprocess, sys, time
subprocess.Popen(["sleep", "2718"])
subprocess.Popen(["sh", "-c", "sleep 2719; true"], start_new_session=True)
print("started", flush=True)
time.sleep(100)
"""


def run_python(code: str, **keywords: object) -> subprocess.Popen[str]:
    words = [sys.executable, "-P", "-c", textwrap.dedent(code)]
    return subprocess.Popen(words, stdout=subprocess.PIPE, text=True, **keywords)


def output_of(code: str, **keywords: object) -> str:
    with run_python(code, **keywords) as process:
        return process.communicate()[0]


def sleepers(*seconds: str) -> list[str]:
    """Command lines of the processes that sleep so long; those of ended ones are empty."""
    found = []
    for one in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            found.append(one.read_bytes().replace(b"\0", b" ").decode(errors="replace"))
    return [line for line in found if any(f"sleep {one}" in line for one in seconds)]


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_nothing_outlives_the_command_that_is_killed(tmp_path, number):
    folder = tmp_path / "folder"
    folder.mkdir()
    kept = f"""
        import subprocess, sys, time
        code = {STARTER!r}
        kept = "from peakcast.collectors.dryrun.keeper import *; keep(Path({str(folder)!r})); exec(" + repr(code) + ")"
        process = subprocess.Popen([sys.executable, "-P", "-c", kept], start_new_session=True)
        print(process.pid, flush=True)
        process.wait()
    """
    with run_python(kept) as command:
        assert command.stdout is not None
        keeper = int(command.stdout.readline())
        assert command.stdout.readline() == "started\n"
        assert len(sleepers("2718", "2719")) >= 2
        os.kill(keeper if number == signal.SIGTERM else command.pid, number)
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and (sleepers("2718", "2719") or (number == signal.SIGKILL and folder.exists())):
        time.sleep(0.02)
    assert sleepers("2718", "2719") == []
    assert folder.exists() == (number != signal.SIGKILL)  # a command that still runs removes its folder by itself


def can_confine() -> bool:
    with tempfile.TemporaryDirectory() as folder:
        code = f"from peakcast.collectors.dryrun.confined import *; print(confine(Path({folder!r})))"
        return output_of(code) == "True\n"


@pytest.mark.skipif(not can_confine(), reason="this Linux has no Landlock")
def test_programs_of_a_script_write_in_its_folder_only(tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "kept.txt").write_text("old")
    code = f"""
        import subprocess
        from pathlib import Path
        from peakcast.collectors.dryrun.confined import confine
        confine(Path("folder"))
        here = "mkdir folder/sub && echo x > folder/sub/a && mv folder/sub/a folder/b && cat kept.txt"
        binds = "import socket; socket.socket().bind(('127.0.0.1', 0))"
        said = [subprocess.call(["sh", "-c", one], stderr=subprocess.DEVNULL, stdout=subprocess.DEVNULL) == 0 for one in (
            here, "mkdir other", "echo new > kept.txt", "rm kept.txt", "mv kept.txt folder/kept.txt",
            {sys.executable!r} + ' -c "' + binds + '"')]
        print(said)
    """
    assert output_of(code, cwd=tmp_path) == f"{[True] + [False] * 5}\n"
    assert (tmp_path / "kept.txt").read_text() == "old"
    assert sorted(one.name for one in tmp_path.rglob("*")) == ["b", "folder", "kept.txt", "sub"]


def test_a_folder_that_is_not_there_is_no_error(tmp_path):
    assert not confine(tmp_path / "absent")


def test_what_a_script_deletes_is_not_there_for_it_and_stays(tmp_path):
    from peakcast.collectors.dryrun.file_overlay import Overlay

    (tmp_path / "out").mkdir()
    kept = tmp_path / "out" / "log.txt"
    kept.write_text("old")
    overlay = Overlay(tmp_path / "temporary")
    overlay.remove(tmp_path / "out")
    assert not Path(overlay.read(kept)).exists()
    made = Path(overlay.write(kept, keeps=True))
    assert not made.exists()
    made.write_text("new")
    assert Path(overlay.read(kept)).read_text() == "new"
    assert kept.read_text() == "old"
