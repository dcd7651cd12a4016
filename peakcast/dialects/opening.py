"""Opens configurations: reads the values in a file, a text or a mapping. For a launch script, these are the arguments of
the program that it starts, and the number of GPUs."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peakcast.core.bounded import is_file
from peakcast.core.errors import SpecError
from peakcast.dialects.common.foreign import foreign, foreign_python
from peakcast.dialects.common.pasted import THE_TEXT, Pasted, mapping_of_text, merged, nested
from peakcast.dialects.common.text import format_of, parse, read_text
from peakcast.dialects.python.notebook import notebook_source
from peakcast.dialects.shell.task_file import script_in

if TYPE_CHECKING:
    from peakcast.dialects.shell.launch import Launch
    from peakcast.dialects.shell.script import Script

RECIPES = ("module", "recipe", "factory")
"""Flags that name a configuration in Python."""
NO_FILES: Mapping[str, Mapping[str, Any]] = {}


def is_text(source: str) -> bool:
    """Whether `source` is the text of a configuration rather than a name or a path: it has several lines, or is JSON or
    flags."""
    return "\n" in source or source.lstrip().startswith("{") or " --" in f" {source}" or len(source) > 1000


def opened(source: str | Path | Mapping[str, Any], files: Mapping[str, Mapping[str, Any]] = NO_FILES) -> Pasted:
    """The values of a configuration, given as the path of a file, as its text (see `is_text`), or as a mapping. `files`:
    other files of the question, by name and by dialect, to which a launch script may refer.

    Raises: SpecError naming the file and what is wrong with it.
    """
    if isinstance(source, Mapping):
        return Pasted(values=source)
    text, where, folder, ending = str(source), THE_TEXT, None, ""
    if isinstance(source, Path) or not is_text(source):
        path = Path(source)
        text, where, folder, ending = read_text(path), path.name, path.parent, path.suffix
    kind = format_of(text, ending)
    if kind == "shell":
        return _launched(text, where, folder, files)
    if kind == "Python":
        return _program(text, where, folder)
    value = parse(text, kind, where)
    if isinstance(value, dict) and {"cells", "nbformat"} <= set(value):
        return _program(notebook_source(value), where, folder)
    if isinstance(value, str) and kind == "YAML" and " --" in f" {value}":  # a list of arguments without a command
        return _launched(f"torchrun pretrain_gpt.py {text}", where, folder, files, counted=False)
    if isinstance(value, dict) and (script := script_in(value)) is not None:
        return _launched(script, where, folder, files)
    if not isinstance(value, dict):
        raise SpecError(f"{where} must hold a mapping of keys to values, or a launch command, not {type(value).__name__}.")
    return Pasted(values=value, where=where, folder=folder)


def _program(text: str, where: str, folder: Path | None) -> Pasted:
    """The training that the calls of a Python program configure. Raises: SpecError if they configure none that peakcast can
    read."""
    from peakcast.dialects.nemo_2 import recipe_in

    if (found := recipe_in(text, where)) is not None:
        return Pasted(values=found.values, where=where, folder=folder, remarks=found.remarks)
    if sentence := foreign_python(text):
        raise SpecError(f"{where} {sentence}", parameter="job")
    from peakcast.dialects.python.calls import calls_of
    from peakcast.dialects.python_script import values_of
    from peakcast.dialects.torchtitan.registry import only_one

    if (found := only_one(text, where)) is not None:
        return Pasted(values=found.values, where=where, folder=folder, remarks=found.remarks)
    values = values_of(calls_of(text, where), text)
    if not values:
        raise SpecError(
            f"{where} is a Python program, which is not run here, and it makes no training arguments that can be read "
            "(TrainingArguments, SFTConfig and the like). Give the launch command or its settings as a YAML, TOML or JSON "
            f"mapping, or run its step on fake tensors: peakcast dryrun -- python {where}.",
            parameter="job",
        )
    return Pasted(values=values, where=where, folder=folder)


def _accelerate_beside(launch: Launch, here: Pasted) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """(accelerate's configuration as a companion, if the launch has one; the program's arguments without it)."""
    found: dict[str, Any] = {"accelerate": _accelerate(launch, here)} if launch.launched_by == "accelerate" else {}
    arguments = _spelled(launch)
    if launch.program.startswith("trl ") and "accelerate_config" in arguments:
        found["accelerate"], arguments = _accelerate_of_trl(arguments, here)
    return found, arguments


def _launched(
    text: str, where: str, folder: Path | None, files: Mapping[str, Mapping[str, Any]], *, counted: bool = True
) -> Pasted:
    """A launch script as the mapping of its program's arguments, which override the configuration file that it names."""
    from peakcast.dialects.megatron_bridge import recipe_of
    from peakcast.dialects.nemo_2 import recipe_of as nemo_recipe_of
    from peakcast.dialects.shell.launch import launch_of
    from peakcast.dialects.shell.script import read_script
    from peakcast.dialects.torchtitan.registry import registered

    script = read_script(text, sourced=lambda name: _sourced(name, folder), where="" if folder is None else f"./{where}")
    launch = launch_of(script, text, where)
    nemo = nemo_recipe_of(launch.program, launch.arguments)
    if nemo is None and (sentence := foreign((), {}, launch.program)):
        raise SpecError(f"{where} {sentence}", parameter="job")
    written = _written(script)
    here = Pasted(values={}, where=where, folder=folder, companions={**written, **files})
    values: dict[str, Any] = {}
    accelerate, arguments = _accelerate_beside(launch, here)
    module = str(arguments.get("module", launch.env.get("MODULE", "")))
    found = nemo or registered(launch.program, module, launch.files, folder) or recipe_of(launch.program, arguments)
    if found is not None:
        arguments = {key.replace("-", "_"): value for key, value in arguments.items() if key not in RECIPES}
        values = found.values
    for file in launch.files if found is None else ():
        values = merged(values, here.file(file, "", "the configuration"))
    if values:
        arguments = nested({key: _plain(value) for key, value in arguments.items()})
    return Pasted(
        values=merged(values, arguments),
        where=where,
        folder=folder,
        companions={**written, **accelerate},
        used=here.used,
        num_gpus=launch.num_gpus if counted else None,
        env=launch.env,
        program="" if nemo is not None else launch.program,
        unset=script.unset,
        remarks=tuple(dict.fromkeys((*script.notes, *launch.remarks, *(found.remarks if found is not None else ())))),
    )


