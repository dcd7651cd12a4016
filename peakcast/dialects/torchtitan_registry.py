"""torchtitan's Python configurations: a function of a `config_registry.py`, read as the mapping of its sections, never run.

Source: torchtitan 0.3.0 config/manager.py (`--module`, `--config`), models/*/config_registry.py, components/loss.py
(`ChunkedLossWrapper.Config`: 8 chunks), models/*/__init__.py `model_registry` (`attn_backend`: flex, varlen for gpt_oss).
"""

from __future__ import annotations

import ast
import importlib.util
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from peakcast.bounded import is_file
from peakcast.dialects.python_calls import Expressions, call_name, plain_value
from peakcast.dialects.text import MAX_SLOW_CHARACTERS, read_text
from peakcast.errors import SpecError, near_misses

TRAINERS = re.compile(r"(\w*Trainer)\.Config")
CHECKPOINTING = {"FullAC": "full", "SelectiveAC": "selective", "MemoryBudgetAC": "memory_budget"}
CHUNKS = 8
MOST_CALLS = 20
"""Functions of a registry that may call one another."""


class Registry:
    """The functions of a `config_registry.py`."""

    def __init__(self, source: str, where: str, module: str = "") -> None:
        if len(source) > MAX_SLOW_CHARACTERS:
            raise SpecError(f"{where} has {len(source):,} characters; a configuration is not that big.")
        try:
            tree = ast.parse(source)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            raise SpecError(f"{where} is not valid Python: {' '.join(str(error).split())}.") from error
        self.where, self.module = where, module
        self.functions = {each.name: each for each in tree.body if isinstance(each, ast.FunctionDef)}
        self._depth = 0

    def names(self) -> list[str]:
        """The functions that give a configuration: those that make one, or change that of another."""
        return [name for name, function in self.functions.items() if "Config" in ast.unparse(function.returns or ast.Name(""))]

    def values(self, name: str) -> dict[str, Any]:
        """The sections of the configuration `name`, as `from_torchtitan` reads them. Raises: SpecError."""
        if name not in self.functions:
            known = self.names()
            raise SpecError(f"config={name!r} is no function of {self.where}{near_misses(name, known)}".rstrip("?") + ".")
        module = self.module or re.split(r"_(?:debugmodel|\d)", name)[0]
        return _sections(plain_value(self._config(name)), module)

    def _config(self, name: str) -> dict[str, Any]:
        """What a function gives: its statements followed one by one, those inside conditions and loops too."""
        self._depth += 1
        if self._depth > MOST_CALLS:
            raise SpecError(f"{self.where} has functions that call one another without end.")
        known = Expressions(keeps_calls=True)
        made: dict[str, dict[str, Any]] = {}
        for statement in self.functions[name].body:
            if isinstance(statement, ast.Return) and statement.value is not None:
                if isinstance(statement.value, ast.Name) and statement.value.id in made:
                    return made[statement.value.id]
                return self._made(statement.value, known) or {}
            if not isinstance(statement, ast.Assign):
                continue
            target = statement.targets[0]
            if isinstance(target, ast.Name):
                config = self._made(statement.value, known)
                if config is not None:
                    made[target.id] = config
                known.names[target.id] = known.value(statement.value)
            elif (path := _path(target)) and path[0] in made:
                _set(made[path[0]], path[1:], known.value(statement.value))
        raise SpecError(f"{name} of {self.where} returns no configuration that can be read without running it.")

    def _made(self, node: ast.expr, known: Expressions) -> dict[str, Any] | None:
        """The configuration that an expression makes: of a trainer's class, or by another function of the registry."""
        called = call_name(node.func) if isinstance(node, ast.Call) else ""
        if called in self.functions:
            return self._config(called)
        if TRAINERS.fullmatch(called):
            value = known.value(node)
            return dict(value) if isinstance(value, dict) else None
        return None


def _path(node: ast.expr) -> list[str]:
    """`config.training.steps` as its names; empty for any other target."""
    if isinstance(node, ast.Attribute):
        inner = _path(node.value)
        return [*inner, node.attr] if inner else []
    return [node.id] if isinstance(node, ast.Name) else []


def _set(values: dict[str, Any], path: list[str], value: Any) -> None:
    for name in path[:-1]:
        inner = values.setdefault(name, {})
        if not isinstance(inner, dict):
            return
        values = inner
    if path:
        values[path[-1]] = value


