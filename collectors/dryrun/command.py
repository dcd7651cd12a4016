"""Reads a training command: the script, its arguments, the number of ranks, and the Python interpreter."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

from peakcast.collectors.dryrun.tools import console_module, is_tool
from peakcast.core.bounded import file_bytes, first_bytes, is_file, yaml_value
from peakcast.core.errors import SpecError
from peakcast.dialects.shell.launch import LAUNCHER_SWITCHES, after_wrappers
from peakcast.dialects.shell.script import MAX_CHARACTERS, read_script
from peakcast.dialects.shell.slurm import sbatch_gpus

PYTHON = re.compile(r"(.*/)?python(\d(\.\d+)?)?t?")
SHELLS = ("sh", "bash", "zsh", "dash")
SUBMITTERS = ("sbatch", "qsub", "bsub")
"""Programs that put a shell script into a queue."""
SOURCES = (".py", ".ipynb")
LAUNCHERS = ("torchrun", "accelerate", "deepspeed")
MODULES = {
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torchrun",
    "accelerate.commands.launch": "accelerate launch",
    "accelerate.commands.accelerate_cli": "accelerate",
}
"""Module that `python -m` runs -> the launcher's words."""
SWITCHES = LAUNCHER_SWITCHES | {"debug", "quiet", "use_megatron_lm", "tpu", "cpu", "dynamo_use_fullgraph", "no_ssh"}
"""Flags of launchers without a value."""
PER_NODE = {"torchrun": ("nproc_per_node",), "deepspeed": ("num_gpus",), "accelerate": ()}
NODES = {"torchrun": ("nnodes",), "deepspeed": ("num_nodes",), "accelerate": ("num_machines",)}
GPUS_PER_NODE = 8
AT_ONCE: dict[str, dict[str, str]] = {
    "srun": {"total": "-n|--ntasks", "per_node": "--ntasks-per-node", "nodes": "-N|--nodes"},
    "mpirun": {"total": "-n|-np|--np|-c"},
    "mpiexec": {"total": "-n|-np|--np"},
}
"""Program that starts a script in several processes -> its flags for their number."""
RUNNERS = ("pdm", "pipenv", "hatch", "rye")
"""Python programs that run another command, which is the one that counts."""


@dataclass(frozen=True, kw_only=True)
class TrainingCommand:
    """The parts of a training command."""

    script: str
    """The file, or the module of `-m`."""
    arguments: tuple[str, ...] = ()
    as_module: bool = False
    python: str = sys.executable
    world_size: int = 1
    ranks_per_node: int = 1
    environment: tuple[str, ...] = ()
    """NAME=value words, as written before the command."""
    accelerate: tuple[str, ...] = ()
    """The words of `accelerate launch`, which gives the script its settings in the environment."""
    launched: bool = False
    """Whether a launcher starts the script and gives it its rank in the environment."""
    function: Callable[[], object] | None = None
    """A function that trains and runs instead of the script, in a copy of a warm process."""


def read_command(command: Sequence[str], ranks_of_job: int | None = None) -> TrainingCommand:
    """Read a command, word by word. `ranks_of_job`: how many processes srun starts if the command does not say. Raises:
    SpecError if it runs no Python script."""
    words = list(command)
    variables: list[str] = []
    while words and ((not variables and words[0] == "env") or re.fullmatch(r"[A-Za-z_]\w*=.*", words[0])):
        variables.append(words.pop(0))
    before, (words, given) = words, after_wrappers(words)
    variables += [f"{name}={value}" for name, value in given.items()]
    words = _after_others(words)
    ranks = _started_at_once(before[: len(before) - len(words)], ranks_of_job)
    found = _read(words, [variable for variable in variables if variable != "env"])
    if ranks is not None and not found.launched:
        found = replace(found, world_size=ranks, ranks_per_node=min(ranks, GPUS_PER_NODE), launched=True)
        variables += [f"{name}={ranks}" for name in ("SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE")]
    return replace(found, environment=(*found.environment, *(variable for variable in variables if variable != "env")))


