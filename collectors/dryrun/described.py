"""Describes the job that a script ran, as far as error bars and findings need it."""

from __future__ import annotations

import importlib.metadata
import math
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from peakcast.collectors.dryrun.losses import loss_of, packages
from peakcast.collectors.dryrun.ranks import MESH_SIZES
from peakcast.collectors.dryrun.steps import ScriptSteps
from peakcast.collectors.dryrun.unsaid import unsaid
from peakcast.collectors.dryrun.wrapped import DTYPES, layout, mixed, of_deepspeed, offloads

OPTIMIZERS = {
    "adamw": "adamw", "adam": "adam", "sgd": "sgd", "adafactor": "adafactor", "muon": "muon", "lion": "lion",
    "adagrad": "adagrad", "rmsprop": "rmsprop",
}  # fmt: skip
"""Prefix of an optimizer's class name -> the name in jobs; if one prefix begins with another, the longer comes first."""
PACKAGES = ("torch", "transformers", "accelerate", "peft", "trl", "deepspeed", "torchao", "bitsandbytes", "liger_kernel")
IMPORTED_BY_OTHERS = ("torchao", "bitsandbytes", "deepspeed", "liger_kernel")
"""Those of the packages that other packages import whenever they are installed: they only count if a network, its kernels
or an optimizer come from them."""


@dataclass(frozen=True)
class Described:
    """A job's mapping, and sentences on what it cannot say of the script."""

    job: dict[str, Any]
    unsaid: tuple[str, ...]


def described(steps: ScriptSteps, question: Mapping[str, Any]) -> Described:
    """The job of the networks and optimizers that `steps` has seen."""
    network = _trained(steps)
    config = next((part.config for part in network.modules() if hasattr(getattr(part, "config", None), "to_dict")), None)
    length, batch = _sizes(steps)
    precision = _precision(steps, network)
    framework = _framework(steps, config)
    sharding, options = layout(steps.networks)
    loss, kernels = loss_of(steps, network) if config is not None else ({}, {})
    parallelism = {**_parallelism(steps.networks), **sharding} if dist.is_initialized() else {}
    parts = parallelism.get("context_parallel_size", 1)  # of a sequence, of which this rank's network sees one
    job: dict[str, Any] = {
        "architecture": _architecture(network, config),
        "framework": framework,
        "versions": _versions(steps, framework, question.get("torch")),
        "micro_batch_size": batch,
        "sequence_length": parts * length,
        "gradient_accumulation_steps": max(1, steps.micro_batches),
        "precision": precision,
        "optimizer": _optimizer(steps.optimizers),
        "finetuning": _finetuning(network, config),
        **_of_transformers(steps, network, config),
        "loss": loss,
        "framework_options": {
            **({"autocast": True} if steps.autocast else {}),
            **({**options, **of_deepspeed(steps.networks)} if config is not None else {}),
            **kernels,
            **_widened(network, config),
            **_multiplied(network, config, precision["compute"]),
            **_library(steps.optimizers, framework),
            **_of_the_loop(steps, framework, config),
        },
        "offload": offloads(steps.networks),
        "compile": _compiled(network),
        "parallelism": parallelism,
        "batch": {"shortest_sequence": max(1, parts * min(steps.lengths.of_steps))} if steps.lengths.change else {},
        "allocator": _allocator(),
    }
    left_out = unsaid(steps, network, config, adapters=bool(job["finetuning"]), of_loops=framework in LOOPS)
    return Described(_told(job), tuple(left_out))


class FunctionalModule(torch.nn.Module):  # type: ignore[misc]
    """The trained tensors of a network that is not a module: its forward is functions of them."""

    def __init__(self, optimizers: Sequence[Any]) -> None:
        super().__init__()
        held = [one for optimizer in optimizers for group in optimizer.param_groups for one in group["params"]]
        for number, one in enumerate(held):
            self.register_parameter(str(number), one if isinstance(one, torch.nn.Parameter) else torch.nn.Parameter(one))


def _trained(steps: ScriptSteps) -> torch.nn.Module:
    """The network of which most is trained: of two alike, as a policy and its reference, the one that the optimizer has."""
    held = {id(one) for optimizer in steps.optimizers for group in optimizer.param_groups for one in group["params"]}

    def elements(network: torch.nn.Module) -> tuple[int, int]:
        trained = [parameter for parameter in network.parameters() if parameter.requires_grad]
        return sum(one.numel() for one in trained if id(one) in held), sum(one.numel() for one in trained)

    return max(steps.networks, key=elements) if steps.networks else FunctionalModule(steps.optimizers)


