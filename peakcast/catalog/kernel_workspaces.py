"""Memory that kernels request from PyTorch's allocator for themselves while an operator runs; it belongs to no tensor.

By operator, GPU and torch release; the trace and the ledger both use it. Each rule is tested against recordings on GPUs
(`tests/test_kernel_workspaces.py` on `datasets/published/histories`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from math import gcd

from peakcast.catalog import Device
from peakcast.core.units import KIB, MIB

MAX_THREADS = 512
"""MAX_NUM_THREADS of aten/src/ATen/native/cuda/Reduce.cuh, for all types except complex128."""
WARP = 32
VECTOR = 4
"""Elements that a thread loads at once (`input_vec_size`, `get_output_vec_size`)."""
MIN_VALUES, MAX_VALUES = 16, 256
"""`min_values_per_thread`, `max_values_per_thread` of `setReduceConfig`."""
SEMAPHORE_BYTES = 4
SUM_ACCUMULATOR_BYTES = 4
"""Sums of bfloat16, float16 and float32 are in float32."""
INDEXED_MAX_ACCUMULATOR_BYTES = 16
"""`max` over a dimension holds a value and its 64-bit index."""


@dataclass(frozen=True, slots=True)
class Workspace:
    """The memory of a reduction: a buffer in which blocks put their part of each output, and a counter for each group of
    outputs. Both are 0 if one block reads all of an output."""

    buffer_bytes: int = 0
    semaphore_bytes: int = 0

    def __bool__(self) -> bool:
        return self.buffer_bytes > 0


NOTHING = Workspace()


def _parts(values: int, grid: int, blocks: int) -> int:
    """In how many parts the `values` of a thread are reduced, each by a block of its own, if the kernel's grid has `grid`
    blocks and the GPU runs `blocks` at once."""
    if values < MAX_VALUES or grid > blocks:
        return 1
    return max(min(_ceil(blocks, grid), _ceil(values, MIN_VALUES)), _ceil(values, MAX_VALUES))


@lru_cache(maxsize=4096)
def reduction(
    num_outputs: int,
    num_reduced: int,
    num_sms: int,
    max_threads_per_sm: int,
    *,
    reduced_is_contiguous: bool,
    accumulator_bytes: int = SUM_ACCUMULATOR_BYTES,
    vector: int = VECTOR,
) -> Workspace:
    """The memory that `gpu_reduce_kernel` takes to reduce `num_reduced` elements to each of `num_outputs`.

    `reduced_is_contiguous`: the elements of one output are adjacent; otherwise neighbouring outputs are, like columns when
    a gradient is summed over tokens. `vector`: outputs that a thread loads at once; fewer if the number of outputs is no
    multiple of it. If outputs are contiguous, this is accumulator × outputs × 128 × min(⌈reduced/64⌉, ⌈SMs · (threads per
    SM/128) / ⌈outputs/128⌉⌉) from 1,021 reduced elements on.

    Source: torch 2.x aten/src/ATen/native/cuda/Reduce.cuh, `setReduceConfig`, `global_memory_size`, `semaphore_size`.
    """
    if num_outputs < 1 or num_reduced < 2:
        return NOTHING
    if reduced_is_contiguous:
        whole = num_outputs == 1 and num_reduced > 128
        width, height, loaded = num_reduced // (VECTOR if whole else 1), num_outputs, 1
    else:
        loaded = gcd(num_outputs, vector)
        width, height = num_outputs // loaded, num_reduced
    most = MAX_THREADS // loaded
    width, height = _power_below(width, most), _power_below(height, most)
    block_height = min(height, most // min(width, WARP))
    block_width = min(width, most // block_height)
    per_block, outputs_per_block = (block_width, 1) if reduced_is_contiguous else (1, block_width)
    if _ceil(num_reduced, per_block) < min(block_height * 16, MAX_VALUES):
        return NOTHING  # each row of threads has an output of its own
    values = _ceil(num_reduced, per_block * block_height)
    grid = _ceil(num_outputs // loaded, outputs_per_block)
    parts = _parts(values, grid, num_sms * (max_threads_per_sm // (block_width * block_height)))
    if parts < 2:
        return NOTHING
    return Workspace(accumulator_bytes * num_outputs * parts * outputs_per_block * loaded, SEMAPHORE_BYTES * grid)


def column_sum(num_columns: int, num_rows: int, num_sms: int, max_threads_per_sm: int) -> Workspace:
    """The memory that a sum over the rows of a contiguous matrix takes: for the gradient, over tokens, of a bias or of a
    norm's weight."""
    return reduction(num_columns, num_rows, num_sms, max_threads_per_sm, reduced_is_contiguous=False)


