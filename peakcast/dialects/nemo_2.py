"""NeMo 2: its recipes by name, which are read from the installed package and not run, for the `nemo llm` command and for
Python programs that call one.

Source: nemo_toolkit 2.5.3 collections/llm/recipes/*.py, recipes/precision/mixed_precision.py, recipes/optim/adam.py,
lightning/pytorch/strategies/megatron_strategy.py; classes of networks: collections/llm/gpt/model/*.py.
"""

from __future__ import annotations

import ast
import importlib.util
import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from peakcast.core.bounded import is_file
from peakcast.core.errors import SpecError, near_misses
from peakcast.core.fields import flat
from peakcast.dialects.common.foreign import NEMO
from peakcast.dialects.common.job_file import note_network, resolve_architecture
from peakcast.dialects.common.pasted import Pasted
from peakcast.dialects.common.text import read_text
from peakcast.dialects.common.translation import Notes, Settings, Translation
from peakcast.dialects.megatron.adapters import BRIDGE, with_adapters
from peakcast.dialects.megatron.job import from_megatron
from peakcast.dialects.megatron.launch import flags_of_yaml, with_gradient_dtype
from peakcast.dialects.python.calls import Expressions, FunctionCall, NotGiven, parsed, plain_value
from peakcast.dialects.python.functions import NO_VALUES, FunctionTable, attribute_path, set_at
from peakcast.dialects.torchtitan.registry import Registered

MAKES = re.compile(r"(run\.)?(Config|Partial)")
RECIPES = "nemo.collections.llm.recipes"
KINDS = ("pretrain_recipe", "finetune_recipe")
NETWORKS = {
    "Llama2Config7B": "llama-2-7b", "Llama2Config13B": "llama-2-13b", "Llama2Config70B": "llama-2-70b",
    "Llama3Config8B": "llama-3-8b", "Llama3Config70B": "llama-3-70b", "Llama31Config8B": "llama-3.1-8b",
    "Llama31Config70B": "llama-3.1-70b", "Llama31Config405B": "llama-3.1-405b", "Llama32Config1B": "llama-3.2-1b",
    "Llama32Config3B": "llama-3.2-3b", "CodeLlamaConfig7B": "codellama-7b", "CodeLlamaConfig13B": "codellama-13b",
    "CodeLlamaConfig34B": "codellama-34b", "MistralConfig7B": "mistral-7b", "MistralNeMoConfig12B": "mistral-nemo-12b",
    "MixtralConfig8x7B": "mixtral-8x7b", "MixtralConfig8x22B": "mixtral-8x22b", "Qwen2Config500M": "qwen2-0.5b",
    "Qwen2Config1P5B": "qwen2-1.5b", "Qwen2Config7B": "qwen2-7b", "Qwen2Config72B": "qwen2-72b",
    "Qwen25Config500M": "qwen2.5-0.5b", "Qwen25Config1P5B": "qwen2.5-1.5b", "Qwen25Config3B": "qwen2.5-3b",
    "Qwen25Config7B": "qwen2.5-7b", "Qwen25Config14B": "qwen2.5-14b", "Qwen25Config32B": "qwen2.5-32b",
    "Qwen25Config72B": "qwen2.5-72b", "Qwen3Config600M": "qwen3-0.6b", "Qwen3Config1P7B": "qwen3-1.7b",
    "Qwen3Config4B": "qwen3-4b", "Qwen3Config8B": "qwen3-8b", "Qwen3Config14B": "qwen3-14b",
    "Qwen3Config32B": "qwen3-32b", "Qwen3Config30B_A3B": "qwen3-30b-a3b", "Qwen3Config235B_A22B": "qwen3-235b-a22b",
    "Llama31Nemotron70BConfig": "llama-3.1-70b", "Llama31NemotronNano8BConfig": "llama-3.1-8b",
    "GemmaConfig2B": "gemma-2b", "GemmaConfig7B": "gemma-7b", "Gemma2Config2B": "gemma-2-2b",
    "Gemma2Config9B": "gemma-2-9b", "Gemma2Config27B": "gemma-2-27b", "Phi3ConfigMini": "phi-3-mini",
    "Nemotron4Config340B": "nemotron-4-340b", "Baichuan2Config7B": "baichuan2-7b", "Starcoder2Config3B": "starcoder2-3b",
    "Starcoder2Config7B": "starcoder2-7b", "Starcoder2Config15B": "starcoder2-15b",
    "DeepSeekV2Config": "deepseek-v2", "DeepSeekV2LiteConfig": "deepseek-v2-lite", "DeepSeekV3Config": "deepseek-v3",
}  # fmt: skip
"""NeMo's classes of networks -> the catalog's names."""
STRATEGY = (
    "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size", "expert_model_parallel_size",
    "expert_tensor_parallel_size", "virtual_pipeline_model_parallel_size", "sequence_parallel",
    "account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split",
    "num_layers_in_first_pipeline_stage", "num_layers_in_last_pipeline_stage",
)  # fmt: skip
DDP = {
    "grad_reduce_in_fp32": "accumulate_allreduce_grads_in_fp32", "average_in_collective": "ddp_average_in_collective",
    "overlap_grad_reduce": "overlap_grad_reduce", "overlap_param_gather": "overlap_param_gather",
}  # fmt: skip
OF_THE_STEP = re.compile(
    r"recompute_\w+|cross_entropy_\w+|moe_\w+|fp8\w*|cpu_offloading\w*|attention_backend|tp_comm_overlap|enable_cuda_graph"
    r"|external_cuda_graph|cuda_graph_\w+|deterministic_mode|mtp_num_layers|num_layers_in_(first|last)_pipeline_stage"
)
"""Fields of a network's configuration that say how it is trained."""
OTHERS = re.compile(
    r"(log|resume|tokenizer|trainer|data|optim|model)(\..*|$)|peft.*|.*_target_|fn"  # what is read of them is read by name
    r"|y|yes|dryrun|detach|tail_logs"
)


