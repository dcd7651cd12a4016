"""Keeps a script's files in a temporary folder: what it writes goes there and is read back from there; what it deletes is
no longer there for it, and not really deleted.

Python's own functions are redirected there (`install`). An audit hook of the interpreter refuses everything else that would
write outside, and every socket that would listen.
"""

from __future__ import annotations

import builtins
import errno
import io
import os
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
LARGEST_COPY_BYTES = 64 * 2**20
"""A file that is opened for changing is copied first, up to this size."""
CHANGES = ("os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.truncate", "os.link", "os.symlink", "shutil.rmtree")
"""Audit events whose first argument is a path that is changed."""
DEVICES = ("/dev/", "/proc/")


class Overlay:
    """Maps paths outside `folder` to ones within it."""

    def __init__(self, folder: Path) -> None:
        self.folder = str(folder.resolve())
        self._written = os.path.join(self.folder, "written")
        self._stat = os.stat
        self._removed: set[str] = set()
        """Files and folders that were there before, and that the script has deleted."""

    def is_inside(self, path: str) -> bool:
        """Whether `path` may be written directly."""
        return path == self.folder or path.startswith((self.folder + os.sep, *DEVICES))

    def shadow(self, path: Any) -> str | None:
        """The path to which writes to `path` go; None if they go to `path` itself, or if `path` is not a path."""
        if isinstance(path, int) or path is None:
            return None
        name = os.path.abspath(os.fsdecode(path))
        return None if self.is_inside(name) else self._written + name

    def read(self, path: Any) -> Any:
        """The path from which `path` is read: the written copy, if there is one."""
        shadow = self.shadow(path)
        return shadow if shadow is not None and (self.is_removed(path) or self._is_there(shadow)) else path

    def remove(self, path: Any) -> None:
        """Note that the script has deleted `path`."""
        name = os.path.abspath(os.fsdecode(path))
        if self._is_there(name):
            self._removed.add(name)

    def is_removed(self, path: Any) -> bool:
        """Whether the script has deleted `path`, or a folder that it was in."""
        if not self._removed:
            return False
        name = os.path.abspath(os.fsdecode(path))
        return any(name == one or name.startswith(one + os.sep) for one in self._removed)

    def write(self, path: Any, *, keeps: bool) -> Any:
        """The path to which `path` is written; `keeps`: its present content is copied there first."""
        shadow = self.shadow(path)
        if shadow is None:
            return path
        _make_folders(os.path.dirname(shadow))
        if keeps and not self._is_there(shadow):
            name = os.path.abspath(os.fsdecode(path))
            if not self.is_removed(name) and os.path.isfile(name) and os.path.getsize(name) <= LARGEST_COPY_BYTES:
                shutil.copyfile(name, shadow)
        return shadow

    def _is_there(self, path: str) -> bool:
        try:
            self._stat(path)
        except (OSError, ValueError):
            return False
        return True


_real_mkdir = os.mkdir


def _make_folders(path: str) -> None:
    if not os.path.isdir(path):
        _make_folders(os.path.dirname(path))
        _real_mkdir(path)