def sort_bytes(num_indices: int, num_keys: int) -> int:
    """The memory of the sort in `_index_put_impl_`, which adds up the gradient of rows that were picked by index: of an
    embedding written as `weight[ids]`.

    1 byte for up to 2,048 indices, which one block sorts. Beyond, CUB's onesweep sort has a second copy of keys and values
    (8 bytes each), digit counts of every pass of 8 bits, and counts for each block: of 1,024 indices, inferred from the
    only recording above 2,048 (72,191 bytes at 4,096 indices of 10,000 rows).
    """
    if num_indices <= 2048:
        return 1
    passes = _ceil(max(num_keys, 2).bit_length(), 8)
    parts = (1024 * passes, 4 * 256 * _ceil(num_indices, 1024), 4 * passes, 8 * num_indices, 8 * num_indices)
    return sum(_ceil(part, 256) * 256 for part in parts) + 255


CUBLAS_BYTES = 8_519_680
"""":4096:2:16:8": 2 × 4096 KiB + 8 × 16 KiB."""
LARGE_CUBLAS_BYTES = 32 * MIB
"""":4096:8" worth, chosen by torch where the compute capability asks for it."""


def cublas_bytes(device: Device, release: tuple[int, ...], config: str | None = None) -> int:
    """Bytes of the workspace that each cuBLAS handle and stream keeps on `device`; `config` is CUBLAS_WORKSPACE_CONFIG if
    it is set. Handles are per thread: the forward and the autograd thread have one each.

    Source: torch 2.11 / 2.13 shipped binaries, `getChosenWorkspaceSize` in aten/src/ATen/cuda/CublasHandlePool.cpp
    (where-memory-goes C). Confirmed by published runs: an A100 with torch 2.4.1 holds 17,039,360 B after the step beyond
    its tensors, which is 2 × 8,519,680; and by every history that recorded one (33,554,432 on an H100 with torch 2.6).
    """
    if config:
        pairs = re.findall(r":(\d+):(\d+)", config)
        return sum(int(kib) * KIB * int(count) for kib, count in pairs)
    large = {9} if release < (2, 12) else {9, 10, 12}
    return LARGE_CUBLAS_BYTES if device.compute_capability[0] in large else CUBLAS_BYTES


CUBLASLT_BYTES = 1 * MIB
"""Workspace of cublasLt, which multiplies and adds a bias in one call (`gemm_and_bias`,
aten/src/ATen/cuda/CUDABlas.cpp)."""


def cublaslt_kept(release: tuple[int, ...]) -> bool | None:
    """Whether this release of torch keeps cublasLt's workspace (recorded with 2.9) or allocates it for each product
    (recorded with 2.1 and 2.2; the code is the same up to 2.4). None for releases in between, of which there is no
    recording."""
    if release >= (2, 9):
        return True
    return False if release <= (2, 4) else None


def flash_backward(rows: int, heads: int, width: int) -> tuple[int, int]:
    """What the backward of flash attention takes for `rows` queries (filled up to blocks of 128) of so many `heads` of
    `width` elements: the gradient of the queries in fp32, and row sums.

    Source: flash-attention 2.8.3 csrc/flash_attn/flash_api.cpp, `mha_bwd`: `dq_accum`, `softmax_d`; torch's copy of it
    (aten/src/ATen/native/transformers/cuda/flash_attn/flash_api.cpp) is the same.
    """
    filled = _ceil(width, 64) * 64 if width > 128 else _ceil(width, 32) * 32
    return 4 * rows * heads * filled, 4 * rows * heads


def _ceil(value: int, divisor: int) -> int:
    return -(-value // divisor)


def _power_below(value: int, most: int) -> int:
    """`last_pow2`: the largest power of two that is at most `value`, and at most `most`."""
    return min(1 << (max(value, 1).bit_length() - 1), most)
