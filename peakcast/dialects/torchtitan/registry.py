"""torchtitan's Python configurations: reads a function of a `config_registry.py` as the mapping of torchtitan's sections.

Source: torchtitan 0.3.0 config/manager.py (`--module`, `--config`), models/*/config_registry.py, components/loss.py
(`ChunkedLossWrapper.Config`: 8 chunks), models/*/__init__.py `model_registry` (`attn_backend`: flex, varlen for gpt_oss).
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from peakcast.core.bounded import is_file
from peakcast.core.errors import SpecError
from peakcast.dialects.common.text import read_text
from peakcast.dialects.python.functions import FunctionTable, without_targets

TRAINERS = re.compile(r"(\w*Trainer)\.Config")
CHECKPOINTING = {"FullAC": "full", "SelectiveAC": "selective", "MemoryBudgetAC": "memory_budget"}
CHUNKS = 8


class Registered(NamedTuple):
    """A configuration read from Python functions: its values, and sentences about statements that could not be
    evaluated."""

    values: dict[str, Any]
    remarks: tuple[str, ...] = ()


def registered(program: str, module: str, files: Sequence[str], folder: Path | None) -> Registered | None:
    """The configuration of a torchtitan command with `--module` and `--config` (one of `files`), before its other flags
    override values; None for any other command. Raises: SpecError."""
    names = [file for file in files if "." not in file.rsplit("/", 1)[-1]]
    if not program.startswith(("torchtitan", "run_train")) or not names:
        return None
    module = module or _family(names[-1])
    return _of(FunctionTable([_registry(module, folder)], f"{module}/config_registry.py", TRAINERS), names[-1], module)


def only_one(source: str, where: str) -> Registered | None:
    """The values of a pasted registry with one function that makes a configuration; None if `source` is no registry.

    Raises: SpecError naming the functions if there are several.
    """
    if "Trainer.Config(" not in source or "torchtitan" not in source:
        return None
    functions = FunctionTable([source], where, TRAINERS)
    names = functions.names()
    if len(names) != 1:
        some = ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")
        raise SpecError(
            f"{where} has {len(names)} configurations of torchtitan ({some}); give the launch command, which names one by "
            "--config, in the checkout or where torchtitan is installed.",
            parameter="config",
        )
    match = re.search(r"torchtitan\.models\.(\w+) import .*model_registry", source)
    return _of(functions, names[0], match[1] if match else _family(names[0]))


def _family(name: str) -> str:
    """The module to which a configuration belongs, from its name, such as deepseek_v3_671b or llama3_8b_mxfp8."""
    return re.split(r"_(?:debugmodel|\d)", name)[0]


def _registry(module: str, folder: Path | None) -> str:
    """The text of a module's registry: from a checkout of torchtitan that contains `folder`, else from the installed
    torchtitan.

    Raises: SpecError if there is neither, with what to give instead.
    """
    inside = Path("torchtitan", "models", module, "config_registry.py")
    places = [] if folder is None else [folder, *folder.absolute().parents][:6]
    found = importlib.util.find_spec("torchtitan") if re.fullmatch(r"\w+", module) else None
    places += [Path(found.origin).parent.parent] if found is not None and found.origin else []
    for place in places:
        if is_file(place / inside):
            return read_text(place / inside, named=False)
    raise SpecError(
        f"module={module!r} names Python functions of torchtitan, and neither a checkout around the command nor an "
        f"installed "
        f"torchtitan has {inside}; install torchtitan (pip install --no-deps torchtitan), give that file with one "
        "configuration, or its values as a TOML, YAML or JSON mapping with the sections model, training, parallelism, ....",
        parameter="module",
        value=module,
    )


def _of(functions: FunctionTable, name: str, module: str) -> Registered:
    sections = _sections(functions.config(name), module)
    return Registered(sections, tuple(functions.notes))


def _sections(config: Mapping[str, Any], module: str) -> dict[str, Any]:
    """The objects of a configuration as the mapping of torchtitan's sections."""
    sections = {key: value for key, value in config.items() if key != "_target_"}
    spec = sections.get("model_spec")
    spec = spec if isinstance(spec, Mapping) else {}
    backend = str(spec.get("attn_backend", "varlen" if module == "gpt_oss" else "flex"))
    known = ("_target_", "_arguments_", "flavor", "attn_backend", "converters")
    flavor = next(iter(spec.get("_arguments_") or ()), spec.get("flavor"))
    others = {key: value for key, value in spec.items() if key not in known}
    sections["model_spec"] = {"name": module, "flavor": flavor, **others}
    sections["model"] = {"attn_backend": backend} if backend == "varlen" else {"use_flex_attn": backend == "flex"}
    converters = [str(each.get("_target_", "")) for each in spec.get("converters") or () if isinstance(each, Mapping)]
    if converters:
        sections["model"]["converters"] = [re.sub(r"(Linear|Converter|\.Config)", "", name).lower() for name in converters]
    checkpointing = sections.get("activation_checkpoint")
    if isinstance(checkpointing, Mapping):
        kind = str(checkpointing.get("_target_", "")).partition(".")[0]
        sections["activation_checkpoint"] = {**checkpointing, "mode": CHECKPOINTING.get(kind, "selective")}
    loss = sections.get("loss")
    if isinstance(loss, Mapping) and str(loss.get("_target_", "")).startswith("ChunkedLoss"):
        sections["loss"] = {"num_chunks": CHUNKS, **loss}
    optimizer = sections.get("optimizer")
    if isinstance(optimizer, Mapping) and str(target := optimizer.get("_target_", "")).startswith("default_"):
        sections["optimizer"] = {**optimizer, "name": "AdamW" if target == "default_adamw" else target}
    found: dict[str, Any] = without_targets(sections)
    return found