def _sections(config: Mapping[str, Any], module: str) -> dict[str, Any]:
    """A configuration's classes in the words of torchtitan's sections."""
    sections = {key: value for key, value in config.items() if key != "_target_"}
    spec = sections.get("model_spec")
    spec = spec if isinstance(spec, Mapping) else {}
    flavor = next(iter(spec.get("_arguments_") or ()), spec.get("flavor"))
    backend = str(spec.get("attn_backend", "varlen" if module == "gpt_oss" else "flex"))
    model: dict[str, Any] = {"name": module, "flavor": flavor}
    converters = spec.get("converters") or ()
    known = ("_target_", "_arguments_", "flavor", "attn_backend", "converters")
    sections["model_spec"] = model | {key: value for key, value in spec.items() if key not in known}
    sections["model"] = {"use_flex_attn": backend == "flex"}
    if backend == "varlen":
        sections["model"] = {"attn_backend": backend}
    if names := [str(each.get("_target_", "")) for each in converters if isinstance(each, Mapping)]:
        sections["model"]["converters"] = [re.sub(r"(Linear|Converter|\.Config)", "", name).lower() for name in names]
    checkpointing = sections.get("activation_checkpoint")
    if isinstance(checkpointing, Mapping):
        kind = str(checkpointing.get("_target_", "")).partition(".")[0]
        sections["activation_checkpoint"] = {**checkpointing, "mode": CHECKPOINTING.get(kind, "selective")}
    loss = sections.get("loss")
    if isinstance(loss, Mapping):
        chunked = str(loss.get("_target_", "")).startswith("ChunkedLoss")
        sections["loss"] = {"num_chunks": CHUNKS, **loss} if chunked else loss
    optimizer = sections.get("optimizer")
    if isinstance(optimizer, Mapping) and "default_" in str(optimizer.get("_target_", "")):
        sections["optimizer"] = {**optimizer, "name": {"default_adamw": "AdamW"}.get(optimizer["_target_"], optimizer["_target_"])}
    return _without_targets(sections)


def _without_targets(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {k: _without_targets(each) for k, each in value.items() if k not in ("_target_", "_arguments_")}
    return [_without_targets(each) for each in value] if isinstance(value, list) else value


def registry_of(module: str, folder: Path | None) -> Registry:
    """The registry of a `--module`: of a checkout around `folder`, else of the torchtitan that is installed here.

    Raises: SpecError where there is neither, with what to give instead.
    """
    inside = Path("torchtitan", "models", module, "config_registry.py")
    places = [] if folder is None else [folder, *folder.absolute().parents][:6]
    found = importlib.util.find_spec("torchtitan") if re.fullmatch(r"\w+", module) else None
    places += [Path(found.origin).parent.parent] if found is not None and found.origin else []
    for place in places:
        if is_file(place / inside):
            return Registry(read_text(place / inside, named=False), inside.name, module)
    raise SpecError(
        f"module={module!r} is a Python module of torchtitan, and neither a checkout around the command nor an installed "
        f"torchtitan has {inside}; install torchtitan (pip install --no-deps torchtitan), give that file itself, or its values "
        "as a TOML, YAML or JSON mapping with the sections model, training, parallelism, ....",
        parameter="module",
        value=module,
    )


def registered(program: str, module: str, files: Sequence[str], folder: Path | None) -> dict[str, Any] | None:
    """What a torchtitan command with `--module` and `--config` (one of `files`) trains with before its other flags change it;
    None for any other command. Raises: SpecError."""
    names = [file for file in files if "." not in file.rsplit("/", 1)[-1]]
    if not program.startswith(("torchtitan", "run_train")) or not names:
        return None
    return registry_of(module or re.split(r"_(?:debugmodel|\d)", names[-1])[0], folder).values(names[-1])


def only_one(source: str, where: str) -> dict[str, Any] | None:
    """The values of a pasted registry with one function that makes a configuration; None where `source` is no registry.

    Raises: SpecError naming the functions where there are several.
    """
    if "Trainer.Config(" not in source or "torchtitan" not in source:
        return None
    registry = Registry(source, where, _module_of(source))
    names = registry.names()
    if len(names) != 1:
        raise SpecError(
            f"{where} has {len(names)} configurations of torchtitan ({', '.join(names[:6])}{', ...' if len(names) > 6 else ''}); "
            "give the launch command, which names one by --config, in the checkout or where torchtitan is installed.",
            parameter="config",
        )
    return registry.values(names[0])


def _module_of(source: str) -> str:
    match = re.search(r"torchtitan\.models\.(\w+) import .*model_registry", source)
    return match[1] if match else ""

