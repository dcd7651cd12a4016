"""Reads how many ranks a script starts by itself. Where that is the number of GPUs that it sees, which is one unless the
command says how many, the answer says so."""

from __future__ import annotations

import functools
import os
import subprocess
from collections.abc import Callable, Mapping
from typing import Any

import torch

from peakcast.collectors.dryrun import ranks
from peakcast.collectors.dryrun.noted import RunFindings, asker, where
from peakcast.collectors.machine.imports import when_imported

COUNTED = "PEAKCAST_DRYRUN_COUNTED"
"""Variable that tells programs that a script starts which line has asked how many GPUs there are."""
LAUNCHER = "accelerate launch"


class RankCounts:
    """Watches how the script of `question` counts GPUs, and starts ranks; `notes` gets what to know."""

    def __init__(self, question: Mapping[str, Any], notes: RunFindings) -> None:
        self._question = question
        self._notes = notes

    def install(self) -> None:
        """Install it in this process."""
        when_imported("torch.distributed.launcher.api", start_one_rank)
        when_imported("accelerate.commands.launch", self._launch_on_several)
        when_imported("accelerate.utils.launch", _open_no_port)
        if self._question["world_size"] > 1:
            return
        if not self._question["launched"] and not self._question.get("is_child"):
            os.environ.pop(COUNTED, None)
        words = self._question["accelerate"]
        if words and not any("num_processes" in word or "config_file" in word for word in words):
            os.environ[COUNTED] = LAUNCHER
        counted = self._question["launched"] or os.environ.get(COUNTED) == LAUNCHER
        if words or (self._question.get("is_child") and counted):
            self._say()
        for asked in (torch.cuda, torch.accelerator):
            asked.device_count = self._counting(asked.device_count)  # type: ignore[attr-defined]
        spawn: Any = torch.multiprocessing.spawn

        def spawned(function: Any, args: Any = (), nprocs: int = 1, *more: Any, **keywords: Any) -> Any:
            if nprocs == 1:
                self._say()
            return spawn(function, args, nprocs, *more, **keywords)

        torch.multiprocessing.spawn = spawned

    def _counting(self, count: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(count)
        def counted() -> Any:
            if asker() is not None:
                os.environ[COUNTED] = where()
            return count()

        counted._dynamo_marked_constant = True  # type: ignore[attr-defined]
        return counted

    def _say(self) -> None:
        """Say that there is one rank because one GPU was counted, if so."""
        if place := os.environ.get(COUNTED):
            starts = "starts" if place == LAUNCHER else "asks how many GPUs there are, of which one was seen; it starts"
            sentence = (
                f"{place} {starts} as many processes as there are GPUs, unless it is told: a run of one rank was followed. "
                "--world-size says how many there will be."
            )
            self._notes.add("value_assumed", "world_size", sentence)

    def _launch_on_several(self, module: Any) -> None:
        """Let accelerate's launcher, if a script calls it in its own process (`trl sft --num_processes 2`), see as many
        GPUs as it is to start processes for; with fewer it starts one (accelerate 1.15 `_validate_launch_command`)."""
        check = module._validate_launch_command

        @functools.wraps(check)
        def checked(arguments: Any) -> Any:
            asked, nodes = arguments.num_processes, max(1, arguments.num_machines or 1)
            count = torch.cuda.device_count
            if asked is None and arguments.config_file is None and count() == 1:
                os.environ[COUNTED] = LAUNCHER
            torch.cuda.device_count = lambda: max(count(), (asked or 1) // nodes)  # type: ignore[assignment]
            try:
                return check(arguments)
            finally:
                torch.cuda.device_count = count  # type: ignore[assignment]

        module._validate_launch_command = checked


def _open_no_port(module: Any) -> None:
    """Which ports other programs of this machine use does not matter (accelerate 1.15 `prepare_multi_gpu_env`)."""
    module.is_port_in_use = lambda *_: False


def start_one_rank(module: Any) -> None:
    """Make torch's elastic agent, which launchers call in their own process (accelerate 1.15 `multi_gpu_launcher`, for
    `trl sft --num_processes 4`), start one program that is told how many there are. A function (`notebook_launcher`) runs
    in this process."""
    launch = module.launch_agent

    @functools.wraps(launch)
    def launched(config: Any, entrypoint: Any, args: Any, **_: Any) -> Any:
        per_node, nodes = int(config.nproc_per_node), int(config.max_nodes)
        if not isinstance(entrypoint, str):
            ranks.set_environment(0, per_node * nodes, per_node, launched=True)
            return {0: entrypoint(*args)}
        sizes = (f"--nnodes={nodes}", f"--nproc-per-node={per_node}")
        program = [word for number, word in enumerate(args) if number or word != "-u"]  # without Python and its option
        subprocess.run(["torchrun", *sizes, *program], check=True)
        return {}

    module.launch_agent = launched
