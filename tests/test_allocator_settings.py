"""Allocator settings: read as PyTorch reads them, held against the parser inside torch's own library."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

from peakcast.core.errors import SpecError
from peakcast.core.units import MIB
from peakcast.jobs.allocator_settings import Allocator, parse_allocator, parse_divisions

DIVISIONS = [
    "4",
    "[256:1,512:2,1024:4,>:8]",
    "[64:8,512:2]",
    "[64:8,128:2,256:4,512:2,1024:4,>:1]",
    "[512:2,64:8]",
    "[131072:2]",
    "[>:8]",
    "[>:8,64:2]",
    "[64:2,>:0,]",
]


@pytest.fixture(scope="module")
def library():
    """torch's c10 and the function that reads a setting from its environment text."""
    torch = pytest.importorskip("torch")
    setter = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    if setter is None:
        pytest.skip("this torch cannot set allocator settings without a GPU")
    c10 = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
    read = getattr(c10, "_ZN3c1016CachingAllocator26AcceleratorAllocatorConfig24roundup_power2_divisionsEm", None)
    if read is None:
        pytest.skip("this torch has no AcceleratorAllocatorConfig")
    read.restype, read.argtypes = ctypes.c_size_t, [ctypes.c_size_t]
    yield setter, read
    setter("expandable_segments:False")


@pytest.mark.parametrize("text", DIVISIONS)
def test_divisions_are_those_of_the_real_parser(library, text):
    setter, read = library
    setter(f"roundup_power2_divisions:{text}")
    assert parse_divisions(text) == tuple(read(MIB << interval) for interval in range(16))


@pytest.mark.parametrize(
    "text",
    [
        "max_non_split_rounding_mb:19",
        "large_segment_size_mb:10",
        "large_segment_size_mb:30,max_non_split_rounding_mb:29",
        "large_segment_size_mb:25,max_split_size_mb:20",
        "roundup_power2_divisions:3",
        "roundup_power2_divisions:0",
        "roundup_power2_divisions:[100:2]",
        "roundup_power2_divisions:[64:3]",
        "garbage_collection_threshold:1.0",
        "expandable_segments:maybe",
    ],
)
def test_what_pytorch_refuses_is_refused(library, text):
    setter, _ = library
    with pytest.raises((ValueError, RuntimeError)):
        setter(text)
    with pytest.raises(SpecError):
        parse_allocator(text)


def test_settings_that_move_no_tensor_are_passed_over():
    text = "expandable_segments:True, max_split_size_mb:128, pinned_use_background_threads:True, backend:native"
    assert parse_allocator(text) == Allocator(expandable_segments=True, max_split_size_mb=128)
    assert parse_allocator("") == Allocator()


def test_a_list_inside_a_text_with_other_settings():
    found = parse_allocator("roundup_power2_divisions:[256:1,>:8],garbage_collection_threshold:0.8")
    assert (found.roundup_power2_divisions, found.garbage_collection_threshold) == ("[256:1,>:8]", 0.8)


def test_an_unknown_setting_is_refused_with_the_near_misses():
    with pytest.raises(SpecError, match="max_split_size_mb"):
        parse_allocator("max_split_size:128")


def test_another_allocator_is_refused_by_name():
    with pytest.raises(SpecError, match="backend"):
        parse_allocator("backend:cudaMallocAsync")
