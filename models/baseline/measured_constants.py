"""What a job holds on a GPU outside PyTorch's allocator, from what `peakcast collect constants` read on this machine.

For a `Device` that has such readings (`Device.constants`), the context, the kernels and handles of each library that the
job uses, and NCCL's communicators are measured. Residuals were still fitted with the estimates of `device_memory.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from peakcast.catalog.constants import Constants
from peakcast.core.units import format_gib
from peakcast.core.versions import resolved
from peakcast.jobs.conventions import conventions
from peakcast.jobs.spec import TrainingJob
from peakcast.models.baseline.device_memory import (
    communicator_bytes,
    communicator_ranks,
    context_bytes,
    cuda_major,
    num_contexts,
    one_communicator_bytes,
)

if TYPE_CHECKING:
    from peakcast.catalog import Device

ALWAYS = ("elementwise", "cublas", "cublaslt")
TRAINING = ("cublas in backward", "embedding backward", "cross entropy")
ENGINE = "transformer_engine"
COMMUNICATORS = "NCCL's communicators"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outside:
    """What a job holds outside PyTorch's allocator by one machine's readings, in bytes."""

    context_bytes: int
    kernels_bytes: int
    """Loaded kernels, and libraries' handles."""
    communicator_bytes: int
    """NCCL's; an estimate if it was not read."""
    missing: tuple[str, ...]
    """Parts of the job that no reading covers, in words."""

    @property
    def num_bytes(self) -> int:
        """The sum."""
        return self.context_bytes + self.kernels_bytes + self.communicator_bytes


def outside(job: TrainingJob, device: Device) -> Outside | None:
    """What `job` holds outside PyTorch's allocator by the readings of `device`; None if none of them applies to the
    job."""
    own = _own(device, job.versions)
    if own is None:
        return None
    pytorch, libraries = first_uses_of(job)
    ranks = communicator_ranks(job)
    missing = [library for library in libraries if library not in own.first_uses_bytes]
    if own.communicator_bytes and ranks:
        nccl = own.first_uses_bytes.get("nccl", 0) + sum(_communicator(own, size, device, job.versions) for size in ranks)
    else:
        nccl = communicator_bytes(job, device)
        missing += [COMMUNICATORS] if ranks else []
    return Outside(
        context_bytes=num_contexts(job, device) * own.context_bytes,
        kernels_bytes=sum(own.first_uses_bytes.get(step, 0) for step in (*pytorch, *libraries)),
        communicator_bytes=nccl,
        missing=tuple(missing),
    )


def first_uses_of(job: TrainingJob) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The steps of `collectors/measure/first_uses.py` that `job` takes: PyTorch's own (one that failed there has no
    kernels on this GPU), and those of other libraries, which are read only where they are installed."""
    chosen, optimizer = conventions(job), job.optimizer
    pytorch = list(ALWAYS)
    if job.attention in ("sdpa", "flash_attention_2"):
        pytorch.append("attention: flash")
    if job.task == "train":
        pytorch += [*TRAINING, "adamw: fused" if optimizer.implementation == "fused" else "adamw: foreach"]
    liger = bool(chosen.get("liger_kernels"))
    libraries = {
        "triton": job.compile or liger,
        "inductor": job.compile,
        "liger": liger,
        "bitsandbytes: nf4": job.finetuning.quantization == "nf4",
        "bitsandbytes: adamw_8bit": optimizer.in_8_bits or optimizer.is_paged,
        "transformer engine": job.framework == "megatron" and chosen.get("transformer_impl", ENGINE) == ENGINE,
    }
    return tuple(pytorch), tuple(name for name, used in libraries.items() if used)


def known_context_bytes(device: Device, versions: Mapping[str, Any]) -> int:
    """Bytes of the CUDA context on `device`: as read on this machine, else as estimated."""
    own = _own(device, versions)
    return own.context_bytes if own is not None else context_bytes(device, versions)


def rests_on_readings(job: TrainingJob, device: Device) -> str:
    """What device memory is based on, as a sentence; "" if nothing was read for the GPU type."""
    own, found = device.constants, outside(job, device)
    if own is None:
        return ""
    read = f"`peakcast collect constants` read on {own.gpu} here ({', '.join(filter(None, (own.observed, own.path)))})"
    if found is None:
        return (
            f"device memory does not use what {read}: that was under CUDA {cuda_major(own.versions)}, and this job's "
            f"versions mean CUDA {cuda_major(job.versions)}."
        )
    parts = f"CUDA context {format_gib(found.context_bytes)}, kernels and handles {format_gib(found.kernels_bytes)}"
    if found.missing:
        return (
            f"device memory is no less than reserved memory and what {read}: {parts}. Not read there: "
            f"{', '.join(found.missing)}."
        )
    parts += f", NCCL {format_gib(found.communicator_bytes)}" if found.communicator_bytes else ""
    return f"device memory is reserved memory and what {read}: {parts}."


def _own(device: Device, versions: Mapping[str, Any]) -> Constants | None:
    """The readings of `device`, unless the job's `versions` mean another major release of CUDA."""
    own = device.constants
    if own is None or not {"cuda", "torch"} & set(own.versions) or not {"cuda", "torch"} & set(resolved(versions)):
        return own
    return own if cuda_major(own.versions) == cuda_major(versions) else None


def _communicator(own: Constants, num_ranks: int, device: Device, versions: Mapping[str, Any]) -> int:
    """Bytes of a communicator of `num_ranks`: as read for this number, else scaled by the ratio of the estimates from the
    next larger number that was read (the largest if there is none)."""
    read = {int(ranks): size for ranks, size in own.communicator_bytes.items()}
    nearest = min((ranks for ranks in read if ranks >= num_ranks), default=max(read))
    estimate, of_nearest = (one_communicator_bytes(device, ranks, versions) for ranks in (num_ranks, nearest))
    return read[nearest] * estimate // of_nearest
