"""Reads a launch command: the program that it starts, the program's arguments, and the number of processes that torchrun or
a similar launcher starts."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any

from peakcast.core.errors import SpecError
from peakcast.dialects.common.foreign import foreign_program
from peakcast.dialects.common.translation import words
from peakcast.dialects.shell.nested import script_to_run
from peakcast.dialects.shell.script import LEFT_OUT, Script, ShellCommand
from peakcast.dialects.shell.slurm import sbatch_gpus
from peakcast.dialects.shell.values import is_whole

SIZES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "torchrun": (("nproc_per_node",), ("nnodes",)),
    "deepspeed": (("num_gpus",), ("num_nodes",)),
    "accelerate": (("num_processes",), ()),
}
"""Launcher -> (flags for the processes per node (accelerate: of all nodes), flags for the number of nodes)."""
LAUNCHER_SWITCHES = words("""
    standalone multi_gpu use_fsdp use_deepspeed no_python use_env no_local_rank same_network use_cpu module m
""")
"""Flags of launchers without a value."""
SHORTENED = {"config": "config_file"}
"""A launcher's flag as argparse takes it shortened (accelerate examples/slurm/submit_multinode_fsdp.sh) -> its name."""
OF_OTHER_MACHINES = words("config_file exclude e hostfile H num_machines machine_rank")
"""Flags of accelerate and deepspeed that may leave out GPUs of this machine, or add those of others; without them, and
without a number, they start a process for each GPU that they see."""
CONFIG_FLAGS = ("config", "config_file", "c", "job.config_file", "config-file", "yaml_cfg", "yaml-cfg")
"""Flags with which programs are given their configuration file."""
_CLIS = ("llamafactory-cli", "axolotl", "tune", "litgpt", "trl", "nemo", "automodel", "megatron", "swift", "oumi")
_TRAIN_NOTHING = words("""
    api app chat convert-to-hf deploy download evaluate eval export generate infer inference ls cp merge-lora preprocess
    rollout sample serve vllm-serve web-ui webchat webui
""")
"""Commands of such tools that train nothing: `swift export`, `tune download`."""
_FILE = re.compile(r".+\.(ya?ml|json|toml)")
_PAIR = re.compile(r"\+{0,2}[A-Za-z_][\w.]*=")
_OF_VERL = re.compile(r"(ppo|sft)(_megatron|_veomni)?_trainer(_engine)?(\.ya?ml)?")
"""verl's own configuration files, which contain its defaults."""
_BEFORE = re.compile(
    r"(.*/)?(srun|mpirun|mpiexec|nohup|numactl|time|env|sudo|nsys|ncu|exec|uv|poetry|run|conda|stdbuf|debugpy)"
)
_MPI = re.compile(r"(.*/)?(mpirun|mpiexec)")
_CONTAINERS = re.compile(r"(.*/)?(docker|podman|nvidia-docker|singularity|apptainer|enroot|kubectl)")
"""Programs that run the rest of their words in a container."""
_STARTED = re.compile(
    r"python[\d.]*|bash|sh|torchrun|deepspeed|accelerate|srun|uv|env|.*\.(py|sh)|\./.*|" + "|".join(_CLIS)
)
"""Programs that mpirun or a container starts."""
_WITH_VALUE = words("""
    --extra --with --group --python --env-file --container-image --container-mounts --container-name --nodes --ntasks
    --ntasks-per-node --gpus-per-node --cpus-per-task --partition --job-name
""")
"""Options of such programs whose value is the next word."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """The parts of a training command."""

    program: str
    """The script or command line tool: "pretrain_gpt.py", "llamafactory-cli train"."""
    arguments: Mapping[str, Any]
    files: tuple[str, ...] = ()
    """Configuration files in its arguments."""
    num_gpus: int | None = None
    launcher: Mapping[str, Any] = field(default_factory=dict)
    """The launcher's own flags."""
    launched_by: str = ""
    """The launcher: torchrun, deepspeed or accelerate."""
    env: Mapping[str, str] = field(default_factory=dict)
    remarks: tuple[str, ...] = ()
    """Sentences about the parts of the script that the answer leaves out."""