class Recipes(FunctionTable):
    """The functions of one recipe of the package in `folder`, and those that it imports from other recipes."""

    def __init__(self, folder: Path, module: str) -> None:
        self._folder = folder
        self._modules: dict[str, str] = {}
        super().__init__([self._text(module)], f"{module}.py", MAKES)
        self._import(self._text(module))

    def expressions(self) -> Expressions:
        """Expressions in which calls of these functions, and of nemo_run's Config and Partial, are followed."""
        return Expressions(keeps_calls=True, follow=self._follow)

    def made(self, kind: str, arguments: Sequence[Any] = (), keywords: Mapping[str, Any] = NO_VALUES) -> dict[str, Any]:
        """The recipe that the function `kind` returns with these arguments. Raises: SpecError."""
        if kind not in self.functions:
            raise SpecError(f"{self.where} has no {kind}; it has {', '.join(self.functions)}.", parameter="factory")
        return self._made_by(kind, arguments, keywords)

    def _text(self, module: str) -> str:
        file = self._folder.joinpath(*module.split(".")).with_suffix(".py")
        if not re.fullmatch(r"\w+(\.\w+)*", module) or not is_file(file):
            known = [each.stem for each in self._folder.glob("[a-z]*_*.py")]
            raise SpecError(
                f"factory={module!r} is no recipe of the installed NeMo{near_misses(module, known) or '.'}",
                parameter="factory",
                value=module,
            )
        return read_text(file, named=False)

    def _import(self, text: str) -> None:
        """Add the functions that `text` imports from other recipes, its constants, and the recipes that it imports as
        modules."""
        for each in parsed(text, self.where).body:
            if isinstance(each, ast.Assign) and isinstance(each.targets[0], ast.Name):
                if isinstance(each.value, ast.Constant):
                    self.constants.setdefault(each.targets[0].id, each.value.value)
                continue
            if not isinstance(each, ast.ImportFrom) or not (each.module or "").startswith(RECIPES):
                continue
            module = (each.module or "").removeprefix(RECIPES).lstrip(".")
            if module.startswith("log"):
                continue
            for name in (alias.name for alias in each.names):
                if not module:
                    self._modules[name] = name
                elif name not in self.functions:
                    source = self._text(module)
                    found = {e.name: e for e in parsed(source, module).body if isinstance(e, ast.FunctionDef)}
                    self.functions = {**found, **self.functions}
                    self._import(source)

    def _follow(self, call: FunctionCall) -> Any:
        owner, _, name = call.name.rpartition(".")
        if MAKES.fullmatch(call.name):
            target = call.arguments[0] if call.arguments else ""
            shown = target.source if isinstance(target, NotGiven) else str(target)
            return {"_target_": shown.rpartition(".")[2], **call.keywords}
        if owner in self._modules:
            return Recipes(self._folder, self._modules[owner]).made(name, call.arguments, call.keywords)
        if not owner and name in self.functions:
            return self._made_by(name, call.arguments, call.keywords)
        return None


def _package() -> Path | None:
    """The folder of the installed NeMo's recipes; None if there is none."""
    found = importlib.util.find_spec("nemo")
    places = (
        [Path(each, "collections", "llm", "recipes") for each in (found.submodule_search_locations or ())] if found else []
    )
    return next((place for place in places if is_file(place / "finetune_default.py")), None)


def _recipe(module: str, kind: str, arguments: Sequence[Any], keywords: Mapping[str, Any]) -> Registered:
    """The values of a recipe. Raises: SpecError if it is not installed here."""
    folder = _package()
    if folder is None:
        raise SpecError(
            f"{module} is a NeMo 2 recipe, a Python function of a package that is not installed here: install it (pip "
            f"install --no-deps 'nemo_toolkit<2.6'), and it is read without being run. Else: {NEMO}.",
            parameter="factory",
            value=module,
        )
    recipes = Recipes(folder, module)
    values = recipes.made(kind, arguments, keywords)
    return Registered(values, tuple(recipes.notes))