def _precision(steps: ScriptSteps, network: torch.nn.Module) -> dict[str, str]:
    """The dtypes of weights, products, gradients and optimizer states."""
    parameters = list(network.parameters())
    weights = _quantized_from(network) or _dtype(parameters)
    computed, reduced = mixed(steps.networks)
    trained = _dtype([parameter for parameter in parameters if parameter.requires_grad])
    return {
        "parameters": weights,
        "compute": computed or (DTYPES.get(steps.autocast, weights) if steps.autocast else weights),
        "gradients": reduced or trained,
        "optimizer_states": trained,
    }


def _sizes(steps: ScriptSteps) -> tuple[int, int]:
    """(length, number) of the sequences of the largest micro-batch."""
    *outer, length = steps.tokens or steps.inputs or (1,)
    return max(1, length), max(1, math.prod(outer))


def _dtype(parameters: Iterable[torch.Tensor]) -> str:
    """The dtype of most elements, among those that a job can name."""
    counts: dict[str, int] = {}
    for parameter in parameters:
        if parameter.dtype in DTYPES:
            name = DTYPES[parameter.dtype]
            elements = getattr(parameter, "ds_numel", None) or parameter.numel()  # ZeRO-3 leaves none in what it shards
            counts[name] = counts.get(name, 0) + elements
    return max(counts, key=counts.__getitem__, default="float32")