def _after_others(words: list[str]) -> list[str]:
    """`words` without programs that run the rest of the command (nice, timeout, pdm run): if the first word is unknown, the
    words from the first one that is Python or a launcher; after `RUNNERS`, also a Python file. Other programs copy, show or
    delete it."""
    first = words[0] if words else ""
    runs = os.path.basename(first) in RUNNERS
    if os.path.basename(first) in SUBMITTERS:
        return words
    if not runs and (_begins(first) or _is_shell(first) or is_file(first) or _tool(first)):
        return words
    at = next((number for number, word in enumerate(words) if _begins(word) and (runs or not word.endswith(".py"))), 0)
    return words[at:]


def _begins(word: str) -> bool:
    name = os.path.basename(word)
    return PYTHON.fullmatch(word) is not None or name in LAUNCHERS or (word.endswith(SOURCES) and is_file(word))


def _started_at_once(words: Sequence[str], ranks_of_job: int | None) -> int | None:
    """Number of processes of the script that srun or mpirun starts, from the `words` before the script, else that of the
    job; None if neither gives one."""
    launcher = next((os.path.basename(word) for word in words if os.path.basename(word) in AT_ONCE), None)
    if launcher is None:
        return None
    text = " ".join(words)
    sizes = {}
    for size, flag in AT_ONCE[launcher].items():
        found = re.search(rf"(?<!\S)(?:{flag})[ =]?(\d+)(?!\S)", text)
        sizes[size] = int(found[1]) if found else None
    total, per_node = sizes["total"], sizes.get("per_node")
    return total or (per_node * (sizes.get("nodes") or 1) if per_node else ranks_of_job)


def _read(words: list[str], variables: Sequence[str]) -> TrainingCommand:
    if not words:
        raise SpecError(
            "no command is given; put it after --, such as: peakcast dryrun --gpu H100-80GB -- python train.py.",
            parameter="command",
        )
    python = sys.executable
    first = words[0]
    if _is_shell(first):
        return _shell(words[1:] if os.path.basename(first) in SHELLS else words, variables)
    if os.path.basename(first) in SUBMITTERS:
        return _shell(words[next((number for number, word in enumerate(words) if is_file(word)), 1) :], variables)
    if PYTHON.fullmatch(first):
        python, words = _interpreter(first), _after_options(words[1:])
        if words[:1] == ["-m"] and len(words) > 1:
            if words[1] not in MODULES:
                return TrainingCommand(script=words[1], arguments=tuple(words[2:]), as_module=True, python=python)
            words = [*MODULES[words[1]].split(), *words[2:]]
        else:
            return replace(_script(words), python=python)
    if "/" in words[0]:
        python = _of_program(words[0]) or python
    if os.path.basename(words[0]) in LAUNCHERS:
        return replace(_launched(os.path.basename(words[0]), words[1:]), python=python)
    return replace(_script(words), python=python)


def _is_shell(word: str) -> bool:
    """Whether `word` is a shell or a shell script."""
    if os.path.basename(word) in SHELLS or not is_file(word):
        return os.path.basename(word) in SHELLS
    start = first_bytes(Path(word), 200).split(b"\n")[0]
    return word.endswith(".sh") or (start.startswith(b"#!") and start.endswith(tuple(name.encode() for name in SHELLS)))


COUNTED_GPUS = re.compile(
    r"(\$\(|`)\s*(nvidia-smi\b[^|()`]*\|\s*wc\s+-l|python3?\s+-c\s+(?P<quote>[\"'])[^`\"']*device_count\(\)\)?(?P=quote))\s*(\)|`)"
)
"""How shell scripts ask for the number of GPUs: by nvidia-smi, or by torch."""


def _as_started(text: str, variables: Sequence[str]) -> str:
    """The `text` of a shell's script as it is run here: with the environment variables that it names, of which `variables`
    are given with the command, and the number of GPUs that it counts with nvidia-smi or torch."""
    given = os.environ | dict(variable.split("=", 1) for variable in variables)
    named = {name: value for name, value in given.items() if re.search(rf"\$\{{?{re.escape(name)}\b", text)}
    exported = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in named.items())
    return exported + COUNTED_GPUS.sub(str(GPUS_PER_NODE), text)


