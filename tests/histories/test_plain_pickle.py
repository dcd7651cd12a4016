"""A pickle of plain values is read as Python's own reader does; anything else is refused before it takes memory or time."""

from __future__ import annotations

import io
import os
import pickle
import struct
import subprocess
import sys
import time
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from peakcast.histories import plain_pickle
from peakcast.histories.plain_pickle import RefusedPickleError, load

PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64) | st.floats(allow_nan=False) | st.text(),
    lambda inner: (
        st.lists(inner) | st.dictionaries(st.text() | st.integers(-5, 300), inner) | st.tuples(inner, inner, inner, inner)
    ),
    max_leaves=40,
)


@settings(max_examples=60, deadline=None)
@given(value=PLAIN, protocol=st.integers(2, 5))
def test_plain_values_are_read_as_by_python(value, protocol):
    assert load(io.BytesIO(pickle.dumps(value, protocol))) == value


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_more_than_a_chunk_and_shared_values(protocol):
    frames = [{"name": f"function_{number}", "line": number} for number in range(500)]
    value = [{"frames": frames[number % 400 :], "addr": 2**46 + number} for number in range(1000)]
    packed = pickle.dumps(value, protocol)
    assert len(packed) > plain_pickle.CHUNK_BYTES
    assert load(io.BytesIO(packed)) == value


class Command:
    """A pickle of this runs a command when it is loaded."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def __reduce__(self):
        return (os.system, (f"touch {self.mark}",))


def framed(*parts: bytes) -> bytes:
    return b"\x80\x04" + b"".join(parts)


HOSTILE = {
    "an index of 2**32 in the memo": framed(b"]r", struct.pack("<I", 2**32 - 1), b"j", struct.pack("<I", 2**32 - 2), b"."),
    "a text of 2**60 bytes": framed(b"\x8d", struct.pack("<Q", 2**60), b"x."),
    "a text of 2**31 bytes": framed(b"X", struct.pack("<I", 2**31), b"x."),
    "a byte array of 2**60 bytes": framed(b"\x96", struct.pack("<Q", 2**60)),
    "a whole number of 2**31 bytes": framed(b"\x8b", struct.pack("<i", 2**31 - 1)),
    "a whole number of 200 bytes": framed(b"\x8a\xc8", b"\x01" * 200, b"."),
    "a number of many digits": framed(b"I", b"9" * 1_000_000, b"\n."),
    "an old global": b"\x80\x02cos\nsystem\n(U\x04truetR.",
    "a global from the stack": framed(b"\x8c\x02os\x8c\x06system\x93."),
    "a persistent id": framed(b"U\x01xQ."),
    "a registered class": framed(b"\x82\x01."),
    "tuples nested a million deep": framed(b")" + b"\x85" * 1_000_000, b"."),
    "lists nested a million deep": framed(b"]" * 1_000_000, b"a" * 999_999, b"."),
    "a key that is a tuple": framed(b"}K\x01K\x02\x86K\x03s."),
    "marks without end": framed(b"(" * 5_000_000),
    "values without end": framed(b"]" * 5_000_000),
    "a mark that is not there": framed(b"e."),
    "no value": framed(b"."),
    "two values": framed(b"NN."),
    "protocol 0": b"(dp0\n.",
    "nothing": b"",
}


@pytest.mark.parametrize("kind", sorted(set(HOSTILE) - {"tuples nested a million deep"}))
def test_what_is_not_plain_is_refused(kind):
    with pytest.raises(RefusedPickleError):
        load(io.BytesIO(HOSTILE[kind]))


def test_deep_tuples_are_refused_or_made_and_never_overflow_the_stack():
    value = load(io.BytesIO(HOSTILE["tuples nested a million deep"]))
    assert len(value) == 1


def test_no_command_runs(tmp_path):
    mark = tmp_path / "ran"
    for protocol in range(2, 6):
        with pytest.raises(RefusedPickleError, match=r"holds a (global|class|call)"):
            load(io.BytesIO(pickle.dumps({"segments": Command(mark)}, protocol)))
    assert not mark.exists()


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_pickle_that_is_cut_off_is_refused_wherever_it_is_cut(protocol):
    packed = pickle.dumps({"a": [1, 2.5, "text", None, (1, 2, 3, 4), {"b": 2**60}], "c": "d" * 300}, protocol)
    for end in range(len(packed)):
        with pytest.raises(RefusedPickleError):
            load(io.BytesIO(packed[:end]))


def test_hostile_files_fill_no_memory_and_take_no_time(tmp_path):
    for number, content in enumerate(HOSTILE.values()):
        (tmp_path / f"{number}.pickle").write_bytes(content)
    code = """
import resource, sys
from pathlib import Path
from peakcast.core.errors import PeakcastError
from peakcast.histories.files import read_histories
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for path in sorted(Path(sys.argv[1]).glob("*.pickle")):
    try:
        read_histories(path)
    except PeakcastError:
        continue
    raise SystemExit(f"{path} was read")
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-P", "-c", code, str(tmp_path)], capture_output=True, text=True, check=True)
    assert int(done.stdout) * 1024 < 300 * 2**20  # Linux counts in KiB
    assert time.monotonic() - began < 60
