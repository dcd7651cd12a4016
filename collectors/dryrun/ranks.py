"""Runs one rank of a distributed run by itself: sets its environment, and makes process groups whose collectives do
nothing."""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import types
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensor

from peakcast.collectors.machine.imports import when_imported
from peakcast.timelines.timeline import Category

_GROUP_USERS = ("torch.distributed", "torch.distributed.distributed_c10d", "torch.distributed.device_mesh")


CHOOSE_A_DEVICE = ("ACCELERATE_USE_CPU", "ACCELERATE_TORCH_DEVICE")
"""Variables that a Trainer on the CPU sets in its process; a dry run is for a GPU."""


STARTED_AT_ONCE = {
    "SLURM_NTASKS": ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID"),
    "OMPI_COMM_WORLD_SIZE": ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_NODE_RANK"),
}
"""Variable in which srun or mpirun gives the number of processes -> the variables that it sets for each process."""


def set_environment(rank: int, world_size: int, ranks_per_node: int, *, launched: bool) -> None:
    """Set the variables that torchrun sets, if a launcher started the script; otherwise none of them."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
    for name in (*names, *CHOOSE_A_DEVICE):
        os.environ.pop(name, None)
    if not launched:
        return
    local, node = rank % ranks_per_node, rank // ranks_per_node
    values = (rank, world_size, local, min(ranks_per_node, world_size), node, "127.0.0.1", 29500)
    os.environ.update({name: str(value) for name, value in zip(names, values, strict=True)})
    os.environ["TORCHELASTIC_RUN_ID"] = "dryrun"
    for size, own in STARTED_AT_ONCE.items():
        if size in os.environ:
            os.environ.update({name: str(value) for name, value in zip(own, (rank, local, node), strict=True)})


def set_settings_of_accelerate(words: Sequence[str]) -> None:
    """Set what `accelerate launch` with these words sets in addition: layout and precision from its file and its flags."""
    if not words:
        return
    launch: Any = importlib.import_module("accelerate.commands.launch")
    given = launch.launch_command_parser().parse_args(list(words))
    arguments, defaults, precision_of_file = launch._validate_launch_command(given)
    if arguments.use_deepspeed:
        fields = [*(defaults.deepspeed_config if defaults else ()), *(["mixed_precision"] if precision_of_file else ())]
        arguments.deepspeed_fields_from_accelerate_config = ",".join(fields)  # as accelerate 1.15's launch_command does
        found = launch.prepare_deepspeed_cmd_env(arguments)[1]
    elif arguments.use_fsdp or (arguments.num_processes and arguments.num_processes > 1):  # `launch_command`
        found = launch.prepare_multi_gpu_env(arguments)
    else:
        found = launch.prepare_simple_launcher_cmd_env(arguments)[1]
    prefixes = ("ACCELERATE_", "FSDP_", "PARALLELISM_CONFIG_", "FP8_", "MEGATRON_LM_")
    os.environ.update({name: value for name, value in found.items() if name.startswith(prefixes)})


Named = Callable[[Iterable[tuple[str, torch.Tensor]], Category], None]
"""Gives living tensors a name and a category."""


def install(rank: int, world_size: int, name: Named, *, launched: bool) -> None:
    """Make every process group of this process a fake one of `world_size` ranks; `name` is told of DDP's buckets.
    `launched`: whether a launcher started the script, which may then shard over one rank too."""
    from peakcast.collectors.dryrun import fsdp1_buffers
    from peakcast.collectors.tracing import deepspeed_fakes

    fsdp1_buffers.install()
    if world_size > 1 or launched:
        _install_sharding()
    _install_groups(rank, world_size)
    _install_objects()
    _install_broadcasts()
    _install_ddp(name)
    _install_meshes()
    os.environ["DS_ACCELERATOR"] = "cuda"
    when_imported("accelerate.data_loader", _read_on_every_rank)
    when_imported("deepspeed", lambda module: deepspeed_fakes.install())


@functools.cache
def _install_sharding() -> None:
    """Let FSDP2 and meshes work on fake tensors; once."""
    from peakcast.collectors.tracing import dtensors

    dtensors.install()
    _remember_meshes()
    fsdp: Any = importlib.import_module("torch.distributed.fsdp._fully_shard._fsdp_param")
    fsdp._chunk_with_empty = _Chunks  # it uses two of them; making one for each rank would take long
    random: Any = importlib.import_module("torch.distributed.tensor._random")
    random.manual_seed = lambda *_, **__: None  # it would set a GPU generator's state


class _Chunks:
    """`tensor` in as many parts as there are ranks, each made when it is read; the last ones may be empty."""

    def __init__(self, tensor: torch.Tensor, num_chunks: int, dim: int) -> None:
        self._tensor, self._dim = tensor, dim
        self._length = -(-tensor.size(dim) // num_chunks)

    def __getitem__(self, index: int) -> torch.Tensor:
        start = index * self._length
        left = min(self._length, self._tensor.size(self._dim) - start)
        return self._tensor.narrow(self._dim, start, left) if left > 0 or index == 0 else self._tensor.new_empty(0)


MESH_SIZES: dict[str, int] = {}
"""Dimension's name -> number of ranks along it, for the meshes that the script has made."""