def _shell(words: Sequence[str], variables: Sequence[str]) -> TrainingCommand:
    """The last training command in a shell's script, which is read and not run; `variables` are given with the command."""
    words = list(words)
    while words and words[0].startswith("-") and words[0] not in ("-c", "-lc", "-xc", "-ec"):
        words = words[1:]
    if words[:1] and words[0].startswith("-"):
        text, name, arguments = " ".join(words[1:2]), "the shell's command", words[3:]  # words[2] is its $0
    elif words and is_file(words[0]):
        name, arguments = words[0], words[1:]
        text = file_bytes(Path(name), 4 * MAX_CHARACTERS).decode(errors="replace")
    else:
        raise SpecError(f"command: the shell script {words[:1]} is not there.", parameter="command", value=words[:1])
    found, refused = [], ""
    for command in read_script(_as_started(text, variables), arguments, partial(_sourced, variables=variables)).commands:
        exported = [f"{key}={value}" for key, value in command.env.items()]
        if not command.words[:1] or os.path.basename(command.words[0]) in SHELLS:
            continue
        try:
            found.append(read_command([*exported, *command.words], sbatch_gpus(text)))
        except SpecError as error:
            if _begins(command.words[0]):
                refused = f" ({' '.join(command.words[:3])} ...: {str(error).rstrip('.')}){_unset(text, variables)}"
    surely = [one for one in found if one.launched] or [one for one in found if is_python(one)]
    training = surely or [one for one in found if trains(one)]
    if not training:
        raise SpecError(
            f"command: {name} starts nothing that trains, as far as it can be read without running it{refused}; put "
            "peakcast dryrun before the command in it that does.",
            parameter="command",
            value=name,
        )
    return training[-1]


def _sourced(name: str, variables: Sequence[str]) -> str | None:
    """The text of a shell script that another one runs, or reads with `source`; None if there is no such file."""
    if not is_file(name):
        return None
    return _as_started(file_bytes(Path(name), 4 * MAX_CHARACTERS).decode(errors="replace"), variables)


def _unset(text: str, variables: Sequence[str]) -> str:
    """Which environment variables the `text` of a shell's script needs that are set nowhere, in words."""
    needed = dict.fromkeys(re.findall(r"\$\{?([A-Z][A-Z0-9_]*)\b(?!:?[-=])", text))
    given = os.environ.keys() | {variable.partition("=")[0] for variable in variables}
    unset = [name for name in needed if name not in given and not re.search(rf"\b(?:{name}=|(?:for|read) {name}\b)", text)]
    return f"; {', '.join(unset)} {'are' if len(unset) > 1 else 'is'} not set" if unset else ""


def is_python(command: TrainingCommand) -> bool:
    """Whether the command runs Python, judging by its name."""
    return command.as_module or command.script.endswith(SOURCES)


def trains(command: TrainingCommand) -> bool:
    """Whether the command may train, judging by its name: any Python program that is no tool."""
    if command.launched:
        return True
    return (is_python(command) or bool(console_module(command.script))) and not is_tool(command.script)


def _interpreter(word: str) -> str:
    """The interpreter if a command names it by its path; for a bare name, the one that runs peakcast."""
    if "/" not in word:
        return sys.executable
    if not is_file(word):
        raise SpecError(f"command={word!r}: there is no such interpreter; check the path.", parameter="command", value=word)
    return word


def _of_program(word: str) -> str:
    """The interpreter of a console script that a command names by its path (/env/bin/torchrun); "" for other files."""
    first = first_bytes(Path(word), 200).split(b"\n")[0].decode(errors="replace") if is_file(word) else ""
    interpreter = first.removeprefix("#!").strip()
    return interpreter if first.startswith("#!/") and PYTHON.fullmatch(interpreter) and is_file(interpreter) else ""


def _after_options(words: list[str]) -> list[str]:
    """`words` without the interpreter's own options (-u, -W ignore)."""
    while words and words[0].startswith("-") and words[0] not in ("-m", "-c"):
        words = words[2:] if words[0] in ("-W", "-X") else words[1:]
    return words