def launch_of(script: Script, text: str, where: str) -> Launch:
    """The training command of `script` (with the text `text`, for #SBATCH lines). Raises: SpecError when there is none."""
    found = [launch for command in script.commands if (launch := _launch(command)) is not None]
    trainings = [launch for launch in found if _trains(launch)] or found
    if not trainings:
        if sentence := foreign_program(text):
            raise SpecError(f"{where} {sentence}")
        scripts = [script_to_run(words) for command in script.commands if (words := after_wrappers(command.words)[0])]
        if runs := next((words[0] for words in reversed(scripts) if words), ""):
            raise SpecError(f"{where} runs {runs}, which is not here; put that script beside it.")
        unread = "".join(f" {note}" for note in script.notes if note.endswith(LEFT_OUT))
        raise SpecError(
            f"{where} runs no training program that is known here (such as torchrun pretrain_gpt.py, accelerate launch, "
            f"llamafactory-cli train); give the configuration itself, or the command with its arguments.{unread}"
        )
    chosen = trainings[-1]
    several = len({(each.program, repr(sorted(each.arguments.items(), key=str)), each.files) for each in trainings})
    if several > 1:
        chosen = replace(chosen, remarks=(f"The script starts {several} different trainings; the last one is read.",))
    if chosen.num_gpus is None and (gpus := sbatch_gpus(text)) is not None:
        chosen = replace(chosen, num_gpus=gpus)
    return chosen


def flags_to_mapping(words: Sequence[str]) -> tuple[dict[str, Any], tuple[str, ...]]:
    """Command-line words as (flags with their values, words that belong to no flag).

    `--flag`, `--flag value`, `--flag=value`, `--flag a b` (a list); `key=value` as in Hydra and LLaMA-Factory. If a flag is
    repeated, the last one counts, as in argparse.
    """
    values: dict[str, Any] = {}
    others: list[str] = []
    flag: str | None = None
    for word in words:
        if re.match(r"--?[A-Za-z]", word):
            flag, equals, value = word.lstrip("-").partition("=")
            values[flag] = value if equals else True
            flag = None if equals else flag
        elif flag is not None and (values[flag] is True or not _PAIR.match(word)):
            old = values[flag]
            values[flag] = word if old is True else [*old, word] if isinstance(old, list) else [old, word]
        elif _PAIR.match(word):
            key, _, value = word.lstrip("+").partition("=")
            values[key] = value
        else:
            others.append(word)
    return values, tuple(others)