def recipe_of(program: str, arguments: Mapping[str, Any]) -> Registered | None:
    """The configuration of `nemo llm pretrain --factory NAME` before overrides; None for any other command. Raises:
    SpecError."""
    factory = arguments.get("factory")
    if not re.fullmatch(r"nemo llm (pretrain|finetune)", program) or not isinstance(factory, str):
        return None
    call = parsed(factory, "--factory").body
    node = call[0].value if call and isinstance(call[0], ast.Expr) else None
    kind = f"{program.rpartition(' ')[2]}_recipe"
    if isinstance(node, ast.Call):
        given = Expressions().call(node)
        found = _recipe(given.name, kind, given.arguments, given.keywords)
    else:
        found = _recipe(factory, kind, (), {})
    return found._replace(values=plain_value(found.values))


def recipe_in(text: str, where: str) -> Registered | None:
    """The recipe that a Python program makes (`llm.llama3_8b.pretrain_recipe(...)`), with the fields that it sets
    afterwards; None if it makes none. Raises: SpecError."""
    if not any(kind in text for kind in KINDS) or "nemo" not in text:
        return None
    found: Registered | None = None
    name = ""
    known = Expressions(keeps_calls=True, follow=lambda call: None)
    for node in _statements(parsed(text, where)):
        target = node.targets[0]
        called = node.value if isinstance(node.value, ast.Call) else None
        call = known.call(called) if called is not None else FunctionCall("", (), {})
        module, _, kind = call.name.rpartition(".")
        if kind in KINDS and isinstance(target, ast.Name):
            found, name = _recipe(module.rpartition(".")[2], kind, call.arguments, call.keywords), target.id
        elif isinstance(target, ast.Name):
            known.names[target.id] = known.value(node.value)
        elif found is not None and (path := attribute_path(target))[:1] == [name]:
            set_at(found.values, path[1:], known.value(node.value))
    return found and found._replace(values=plain_value(found.values))


def _statements(tree: ast.Module) -> list[ast.Assign]:
    return sorted((node for node in ast.walk(tree) if isinstance(node, ast.Assign)), key=lambda node: node.lineno)


def from_nemo_2(pasted: Pasted) -> Translation:
    """The job of a NeMo 2 recipe. Raises: SpecError naming the field, its value, the rule and the way out."""
    notes = Notes()
    values = flat(pasted.values)
    settings = Settings(values, notes, "NeMo 2")
    kind = settings.text("model.config._target_")
    named = pasted.model or NETWORKS.get(kind)
    if not named:
        raise SpecError(
            f"model.config={kind or None!r} is a network without a known shape here; give it by --model, or: {NEMO}.",
            parameter="model.config",
            value=kind,
        )
    network = resolve_architecture(named)
    note_network(named, notes)
    flags = _flags(settings, values)
    if network.moe is None:
        flags = {key: value for key, value in flags.items() if not key.startswith(("moe_", "expert_"))}
    flags = with_gradient_dtype({key: value for key, value in flags.items() if value is not None})
    adapts = any(key.startswith("peft.") for key in values)
    method = settings.text("peft._target_", "LoRA").rpartition(".")[2]
    if adapts and method.lower() != "lora":
        notes.unsupported.append(f"peft={method} is not modelled; LoRA is counted instead.", "peft")
    settings.note_left(OTHERS)
    nodes, each = settings.size("trainer.num_nodes", 1), settings.size("trainer.devices", 1)
    sizes = [int(flags.get(f"{kind}_parallel_size") or 1) for kind in ("tensor_model", "context", "pipeline_model")]
    num_gpus = pasted.num_gpus or max(nodes * each, math.prod(sizes))
    notes.assumptions.append(f"the run has {num_gpus} GPUs: trainer.num_nodes={nodes} × trainer.devices={each}.")
    flags["sequence_parallel"] = bool(flags.get("sequence_parallel")) and sizes[0] > 1
    job = notes.include(from_megatron(flags_of_yaml(flags, notes), num_gpus, {}, pasted.versions.of("megatron"), network))
    return notes.finish(with_adapters(job, settings, BRIDGE.under("peft."), "megatron_bridge") if adapts else job)


def _flags(settings: Settings, values: Mapping[str, Any]) -> dict[str, Any]:
    """Megatron-LM's flags, from the recipe's strategy, data, precision and network; None for what it does not say."""
    place = "trainer.strategy."
    flags = {key: settings.raw(place + key) for key in STRATEGY}
    flags |= {key: settings.raw(f"data.{key}") for key in ("micro_batch_size", "global_batch_size", "seq_length")}
    flags |= {flag: settings.raw(f"{place}ddp.{key}") for key, flag in DDP.items()}
    precision = settings.text("trainer.plugins.precision", "bf16-mixed")
    flags |= {"fp16" if precision.startswith("16") else "bf16": True}
    reduces = settings.raw("trainer.plugins.grad_reduce_in_fp32")
    if reduces is not None:
        flags["accumulate_allreduce_grads_in_fp32"] = reduces
    flags["use_distributed_optimizer"] = settings.switch("optim.config.use_distributed_optimizer", True)
    for section in ("model.config.", "trainer.plugins."):
        fields = {key.removeprefix(section): key for key in values if key.startswith(section)}
        flags |= {name: settings.raw(key) for name, key in fields.items() if OF_THE_STEP.fullmatch(name)}
    return flags