def _script(words: Sequence[str]) -> TrainingCommand:
    if not words:
        raise SpecError("the command names no script; give one, such as python train.py.", parameter="command")
    script, *arguments = words
    if not is_file(script):
        if tool := _tool(script):
            return TrainingCommand(script=tool, arguments=tuple(arguments))
        if not (script.endswith(SOURCES) or "/" in script or os.path.isdir(script)):
            absent = not script.startswith("-") and shutil.which(script) is None
            raise SpecError(
                f"command: {f'there is no program {script!r} here' if absent else f'what {script!r} runs cannot be read'}; "
                f"{'install the package that has it, or ' if absent else ''}give the Python command that trains, such as "
                "torchrun --nproc-per-node 8 train.py.",
                parameter="command",
                value=script,
            )
        why = "is a folder" if os.path.isdir(script) else "is not there"
        raise SpecError(
            f"command: the script {script!r} {why}; give a Python file, or -m and a module.",
            parameter="command",
            value=script,
        )
    return TrainingCommand(script=script, arguments=tuple(arguments))


def _tool(word: str) -> str:
    """The file of a package's console script, of this environment first; "" if `word` is none."""
    places = (os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath))
    tool = shutil.which(word, path=os.pathsep.join(places)) if word else None
    first = first_bytes(Path(tool), 200).split(b"\n")[0] if tool is not None else b""
    return tool if tool is not None and first.startswith(b"#!") and b"python" in first else ""


def _launched(launcher: str, words: list[str]) -> TrainingCommand:
    """The script that a launcher starts, and its ranks."""
    if launcher == "accelerate":
        if words[:1] != ["launch"]:
            raise SpecError(
                "command: of accelerate, only `accelerate launch` trains.", parameter="command", value=words[:1]
            )
        words = words[1:]
    whole = tuple(words)
    flags: dict[str, str] = {}
    while words and words[0].startswith("-"):
        flag, equals, value = words.pop(0).lstrip("-").partition("=")
        name = flag.replace("-", "_")
        if not equals and name not in SWITCHES and words:
            value = words.pop(0)
        flags[name] = value
    as_module = bool({"m", "module"} & set(flags))
    if as_module:
        if not words:
            raise SpecError(f"the command of {launcher} names no module after -m; give one.", parameter="command")
        command = TrainingCommand(script=words[0], arguments=tuple(words[1:]), as_module=True)
    else:
        command = _script(words)
    if command.arguments[:1] == ("--",):  # launchers use argparse, which removes it
        command = replace(command, arguments=command.arguments[1:])
    world_size, per_node = _ranks(launcher, flags)
    settings = whole if launcher == "accelerate" else ()
    return replace(command, world_size=world_size, ranks_per_node=per_node, launched=True, accelerate=settings)


def _ranks(launcher: str, flags: dict[str, str]) -> tuple[int, int]:
    """(number of all ranks, number of ranks on a node)."""
    nodes = next((_number(flags[name].rpartition(":")[2], name) for name in NODES[launcher] if name in flags), 1)
    if launcher == "accelerate":
        settings = _accelerate_settings(flags.get("config_file"))
        total = _number(flags.get("num_processes", settings.get("num_processes", 1)), "num_processes")
        nodes = _number(flags.get("num_machines", settings.get("num_machines", 1)), "num_machines")
        return total, max(1, total // max(1, nodes))
    default = "1" if launcher == "torchrun" else str(GPUS_PER_NODE)
    text = next((flags[name] for name in PER_NODE[launcher] if name in flags), default)
    per_node = GPUS_PER_NODE if text in ("gpu", "auto") else _number(text, PER_NODE[launcher][0])
    return nodes * per_node, per_node


def _accelerate_settings(path: str | None) -> dict[str, str]:
    if path is None or not is_file(path):
        return {}
    try:
        read = yaml_value(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SpecError(f"config_file={path!r} cannot be read: {error}.", parameter="config_file", value=path) from error
    return {key: str(value) for key, value in read.items()} if isinstance(read, dict) else {}


def _number(text: object, name: str) -> int:
    if isinstance(text, str) and text.isdecimal() and int(text) > 0:
        return int(text)
    if isinstance(text, int) and text > 0:
        return text
    raise SpecError(f"{name}={text!r} must be a whole number above 0, such as 8.", parameter=name, value=text)
