"""The resources that a launch script's #SBATCH lines request from Slurm: nodes, and GPUs or tasks on each."""

from __future__ import annotations

import re


def sbatch_gpus(text: str) -> int | None:
    """Nodes × GPUs (or tasks) per node in #SBATCH lines; None if they do not say."""
    found = _numbers(text)
    per_node = _per_node(found)
    return _nodes(found) * per_node if per_node else found.get("gpus", found.get("ntasks", found.get("n")))


def slurm_variables(text: str) -> dict[str, str]:
    """The variables with numbers that Slurm sets for a job with these #SBATCH lines (sbatch's manual, "OUTPUT ENVIRONMENT
    VARIABLES"); none without such lines."""
    found = _numbers(text)
    if not found:
        return {}
    nodes, per_node = _nodes(found), _per_node(found)
    variables = {"SLURM_NNODES": nodes, "SLURM_JOB_NUM_NODES": nodes}
    variables |= dict.fromkeys(("SLURM_NODEID", "SLURM_PROCID", "SLURM_LOCALID"), 0)
    if per_node:
        variables["SLURM_GPUS_ON_NODE"] = variables["SLURM_GPUS_PER_NODE"] = per_node
    tasks_per_node = found.get("ntasks-per-node")
    tasks = found.get("ntasks", found.get("n", tasks_per_node * nodes if tasks_per_node else None))
    if tasks_per_node:
        variables["SLURM_NTASKS_PER_NODE"] = tasks_per_node
    if tasks:
        variables["SLURM_NTASKS"] = variables["SLURM_NPROCS"] = tasks
    return {name: str(value) for name, value in variables.items()}


def _numbers(text: str) -> dict[str, int]:
    """Flag -> the number at the end of its value (`--gres=gpu:h100:8` has 8)."""
    found: dict[str, int] = {}
    for name, value in re.findall(r"^#SBATCH\s+(?:--?)?([\w-]+)[ =]([^\s#]+)", text, re.MULTILINE):
        number = re.search(r"(\d{1,6})$", value)
        if number:
            found[name] = int(number[1])
    return found


def _nodes(found: dict[str, int]) -> int:
    return found.get("nodes", found.get("N", 1))


def _per_node(found: dict[str, int]) -> int | None:
    return next((found[key] for key in ("gpus-per-node", "gres", "ntasks-per-node") if key in found), None)
