"""Megatron-Bridge: the configuration that its runs save (run_config.yaml), and its recipes by name, read from the package.

Source: megatron_bridge 0.3.1 training/config.py (ConfigContainer), recipes/common.py `_pretrain_common`, recipes/*/*.py,
training/mixed_precision.py, scripts/training/run_recipe.py (`--recipe NAME section.key=value`).
"""

from __future__ import annotations

import importlib.util
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from peakcast.core.bounded import is_file
from peakcast.core.errors import SpecError
from peakcast.dialects.common.job_file import note_network, resolve_architecture
from peakcast.dialects.common.pasted import Pasted
from peakcast.dialects.common.text import read_text
from peakcast.dialects.common.translation import Notes, Settings, Translation
from peakcast.dialects.megatron.adapters import BRIDGE, with_adapters
from peakcast.dialects.megatron.job import from_megatron
from peakcast.dialects.megatron.launch import flags_of_yaml, with_gradient_dtype
from peakcast.dialects.python.functions import FunctionTable, without_targets
from peakcast.dialects.torchtitan.registry import Registered
from peakcast.jobs.spec import TrainingJob

CONTAINER = re.compile(r"ConfigContainer")
LAUNCHER = "run_recipe.py"
DDP = {
    "grad_reduce_in_fp32": "accumulate_allreduce_grads_in_fp32", "average_in_collective": "ddp_average_in_collective",
    "bucket_size": "ddp_bucket_size",
}  # fmt: skip
"""Fields of DistributedDataParallelConfig -> their flags, if the names differ."""
OF_DDP = (
    "overlap_grad_reduce", "overlap_param_gather", "use_distributed_optimizer", "use_megatron_fsdp",
    "data_parallel_sharding_strategy", "fp8_param_gather",
)  # fmt: skip
OF_OPTIMIZER = (
    "use_precision_aware_optimizer", "main_grads_dtype", "main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype",
    "optimizer",
    "optimizer_cpu_offload",
)  # fmt: skip
OF_PRECISION = (
    "bf16", "fp16", "fp8", "fp8_recipe", "fp8_param_gather", "reuse_grad_buf_for_mxfp8_param_ag", "first_last_layers_bf16",
)  # fmt: skip
SHAPES = ("vocab_size", "hidden_dropout", "attention_dropout", "make_vocab_size_divisible_by")
"""Fields that the configuration of a network on the hub contains too."""
_HYBRID, _GATHERED = {"fp8": "hybrid"}, {"fp8": "hybrid", "fp8_param_gather": True}
RECIPES = (
    ("mxfp8", {**_GATHERED, "fp8_recipe": "mxfp8", "reuse_grad_buf_for_mxfp8_param_ag": True}),
    ("subchannel", {**_HYBRID, "fp8_recipe": "blockwise"}),
    ("nanov2", {**_GATHERED, "fp8_recipe": "blockwise", "first_last_layers_bf16": True}),
    ("current_scaling", {**_GATHERED, "fp8_recipe": "tensorwise", "first_last_layers_bf16": True}),
    ("nvfp4", {**_HYBRID, "fp8_recipe": "nvfp4"}),
    ("fp8", {**_GATHERED, "fp8_recipe": "delayed"}),
)
"""Words in the name of a mixed-precision recipe -> what they ask for in addition to 16 bits (Megatron-Bridge 0.6.2
training/mixed_precision.py)."""
NOT_FLAGS = re.compile(
    r"hf_model_id|_target_|.*(func|init|init_method|hook|stream|group|config|fn|timers|spec|provider|generation_config)$"
    r"|(bias_activation|masked_softmax|persist_layer|gradient_accumulation|bias_dropout)_fusion|tp_only_amax_red"
    r"|cuda_graph_(use|retain)_\w+|should_pad_vocab|parallel_output|perform_initialization|rotary_\w+"
    r"|seq_len_interpolation_factor|scatter_embedding_\w+|fp16_lm_cross_entropy|layernorm_epsilon|softmax_scale"
    r"|calculate_per_token_loss|autocast\w*|enable_autocast|attention_softmax_in_fp32|bf16|fp16|params_dtype|pipeline_dtype"
    r"|deallocate_pipeline_outputs|batch_p2p_\w+|variable_seq_lengths|moe_token_drop\w*|inference_\w+"
    r"|symmetric_\w+|qk_clip\w*|window_\w+|barrier_\w+|use_transformer_engine\w*|restore_modelopt_state|heterogeneous_\w+"
)
"""Fields of the model's provider that do not affect memory, or that are read with the network."""
OTHER_SECTIONS = re.compile(
    r"(scheduler|logger|checkpoint|rng|tokenizer|dist|profiling|straggler|nvrx_straggler|ft|inprocess_restart|rerun_state_machine"
    r"|tensor_inspect|validation|dataset|comm_overlap|model|train|ddp|optimizer|mixed_precision|_\w+_|optimizer_config_override\w*)"
)