def _architecture(network: torch.nn.Module, config: Any) -> dict[str, Any]:
    """The architecture from the configuration of a transformers network; else from the shapes that were seen."""
    if config is not None:
        from peakcast.core.errors import PeakcastError
        from peakcast.core.fields import to_mapping
        from peakcast.networks.config import architecture_from_hf_config

        try:
            return dict(to_mapping(architecture_from_hf_config(config.to_dict())))
        except PeakcastError:
            pass
    matrices = [shape for shape in _whole_shapes(network) if len(shape) == 2] or [(1, 1)]
    widths = Counter(size for shape in matrices for size in shape if size > 1) or Counter([1])
    hidden = widths.most_common(1)[0][0]
    tables = [part.num_embeddings for part in network.modules() if isinstance(part, torch.nn.Embedding)]
    vocabulary = max(tables, default=max(widths))
    inner = max((width for width in widths if width != vocabulary), default=hidden)
    lists = [part for part in network.modules() if isinstance(part, (torch.nn.ModuleList, torch.nn.Sequential))]
    layers = max(map(len, lists), default=1)
    heads = max(1, hidden // 64)
    return {
        "name": type(_bare(network)).__name__,
        "model_type": "script",
        "norm_placement": "pre",  # by this key it is a description in peakcast's own form, not a config.json
        "hidden_size": int(hidden),
        "num_hidden_layers": max(1, layers),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": max(1, int(hidden) // heads),
        "intermediate_size": int(inner),
        "vocab_size": int(vocabulary),
    }


def _whole_shapes(network: torch.nn.Module) -> Iterator[tuple[int, ...]]:
    """The shapes that weights had before FSDP1 or ZeRO-3 left a rank's part of them."""
    for part in network.modules():
        flat = getattr(vars(part).get("_handle"), "flat_param", None)
        yield from map(tuple, getattr(flat, "_shapes", ()))
    yield from (tuple(getattr(one, "ds_shape", one.shape)) for one in network.parameters())


def _bare(network: torch.nn.Module) -> torch.nn.Module:
    """`network` without what Lightning, DDP and `torch.compile` put around it."""
    network = network._modules.get("_original_module") or network
    for wrapper in ("module", "_orig_mod", "module", "_fsdp_wrapped_module"):
        inner = network._modules.get(wrapper)
        network = network if inner is None or len(network._modules) > 1 else inner
    return network


def _framework(steps: ScriptSteps, config: Any) -> str:
    for network in steps.networks:
        if type(network).__name__ == "DeepSpeedEngine":
            return "deepspeed"
        if any(type(part).__module__.startswith("megatron.") for part in network.modules()):
            return "megatron"
    return "huggingface" if config is not None and steps.loop else "torch"


LOOPS = ("huggingface", "torch")
"""Frameworks of which a job says what a loop does with a network's outputs."""


def _of_the_loop(steps: ScriptSteps, framework: str, config: Any) -> dict[str, bool]:
    """What a loop over a network of transformers does with its outputs, if it is the script's own."""
    if config is None or framework not in LOOPS or steps.loop == "transformers":
        return {}
    own = {"trainer": False} if framework == "huggingface" else {}
    dropped = not (steps.output_bytes or steps.cache_bytes)
    return {**own, "outputs_dropped": dropped, "outputs_have_cache": bool(steps.cache_bytes)}


def _versions(steps: ScriptSteps, framework: str, asked: str | None) -> dict[str, str]:
    """Versions of the packages that the script has loaded; for the script's own networks, of the packages from which these
    may be built. torch is the release `asked` for, which it was made to allocate as."""
    parts = [part for network in steps.networks for part in network.modules()]
    used = {type(one).__module__.partition(".")[0] for one in (*parts, *map(_unwrapped, steps.optimizers))}
    used |= {package for network in steps.networks for package in packages(network)}
    found = {}
    for package in PACKAGES if framework != "torch" else ("torch", "transformers", *IMPORTED_BY_OTHERS):
        if package in sys.modules and (package in used or package not in IMPORTED_BY_OTHERS):
            found[package] = importlib.metadata.version(package).partition("+")[0]
    return {**found, "torch": asked.partition("+")[0]} if asked and "torch" in found else found


def _unwrapped(optimizer: Any) -> Any:
    """`optimizer` without the wrappers of accelerate and similar libraries."""
    return getattr(optimizer, "optimizer", optimizer)


def _optimizer(optimizers: list[Any]) -> dict[str, Any]:
    if not optimizers:
        return {}
    names = [type(_unwrapped(one)).__name__.lower() for one in optimizers]
    name = next((ours for begin, ours in OPTIMIZERS.items() for one in names if begin in one), "adamw")
    name = _of_bitsandbytes(name, _unwrapped(optimizers[0])) or name
    settings = optimizers[0].param_groups[0]
    kind = "fused" if settings.get("fused") else "loop" if settings.get("foreach") is False else "foreach"
    return {"name": name, "implementation": kind}


def _of_bitsandbytes(name: str, optimizer: Any) -> str:
    """The name in jobs of a bitsandbytes optimizer with 8-bit states or states in managed memory; "" for other
    optimizers."""
    bits = getattr(getattr(optimizer, "args", None), "optim_bits", 32)
    if getattr(optimizer, "is_paged", False):
        return f"paged_{name}_{bits}bit"
    return f"{name}_8bit" if bits == 8 else ""


def _library(optimizers: list[Any], framework: str) -> dict[str, str]:
    """The library of an optimizer of which several have one, where it is bitsandbytes."""
    name = _optimizer(optimizers).get("name")
    ours = framework != "megatron" and name in ("lion", "rmsprop")
    found = ours and type(_unwrapped(optimizers[0])).__module__.startswith("bitsandbytes")
    return {f"{name}_library": "bitsandbytes"} if found else {}


LORA = re.compile(r"(.*)\.lora_[aA](\..*)?")
"""The first matrix of an adapter: of peft (`q_proj.lora_A.default.weight`), litgpt (`qkv.lora_A`) or torchtune
(`q_proj.lora_a.weight`)."""


def _finetuning(network: torch.nn.Module, config: Any) -> dict[str, Any]:
    """The settings of low-rank adapters, by peft's names. `config`: that of transformers; only of its layers a job can
    name targets."""
    named = ((LORA.fullmatch(name), parameter) for name, parameter in network.named_parameters())
    adapters = {found[1]: parameter for found, parameter in named if found is not None}
    if not adapters:
        return {}
    place, first = next(iter(adapters.items()))
    rank = getattr(network.get_submodule(place), "r", None)  # litgpt joins the matrices of queries, keys and values
    rank = next(iter(rank.values())) if isinstance(rank, dict) else rank  # peft's; FSDP1 has flattened the matrices
    drops = (part.p for name, part in network.named_modules() if ".lora_dropout" in name and hasattr(part, "p"))
    return {
        "method": "lora",
        **_quantization(network),
        "rank": rank if isinstance(rank, int) else int(first.shape[0]),
        **({"targets": sorted({name.rpartition(".")[2] for name in adapters})} if config is not None else {}),
        "dropout": float(next(drops, 0.0)),
        "adapter_dtype": DTYPES.get(first.dtype, "float32"),
    }


def _quantization(network: torch.nn.Module) -> dict[str, Any]:
    """The quantization of the base model under adapters, if bitsandbytes has packed its weights."""
    if (state := _state(network)) is not None:
        return {"method": "qlora", "quantization": "nf4", "double_quantization": bool(state.nested)}
    eight = any(type(part).__name__ == "Linear8bitLt" for part in network.modules())
    return {"method": "qlora", "quantization": "int8"} if eight else {}


def _state(network: torch.nn.Module) -> Any:
    """The quantization state of the first weight of 4 bits; None if there is none."""
    return next((part.quant_state for part in network.modules() if hasattr(part, "quant_state")), None)


def _quantized_from(network: torch.nn.Module) -> str:
    """The dtype of the weights that were packed; "" if none were."""
    state = _state(network)
    return DTYPES.get(state.dtype, "") if state is not None else ""


def _multiplied(network: torch.nn.Module, config: Any, narrow: str) -> dict[str, str]:
    """The dtype in which bitsandbytes' 4-bit layers multiply, if it is not `narrow`, that of other products."""
    layers = (part for part in network.modules() if hasattr(part, "quant_state"))
    asked = DTYPES.get(getattr(next(layers, None), "compute_dtype", None), narrow)
    return {"quantized_compute_dtype": asked} if config is not None and asked != narrow else {}


def _widened(network: torch.nn.Module, config: Any) -> dict[str, bool]:
    """Which weights beside packed ones are in float32: peft's `prepare_model_for_kbit_training` and trl's
    `peft_module_casting_to_bf16` widen them."""
    if config is None or not _quantization(network) or _quantized_from(network) == "float32":
        return {}
    dtypes: dict[bool, set[torch.dtype]] = {True: set(), False: set()}
    for part in network.modules():
        weight = getattr(part, "weight", None)
        if isinstance(weight, torch.nn.Parameter) and (weight.ndim == 1 or isinstance(part, torch.nn.Embedding)):
            dtypes[weight.ndim == 1].add(weight.dtype)
    return {"norms_in_float32": dtypes[True] == {torch.float32}, "ends_in_float32": dtypes[False] == {torch.float32}}


def _of_transformers(steps: ScriptSteps, network: torch.nn.Module, config: Any) -> dict[str, Any]:
    """Settings that networks of transformers have as attributes: checkpointing as it was when the optimizer stepped (TRL
    switches it off where it generates), and the attention kernel."""
    found: dict[str, Any] = {}
    if recomputes := steps.checkpointing.get(id(network)):
        found["activation_checkpointing"] = recomputes
    kernels = getattr(config, "_attn_implementation", None)
    if kernels in ("eager", "sdpa", "flash_attention_2"):
        found["attention"] = kernels
    elif kernels == "flex_attention":
        found["attention"] = "flex"
    return found


def _compiled(network: torch.nn.Module) -> bool:
    return any(
        part._compiled_call_impl is not None or type(part).__name__ == "OptimizedModule" for part in network.modules()
    )


MESH_NAMES = {"tp": "tensor", "tensor": "tensor", "pp": "pipeline", "cp": "context", "ep": "expert"}
"""Names of mesh dimensions in scripts -> the parallelism along them."""


def _parallelism(networks: Sequence[torch.nn.Module]) -> dict[str, Any]:
    """The sizes of the layout, from the meshes that the script has made, and DeepSpeed's stage."""
    sizes = {MESH_NAMES[name]: size for name, size in MESH_SIZES.items() if name in MESH_NAMES and size > 1}
    sizes |= _sizes_of_megatron()
    divided = math.prod(size for name, size in sizes.items() if name != "expert")
    found: dict[str, Any] = {f"{name}_parallel_size": size for name, size in sizes.items()}
    found["data_parallel_size"] = max(1, dist.get_world_size() // divided)
    parts = (part for network in networks for part in network.modules())
    stage = next((part.zero_optimization_stage() for part in parts if type(part).__name__ == "DeepSpeedEngine"), 0)
    return {**found, "zero_stage": stage} if stage else found


def _sizes_of_megatron() -> dict[str, int]:
    """The sizes of Megatron-LM's groups, which it makes without meshes."""
    state = sys.modules.get("megatron.core.parallel_state")
    if state is None or not state.model_parallel_is_initialized():
        return {}
    functions = {
        "tensor": state.get_tensor_model_parallel_world_size,
        "pipeline": state.get_pipeline_model_parallel_world_size,
        "context": state.get_context_parallel_world_size,
        "expert": state.get_expert_model_parallel_world_size,
    }
    return {name: size for name, function in functions.items() if (size := function()) > 1}


def _told(job: dict[str, Any]) -> dict[str, Any]:
    """`job` with the options that differ from the framework's conventions; if a `TrainingJob` cannot express the script's
    layout, with all ranks data-parallel."""
    from peakcast.core.errors import PeakcastError
    from peakcast.dialects.common.job_file import job_from_mapping
    from peakcast.jobs.conventions import conventions

    alike = {"data_parallel_size": dist.get_world_size()} if dist.is_initialized() else {}
    try:
        plain = conventions(job_from_mapping({**job, "framework_options": {}}))
    except PeakcastError:
        job = {**job, "parallelism": alike}
        plain = conventions(job_from_mapping({**job, "framework_options": {}}))
    precision = job["precision"]
    # without mixed precision gradients are reduced as they are, unless the job itself says otherwise
    own = {"fsdp_reduce_dtype"} if precision["parameters"] == precision["compute"] else set()
    found = job["framework_options"].items()
    options = {name: value for name, value in found if name in own or plain.get(name, value) != value}
    return {**job, "framework_options": options}


def _allocator() -> dict[str, Any]:
    from peakcast.core.fields import to_mapping
    from peakcast.jobs.allocator_settings import Allocator

    settings = os.environ.get("PYTORCH_ALLOC_CONF") or os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or ""
    if "expandable_segments:true" in settings.lower().replace(" ", ""):
        mapping: dict[str, Any] = to_mapping(Allocator(expandable_segments=True))
        return mapping
    return {}
