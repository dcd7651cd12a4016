"""Copies of fake tensors by `copy.deepcopy`, as peft makes of modules and TRL of networks.

torch's own (`Tensor.__deepcopy__`) asks for the tensor's address, which a fake one lacks, and then copies its storage apart
from it: views of the copy are counted a second time, and the process may crash.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor


def install() -> None:
    """Use them for every fake tensor in this process."""
    FakeTensor.__deepcopy__ = _copied


def _copied(tensor: FakeTensor, memo: dict[int, Any]) -> Any:
    """A copy as `Parameter.__deepcopy__` makes it. A weight that bitsandbytes has packed keeps its quantization state, as
    in its own class."""
    if id(tensor) not in memo:
        made: Any = tensor.detach().clone()
        is_parameter = isinstance(tensor, torch.nn.Parameter)
        made = torch.nn.Parameter(made, tensor.requires_grad) if is_parameter else made.requires_grad_(tensor.requires_grad)
        if (state := getattr(tensor, "quant_state", None)) is not None:
            made.quant_state = copy.deepcopy(state, memo)
        memo[id(tensor)] = made
    return memo[id(tensor)]