def recipe_of(program: str, arguments: Mapping[str, Any]) -> Registered | None:
    """The configuration that `run_recipe.py --recipe NAME` uses before overrides; None for any other command. Raises:
    SpecError."""
    if program.rsplit("/", 1)[-1] != LAUNCHER or not arguments.get("recipe"):
        return None
    name = str(arguments["recipe"])
    found = importlib.util.find_spec("megatron")
    places = [Path(each) / "bridge" / "recipes" for each in (found.submodule_search_locations or ())] if found else []
    for place in places:
        for file in sorted(place.rglob("*.py")) if is_file(place / "common.py") else ():
            text = read_text(file, named=False)
            if re.search(rf"^def {re.escape(name)}\(", text, re.MULTILINE):
                common = read_text(place / "common.py", named=False)
                functions = FunctionTable([common, text], file.name, CONTAINER)
                return Registered(functions.config(name), tuple(functions.notes))
    raise SpecError(
        f"recipe={name!r} is a Python function of Megatron-Bridge, which is not installed here or has no function of "
        "that name; install it (pip install --no-deps megatron-bridge), give the run_config.yaml that a run saves, or "
        "the model, layout and batch as Megatron-LM flags (peakcast megatron --num-layers ...).",
        parameter="recipe",
        value=name,
    )


def from_megatron_bridge(pasted: Pasted) -> Translation:
    """The job of a Megatron-Bridge configuration. Raises: SpecError naming the key, its value, the rule and the way out."""
    notes = Notes()
    sections = {key: value if isinstance(value, Mapping) else {} for key, value in pasted.values.items()}
    model = dict(sections.get("model", {}))
    named = pasted.model or _hub_id(model)
    network = resolve_architecture(named) if named else None
    if named:
        note_network(named, notes)
    flags = _flags(pasted.values, sections, model, notes, described=network is None)
    sizes = [_size(flags, f"{kind}_parallel_size") for kind in ("tensor_model", "context", "pipeline_model")]
    experts = _size(flags, "expert_model_parallel_size") * _size(flags, "expert_tensor_parallel_size")
    least = sizes[2] * math.lcm(sizes[0] * sizes[1], experts)
    num_gpus = pasted.gpus(notes, least, ", the least for this layout")
    for key in pasted.values:
        if not OTHER_SECTIONS.fullmatch(str(key)) and key != "peft":
            notes.unknown.append(str(key))
    job = notes.include(from_megatron(flags, num_gpus, pasted.env, pasted.versions.of("megatron"), network))
    if pasted.values.get("peft") and Settings(model, notes, "Megatron-Bridge").switch("restore_modelopt_state"):
        notes.unsupported.append(
            "Frozen weights that ModelOpt has quantised (restore_modelopt_state) are counted in 16 bits.",
            "model.restore_modelopt_state",
            "less",
        )
    return notes.finish(_adapted(job, pasted.values.get("peft"), notes))


def _adapted(job: TrainingJob, peft: Any, notes: Notes) -> TrainingJob:
    """`job` with the adapters of section `peft`: LoRA's fields, or the name of a method with its defaults."""
    fields = dict(peft) if isinstance(peft, Mapping) else {"_target_": peft} if peft else {}
    if not fields:
        return job
    method = str(fields.get("_target_") or "LoRA").rpartition(".")[2]
    if method.lower() not in ("lora", "vlmlora"):
        notes.unsupported.append(f"peft={method} is not modelled; LoRA is counted instead.", "peft")
    settings = Settings({f"peft.{key}": value for key, value in fields.items()}, notes, "Megatron-Bridge")
    return with_adapters(job, settings, BRIDGE.under("peft."), "megatron_bridge")


def _hub_id(model: Mapping[str, Any]) -> str:
    """The hub id of the network that a recipe loads: `AutoBridge.from_hf_pretrained(ID).to_megatron_provider()`."""
    inner = model.get("_of_")
    given = inner.get("_arguments_") if isinstance(inner, Mapping) else None
    return str(given[0]) if given else str(model.get("hf_model_id") or "")


def _size(flags: Mapping[str, Any], key: str) -> int:
    value = str(flags.get(key))
    return int(value) if value.isdecimal() and int(value) else 1


