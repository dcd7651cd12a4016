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
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from peakcast.allocator import parse_allocator
from peakcast.models.caching_allocator import Block, CachingAllocator, SimulatedOutOfMemoryError
from peakcast.units import MIB

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


def recordings() -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(gzip.decompress(RECORDED.read_bytes()))["recordings"]
    return found


@pytest.mark.parametrize("recording", recordings(), ids=lambda each: f"{each['settings']} {each['device_bytes']}")
def test_every_counter_after_every_recorded_call(recording):
    counters = simulated(recording["calls"], recording["settings"], recording["device_bytes"])
    for call, ours, theirs in zip(recording["calls"], counters, recording["counters"], strict=True):
        assert ours == tuple(theirs), call


def test_the_recordings_reach_every_way_of_giving_memory_back():
    retried, ran_out, shrank = set(), set(), set()
    for recording in recordings():
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


def answered(
    program: Path, calls: Sequence[Call], text: str, device_bytes: int | None, *, falling: bool = False
) -> list[Counters]:
    """What torch's allocator counts after each call, where the driver's addresses rise or fall."""
    environment = {"PYTORCH_ALLOC_CONF": text, **({"STANDIN_FALLING": "yes"} if falling else {})}
    if device_bytes is not None:
        environment["STANDIN_BYTES"] = str(device_bytes)
    lines = "".join(" ".join(map(str, call)) + "\n" for call in calls)
    done = subprocess.run([program], input=lines, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.returncode, done.stdout[-200:], done.stderr)
    return [tuple(map(int, line.split())) for line in done.stdout.splitlines()]


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


@pytest.mark.parametrize("text", SETTINGS)
def test_torch_answers_the_same_now(program, text):
    release = tuple(map(int, version(site_packages())["__version__"].split(".")[:2]))
    for seed in range(4):
        calls = traffic(1000 + seed, 400)
        # of equal blocks, releases before 2.13 take the lowest address, later ones the oldest segment (pytorch#183591)
        falling = bool(seed % 2) and release >= (2, 13)
        for device_bytes in device_sizes(program, calls, text):
            theirs = answered(program, calls, text, device_bytes, falling=falling)
            ours = simulated(calls, text, device_bytes)
            first = next((at for at, pair in enumerate(zip(ours, theirs, strict=True)) if pair[0] != pair[1]), None)
            assert first is None, (seed, device_bytes, calls[first], ours[first], theirs[first])


def version(site: Path | None) -> dict[str, str]:
    """What torch's `version.py` says."""
    assert site is not None
    said: dict[str, str] = {}
    exec((site / "torch/version.py").read_text(encoding="utf-8"), said)
    return said


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
    content = {"torch": version(site)["__version__"], "git": version(site)["git_version"], "recordings": runs}
    RECORDED.write_bytes(gzip.compress(json.dumps(content, separators=(",", ":")).encode(), 9, mtime=0))


if __name__ == "__main__":
    import tempfile

    with tempfile.TemporaryDirectory() as temporary:
        record(Path(sys.argv[1]), Path(temporary))
