"""Which process made something, written down so that another one can tell whether it is still there."""

from __future__ import annotations

import os
import socket
from pathlib import Path


def this_process() -> str:
    """This process by its machine, its number and, since numbers come again, the moment at which it began."""
    return f"{socket.gethostname()} {os.getpid()} {_began(os.getpid())}"


def is_gone(process: str) -> bool:
    """Whether a process written down by `this_process` has ended; of another machine's, nothing is known."""
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
    """Clock ticks since boot when it began (proc(5), stat, field 22); "0" where the system does not say."""
    try:
        after_name = Path(f"/proc/{number}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        return after_name[19]
    except (OSError, IndexError):
        return "0"
