"""The simulated allocator against torch's own, compiled one, on a driver that only keeps accounts
(`torchs_allocator/README.md`): every counter after every call, as recorded, and anew where a CUDA build of torch is found.

`python -P tests/models/test_torchs_allocator.py SITE_PACKAGES` records anew.
"""

from __future__ import annotations

import gzip
import importlib.util
import itertools
import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest

from peakcast.collectors.tracing import history
from peakcast.core.units import MIB, round_up
from peakcast.jobs.allocator_settings import parse_allocator
from peakcast.models.allocator.caching_allocator import Block, CachingAllocator, SimulatedOutOfMemoryError
from peakcast.models.allocator.replay import replay
from peakcast.timelines.timeline import Phase

HERE = Path(__file__).parent / "torchs_allocator"
RECORDED = HERE / "recorded.json.gz"
OTHER_STREAM = 9
"""Records uses of what the others allocate."""
SETTINGS = [
    ",".join(filter(None, texts))
    for texts in itertools.product(
        ("", "expandable_segments:True"),
        ("", "max_split_size_mb:40", "large_segment_size_mb:12,max_split_size_mb:32", "large_segment_size_mb:26"),
        ("", "roundup_power2_divisions:1", "roundup_power2_divisions:[1:8,2:4,8:2,32:1,>:16]"),
        ("", "per_process_memory_fraction:0.75,garbage_collection_threshold:0.6"),
    )
]

ENTRY = ("action", "addr", "size", "stream", "user_metadata")
"""Of a history: the keys of `torch.cuda.memory._snapshot()["device_traces"]` that are read."""

Call = tuple[Any, ...]
Counters = tuple[int, ...]
"""Whether it ran out of memory, reserved and allocated bytes, segments, retries."""


def traffic(seed: int, num_calls: int = 160) -> list[Call]:
    """Random calls, as `calls.cpp` reads them: sizes that repeat and others, from bytes to 90 MiB, on two streams."""
    rng = random.Random(seed)
    repeated = [int(2 ** rng.uniform(0, 26.5)) for _ in range(20)]
    calls: list[Call] = []
    held: list[int] = []
    for holder in range(num_calls):
        chance = rng.random()
        if chance < 0.01:
            calls.append(("e",))
        elif chance < 0.05:
            calls.append(("d", OTHER_STREAM))
        elif held and chance < 0.48:
            freed = held.pop(rng.randrange(len(held)))
            if rng.random() < 0.15:
                calls.append(("u", freed, OTHER_STREAM))
            calls.append(("f", freed))
        else:
            size = rng.choice(repeated) if rng.random() < 0.7 else int(2 ** rng.uniform(0, 26.5))
            calls.append(("a", holder, size, rng.randrange(2)))
            held.append(holder)
    return calls


def simulated(calls: Sequence[Call], text: str, device_bytes: int | None) -> list[Counters]:
    settings = parse_allocator(text)
    fraction = settings.per_process_memory_fraction
    allowed = int(fraction * device_bytes) if fraction is not None and device_bytes is not None else None
    allocator = CachingAllocator(settings, capacity_bytes=device_bytes, allowed_bytes=allowed)
    held: dict[int, Block] = {}
    counters = []
    for call, *arguments in calls:
        failed = False
        if call == "a":
            holder, size, stream = arguments
            try:
                held[holder] = allocator.allocate(size, stream)
            except SimulatedOutOfMemoryError:
                failed = True
        elif call == "e":
            allocator.empty_cache()
        elif call == "d":
            allocator.finish(arguments[0])
        elif arguments[0] in held:  # else it had found no memory
            if call == "u":
                allocator.record_stream(held[arguments[0]], arguments[1])
            else:
                allocator.release(held.pop(arguments[0]))
        # torch does not count expandable segments
        num_segments = 0 if settings.expandable_segments else allocator.num_segments
        row = (failed, allocator.reserved_bytes, allocator.allocated_bytes, num_segments, allocator.num_retries)
        counters.append(tuple(map(int, row)))
    return counters


def recorded(name: str) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(gzip.decompress(RECORDED.read_bytes()))[name]
    return found


@pytest.mark.parametrize("recording", recorded("recordings"), ids=lambda each: f"{each['settings']} {each['device_bytes']}")
def test_every_counter_after_every_recorded_call(recording):
    counters = simulated(recording["calls"], recording["settings"], recording["device_bytes"])
    for call, ours, theirs in zip(recording["calls"], counters, recording["counters"], strict=True):
        assert ours == tuple(theirs), call


