"""A Model Context Protocol server over standard input and output: the functions of `peakcast.api` as tools of an assistant.

Each tool gives the same answer as the command with its name. No tool measures anything or writes a file, except the user's
cache of recipes. Source of the protocol: modelcontextprotocol.io. The package `mcp` implements it, and is imported only
here.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Annotated, Any

from mcp.server import MCPServer
from mcp.server.mcpserver.exceptions import ToolError
from mcp.server.mcpserver.tools import Tool
from mcp.types import ToolAnnotations
from pydantic import Field, ValidationError

from peakcast import __version__, api, catalog
from peakcast.core.errors import PeakcastError, near_misses
from peakcast.printing import answers as render
from peakcast.printing.explanations import explanation_text
from peakcast.printing.recordings import replayed_text

INSTRUCTIONS = (
    "Peak GPU memory of LLM training and inference, predicted with error bars. `predict` says whether a run fits on a GPU "
    "type; `search` finds layouts that fit; `explain` says what the peak is made of and what would lower it. All sizes are "
    "bytes unless a text says GiB. `fits` is yes, no or uncertain; peak_device_bytes.upper_95 decides it. An answer's "
    "findings and warnings say what is not modelled: pass them on."
)
Job = Annotated[
    str | dict[str, Any],
    Field(
        description="What is trained: the catalog name of a network (llama-3.1-8b), the path or the text of a job file or "
        "of a configuration of another project (Trainer arguments, DeepSpeed, Axolotl, LLaMA-Factory, torchtitan, a "
        "Megatron-LM launch script, ...), or a mapping such as {architecture: llama-3.1-8b, micro_batch_size: 1, "
        "sequence_length: 4096, finetuning: {method: lora, rank: 16}, activation_checkpointing: {mode: full}}; or "
        "{huggingface: {config: ..., training_arguments: {...}, peft: {...}, deepspeed: {...}, num_gpus: 8}}."
    ),
]
GpuArgument = Annotated[str, Field(description="GPU type, such as H100-80GB; `gpus` lists them.")]
RankArgument = Annotated[str, Field(description="worst, last, or a number.")]
NumGpus = Annotated[int | None, Field(description="GPUs of the whole run, where the configuration does not say it.", ge=1)]
Files = Annotated[
    list[str] | None, Field(description="Paths of other files of the same run, such as the DeepSpeed file that it names.")
]
HostMemoryArgument = Annotated[float | None, Field(description="Host memory of a node in GiB, where it is to be weighed.")]


def predict(
    job: Job,
    gpu: GpuArgument,
    rank: RankArgument = "worst",
    host_memory_gib: HostMemoryArgument = None,
    num_gpus: NumGpus = None,
    files: Files = None,
) -> dict[str, Any]:
    """Predict the peak memory of one rank of a job (allocated, reserved, as nvidia-smi shows it, and of the host), with
    error bars, whether it fits, which GPU types would fit and what to try first."""
    return api.predict(_asked(job, num_gpus, files), gpu, rank, host_memory_gib=host_memory_gib).to_mapping()


def megatron(
    arguments: Annotated[list[str], Field(description="The flags after pretrain_gpt.py, one word each.")],
    gpu: GpuArgument,
    num_gpus: Annotated[int, Field(description="GPUs of the whole run.", ge=1)],
    env: Annotated[dict[str, str] | None, Field(description="Environment variables of the run.")] = None,
    rank: RankArgument = "worst",
) -> dict[str, Any]:
    """As `predict`, of a Megatron-LM command line."""
    return api.megatron(arguments, gpu, num_gpus, rank, env=env).to_mapping()


def explain(
    job: Job,
    gpu: Annotated[
        str | None, Field(description="GPU type; without it kernels' and libraries' memory is left out.")
    ] = None,
    rank: RankArgument = "worst",
    against: Annotated[str | dict[str, Any] | None, Field(description="Another job to compare with.")] = None,
    num_gpus: NumGpus = None,
    files: Files = None,
) -> str:
    """Explain the memory of one rank of a job in text: why the peak is where it is, layer by layer, what is communicated,
    and what would lower it by how much."""
    return explanation_text(
        api.explain(_asked(job, num_gpus, files), gpu, rank, against=against), layers=False, whole=True
    )


def search(
    job: Job,
    gpu: GpuArgument,
    num_gpus: Annotated[int | None, Field(description="GPUs to spread it over; default: those of the job.", ge=1)] = None,
    global_batch_size: Annotated[int | None, Field(description="Sequences per optimizer step.", ge=1)] = None,
    find: Annotated[
        str, Field(description="plans; or the largest micro_batch_size, sequence_length or model; or the fewest num_gpus.")
    ] = "plans",
    top: Annotated[int, Field(description="Plans to give.", ge=1, le=100)] = 5,
    host_memory_gib: HostMemoryArgument = None,
    files: Files = None,
) -> dict[str, Any]:
    """Find layouts, micro-batches, checkpointing, sharding and offloading with which a job fits, ranked."""
    found = api.search(
        _asked(job, None, files),
        gpu,
        num_gpus=num_gpus,
        global_batch_size=global_batch_size,
        find=find,
        top=top,
        host_memory_gib=host_memory_gib,
    )
    return found.to_mapping()


def read(job: Job, num_gpus: NumGpus = None, files: Files = None) -> str:
    """How a configuration is understood: the job with every default as YAML, and as comments what was assumed and what was
    left out."""
    return render.job_text(_asked(job, num_gpus, files), as_json=False)


def replay(
    file: Annotated[str, Field(description="A file that torch.cuda.memory._dump_snapshot wrote.")],
    against: Annotated[str | dict[str, Any] | None, Field(description="A job: compare with its prediction.")] = None,
    gpu: Annotated[str | None, Field(description="GPU type of that prediction.")] = None,
) -> str:
    """Replay a recorded allocator history through the simulated allocator, and compare it with a prediction, in text."""
    return replayed_text(api.replay(file, against, gpu))


def gpus() -> dict[str, int]:
    """The GPU types that are known, and the bytes of memory that CUDA gives on each."""
    return {name: catalog.gpu(name).cuda_memory_bytes for name in catalog.gpu_names()}


def architectures() -> list[str]:
    """The networks that are known by name; others are given as their config.json."""
    return list(catalog.architecture_names())


def doctor() -> str:
    """What is installed on this machine, which GPUs and calibrations are found, and what works with them."""
    return render.installation_text(api.doctor())


TOOLS: tuple[Callable[..., Any], ...] = (predict, megatron, explain, search, read, replay, gpus, architectures, doctor)


def server() -> MCPServer:
    """The server with its tools."""
    tools = [_tool(function) for function in TOOLS]
    return MCPServer("peakcast", version=__version__, instructions=INSTRUCTIONS, log_level="ERROR", tools=tools)


class _Told(Tool):
    """A tool that says in peakcast's words which argument is missing, unknown or of another form."""

    async def run(self, arguments: dict[str, Any], *more: Any, **options: Any) -> Any:
        try:
            self.fn_metadata.validate_arguments(arguments)
        except ValidationError as error:
            raise ToolError(" ".join(dict.fromkeys(map(self._sentence, error.errors())))) from error
        return await super().run(arguments, *more, **options)

    def _sentence(self, error: Mapping[str, Any]) -> str:
        """The sentence about one thing that pydantic finds wrong with the arguments."""
        known = self.parameters["properties"]
        name = str(error["loc"][0])
        if name not in known:
            near = near_misses(name, known) or f"; it has {', '.join(known)}"
            return f"{name} is no argument of {self.name}{near}."
        described = str(known[name]["description"]).rstrip(".")
        if error["type"] == "missing":
            return f"{name} is required and missing: {described}."
        return f"{name}={error['input']!r} is not right ({error['msg'].lower()}): {described}."


