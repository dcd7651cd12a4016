"""Tests that need a process in which torch has not been used yet."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

DRY_RUNS = Path(__file__).parent / "dryrun"


@pytest.mark.slow
def test_dry_runs_pass_in_a_process_of_their_own() -> None:
    command = [sys.executable, "-P", "-m", "pytest", str(DRY_RUNS), "-q", "-n", "0", "-m", "apart"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=DRY_RUNS.parents[1], check=False)
    assert done.returncode == 0, done.stdout[-6000:]
    assert " passed" in done.stdout
