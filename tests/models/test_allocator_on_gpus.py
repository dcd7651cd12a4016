"""The simulated allocator against what allocators of real GPUs counted: runs that their authors published together with the
program, and what PyTorch's own tests assert on a GPU. Only the facts are kept here: sizes, their order, and the counters.

"test_cuda.py" is pytorch/pytorch test/test_cuda.py at 000e43cdff99 (BSD-3-Clause). A private pool of a CUDA graph, which
the simulation does not have, behaves as the pool of a stream of its own.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from peakcast.core.units import GIB, MIB
from peakcast.jobs.allocator_settings import parse_allocator
from peakcast.models.allocator.caching_allocator import Block, CachingAllocator, SimulatedOutOfMemoryError

EXPANDABLE = pytest.mark.parametrize("expandable", [False, True])


def allocator_of(text: str = "", **limits: int) -> CachingAllocator:
    return CachingAllocator(parse_allocator(text), **limits)


# -- published runs -----------------------------------------------------------------------------------------------------

GROWTH = "expandable_segments:True,max_split_size_mb:128"
BEFORE_FULL = {0: (66, 220), 20: (106, 2980), 40: (146, 5760), 60: (186, 8520), 80: (226, 11300), 100: (266, 14060)}
"""MiB allocated and reserved after each of these cycles."""


def fenced_cycles(allocator: CachingAllocator, num_cycles: int) -> Iterator[int]:
    """64 MiB that stay; then in every cycle 91 and 45.5 MiB, 2 MiB that stay, and the first two freed."""
    allocator.allocate(64 * MIB)
    for cycle in range(num_cycles):
        blocks = [allocator.allocate(size) for size in (91 * MIB, 91 * MIB // 2)]
        allocator.allocate(2 * MIB)
        for block in blocks:
            allocator.release(block)
        yield cycle


def test_reserved_grows_where_expandable_blocks_are_too_large_to_be_split():
    """Radeon RX 9070 XT, torch 2.12.0+rocm7.14.0, which compiles the same allocator (pytorch/pytorch#193400, #123548)."""
    allocator = allocator_of(GROWTH)
    counted = {}
    for cycle in fenced_cycles(allocator, 101):
        counted[cycle] = (allocator.allocated_bytes // MIB, allocator.reserved_bytes // MIB)
    assert {cycle: counted[cycle] for cycle in BEFORE_FULL} == BEFORE_FULL


def test_and_what_it_gives_back_when_the_gpu_is_full():
    """The same run, until the GPU of 16,304 MiB had given the 16,000 that it gave: in cycle 115, ten times of ten, it
    retried and had 2,680 left (ROCm/legacy-rocm-build#6603)."""
    allocator = allocator_of(GROWTH, capacity_bytes=16_000 * MIB)
    for cycle in fenced_cycles(allocator, 116):
        assert allocator.num_retries == (cycle == 115)
    assert allocator.peak_reserved_bytes == 16_000 * MIB
    assert (allocator.reserved_bytes, allocator.allocated_bytes) == (2680 * MIB, 296 * MIB)


@pytest.mark.parametrize("text", ["", "max_split_size_mb:128", "expandable_segments:True"])
def test_either_setting_alone_keeps_it_below_500(text):
    allocator = allocator_of(text)
    for _ in fenced_cycles(allocator, 101):
        assert allocator.reserved_bytes < 500 * MIB


NUM_POOL_STREAMS = 32
"""Streams that torch.cuda.Stream() hands out in turn (kStreamsPerPool, c10/cuda/CUDAStream.cpp)."""
AT_THE_START_OF = {
    (256, "triton"): 42,
    (256, "torch"): 318,
    (256, "naive"): 594,
    (3584, "naive"): 12278,
    (3712, "triton"): 12448,
    (3712, "torch"): 12506,
    (3712, "naive"): 12564,
}
"""MiB reserved at these calls of the benchmark."""


def test_a_benchmark_on_33_streams():
    """GeForce RTX 3060 Laptop, Windows: Triton's tutorial 02-fused-softmax.py, 81 cases, until it ran out of memory
    (triton-lang/triton#11661). Every case makes a matrix on the stream of the case before, and all else on its own."""
    allocator = allocator_of()
    stream = 0

    def make(num_bytes: int) -> Block:
        return allocator.allocate(num_bytes, stream)

    def passing(*sizes: int) -> None:
        for block in [make(size) for size in sizes]:
            allocator.release(block)

    first = 4 * 1823 * 781  # the tutorial's own check: its input and two results stay, and what `allclose` compared went
    for _ in range(3):
        make(first)
    passing(first // 4, first, first, first)
    passing(1)
    assert allocator.allocated_bytes // MIB == 16

    reserved = {}
    num_cases = 0
    for columns in range(256, 3712 + 1, 128):
        for provider in ("triton", "torch", "naive"):
            reserved[columns, provider] = allocator.reserved_bytes // MIB
            matrix = 4 * 4096 * columns
            given = make(matrix)
            stream = num_cases % NUM_POOL_STREAMS + 1
            num_cases += 1
            # rows' largest and its place, the difference, its exponential, rows' sum, the quotient; or the result alone
            naive = (4096 * 4, 4096 * 8, matrix, matrix, 4096 * 4, matrix)
            temporaries = naive if provider == "naive" else (matrix,)
            passing(*temporaries)
            flushed = make(256 * MIB)  # do_bench overwrites it between repetitions, so that the L2 cache is cold
            passing(*temporaries)
            for block in (flushed, given):
                allocator.release(block)
    assert {case: reserved[case] for case in AT_THE_START_OF} == AT_THE_START_OF


# -- what PyTorch's tests assert on a GPU -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "request_mib", "allocated_mib"),
    [
        ("", 84, 84),
        ("roundup_power2_divisions:4", 84, 96),
        ("garbage_collection_threshold:0.5,max_split_size_mb:40", 84, 84),
        ("roundup_power2_divisions:[64:8,128:2,256:2,512:2,1024:1,>:1]", 84, 88),
        ("roundup_power2_divisions:[64:8,128:2,256:2,512:2,1024:1,>:1]", 400, 512),
        ("release_lock_on_cudamalloc:True", 84, 84),
    ],
)
def test_allocator_settings(text, request_mib, allocated_mib):
    """test_cuda.py, test_allocator_settings."""
    allocator = allocator_of(text)
    allocator.allocate(request_mib * MIB)
    assert allocator.allocated_bytes == allocated_mib * MIB


def test_memory_stats():
    """test_cuda.py, test_memory_stats: 256 floats are a KiB."""
    allocator = allocator_of()
    allocator.allocate(4 * 256)
    assert allocator.allocated_bytes == 1024


SEED_STREAM, CAPTURE_STREAM = 1, 2
SMALL_SEGMENT, LARGE_SEGMENT = 2 * MIB, 20 * MIB


@EXPANDABLE
@pytest.mark.parametrize(
    ("num_bytes", "num_segments", "reserved", "left", "reserved_in_pages", "left_in_pages"),
    [
        (512, 2, 2 * SMALL_SEGMENT, SMALL_SEGMENT, 2 * SMALL_SEGMENT, SMALL_SEGMENT),
        (MIB, 3, 3 * SMALL_SEGMENT, SMALL_SEGMENT, 3 * SMALL_SEGMENT, SMALL_SEGMENT),
        (MIB + 512, 1, LARGE_SEGMENT, LARGE_SEGMENT, LARGE_SEGMENT, LARGE_SEGMENT),
        (10 * MIB - 512, 2, 2 * LARGE_SEGMENT, LARGE_SEGMENT, 2 * LARGE_SEGMENT, 2 * LARGE_SEGMENT),
        (10 * MIB + 512, 3, 3 * 12 * MIB, 12 * MIB, 2 * LARGE_SEGMENT, LARGE_SEGMENT),
    ],
)
def test_graph_memory_stats(expandable, num_bytes, num_segments, reserved, left, reserved_in_pages, left_in_pages):
    """test_cuda.py, test_graph_memory_stats_and_use_result_after_destroy_graph: a copy, five times a copy and a sum of it,
    and what stays reserved for the last sum once the cache is emptied. The small cases count a graph's seed and offset too;
    expandable segments differ in the last two, by the page in which the last sum lies."""
    allocator = allocator_of("expandable_segments:True" if expandable else "")
    allocator.allocate(num_bytes)  # what is copied
    small = num_bytes <= MIB
    before = allocator.reserved_bytes, allocator.num_segments
    seeds = [allocator.allocate(8, SEED_STREAM) for _ in range(2)] if small else []
    result = allocator.allocate(num_bytes, CAPTURE_STREAM)
    for _ in range(5):
        copy = allocator.allocate(num_bytes, CAPTURE_STREAM)
        total = allocator.allocate(num_bytes, CAPTURE_STREAM)
        allocator.release(copy)
        allocator.release(result)
        result = total
    assert allocator.reserved_bytes - before[0] == (reserved_in_pages if expandable else reserved)
    if not expandable:  # torch counts no expandable segments
        assert allocator.num_segments - before[1] == num_segments
    for seed in seeds:
        allocator.release(seed)
    allocator.empty_cache()
    assert allocator.reserved_bytes - before[0] == (left_in_pages if expandable else left)


@EXPANDABLE
def test_allocate_in_thread_to_pool(expandable):
    """test_cuda.py, test_allocate_in_thread_to_pool: a pool with one small tensor, then ten times three of 20 MiB."""
    allocator = allocator_of("expandable_segments:True" if expandable else "")
    allocator.release(allocator.allocate(4 * 4))
    for _ in range(10):
        for block in [allocator.allocate(LARGE_SEGMENT) for _ in range(3)]:
            allocator.release(block)
    assert allocator.num_segments == (2 if expandable else 4)
    allocator.empty_cache()
    assert allocator.num_segments == 0


def test_record_stream():
    """test_cuda.py, test_record_stream: not reused too soon, reused once the other stream is done."""
    allocator = allocator_of()
    block = allocator.allocate(4 * 4, stream=1)
    address = block.address
    allocator.record_stream(block, 0)
    allocator.release(block)
    assert allocator.allocate(4 * 4, stream=1).address != address
    allocator.finish(0)
    assert allocator.allocate(4 * 4, stream=1).address == address


def test_caching_allocator_record_stream_oom():
    """test_cuda.py, test_caching_allocator_record_stream_oom: what waits for a stream is freed before memory runs out."""
    allocator = allocator_of(capacity_bytes=4 * GIB)
    allocator.allocate(160 * MIB, stream=1)
    for _ in range(100):
        block = allocator.allocate(160 * MIB)
        allocator.record_stream(block, 1)
        allocator.release(block)
    assert allocator.num_retries > 0


def test_out_of_memory_retry():
    """test_cuda.py, test_out_of_memory_retry: half of the memory twice, and again once the first half is free."""
    allocator = allocator_of(capacity_bytes=1000 * MIB - 1)
    first = allocator.allocate(500 * MIB)
    with pytest.raises(SimulatedOutOfMemoryError):
        allocator.allocate(500 * MIB)
    allocator.release(first)
    allocator.allocate(500 * MIB)


def test_set_per_process_memory_fraction():
    """test_cuda.py, test_set_per_process_memory_fraction: 0.499 of the memory less what is reserved is allowed, 0.5 not."""
    total = 80 * GIB
    allocator = allocator_of("per_process_memory_fraction:0.5", capacity_bytes=total, allowed_bytes=total // 2)
    allocator.allocate(4 * 1024)
    allocator.release(allocator.allocate(int(total * 0.499) - allocator.reserved_bytes))
    allocator.empty_cache()
    with pytest.raises(SimulatedOutOfMemoryError):
        allocator.allocate(total // 2)


@pytest.mark.parametrize(("text", "is_pinned"), [("", True), ("max_split_size_mb:20", False)])
def test_a_small_tensor_pins_the_segment_of_a_large_one(text, is_pinned):
    """vllm-project/vllm (Apache-2.0), test_scoped_max_split_keeps_freed_large_blocks_releasable: 2 MiB out of a freed block
    of 512, and the cache emptied."""
    allocator = allocator_of(text)
    allocator.release(allocator.allocate(512 * MIB))
    allocator.allocate(2 * MIB)
    allocator.empty_cache()
    assert (allocator.reserved_bytes >= 512 * MIB) is is_pinned
