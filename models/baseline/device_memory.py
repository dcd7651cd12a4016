"""What a process holds on a GPU outside PyTorch's allocator: the CUDA context and NCCL's communicators, in bytes.

Estimates from published readings, each with its source. What kernels load beyond that differs between machines: the
residual of device memory learns it from rows, and `peakcast collect constants` reads it (`measured_constants.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from peakcast.core.units import KIB, MIB
from peakcast.core.versions import release, resolved, torch_release
from peakcast.jobs.conventions import conventions
from peakcast.jobs.spec import TrainingJob

if TYPE_CHECKING:
    from peakcast.catalog import Device

HOPPER = (9, 0)
LOCAL_MEMORY_BYTES_PER_THREAD = 1 * KIB
"""The default stack of a thread; the driver reserves it for every thread that the GPU can run at once. Source: NVIDIA
developer forums 289339 and 39558; A100 216 MiB = 108 × 2048 KiB as reported."""
BASE_CONTEXT_BYTES = {12: 256 * MIB, 13: 213 * MIB}
"""By CUDA major release: the context and the kernels loaded with it, without the local-memory arena. Source: CUDA 12.8 on
H200, a process of 520 MiB next to another one's (CTX-045 of datasets/published/constants/device_constants_h100.csv), less
its arena of 264 MiB; CUDA 13.0 on RTX 6000 Ada, bare context 426 MiB (unslothai/unsloth-zoo #1053), less 213 MiB. Older
releases of CUDA count as 12."""
KERNELS_BYTES = 50 * MIB
"""Kernels and handles that the steps of a job load into its process's context. Source: optimum-benchmark, which publishes
what NVML says and what is reserved: 120 runs of torch 2.1.1 on A100-80GB, in float16 and GPTQ, with three kinds of
attention, held 49 to 54 MiB more than reserved memory and the context above (rows of commits 450f5b8, 4dc5b95 and
adbc1e9; at another commit nine held 840 MiB more and nine 31 less). Of fms-acceleration's runs on one GPU, whose reserved
memory is replayed, a quarter held no more than 39 to 56 MiB in five of eight tables."""
AMPERE_COMMUNICATOR_BYTES = (544 * MIB, 688 * MIB)
"""Buffers of one NCCL communicator of 2 ranks and of more, up to compute capability 8.x. Source: 4 × A100, NVIDIA/nccl
#964, which writes MB but means MiB: 256 MiB that sends and receives share (32 channels × 16 steps × 512 KiB, the formula in
#2363), and 24 channels with 10 and 2 MiB of buffers (sizes seen in #1685); with more than 2 ranks 36, because a tree has
edges that the ring does not have."""
AMPERE_NCCL_BYTES = 128 * MIB
"""NCCL's kernels, once per process, up to compute capability 8.x; a communicator has only the buffers above. Source: 4 × L4
without peer access, where buffers are a few MiB, hold 0.13 GiB after NCCL 2.21.5's first collectives (log of SGLang's start
under torch 2.5 in didier-durand/llms-in-clouds)."""
HOPPER_COMMUNICATOR_BYTES = {12: 990 * MIB, 13: 699 * MIB}
"""Buffers and kernels together, for 8 ranks from compute capability 9.0 on, by major release of CUDA, including NVLink
SHARP's buffers. Source: median of what a process holds after NCCL's first collective on 8 × H100 (1,510 MiB under CUDA 12,
1,176 MiB under CUDA 13; device_constants_h100.jsonl), less the context above."""


def cuda_major(versions: Mapping[str, Any]) -> int:
    """The major release of CUDA that a job's `versions` imply: that of `cuda`, or of torch's build (`2.4.1+cu121`), or the
    default of torch's wheels. Source: pip's torch 2.1 to 2.10 depend on CUDA 12, torch 2.11 on CUDA 13.0."""
    versions = resolved(versions)
    if numbers := release(versions.get("cuda", "")):
        return int(numbers[0])
    build = str(versions.get("torch", "")).partition("+cu")[2]
    if build[:2].isdigit():
        return int(build[:2])
    return 13 if torch_release(versions) >= (2, 11) else 12


def context_bytes(device: Device, versions: Mapping[str, Any]) -> int:
    """Estimate of the CUDA context on `device` under a job's `versions`: its base and the local-memory arena."""
    arena = device.num_sms * device.max_threads_per_sm * LOCAL_MEMORY_BYTES_PER_THREAD
    return _by_release(BASE_CONTEXT_BYTES, versions) + arena


def num_contexts(job: TrainingJob, device: Device) -> int:
    """Number of processes that have a CUDA context on the GPU of a rank: its own, and all of its node where each of them
    touches every GPU (convention `contexts_on_every_gpu`)."""
    everywhere = conventions(job).get("contexts_on_every_gpu")
    return min(job.parallelism.world_size, device.gpus_per_node) if everywhere else 1


def contexts_and_kernels_bytes(job: TrainingJob, device: Device) -> int:
    """Estimate of the CUDA contexts on the GPU of a rank of `job`, and of what its own steps load into them."""
    return num_contexts(job, device) * context_bytes(device, job.versions) + KERNELS_BYTES


def communicator_bytes(job: TrainingJob, device: Device) -> int:
    """Estimate of NCCL's device memory: kernels, and one communicator for each axis of the layout with more than one
    rank."""
    ranks = communicator_ranks(job)
    kernels = AMPERE_NCCL_BYTES if ranks and device.compute_capability < HOPPER else 0
    return kernels + sum(one_communicator_bytes(device, size, job.versions) for size in ranks)


def communicator_ranks(job: TrainingJob) -> tuple[int, ...]:
    """Number of ranks of each of the communicators of `job`."""
    layout = job.parallelism
    axes = (
        layout.data_parallel_size,
        layout.tensor_parallel_size,
        layout.pipeline_parallel_size,
        layout.context_parallel_size,
        layout.expert_parallel_size,
    )
    return tuple(size for size in axes if size > 1)


def one_communicator_bytes(device: Device, num_ranks: int, versions: Mapping[str, Any]) -> int:
    """Estimate of one NCCL communicator of `num_ranks` on `device`. For 2 ranks on Hopper, the share of 8 ranks' bytes is
    assumed to be as on A100, because nobody has published it."""
    pair, more = AMPERE_COMMUNICATOR_BYTES
    if device.compute_capability < HOPPER:
        return more if num_ranks > 2 else pair
    full = _by_release(HOPPER_COMMUNICATOR_BYTES, versions)
    return full if num_ranks > 2 else full * pair // more


def _by_release(table: Mapping[int, int], versions: Mapping[str, Any]) -> int:
    """The table's value for the CUDA release that `versions` imply, or the nearest one."""
    return table[min(max(cuda_major(versions), min(table)), max(table))]