def test_the_recordings_reach_every_way_of_giving_memory_back():
    retried, ran_out, shrank = set(), set(), set()
    for recording in recorded("recordings"):
        text, before = recording["settings"], [0, 0, 0, 0, 0]
        for (call, *_), row in zip(recording["calls"], recording["counters"], strict=True):
            retried |= {text} if row[4] > before[4] else set()
            ran_out |= {text} if row[0] else set()
            shrank |= {text} if call == "a" and row[1] < before[1] and row[4] == before[4] else set()
            before = row
    for texts in (retried, ran_out):
        assert {"expandable_segments" in text for text in texts} == {False, True}
    # without a retry: just enough oversize blocks, or garbage
    assert any("max_split" in text and "garbage" not in text for text in shrank)
    assert any("garbage" in text and "max_split" not in text for text in shrank)


# -- histories ------------------------------------------------------------------------------------------------------------


def stamp(at: int) -> str:
    """What operator call number `at` is made by: every fourth comes after one ("17+")."""
    return f"{at // 4}+" if at % 4 == 3 else str(at // 4)


@pytest.mark.parametrize("found", recorded("histories"), ids=lambda each: each["settings"])
def test_a_history_of_torchs_own_is_read_as_the_calls_that_were_made(found):
    made = history.allocations([dict(zip(ENTRY, entry, strict=True)) for entry in found["trace"]])
    asked = [(at, call[1:]) for at, call in enumerate(found["calls"]) if call[0] == "a"]
    freed = {call[1]: at for at, call in enumerate(found["calls"]) if call[0] == "f"}
    streams = list(dict.fromkeys(stream for _, (_, _, stream) in asked))
    for (at, (holder, size, stream)), found_one in zip(asked, made, strict=True):
        assert (found_one.operator, found_one.between) == (at // 4, at % 4 == 3)
        assert (found_one.num_bytes, found_one.stream) == (max(512, round_up(size, 512)), streams.index(stream))
        dies = None if holder not in freed else sum(born < freed[holder] for born, _ in asked)
        assert found_one.dies == dies


@pytest.mark.parametrize("found", recorded("plain histories"), ids=lambda each: each["settings"])
def test_the_timeline_of_such_a_history_replays_to_what_torch_reserved(found):
    made = history.allocations([dict(zip(ENTRY, entry, strict=True)) for entry in found["trace"]])
    operators = [history.Operator("any", Phase.FORWARD)] * len(found["calls"])
    replayed = replay(history.timeline(made, [], operators, 0, len(operators)), parse_allocator(found["settings"]))
    assert replayed.peak_reserved_bytes == max(reserved for _, reserved, *_ in found["counters"])
    assert replayed.peak_allocated_bytes == max(allocated for _, _, allocated, *_ in found["counters"])


# -- torch itself -------------------------------------------------------------------------------------------------------


def site_packages() -> Path | None:
    """Where a CUDA build of torch is installed, if it is."""
    spec = importlib.util.find_spec("torch")
    places = [os.environ.get("PEAKCAST_CUDA_TORCH"), spec and spec.origin and Path(spec.origin).parents[1]]
    return next((Path(place) for place in places if place and (Path(place) / "torch/lib/libc10_cuda.so").exists()), None)


def build(site: Path, folder: Path) -> Path:
    """Compile the stand-in for a driver and the program that makes the calls; returns the program."""
    library, torch = folder / "libcudart.so.13", site / "torch"
    headers = [site / "nvidia/cu13/include", site / "triton/backends/nvidia/include", Path("/usr/local/cuda/include")]
    include = [f"-I{place}" for place in (torch / "include", *headers) if place.is_dir()]
    common = ["-O1", "-w", *include]
    shared = ["gcc", *common, "-shared", "-fPIC"]
    libraries = [f"-L{torch / 'lib'}", "-lc10", "-lc10_cuda", f"-Wl,--disable-new-dtags,-rpath,{folder}:{torch / 'lib'}"]
    script = f"-Wl,-soname,{library.name},--version-script={HERE / 'exports.map'}"
    for command in (
        [*shared, script, str(HERE / "driver.c"), str(HERE / "rest.c"), "-o", str(library)],
        [*shared, str(HERE / "rest.c"), "-o", str(folder / "libnvidia-ml.so.1")],
        # the stand-in comes first: then torch's library finds it under the name of the runtime
        ["g++", "-std=c++20", *common, str(HERE / "calls.cpp"), str(library), *libraries, "-o", str(folder / "calls")],
    ):
        subprocess.run(command, check=True)
    return folder / "calls"


def said(
    program: Path, calls: Iterable[Call], text: str, device_bytes: int | None = None, *, falling: bool = False
) -> list[str]:
    """What the program prints, where the driver's addresses rise or fall."""
    environment = {"PYTORCH_ALLOC_CONF": text, **({"STANDIN_FALLING": "yes"} if falling else {})}
    if device_bytes is not None:
        environment["STANDIN_BYTES"] = str(device_bytes)
    lines = "".join(" ".join(map(str, call)) + "\n" for call in calls)
    done = subprocess.run([program], input=lines, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.returncode, done.stderr)
    return done.stdout.splitlines()


def answered(program: Path, calls: Sequence[Call], text: str, device_bytes: int | None, **driver: bool) -> list[Counters]:
    """What torch's allocator counts after each call."""
    return [tuple(map(int, line.split())) for line in said(program, calls, text, device_bytes, **driver)]


def history_of(program: Path, calls: Sequence[Call], text: str) -> dict[str, Any]:
    """The same with the history of its own that torch's allocator keeps."""
    stamped = [each for at, call in enumerate(calls) for each in (("o", stamp(at)), call)]
    trace = []
    for line in said(program, [("h",), *stamped, ("t",)], text):
        if line.startswith("="):
            _, action, address, size, stream, *stamps = line.split()
            trace.append([action, int(address), int(size), int(stream), "".join(stamps)])
    return {"settings": text, "calls": calls, "trace": trace, "counters": answered(program, calls, text, None)}


def device_sizes(program: Path, calls: Sequence[Call], text: str) -> list[int | None]:
    """No limit, and one that the same calls do not fit into."""
    unlimited = ",".join(each for each in text.split(",") if not each.startswith(("per_process", "garbage")))
    most = max(reserved for _, reserved, *_ in answered(program, calls, unlimited, None))
    tight = int(most * (1.1 if "fraction" in text else 0.8)) // (2 * MIB) * 2 * MIB
    return [tight] if "fraction" in text else [None, tight]


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    site = site_packages()
    if site is None or shutil.which("g++") is None:
        pytest.skip("no CUDA build of torch is installed, or no C++ compiler")
    return build(site, tmp_path_factory.mktemp("torchs_allocator"))


def test_torch_answers_the_same_now(program):
    release = tuple(map(int, version(site_packages())["__version__"].split(".")[:2]))
    for text, seed in itertools.product(SETTINGS, range(1000, 1004)):
        calls = traffic(seed, 400)
        # of equal blocks, releases before 2.13 take the lowest address, later ones the oldest segment (pytorch#183591)
        falling = bool(seed % 2) and release >= (2, 13)
        for device_bytes in device_sizes(program, calls, text):
            theirs = answered(program, calls, text, device_bytes, falling=falling)
            ours = simulated(calls, text, device_bytes)
            first = next((at for at, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1]), None)
            assert first is None, (text, seed, device_bytes, calls[first], ours[first], theirs[first])


def version(site: Path | None) -> dict[str, str]:
    """What torch's `version.py` says."""
    assert site is not None
    names: dict[str, str] = {}
    exec((site / "torch/version.py").read_text(encoding="utf-8"), names)
    return names


def record(site: Path, folder: Path) -> None:
    """Write what torch of `site` answers to one run under each of the settings, without a limit and with one; every second
    time on a driver whose addresses fall."""
    program = build(site, folder)
    runs = [
        {
            "settings": text,
            "device_bytes": device_bytes,
            "falling": bool(seed % 2),
            "calls": calls,
            "counters": answered(program, calls, text, device_bytes, falling=bool(seed % 2)),
        }
        for seed, text in enumerate(SETTINGS)
        for calls in [traffic(seed)]
        for device_bytes in device_sizes(program, calls, text)
    ]
    calls = traffic(1)
    plain = [call for call in calls if call[0] in "af"]  # a timeline knows no waiting for streams and no emptied caches
    content = {
        "torch": version(site)["__version__"],
        "git": version(site)["git_version"],
        "recordings": runs,
        "histories": [history_of(program, calls, text) for text in ("", "expandable_segments:True")],
        "plain histories": [history_of(program, plain, text) for text in ("", "expandable_segments:True")],
    }
    RECORDED.write_bytes(gzip.compress(json.dumps(content, separators=(",", ":")).encode(), 9, mtime=0))


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as temporary:
        record(Path(sys.argv[1]), Path(temporary))