def _remember_meshes() -> None:
    """Record the dimensions into which a script divides its ranks."""
    from torch.distributed.device_mesh import DeviceMesh

    make = DeviceMesh.__init__

    @functools.wraps(make)
    def made(self: Any, *arguments: Any, **keywords: Any) -> None:
        make(self, *arguments, **keywords)
        for name, size in zip(self.mesh_dim_names or (), self.shape, strict=False):
            MESH_SIZES[name] = max(size, MESH_SIZES.get(name, 1))

    DeviceMesh.__init__ = made  # type: ignore[method-assign]


def _install_groups(rank: int, world_size: int) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    begin, divide = dist.init_process_group, dist.new_group

    def begin_fake(*_: Any, **asked: Any) -> None:
        if dist.is_initialized():
            return
        size = world_size
        if size == 1:  # a script that starts its ranks itself says how many here, or in the environment as torchrun does
            given = int(asked.get("world_size", -1))
            size = max(1, given if given > 0 else int(os.environ.get("WORLD_SIZE") or 1))
        if size > 1:
            _install_sharding()
        begin("fake", rank=rank % size, world_size=size, store=FakeStore())

    def divide_fake(ranks: Any = None, *_: Any, **__: Any) -> Any:
        return divide(ranks=ranks, backend="fake")

    for name in _GROUP_USERS:
        module = importlib.import_module(name)
        for function, fake in (("init_process_group", begin_fake), ("new_group", divide_fake)):
            if hasattr(module, function):
                setattr(module, function, fake)
    dist.barrier = dist.monitored_barrier = lambda *_, **__: None  # type: ignore[assignment]
    for name in ("set_timeout", "_set_pg_timeout"):  # of groups that never wait
        for module in (dist, dist.distributed_c10d):
            setattr(module, name, lambda *_, **__: None)
    for module in (dist, dist.distributed_c10d):  # collectives that are sent as one are sent one by one
        module._coalescing_manager = _one_by_one  # type: ignore[attr-defined]
    dist.destroy_process_group = lambda *_, **__: None  # type: ignore[assignment]
    dist.is_nccl_available = lambda: True  # type: ignore[assignment]


@contextlib.contextmanager
def _one_by_one(*_: Any, **__: Any) -> Iterator[Any]:
    """A context whose collectives have happened when it is waited for."""
    yield types.SimpleNamespace(append=lambda work: None, wait=lambda: None)


