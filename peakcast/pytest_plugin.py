"""A pytest fixture that fails when a change makes training need more memory: `pytest_plugins = ["peakcast.pytest_plugin"]`.

```python
def test_memory(peak_memory):
    peak_memory(train, "H100-80GB")  # train: a function of no arguments, or the words of a command
```

The peaks of the first run are saved in `peaks.json` beside the test; `pytest --update-peaks` saves new ones.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from peakcast.answers.prediction import QUANTITIES
from peakcast.core.durable import replace_file
from peakcast.core.units import format_gib
from peakcast.doors.dryrunning import Dryrun, dryrun

FILE = "peaks.json"
TOLERANCE = 0.002
"""A peak may grow by this fraction, as allocator blocks and library releases may change it by as much."""
KEPT = tuple(name for name in QUANTITIES if name in ("peak_allocated_bytes", "peak_reserved_bytes"))
"""Quantities that depend only on tensors; the others depend on the machine."""


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--update-peaks`."""
    parser.addoption("--update-peaks", action="store_true", help="keep the peaks of this run, larger ones too")


@pytest.fixture
def peak_memory(request: pytest.FixtureRequest) -> Callable[..., Dryrun]:
    """A function `(train, gpu, name=..., tolerance=..., **options)` that dry-runs `train` and fails if a peak has grown.
    `options` are those of `peakcast.dryrun`; `name` distinguishes several calls in one test."""
    file = request.path.parent / FILE
    update = bool(request.config.getoption("--update-peaks"))

    def check(
        train: Sequence[str] | Callable[[], object],
        gpu: str,
        *,
        name: str = "",
        tolerance: float = TOLERANCE,
        **options: int,
    ) -> Dryrun:
        found = dryrun(train, gpu, **options)  # type: ignore[arg-type]
        key = "/".join(filter(None, (request.node.nodeid.rpartition("/")[2], gpu, name)))
        peaks = {quantity: getattr(found.answer, quantity).point for quantity in KEPT}
        kept = _read(file)
        grown = [_sentence(quantity, kept[key][quantity], peak) for quantity, peak in peaks.items() if key in kept
                 and peak > kept[key][quantity] * (1 + tolerance)]  # fmt: skip
        if grown and not update:
            pytest.fail(f"{' '.join(grown)} If that is meant, keep it with: pytest --update-peaks.", pytrace=False)
        if update or key not in kept:
            text = json.dumps({**kept, key: peaks}, indent=2, sort_keys=True) + "\n"
            replace_file(file, text.encode())
        return found

    return check


def _read(file: Path) -> dict[str, dict[str, int]]:
    if not file.is_file():
        return {}
    read: dict[str, dict[str, int]] = json.loads(file.read_text(encoding="utf-8"))
    return read


def _sentence(quantity: str, before: int, now: int) -> str:
    return f"{quantity} grew from {format_gib(before)} to {format_gib(now)}, by {now / before - 1:.1%}."
