"""Notes which process made something, so that another process can tell whether it still runs."""

from __future__ import annotations

import os
import socket
from pathlib import Path


def this_process() -> str:
    """This process as text: its machine, its number and, as numbers are reused, the time at which it began."""
    return f"{socket.gethostname()} {os.getpid()} {_began(os.getpid())}"


def is_gone(process: str) -> bool:
    """Whether a process noted by `this_process` has ended; False for processes of other machines, which cannot be seen."""
    host, digits, began = ["", "", *process.rsplit(" ", 2)][-3:]
    if host != socket.gethostname() or not digits.isdecimal():
        return False
    number = int(digits)
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        return False
    return began != _began(number)


def _began(number: int) -> str:
    """Clock ticks from boot to the process's beginning (proc(5), stat, field 22); "0" if the system does not tell."""
    try:
        after_name = Path(f"/proc/{number}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return after_name[19]
    except (OSError, IndexError):
        return "0"
