"""What tests of several folders share."""

from __future__ import annotations

import base64
import contextlib
import gc
import importlib.util
import logging
import os
import sys
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from peakcast.collectors.machine import quick_imports
from peakcast.core.cores import available_cores
from peakcast.jobs.spec import TrainingJob, job_to_mapping
from peakcast.timelines.files import STEPS, timeline_from_mapping, unpack
from peakcast.timelines.timeline import Timeline

MOST_AT_ONCE = 4
"""Each process has torch in its memory, and another one that its traces are forked from: some 1.5 GB."""
TESTS = Path(__file__).parent
COMPUTE_ALONE = ("catalog", "dialects", "explaining", "histories", "models", "reports", "searching", "store")
"""Folders of tests that start no process, trace nothing and fit little: those of the fast lane, and files beside them."""
NOT_FAST = frozenset((TESTS / "not_fast.txt").read_text(encoding="utf-8").splitlines())
"""... but these files."""
NEVER_FAST = frozenset(("attacks", "benchmarks", "gpu", "slow", "whole"))

# the networks here are tiny and several tests run at once: threads would only wait for each other
os.environ.setdefault("OMP_NUM_THREADS", "1")
# hundreds of processes import peakcast: the first ones leave it compiled for the others
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
# what was read on this machine's GPU is no part of any expected answer
os.environ["PEAKCAST_CONSTANTS"] = str(Path(__file__).parent / "no-such-folder")
# a recording takes seconds: only the tests that are about it make one, outside the checkout
os.environ["PEAKCAST_RECORD"] = "never"
RECIPES = tempfile.TemporaryDirectory(prefix="peakcast-tests-")
os.environ["PEAKCAST_RECIPES"] = RECIPES.name
# transformers is imported here as in the processes that trace its networks
quick_imports.install()
# how long an example takes says how busy the machine is
hypothesis.settings.register_profile("busy", deadline=None, suppress_health_check=[hypothesis.HealthCheck.too_slow])
hypothesis.settings.load_profile("busy")


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Processes of `-n auto`: none beside this one where there is one file to run, or where tests that need the machine or
    its GPU to themselves may be among them."""
    chosen = config.option.markexpr
    if chosen != "fast" and any(f"not {alone}" not in chosen for alone in ("gpu", "benchmarks")):
        return 0
    paths = {argument.partition("::")[0] for argument in config.args}
    most = len(paths) if all(path.endswith(".py") for path in paths) else MOST_AT_ONCE
    num_processes = min(most, MOST_AT_ONCE, available_cores())
    return num_processes if num_processes > 1 else 0


def pytest_configure(config: pytest.Config) -> None:
    """Every second process collects all files from the last to the first. In a new checkout files are compiled as they are
    imported, which takes as long as importing them; in one order, processes would each compile all of them."""
    worker: dict[str, str] = getattr(config, "workerinput", {})
    odd = int(worker.get("workerid", "gw0").removeprefix("gw")) % 2
    if odd and [Path(path).resolve() for path in config.args] == [TESTS]:
        inside = {path.relative_to(TESTS).parts[0] for path in TESTS.rglob("test_*.py")}
        config.args = [str(TESTS / name) for name in sorted(inside, reverse=True)]


@cache
def _computes_alone(path: Path) -> bool:
    """Whether all tests of a file are of the fast lane, but those that a marker takes out of it."""
    if not path.is_relative_to(TESTS):
        return False
    inside = path.relative_to(TESTS)
    return (len(inside.parts) == 1 or inside.parts[0] in COMPUTE_ALONE) and inside.as_posix() not in NOT_FAST


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """In the fast lane other files are not even imported, which takes longer than its tests."""
    left_out = config.option.markexpr == "fast" and collection_path.suffix == ".py" and not _computes_alone(collection_path)
    return left_out or None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the fast lane, before `-m` chooses. Its files, which are short, come last: where files are shared out among
    processes, none waits long for another's last one."""
    for item in items:
        if _computes_alone(item.path) and NEVER_FAST.isdisjoint(mark.name for mark in item.iter_markers()):
            item.add_marker("fast")
    items.sort(key=lambda item: (_computes_alone(item.path), item.path))