def _tool(function: Callable[..., Any]) -> Tool:
    """The tool that calls `function`. It refuses an argument that it does not have: left out in silence, as the package
    does it, the answer would be to another question."""
    made = _Told.from_function(
        _explained(function),
        description=" ".join(str(function.__doc__).split()),
        annotations=ToolAnnotations(read_only_hint=True, open_world_hint=False),
    )
    arguments = made.fn_metadata.arg_model
    arguments.model_config["extra"] = "forbid"
    arguments.model_rebuild(force=True)
    made.parameters = arguments.model_json_schema(by_alias=True)
    return made


def _asked(job: Any, num_gpus: int | None, files: list[str] | None) -> Any:
    """`job` read with what goes with it."""
    return api.read(job, files or (), num_gpus) if files or num_gpus else job


def tools() -> list[dict[str, Any]]:
    """A description of the server's tools: name, description, and the schemas of arguments and answers."""
    import asyncio

    return [tool.model_dump(mode="json", by_alias=True, exclude_none=True) for tool in asyncio.run(server().list_tools())]


def serve() -> None:
    """Serve until standard input ends."""
    server().run("stdio")


def _explained(tool: Callable[..., Any]) -> Callable[..., Any]:
    """`tool` with its errors turned into the sentence that a user of the command would read."""

    @functools.wraps(tool)
    def answered(*args: Any, **kwargs: Any) -> Any:
        try:
            return tool(*args, **kwargs)
        except PeakcastError as error:
            raise ToolError(error.message) from error

    return answered