def _length(model: Mapping[str, Any], data: Mapping[str, Any], notes: Notes) -> dict[str, Any]:
    """The flag for the length of sequences: the model's, else that of the data."""
    length = model.get("seq_length") or data.get("seq_length") or data.get("sequence_length")
    for key in ("seq_length", "sequence_length"):
        if length and data.get(key) and str(data[key]) != str(length):
            notes.warnings.append(
                f"dataset.{key}={data[key]} differs from model.seq_length={length}, and Megatron-Bridge refuses such a "
                "run. The answer is for model.seq_length: override both.",
                "model.seq_length",
            )
    return {"seq_length": length} if length else {}


def _flags(
    values: Mapping[str, Any],
    sections: Mapping[str, Mapping[str, Any]],
    model: dict[str, Any],
    notes: Notes,
    *,
    described: bool,
) -> dict[str, Any]:
    """The sections as Megatron-LM's flags. `described`: whether the sections contain the network's shapes."""
    plain: dict[str, Any] = without_targets(model)
    precision = _precision(values.get("mixed_precision"), notes)
    ddp, train = sections.get("ddp", {}), sections.get("train", {})
    fields = {key: value for key, value in plain.items() if value is not None and key != "load_weights"}
    if described:
        fields |= _shapes(plain)
    left = {
        key: value for key, value in fields.items() if not NOT_FLAGS.fullmatch(key) and (described or key not in SHAPES)
    }
    notes.ignored += [f"model.{key}" for key in fields if key not in left]
    left |= {key: train[key] for key in ("micro_batch_size", "global_batch_size") if train.get(key) is not None}
    left |= _length(plain, sections.get("dataset", {}), notes)
    left |= {key: ddp[key] for key in OF_DDP if ddp.get(key) is not None}
    left |= {flag: ddp[key] for key, flag in DDP.items() if ddp.get(key) is not None}
    optimizer = sections.get("optimizer", {})
    left |= {key: _dtype(optimizer[key]) for key in OF_OPTIMIZER if optimizer.get(key) is not None}
    for name, section, known in (("ddp", ddp, (*OF_DDP, *DDP)), ("train", train, ("micro_batch_size", "global_batch_size")),
                                 ("optimizer", optimizer, OF_OPTIMIZER)):  # fmt: skip
        notes.ignored += [f"{name}.{key}" for key in section if key not in known]
    notes.ignored += [key for key in values if key not in ("model", "ddp", "train", "optimizer", "mixed_precision")
                      and OTHER_SECTIONS.fullmatch(str(key))]  # fmt: skip
    left |= precision
    if "accumulate_allreduce_grads_in_fp32" in precision:  # training/config.py: mixed precision decides
        notes.ignored.append("ddp.grad_reduce_in_fp32")
    if left.get("use_distributed_optimizer") is None:
        left["use_distributed_optimizer"] = True
    return flags_of_yaml(with_gradient_dtype(left), notes)


def _shapes(model: Mapping[str, Any]) -> dict[str, Any]:
    """The network's shapes as Megatron-LM's flags."""
    settings = Settings(model, Notes(), "Megatron-Bridge")
    out: dict[str, Any] = {"group_query_attention": bool(settings.raw("num_query_groups"))}
    out |= {"untie_embeddings_and_output_weights": not settings.switch("share_embeddings_and_output_weights", True)}
    out |= {"swiglu": settings.switch("gated_linear_unit")}
    return out


def _dtype(value: Any) -> Any:
    return {"float32": "fp32", "torch.float32": "fp32", "bfloat16": "bf16", "torch.bfloat16": "bf16"}.get(str(value), value)


def _precision(given: Any, notes: Notes) -> dict[str, Any]:
    """Flags for mixed precision, which is given as the name of a recipe, such as bf16_with_fp8_current_scaling_mixed, or as
    its fields."""
    if isinstance(given, Mapping):
        inner = Settings(given, notes, "Megatron-Bridge", lambda key: f"mixed_precision.{key}")
        found = {key: inner.raw(key) for key in OF_PRECISION if inner.raw(key) is not None}
        if inner.raw("grad_reduce_in_fp32") is not None:
            found["accumulate_allreduce_grads_in_fp32"] = inner.switch("grad_reduce_in_fp32")
        inner.note_left(
            re.compile(
                r"mixed_precision\.\w+|\w*dtype|autocast\w*|loss_scale\w*|min_loss_scale|hysteresis|fp8_\w+|_target_"
            )
        )
        return found
    word = str(given or "bf16_mixed")
    if given is None:
        notes.assumptions.append("mixed_precision is not given; bf16_mixed is assumed.")
    more = next((fields for name, fields in RECIPES if name in word), {})
    narrow = word.startswith("fp16")  # the only one whose gradients are reduced in 16 bits
    return {"fp16" if narrow else "bf16": True, "accumulate_allreduce_grads_in_fp32": not narrow, **more}