def _install_meshes() -> None:
    """Meshes without a device type are of GPUs; torch would take the type from its own build, which may have none."""

    def default(mesh_dim_names: tuple[str, ...] | None = None) -> Any:
        if not dist.is_initialized():
            dist.init_process_group()
        return dist.init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=mesh_dim_names)

    for name in ("_fsdp_init", "_fully_shard"):
        module: Any = importlib.import_module(f"torch.distributed.fsdp._fully_shard.{name}")
        for function in ("_init_default_mesh", "_init_default_fully_shard_mesh"):
            if hasattr(module, function):
                setattr(module, function, default)


def _install_objects() -> None:
    """Objects that ranks send each other: every rank's object is this rank's."""

    def gather_all(gathered: list[Any], value: Any, group: Any = None) -> None:
        gathered[:] = [value] * len(gathered)

    def gather(value: Any, gathered: list[Any] | None = None, *_: Any, **__: Any) -> None:
        if gathered is not None:
            gathered[:] = [value] * len(gathered)

    def scatter(received: list[Any], values: list[Any] | None, *_: Any, **__: Any) -> None:
        received[:1] = (values or [None])[:1]

    fakes = {
        "all_gather_object": gather_all,
        "gather_object": gather,
        "scatter_object_list": scatter,
        "broadcast_object_list": lambda *_, **__: None,
    }
    for name, fake in fakes.items():
        for module in (dist, dist.distributed_c10d):
            setattr(module, name, fake)
    torch.distributed.send_object_list = lambda *_, **__: None  # type: ignore[attr-defined]


def _install_broadcasts() -> None:
    """What another rank broadcasts is not known here, whatever this rank's tensor held before."""
    broadcast = dist.broadcast

    @functools.wraps(broadcast)
    def received(tensor: Any, src: Any = None, group: Any = None, async_op: bool = False, group_src: Any = None) -> Any:
        work = broadcast(tensor, src, group, async_op, group_src)
        own = dist.get_rank() if group_src is None else dist.get_rank(group)
        if own != (src if group_src is None else group_src) and isinstance(tensor, FakeTensor):
            tensor.known_value = tensor.constant = None  # type: ignore[attr-defined]
        return work

    for module in (dist, dist.distributed_c10d):
        module.broadcast = received  # type: ignore[assignment]


def _read_on_every_rank(module: Any) -> None:
    """accelerate's loader of iterable data sets reads on rank 0, which sends the other ranks their part; here each rank
    reads, and takes the first part."""

    class Dispatcher(module.DataLoaderDispatcher):  # type: ignore[misc]
        def __init__(self, *arguments: Any, **keywords: Any) -> None:
            super().__init__(*arguments, **keywords)
            self.state: Any = _FirstRank(self.state)

    module.DataLoaderDispatcher = Dispatcher


class _FirstRank:
    """A process's state as accelerate has it, with rank 0."""

    process_index = 0

    def __init__(self, state: Any) -> None:
        self._state = state

    def __getattr__(self, name: str) -> Any:
        return getattr(self._state, name)


def _install_ddp(name: Named) -> None:
    """The fake group's all-reduce has no result that the reducer would accept, so buckets are returned unchanged."""
    from torch.nn.parallel import DistributedDataParallel

    wrap, register = DistributedDataParallel.__init__, DistributedDataParallel.register_comm_hook

    def unreduced(network: Any, bucket: Any) -> Any:
        future: Any = torch.futures.Future()
        future.set_result(bucket.buffer())
        if not network.gradient_as_bucket_view:  # otherwise the bucket is the gradients' own memory
            name([("ddp_bucket", bucket.buffer())], Category.COMMUNICATION_BUFFERS)
        return future

    def wrap_unreduced(self: Any, *arguments: Any, static_graph: bool = False, **keywords: Any) -> None:
        # a static graph counts in pinned memory which parameters were used, as fake tensors cannot
        wrap(self, *arguments, **keywords)
        register(self, self, lambda network, bucket: unreduced(network, bucket))  # DDP checks the annotations of a hook

    DistributedDataParallel.__init__ = wrap_unreduced  # type: ignore[method-assign]
    DistributedDataParallel.register_comm_hook = lambda *_, **__: None  # type: ignore[method-assign]
