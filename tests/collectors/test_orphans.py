"""A cell ends with the process that started it: an orphan on the GPU would spoil the next measurement."""

import os
import signal
import subprocess
import sys
import time

import pytest

PARENT = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-P", "-c", sys.argv[1]], stdout=subprocess.PIPE, start_new_session=True)
child.stdout.readline()
print(child.pid, flush=True)
time.sleep(60)
"""
CHILD = """
import time
from peakcast.collectors.processes.warm_parent import die_with_parent
die_with_parent()
print("ready", flush=True)
time.sleep(60)
"""


def alive(pid):
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat", encoding="ascii") as file:
        return file.read().rsplit(")", 1)[1].split()[0] != "Z"  # killed, though nobody has asked for its status yet


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process of its parent's end")
def test_a_cell_does_not_outlive_a_collector_that_is_killed():
    with subprocess.Popen([sys.executable, "-P", "-c", PARENT, CHILD], stdout=subprocess.PIPE, text=True) as parent:
        cell = int(parent.stdout.readline())
        assert alive(cell)
        parent.send_signal(signal.SIGKILL)
        parent.wait()
    for _ in range(50):
        if not alive(cell):
            break
        time.sleep(0.1)
    assert not alive(cell)
