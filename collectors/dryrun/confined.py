"""Lets a process and all that it starts write files in one folder only and open no TCP port, where Linux can see to it
(Landlock, from 5.19 on). It holds for programs that are not Python and for compiled libraries too."""

from __future__ import annotations

import contextlib
import ctypes
import os
import struct
from pathlib import Path

from peakcast.core.errors import CollectorError

DEVICES = ("/dev", "/proc")
"""Where writing leaves no file."""
CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446
"""System calls, the same on every architecture (include/uapi/asm-generic/unistd.h of Linux)."""
VERSION_FLAG, PATH_BENEATH, NO_NEW_PRIVILEGES = 1, 1, 38
WRITES = sum(1 << bit for bit in (1, *range(4, 14)))
"""Rights of include/uapi/linux/landlock.h: write a file, remove or make any kind of file or folder, and move between
folders."""
TRUNCATES = 1 << 14
BINDS_TCP = 1 << 0
MOVES, TRUNCATING, NETWORK = 2, 3, 4
"""Versions of Landlock that have the right to move between folders, to truncate, and to bind."""


def confine(folder: Path) -> bool:
    """Confine this process to `folder`. Returns whether Linux can do it."""
    with contextlib.suppress(OSError, AttributeError, CollectorError):
        version = _call(CREATE_RULESET, None, 0, VERSION_FLAG)
        if version < MOVES:
            return False
        rights = WRITES | (TRUNCATES if version >= TRUNCATING else 0)
        attributes = struct.pack("=QQ", rights, BINDS_TCP) if version >= NETWORK else struct.pack("=Q", rights)
        rules = _call(CREATE_RULESET, attributes, len(attributes), 0)
        for place in (*DEVICES, str(folder)):
            descriptor = os.open(place, os.O_PATH | os.O_CLOEXEC)
            _call(ADD_RULE, rules, PATH_BENEATH, struct.pack("=Qi", rights, descriptor), 0)
            os.close(descriptor)
        ctypes.CDLL(None).prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0)
        _call(RESTRICT_SELF, rules, 0)
        os.close(rules)
        return True
    return False


def _call(number: int, *arguments: int | bytes | None) -> int:
    """The result of a system call. Raises: CollectorError if it fails."""
    values = (ctypes.c_char_p(one) if isinstance(one, bytes) else ctypes.c_long(one or 0) for one in arguments)
    result = int(ctypes.CDLL(None).syscall(ctypes.c_long(number), *values))
    if result < 0:
        raise CollectorError(f"system call {number} was refused.", parameter="confined")
    return result
