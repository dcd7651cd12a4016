"""Facts with their sources: GPUs, architectures, framework conventions. They are read from TOML when first needed, and
found by any of their names."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from peakcast.catalog.constants import Constants
from peakcast.core.errors import CatalogError, near_misses
from peakcast.jobs.architecture import Architecture

_HERE = files("peakcast.catalog")


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """A GPU type: where a job runs. Numbers are per GPU."""

    name: str
    generation: str
    """NVIDIA's name of the GPU architecture ("Hopper")."""
    memory_bytes: int
    """Nominal memory as advertised, in bytes."""
    nvml_memory_bytes: int
    """Total that nvidia-smi shows, in bytes; memory for error correction is already subtracted."""
    cuda_memory_bytes: int
    """Total that `cudaMemGetInfo` reports, in bytes: what all CUDA programs together can use."""
    num_sms: int
    """Streaming multiprocessors."""
    max_threads_per_sm: int
    compute_capability: tuple[int, int]
    source: str
    """Source of the multiprocessors, threads and nominal memory."""
    cuda_memory_source: str
    """How `cuda_memory_bytes` is known: "measured report: ..." or "estimated: ..."."""
    host_memory_bytes: int | None = None
    """Host memory of a node, in bytes. Catalogs do not have it; None unless the question gives it."""
    gpus_per_node: int = 8
    """GPUs of a node, as in the usual machine (DGX, HGX)."""
    constants: Constants | None = None
    """Readings of memory outside PyTorch's allocator on a machine with this GPU. Catalogs do not have them."""


# -- GPUs -------------------------------------------------------------------------------------------------------------


def gpu(name: str) -> Device:
    """The GPU type called `name`: peakcast's name ("H100-80GB") or torch's ("NVIDIA H100 80GB HBM3"), in upper or lower
    case. Raises: CatalogError with near misses."""
    key = _gpu_aliases().get(_folded(name, "gpu"))
    if key is None:
        _refuse_several(name)
        hint = near_misses(name, gpu_names()) or f"; known: {', '.join(gpu_names())}."
        raise CatalogError(
            f"gpu={name!r} is not in the catalog{hint} A new GPU is a stanza in peakcast/catalog/gpus.toml.",
            parameter="gpu",
            value=name,
        )
    return _device(key)


LONGEST_NODE = 200
"""Most characters of a text that is read as the GPUs of a node."""
_OF_A_NODE = re.compile(r"(?:(?P<before>\d+)\s*[x×*]\s*)?(?P<name>.+?)(?:\s*[:x×*]\s*(?P<after>\d+))?")
"""A GPU type of a node, which may say how many there are: "4xA100-40GB", "A100-40GB:4"."""


def _refuse_several(name: str) -> None:
    """Raises: CatalogError where `name` is several GPU types, such as "RTX4090+RTX3090" or "4xA100-40GB+4xH100-80GB", with
    the one that decides; or where it says how many GPUs of one type there are."""
    if len(name) > LONGEST_NODE:
        return
    parts = [_OF_A_NODE.fullmatch(each) for each in re.split(r"\s*(?:[+,&;/]|\band\b)\s*", name.strip())]
    counts = [int(part["before"] or part["after"] or 0) for part in parts if part]
    known = [_gpu_aliases().get(_folded(part["name"], "gpu")) for part in parts if part]
    if len(known) < len(parts) or not all(known) or (len(known) == 1 and not counts[0]):
        return
    least = min((_device(key) for key in known if key), key=lambda device: device.cuda_memory_bytes)
    number = f" and num_gpus={sum(counts)}" if all(counts) else ""
    sentence = f"says how many GPUs there are; ask with {least.name}{number}."
    if len(set(known)) > 1:
        sentence = (
            "is several GPU types. Layouts give each GPU an equal share, so a run over unequal GPUs has to fit on the one "
            f"with the least memory: ask with {least.name}{number}. Which type to take, `peakcast search --gpu "
            f"{','.join(dict.fromkeys(filter(None, known)))}` says."
        )
    raise CatalogError(f"gpu={name!r} {sentence}", parameter="gpu", value=name)


def gpu_names() -> tuple[str, ...]:
    """The catalog's own GPU names, as written in gpus.toml."""
    return tuple(_gpus())


def read_ahead() -> None:
    """Read the tables of GPUs now. A process that forks others calls it, since each of them would read them again."""
    _gpu_aliases()


@cache
def _gpus() -> dict[str, dict[str, Any]]:
    return tomllib.loads(_HERE.joinpath("gpus.toml").read_text(encoding="utf-8"))


@cache
def _device(name: str) -> Device:
    row = {key: value for key, value in _gpus()[name].items() if key != "aliases"}
    major, minor = row.pop("compute_capability")
    return Device(name=name, compute_capability=(major, minor), **row)


@cache
def _gpu_aliases() -> Mapping[str, str]:
    return {_folded(alias): name for name, row in _gpus().items() for alias in (name, *row.get("aliases", ()))}


