"""A shard that several collectors fill at once: which cells are done, and which ones another process is running."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from types import ModuleType

from peakcast.collectors.machine.versions import followed
from peakcast.core.durable import file_errors
from peakcast.jobs.spec import TrainingJob
from peakcast.measurements import store
from peakcast.measurements.records import Measurement

fcntl: ModuleType | None
try:
    import fcntl
except ImportError:  # Windows has no such locks; two collectors then run the same cells
    fcntl = None


def cell_identity(job: TrainingJob, rank: int | None = 0, case: str = "") -> str:
    """The identity of a cell before it has run. It leaves out the versions that the run will find, but has those of stacks
    that the job follows. `case` marks a repeat."""
    return f"{job.replace(versions=followed(job)).config_hash}.{rank}.{case}"


class SharedShard:
    """The cells of a shard that need not run again, and those that this process is running. Running cells are locks on
    bytes of a file beside the shard, so a process that is killed releases its cells. Rows of another GPU type than the
    named one are ignored."""

    def __init__(self, shard: Path, *, trace: bool, gpu: str | None) -> None:
        self._shard, self._gpu = shard, gpu
        self._provenance = "traced" if trace else "measured"
        self._together: set[str] = set()
        self._locks: int | None = None
        rows, bad = store.read_shard(shard)
        self.done = {cell for row in rows if (cell := self._cell(row))}
        self.unreadable = len(bad)
        """Lines that cannot be read."""
        self._read_bytes = store.read_rows(shard, 0)[2]

    def look(self) -> None:
        """Read the rows that were added to the shard since the last look."""
        rows, _, self._read_bytes = store.read_rows(self._shard, self._read_bytes)
        self.done.update(cell for row in rows if (cell := self._cell(row)))

    def _cell(self, row: Measurement) -> str:
        """The cell to which a row is the answer; "" if it belongs to no cell of this collection."""
        if row.provenance != self._provenance or self._gpu not in (None, row.gpu):
            return ""
        if row.outcome == "failed" and self._locks is None:  # failed before: one collector tries it again
            return ""
        # with real ranks, the first one's row is written last; the row of any rank that ran out of memory counts for all
        if row.outcome == "out_of_memory" and row.collectives in ("nccl", "gloo"):
            self._together.add(row.key)
        return cell_identity(row.job, 0 if row.key in self._together else row.rank, row.case)

    def begin(self) -> None:
        """Make sure that rows can be written, before any cell has cost its time. Raises: RecordError."""
        store.require_writable(self._shard)
        if fcntl is not None and self._locks is None:
            path = self._shard.with_name(f".{self._shard.name}.lock")
            with file_errors(path, "written"):
                self._locks = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)

    def take(self, cell: str) -> bool:
        """Whether this process may run `cell` now: no other runs it or has finished it. If so, it is locked."""
        if self._locks is not None and fcntl is not None:
            try:
                fcntl.lockf(self._locks, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, self._place(cell))
            except (BlockingIOError, PermissionError):  # EAGAIN or EACCES: fcntl(2)
                return False
            except OSError:  # a file system without locks
                return True
        self.look()
        if cell in self.done:
            self.leave(cell)
        return cell not in self.done

    def leave(self, cell: str) -> None:
        """Unlock `cell`, which is done or has failed."""
        if self._locks is not None and fcntl is not None:
            fcntl.lockf(self._locks, fcntl.LOCK_UN, 1, self._place(cell))

    def end(self) -> None:
        """Release all locks."""
        if self._locks is not None:
            os.close(self._locks)
            self._locks = None

    def _place(self, cell: str) -> int:
        named = f"{self._provenance} {self._gpu} {cell}"
        return int(hashlib.sha256(named.encode()).hexdigest()[:15], 16)
