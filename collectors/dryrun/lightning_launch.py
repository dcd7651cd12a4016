"""Lightning's trainers, which start a process for each GPU themselves: such a script is followed as if torchrun had started
it."""

from __future__ import annotations

import functools
import inspect
import os
from collections.abc import Mapping
from typing import Any

from peakcast.collectors.machine.imports import when_imported

CONNECTORS = {
    "lightning.pytorch.trainer.connectors.accelerator_connector": "_AcceleratorConnector",
    "pytorch_lightning.trainer.connectors.accelerator_connector": "_AcceleratorConnector",
    "lightning.fabric.connector": "_Connector",
    "lightning_fabric.connector": "_Connector",
}
"""Module -> its class that reads `devices` and `num_nodes` of a Trainer or of Fabric (Lightning 2.x)."""


def install(question: Mapping[str, Any]) -> None:
    """Start the script of `question` again under torchrun once it asks Lightning for several GPUs. Under a launcher, which
    has said how many there are, nothing changes; nor for a function, which cannot be started again."""
    if question["launched"] or "function" in question:
        return

    def change(module: Any, name: str) -> None:
        begin = getattr(module, name).__init__
        signature = inspect.signature(begin)

        @functools.wraps(begin)
        def connect(self: Any, *arguments: Any, **keywords: Any) -> None:
            asked = signature.bind(self, *arguments, **keywords).arguments
            per_node, nodes = num_devices(asked.get("devices")), int(asked.get("num_nodes") or 1)
            if per_node * nodes > 1 and asked.get("accelerator") != "cpu":
                os.execvp("torchrun", _under_torchrun(question, nodes, per_node))
            begin(self, *arguments, **keywords)

        getattr(module, name).__init__ = connect

    for module, name in CONNECTORS.items():
        when_imported(module, functools.partial(change, name=name))


def num_devices(devices: Any) -> int:
    """How many GPUs of a node Lightning's `devices` names: a number, a list of indices, or either as text; 1 for "auto",
    which is all that there are."""
    if isinstance(devices, (list, tuple)):
        return max(1, len(devices))
    if isinstance(devices, str):
        indices = [word for word in devices.split(",") if word.strip()]
        if len(indices) > 1 or devices.endswith(","):
            return len(indices)
        devices = int(devices) if devices.strip().isdigit() else 1
    return max(1, devices) if isinstance(devices, int) else 1


def _under_torchrun(question: Mapping[str, Any], nodes: int, per_node: int) -> list[str]:
    """The script's command with torchrun before it."""
    module = ["-m"] if question["as_module"] else []
    ranks = [f"--nnodes={nodes}", f"--nproc-per-node={per_node}"]
    return ["torchrun", *ranks, *module, question["script"], *question["arguments"]]