def install(folder: Path) -> Overlay:
    """Redirect the file functions of this process to an overlay in `folder`; returns the overlay."""
    overlay = Overlay(folder)
    open_file, open_descriptor = builtins.open, os.open

    def opened(file: Any, mode: str = "r", *arguments: Any, **keywords: Any) -> Any:
        writes = any(letter in mode for letter in "wax+")
        place = overlay.write(file, keeps="w" not in mode and "x" not in mode) if writes else overlay.read(file)
        return open_file(place, mode, *arguments, **keywords)

    def opened_descriptor(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if dir_fd is None:
            path = overlay.write(path, keeps=not flags & os.O_TRUNC) if flags & WRITING else overlay.read(path)
        return open_descriptor(path, flags, mode, dir_fd=dir_fd)

    builtins.open = io.open = opened  # type: ignore[assignment]
    os.open = opened_descriptor  # type: ignore[assignment]
    _install_reading(overlay)
    _install_changes(overlay)
    sys.dont_write_bytecode = True
    sys.addaudithook(_Guard(overlay))
    return overlay


def _install_reading(overlay: Overlay) -> None:
    def redirected(function: Callable[..., Any]) -> Callable[..., Any]:
        return lambda path=".", *arguments, **keywords: function(overlay.read(path), *arguments, **keywords)

    for name in ("stat", "lstat", "scandir", "access", "statvfs"):
        setattr(os, name, redirected(getattr(os, name)))
    listed = os.listdir

    def list_both(path: Any = ".") -> list[Any]:
        shadow = overlay.shadow(path)
        written = listed(shadow) if shadow is not None and os.path.isdir(shadow) else []
        try:
            there = (name for name in listed(path) if not overlay.is_removed(os.path.join(path or ".", name)))
            return list(dict.fromkeys((*there, *written)))
        except FileNotFoundError:
            if shadow is None or not os.path.isdir(shadow):
                raise
            return written

    os.listdir = list_both  # type: ignore[assignment]


def _install_changes(overlay: Overlay) -> None:
    """Redirect the functions that make, remove and move files to the overlay."""
    _install_making(overlay)
    _install_removing(overlay)
    _install_moving(overlay)


def _install_making(overlay: Overlay) -> None:
    def made(path: Any, *arguments: Any, **keywords: Any) -> None:
        shadow = overlay.shadow(path)
        if shadow is None:
            _real_mkdir(path, *arguments, **keywords)
            return
        if os.path.isdir(path):
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), os.fspath(path))
        _make_folders(shadow)

    os.mkdir = made


def _install_removing(overlay: Overlay) -> None:
    """Files that were there before the dry run are not removed."""

    def removing(function: Callable[..., Any], *, deletes: bool) -> Callable[..., None]:
        def remove(path: Any, *arguments: Any, **keywords: Any) -> None:
            if keywords.get("dir_fd") is not None:  # shutil.rmtree, within folders that it may remove
                if overlay.is_inside(os.path.join(os.readlink(f"/proc/self/fd/{keywords['dir_fd']}"), os.fsdecode(path))):
                    function(path, *arguments, **keywords)
                return
            shadow, place = overlay.shadow(path), overlay.read(path)
            if place != path or shadow is None:
                function(place, *arguments, **keywords)
            if shadow is not None and deletes:
                overlay.remove(path)

        return remove

    removed = shutil.rmtree

    def remove_tree(path: Any, *arguments: Any, **keywords: Any) -> None:
        place = overlay.read(path)
        if overlay.shadow(path) is None or place != path:
            removed(place, *arguments, **keywords)
        if overlay.shadow(path) is not None:
            overlay.remove(path)

    for name in ("remove", "unlink", "rmdir", "chmod", "utime", "chown"):
        setattr(os, name, removing(getattr(os, name), deletes=name in ("remove", "unlink", "rmdir")))
    shutil.rmtree = remove_tree  # type: ignore[assignment]


def _install_moving(overlay: Overlay) -> None:
    def moving(function: Callable[..., Any]) -> Callable[..., None]:
        def move(source: Any, target: Any, *arguments: Any, **keywords: Any) -> None:
            if overlay.shadow(source) is None or overlay.read(source) != source:
                function(overlay.read(source), overlay.write(target, keeps=False), *arguments, **keywords)

        return move

    for name in ("rename", "replace", "link", "symlink"):
        setattr(os, name, moving(getattr(os, name)))


class _Guard:
    """Refuses writes that were not redirected into the folder."""

    def __init__(self, overlay: Overlay) -> None:
        self._overlay = overlay

    def __call__(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open":
            path, _, flags = arguments
            if isinstance(flags, int) and flags & WRITING and isinstance(path, (str, bytes)):
                self._check(path)
        elif event in CHANGES and isinstance(arguments[0], (str, bytes, os.PathLike)) and os.path.isabs(arguments[0]):
            self._check(arguments[1] if event in ("os.rename", "os.link", "os.symlink") else arguments[0])
        elif event == "sqlite3.connect" and isinstance(arguments[0], str) and arguments[0] not in ("", ":memory:"):
            self._check(arguments[0].removeprefix("file:"))
        elif event == "socket.bind" and isinstance(arguments[1], tuple):
            raise PermissionError(errno.EPERM, f"a dry run opens no port, and the script asked for {arguments[1]!r}")

    def _check(self, path: Any) -> None:
        name = os.path.abspath(os.fsdecode(path))
        if not self._overlay.is_inside(name):
            raise PermissionError(errno.EPERM, "a dry run writes nothing outside its temporary folder", name)