def _written(script: Script) -> dict[str, Mapping[str, Any]]:
    """The configurations that a launch script writes, by the names of their files."""
    written: dict[str, Mapping[str, Any]] = {}
    for name, body in script.files.items():
        with contextlib.suppress(SpecError):  # a script also writes files that are no configurations
            written[Path(name).name] = mapping_of_text(body, name, Path(name).suffix)
    return written


def _accelerate(launch: Launch, here: Pasted) -> Mapping[str, Any]:
    """accelerate's configuration: the flags of `accelerate launch` on top of the file that it names, or of the one among
    the companions of `here`, which then counts as used."""
    from peakcast.dialects.huggingface.accelerate import of_flags

    named = launch.launcher.get("config_file")
    base = here.file(named, "accelerate", "--config_file") if named else here.companions.get("accelerate", {})
    here.used.update(name for name, mapping in here.companions.items() if mapping is base)
    return merged(base, of_flags(launch.launcher))


def _spelled(launch: Launch) -> Mapping[str, Any]:
    """The arguments of a program; with underscores for hyphens if its parser accepts both, as those of axolotl and
    transformers' HfArgumentParser do."""
    spelled = {key.replace("-", "_"): value for key, value in launch.arguments.items()}
    of_trainer = {"model_name_or_path", "per_device_train_batch_size"} & set(spelled)
    return spelled if of_trainer or launch.program.startswith(("axolotl", "trl ")) else launch.arguments


def _accelerate_of_trl(arguments: Mapping[str, Any], here: Pasted) -> tuple[Mapping[str, Any], Mapping[str, Any]]:
    """(accelerate's configuration that `trl sft --accelerate_config` names, the other arguments)."""
    from peakcast.dialects.huggingface.accelerate import OF_TRL

    named = str(arguments["accelerate_config"])
    own = {"num_processes": arguments["num_processes"]} if "num_processes" in arguments else {}
    shipped = OF_TRL.get(named) or here.file(named, "accelerate", "accelerate_config")
    left = {key: value for key, value in arguments.items() if key not in ("accelerate_config", "num_processes")}
    return {**shipped, **own}, left


def _sourced(name: str, folder: Path | None) -> str | None:
    """The text of a shell script that another one in `folder` reads with `source`; None if there is no such file."""
    for candidate in (folder / name, folder / Path(name).name) if folder is not None else ():
        if is_file(candidate):
            return read_text(candidate)
    return None


def _plain(value: Any) -> Any:
    """A command-line value as YAML reads it, so that numbers and switches are not texts."""
    if isinstance(value, str) and len(value) < 100 and value.replace(".", "").replace("-", "").isalnum():
        try:
            return parse(value, "YAML", "an argument")
        except SpecError:
            return value
    return value