def pytest_collection(session: pytest.Session) -> None:
    """What is imported and collected stays; examining it for reference cycles, again and again, would take two seconds."""
    if not session.config.pluginmanager.hasplugin("dsession"):  # the process that shares out tests collects none
        gc.disable()


def pytest_collection_finish() -> None:
    """... and a second each time afterwards."""
    gc.freeze()
    gc.enable()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skips what needs another project's package, by its name, where that is not installed."""
    for mark in item.iter_markers("needs"):
        for package in mark.args:
            if importlib.util.find_spec(package) is None:
                pytest.skip(f"{package} is not installed")


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A migrated store: making one takes seconds, copying it does not."""
    from peakcast.tracking import Tracker

    folder = tmp_path_factory.mktemp("store")
    logging.getLogger("mlflow").setLevel(logging.ERROR)
    logging.getLogger("alembic").setLevel(logging.ERROR)
    Tracker(folder)._client.search_experiments()
    return folder


@pytest.fixture(scope="session")
def served() -> Callable[[Any], contextlib.AbstractContextManager[int]]:
    """Gives a context with the port at which this process serves an ASGI application."""

    @contextlib.contextmanager
    def context(application: Any) -> Iterator[int]:
        import uvicorn

        server = uvicorn.Server(uvicorn.Config(application, host="127.0.0.1", port=0, log_level="error"))
        thread = threading.Thread(target=server.run, daemon=True)
        thread.start()
        while not server.started and thread.is_alive():
            thread.join(0.05)
        yield server.servers[0].sockets[0].getsockname()[1]
        server.should_exit = True
        thread.join(10)
        gc.collect()  # event loops of Gradio's, here where their warnings are passed over

    return context


@pytest.fixture(scope="session")
def few_rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of tables with two published rows of each network on each GPU type: a fit to all of them takes minutes."""
    from peakcast.measurements.store import load, write_csv

    kept: dict[tuple[str, str], list[Any]] = {}
    for row in load():
        if row.outcome == "ok" and not row.out_of_scope and not row.spoiled:
            kept.setdefault((row.gpu, row.job.architecture.name), []).append(row)
    folder = tmp_path_factory.mktemp("datasets")
    write_csv(folder / "few.csv", [row for rows in kept.values() for row in rows[:2]])
    return folder


@pytest.fixture(scope="session")
def warm_parent() -> Iterator[Callable[..., dict[str, Any]]]:
    """The answer to a question of a collection, from a process that is forked from one that has imported the libraries:
    importing them takes longer than tracing a cut-down network, so all tests here share it."""
    from peakcast.collectors.processes.engines import WORK, local

    yield local.one
    if WORK in local._kept:
        local._kept.pop(WORK).end()


@pytest.fixture
def from_the_warm_parent(warm_parent: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch) -> None:
    """Collections run their cells one after the other from the process that traces share, not from one of their own."""
    from peakcast.collectors.processes.engines import local

    def run(questions: Iterable[Any], timeout_seconds: float, **_: Any) -> Iterator[tuple[Any, dict[str, Any]]]:
        for question in questions:
            yield question, warm_parent(question, timeout_seconds)

    monkeypatch.setattr(local, "run", run)


@pytest.fixture(scope="session")
def traced(warm_parent: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Timeline]]:
    """The timelines of a job's two steps on a rank, traced in a process of its own."""

    @cache
    def trace(job: TrainingJob, rank: int) -> dict[str, Timeline]:
        question = {"job": job_to_mapping(job), "rank": rank, "gpu": "A100-80GB", "trace": True, "history": True}
        answer = warm_parent(question, timeout_seconds=300)
        assert "history" in answer, answer
        steps = unpack(base64.b64decode(answer["history"]))
        return {step: timeline_from_mapping(steps[step]) for step in STEPS}

    return lambda job, rank=0: trace(job, rank)  # the same answer whether the rank is given or not