# -- architectures ------------------------------------------------------------------------------------------------------


def architecture(name: str) -> Architecture:
    """The network called `name`: peakcast's name ("llama-3.1-8b") or a hub id ("meta-llama/Llama-3.1-8B"), in upper or
    lower case. Raises: CatalogError with near misses."""
    return _architecture(_architecture_key(name))


def architecture_names() -> tuple[str, ...]:
    """The catalog's own architecture names, sorted."""
    folder = _HERE.joinpath("architectures")
    return tuple(sorted(file.name.removesuffix(".toml") for file in folder.iterdir() if file.name.endswith(".toml")))


def published_num_parameters(name: str) -> int:
    """Number of parameters of the network called `name` as its authors state it; tied weights count once. It may be
    rounded: see `published_num_parameters_tolerance`."""
    return int(_file(_architecture_key(name))["num_parameters"])


def checkpoint_dtype(name: str) -> str:
    """The dtype in which transformers loads the network's published weights: that of its config.json, or of the weights
    where that has none, as those of BERT, GPT-2 and T5. "bfloat16" unless the network's file says otherwise."""
    return str(_file(_architecture_key(name)).get("checkpoint_dtype", "bfloat16"))


def published_num_parameters_tolerance(name: str) -> int:
    """How far `published_num_parameters` may be from the exact number because it was published rounded; 0 if it is
    exact."""
    return int(_file(_architecture_key(name)).get("num_parameters_tolerance", 0))


@cache
def _architecture(key: str) -> Architecture:
    from peakcast.networks.config import architecture_from_hf_config

    return architecture_from_hf_config(_file(key)["config"], name=key)


@cache
def _file(key: str) -> dict[str, Any]:
    """The content of one architecture's file: its own keys, and `config`, the excerpt of its config.json (in which "null"
    stands for null, which TOML does not have)."""
    mapping = tomllib.loads(_HERE.joinpath("architectures", f"{key}.toml").read_text(encoding="utf-8"))
    mapping["config"] = _with_nulls(mapping["config"])
    return mapping


def _with_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {field: _with_nulls(inner) for field, inner in value.items()}
    return None if value == "null" else value


@cache
def _known_architectures() -> Mapping[str, str]:
    return {_folded(name): name for name in architecture_names()}


@cache
def _architecture_aliases() -> Mapping[str, str]:
    text = _HERE.joinpath("aliases.toml").read_text(encoding="utf-8")
    pairs = [(alias, name) for name, aliases in tomllib.loads(text).items() for alias in aliases]
    bare = {_folded(alias.rsplit("/", 1)[-1]): name for alias, name in reversed(pairs)}
    return bare | {_folded(alias): name for alias, name in pairs}


def _architecture_key(name: str) -> str:
    folded = _folded(name, "architecture")
    bare = _folded(_without_packaging(name))
    for known in (_known_architectures(), _architecture_aliases()):
        for candidate in (folded, bare):
            if candidate in known:
                return known[candidate]
    family_member = _without_role(bare)  # last, since gemma-3-4b-it sees images and gemma-3-4b is its text part
    for known in (_known_architectures(), _architecture_aliases()):
        if family_member in known:
            return known[family_member]
    raise CatalogError(
        f"architecture={name!r} is not in the catalog{near_misses(name.rsplit('/', 1)[-1], architecture_names()) or '.'}"
        " Give the network's config.json instead: by its path (--model, also beside a configuration) or as its mapping.",
        parameter="architecture",
        value=name,
    )


_PACKAGING = re.compile(
    r"[-_.](gptq|awq|gguf|unsloth|bnb|nf4|4bit|8bit|int4|int8|fp16|fp8|bf16|hf)(?=$|[-_.])", re.IGNORECASE
)


_ROLE = re.compile(
    r"[-.](instruct|chat|base|it|pt|sft|dpo|thinking|think|reasoning|abliterated)(?=$|[-.])",
)


def _without_role(folded: str) -> str:
    """A folded name without its words for what the weights were trained for, which change no tensor's shape:
    `llama-3-base-8b-sft` -> `llama-3-8b`. Fine-tuned networks that differ, in their vocabulary for example, have names of
    their own in the catalog."""
    return _ROLE.sub("", folded)


def _without_packaging(name: str) -> str:
    """A hub id without its owner and its words for the storage of weights: `TheBloke/Llama-2-70B-GPTQ` -> `Llama-2-70B`."""
    return _PACKAGING.sub("", name.rsplit("/", 1)[-1])


def _folded(name: str, parameter: str = "name") -> str:
    """`name` in the form used for comparison: lower case, one kind of separator, no vendor."""
    if not isinstance(name, str):
        raise CatalogError(f"{parameter}={name!r} must be a name, as text.", parameter=parameter, value=name)
    return re.sub(r"[\s_]+", "-", name.strip().lower()).removeprefix("nvidia-")
