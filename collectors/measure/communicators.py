"""How much GPU memory NCCL takes, by the number of ranks of a communicator. torchrun starts this program on each GPU (`-m
peakcast.collectors.measure.communicators FILE.json`), and rank 0 writes the file.

First every rank makes a communicator of its own, which loads NCCL; then come communicators of 2 ranks, of 4, ..., of all.
For each it records the bytes on rank 0's GPU that the driver counts and PyTorch's allocator does not.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from peakcast.collectors.machine import probes
from peakcast.collectors.machine.nvml import Nvml
from peakcast.collectors.measure.growth import Growth
from peakcast.collectors.processes import gang

Use = Callable[[tuple[int, ...]], None]
"""Makes a communicator of the given ranks and runs a collective in it. Every rank calls it in the same way."""


def sizes(num_ranks: int) -> tuple[int, ...]:
    """The powers of two from 2 to below `num_ranks`, and `num_ranks` itself."""
    powers = (2**power for power in range(1, num_ranks.bit_length()))
    return (*(size for size in powers if size < num_ranks), num_ranks)


def communicators(num_ranks: int, growth: Growth, use: Use) -> dict[str, Any]:
    """Bytes that loading NCCL took (`nccl`), and bytes of one communicator by its number of ranks (`communicators`)."""
    for rank in range(num_ranks):
        use((rank,))
    loaded = growth.mark("nccl")
    return {"nccl": loaded, "communicators": {str(size): _one(size, growth, use) for size in sizes(num_ranks)}}


def _one(size: int, growth: Growth, use: Use) -> int | None:
    use(tuple(range(size)))
    return growth.mark(f"communicator of {size}")


def _used(ranks: tuple[int, ...]) -> None:
    import torch
    import torch.distributed as dist

    group = dist.new_group(list(ranks))
    if dist.get_rank() in ranks:
        dist.all_reduce(torch.ones(1024, device="cuda"), group=group)
        torch.cuda.synchronize()


def main(arguments: list[str]) -> int:
    """Run one rank. Returns exit code 0; the file is complete once it exists."""
    import torch
    import torch.distributed as dist

    from peakcast.collectors.processes.warm_parent import die_with_parent
    from peakcast.core.durable import replace_file

    die_with_parent()
    probes.require_gpu()
    torch.cuda.set_device(gang.local_rank())
    nvml = Nvml(gang.local_rank())
    growth = Growth(nvml.used_bytes, torch.cuda.memory_reserved, nvml.settled_bytes())
    probes.open_context()
    nvml.check(probes.cuda_uuid())
    growth.mark("context")
    dist.init_process_group("nccl")
    found = communicators(dist.get_world_size(), growth, _used)
    if gang.rank() == 0:
        replace_file(Path(arguments[0]), json.dumps(found).encode())
    dist.barrier(device_ids=[gang.local_rank()])
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except Exception as error:  # torchrun's own last lines do not say why a rank ended
        sys.exit(f"peakcast: rank {gang.rank()}: {type(error).__name__}: {' '.join(str(error).split())}")