def after_wrappers(command: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """(`command` without programs that run the rest of it (srun, time, env), the variables that they set)."""
    words = list(command)
    env: dict[str, str] = {}
    if words[:3] == ["ray", "job", "submit"] and "--" in words:
        words = words[words.index("--") + 1 :]
    if words[:3] == ["oumi", "distributed", "torchrun"]:  # a process for each GPU that it finds, unless a flag says
        words = ["torchrun", "--nproc_per_node=gpu", *words[3:]]
    if words[:3] == ["oumi", "distributed", "accelerate"]:
        words = words[2:]
    while words and (_BEFORE.fullmatch(words[0]) or _CONTAINERS.fullmatch(words[0])):
        if _MPI.fullmatch(words[0]):
            words, processes = _after_mpi(words[1:])
            env |= {"OMPI_COMM_WORLD_SIZE": processes} if processes else {}
            continue
        if _CONTAINERS.fullmatch(words[0]):
            words, given = _after_container(words[1:])
            env |= given
            continue
        words = words[1:]
        while words and (words[0].startswith("-") or "=" in words[0] or words[0].isdigit()):
            key, equals, value = words[0].partition("=")
            if equals and not key.startswith("-"):
                env[key] = value
            if key == "-m":
                return ["python", *words], env
            words = words[2 if key in _WITH_VALUE and not equals else 1 :]
    return words, env


def _after_mpi(words: list[str]) -> tuple[list[str], str]:
    """(the words from the program that mpirun starts, the number of processes if `words`, its options, say it)."""
    begins = _begin_of_program(words)
    numbers = [value for flag, value in pairwise(words[:begins]) if flag in ("-np", "-n", "--np")]
    return words[begins:], numbers[-1] if numbers and is_whole(numbers[-1]) else ""


def _after_container(words: list[str]) -> tuple[list[str], dict[str, str]]:
    """(the words from the program that runs in the container, the variables that its options set: `-e NAME=VALUE`)."""
    begins = _begin_of_program(words)
    given = [value for flag, value in pairwise(words[:begins]) if flag in ("-e", "--env") and "=" in value]
    given += [word.removeprefix("--env=") for word in words[:begins] if word.startswith("--env=")]
    return words[begins:], {name: value for name, _, value in (each.partition("=") for each in given)}


def _begin_of_program(words: list[str]) -> int:
    """The place of the program among `words`, which begin with options of another one. Which options take how many values
    differs from one release to another, so the program is the first word that can be one; a path on both sides of a colon
    is a folder of a container."""
    programs = (i for i, word in enumerate(words) if ":" not in word and _STARTED.fullmatch(word.rsplit("/", 1)[-1]))
    return next(programs, len(words))


def _launch(command: ShellCommand) -> Launch | None:
    env, words = dict(command.env), list(command.words)
    launcher: dict[str, Any] = {}
    num_gpus: int | None = None
    by, nodes = "", "1"
    while words:
        words, given = after_wrappers(words)
        env |= given
        if not words:
            return None
        name = words[0].rsplit("/", 1)[-1]
        if re.fullmatch(r"python[\d.]*", name):
            words = _after_python(words[1:])
            if words[:1] == ["-m"]:
                return replace(_program(words[1:2], words[2:], num_gpus or _of_mpi(env, by), launcher, env), launched_by=by)
        elif name in SIZES:
            words = words[1 + (name == "accelerate" and words[1:2] == ["launch"]) :]
            own, words = _launcher_flags(words)
            launcher |= own
            num_gpus, by = _processes(name, own, env), name
            whole = any(flag in own for flag in SIZES[name][1])  # the launcher's own --nnodes
            if num_gpus is not None and is_whole(nodes) and not whole:  # open-instruct's mason.py multiplies num_processes
                num_gpus *= int(nodes)
        elif name in _CLIS:
            if name == "tune" and words[1:2] == ["run"]:
                own, rest = _launcher_flags(words[2:])
                num_gpus = _processes("torchrun", own, env) if own else 1
                return _program([f"tune run {rest[0]}" if rest else "tune run"], rest[1:], num_gpus, launcher, env)
            verbs = 2 if name == "nemo" else 1  # nemo llm pretrain
            program = " ".join([name, *words[1 : 1 + verbs]])
            num_gpus = _visible(name, env) if num_gpus is None else num_gpus
            found = _program([program], _with_network(program, words[1 + verbs :]), num_gpus, launcher, env)
            return replace(found, launched_by=by)
        elif name == "run_train.sh":  # torchtitan's; reads its file and number of GPUs from the environment
            gpus = env.get("NGPU", "8")
            found = _program([name], words[1:], int(gpus) if re.fullmatch(r"[1-9]\d{0,5}", gpus) else None, launcher, env)
            named = tuple(env[key] for key in ("CONFIG_FILE", "CONFIG") if key in env)
            return replace(found, files=(*named, *found.files))
        elif name.endswith(".py") and (begins := _after_dashes(words)):
            # a program that starts another on several nodes: mason.py --num_nodes 8 ... -- accelerate launch ...
            outer, _ = _launcher_flags(words[1 : len(words) - len(begins) - 1])
            nodes, words = str(outer.get("num_nodes", "1")), begins
        elif name.endswith(".py") or (launcher and not name.startswith("-")):
            return replace(_program([name], words[1:], num_gpus or _of_mpi(env, by), launcher, env), launched_by=by)
        else:
            return None
    return None


def _of_mpi(env: Mapping[str, str], launched_by: str) -> int | None:
    """The processes that mpirun starts, one for each GPU, unless each is a launcher that starts more."""
    processes = env.get("OMPI_COMM_WORLD_SIZE", "")
    return int(processes) if re.fullmatch(r"[1-9]\d{0,5}", processes) and not launched_by else None


def _visible(name: str, env: Mapping[str, str]) -> int | None:
    """The processes that `llamafactory-cli` starts: NPROC_PER_NODE, or one for each GPU that it sees, on NNODES
    (launcher.py); None if the environment does not say, and for other programs."""
    if name != "llamafactory-cli":
        return None
    each, nodes = env.get("NPROC_PER_NODE") or _seen(env), env.get("NNODES") or "1"
    return int(each) * int(nodes) if all(re.fullmatch(r"[1-9]\d{0,5}", text) for text in (each, nodes)) else None


def _seen(env: Mapping[str, str]) -> str:
    """The number of GPUs that CUDA_VISIBLE_DEVICES leaves to a program; "" if it is not set."""
    return str(len([each for each in env.get("CUDA_VISIBLE_DEVICES", "").split(",") if each.strip()]) or "")


def _with_network(program: str, words: list[str]) -> list[str]:
    """`words` with the flag of LitGPT's network, which its commands may have first without it (litgpt 0.5.13 __main__.py:
    `litgpt finetune_lora microsoft/phi-2`)."""
    if not program.startswith("litgpt ") or not words or words[0].startswith("-"):
        return words
    return ["--model_name" if program == "litgpt pretrain" else "--checkpoint_dir", *words]


def _after_dashes(words: list[str]) -> list[str]:
    """The words after `--`, of several commands (`source env.sh \\&\\& torchrun ...`) those of the last one, if they begin
    with a launcher, Python, or a program that runs these; else empty."""
    rest = words[words.index("--") + 1 :] if "--" in words else []
    while "&&" in rest:
        rest = rest[rest.index("&&") + 1 :]
    runs = rest and (rest[0] in SIZES or re.fullmatch(r"python[\d.]*", rest[0]) or _BEFORE.fullmatch(rest[0]))
    return rest if runs else []


def _after_python(words: list[str]) -> list[str]:
    """The script that Python runs, with its arguments; a launcher that is run with `-m` becomes the name of its command."""
    while words and words[0].startswith("-") and words[0] != "-m":
        words = words[1:]
    if words[:2] in (["-m", "torch.distributed.run"], ["-m", "torch.distributed.launch"]):
        return ["torchrun", *words[2:]]
    if words[:2] == ["-m", "accelerate.commands.launch"]:
        return ["accelerate", "launch", *words[2:]]
    return words


def _program(
    name: list[str], words: list[str], num_gpus: int | None, launcher: dict[str, Any], env: dict[str, str]
) -> Launch:
    values, others = flags_to_mapping(words)
    files = [str(values.pop(flag)) for flag in CONFIG_FLAGS if flag in values]
    files += [word for word in others if _FILE.fullmatch(word)]
    if (hydra := values.pop("config-name", None)) is not None:
        values.pop("config-path", None)
        own = name and name[0].startswith("verl.") and _OF_VERL.fullmatch(str(hydra))
        files += [] if own else [str(hydra) if _FILE.fullmatch(str(hydra)) else f"{hydra}.yaml"]
    return Launch(
        program=name[0] if name else "",
        arguments=values,
        files=tuple(files),
        num_gpus=num_gpus,
        launcher=launcher,
        env=env,
    )


def _launcher_flags(words: list[str]) -> tuple[dict[str, Any], list[str]]:
    """(a launcher's own flags at the start of `words`, the words from its program on)."""
    own: dict[str, Any] = {}
    while words and words[0].startswith("-"):
        flag, equals, value = words[0].lstrip("-").partition("=")
        key = SHORTENED.get(flag, flag.replace("-", "_"))
        words = words[1:]
        if equals:
            own[key] = value
        elif key in LAUNCHER_SWITCHES or not words or words[0].startswith("-") or words[0].endswith(".py"):
            own[key] = True
            if key in ("m", "module"):
                break
        else:
            own[key], words = words[0], words[1:]
    return own, words


def _processes(launcher: str, own: Mapping[str, Any], env: Mapping[str, str]) -> int | None:
    """The processes that `launcher` starts with its flags `own`; None if neither they nor the environment say."""
    per_node, nodes = ([own.get(flag) for flag in flags] for flags in SIZES[launcher])
    number = next((value for value in per_node if value is not None), None)
    multiple = next((value for value in nodes if value is not None), "1")
    if number is True:  # what says it is not known here
        number = _seen(env)
    elif launcher == "deepspeed" and (chosen := own.get("include", own.get("i"))):
        number, multiple = _included(str(chosen)), "1"
    elif number is None and launcher == "torchrun":
        number = "1" if own else None  # torchrun's default
    elif number in ("gpu", "auto") or (number is None and not OF_OTHER_MACHINES.intersection(own)):
        number = _seen(env)
    texts = [str(number), str(multiple).rpartition(":")[2]]  # --nnodes may be MIN:MAX
    return int(texts[0]) * int(texts[1]) if all(re.fullmatch(r"[1-9]\d{0,5}", text) for text in texts) else None


def _included(hosts: str) -> str:
    """The number of GPUs in DeepSpeed's `--include worker-0@worker-1:0,2` (launcher/runner.py); "" where a host has no
    list, which means all of its GPUs."""
    lists = [host.partition(":")[2] for host in hosts.split("@")]
    return str(sum(len(gpus.split(",")) for gpus in lists)) if all(lists) else ""


def _trains(launch: Launch) -> bool:
    return (
        bool(launch.arguments or launch.files)
        and not _TRAIN_NOTHING.intersection(launch.program.split()[1:2])
        and (
            bool(launch.launcher)
            or launch.program.split()[0] in _CLIS
            or re.search(r"train|tune|sft|dpo|run_clm|lora", launch.program) is not None
        )
    )
