"""Every tensor that a job's adapters put on its network, by the entries of `adapter_methods.py`."""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from peakcast.jobs.adapter_settings import settings_of
from peakcast.jobs.architecture import Architecture
from peakcast.jobs.spec import Finetuning
from peakcast.models.ledger.huggingface.blocks.builder import is_adapter_target
from peakcast.models.ledger.parameters.adapter_methods import METHODS, ON_NETWORK, matrix_of
from peakcast.models.ledger.parameters.adapter_parts import Made, Matrix
from peakcast.models.ledger.parameters.inventory import layer_parameters

ADAPTED_ROLES = ("attention", "mlp")
"""Roles of the matrices that get adapters in the ledger."""
NETWORK = "adapters"
"""The module name of tensors that an adapter method has once for the network."""


def adapted_matrices(architecture: Architecture, tuning: Finetuning) -> Iterator[Matrix]:
    """The projections with an adapter, in the order of the network."""
    for layer in range(architecture.num_layers):
        for tensor in layer_parameters(architecture, layer):
            name = tensor.name.removesuffix(".weight")
            if len(tensor.shape) == 2 and tensor.role in ADAPTED_ROLES and is_adapter_target(name, tuning, architecture):
                yield matrix_of(tuning, name, tensor.shape, layer)


@lru_cache(maxsize=64)
def network_tensors(architecture: Architecture, tuning: Finetuning) -> tuple[Made, ...]:
    """The tensors that the method has once for the network, not on each projection; equal names are made distinct by a
    number."""
    on_network = None if tuning.method == "full" else METHODS[tuning.method].on_network
    if on_network is None:
        return ()
    settings, matrices = settings_of(tuning.method, tuning.settings), list(adapted_matrices(architecture, tuning))
    made = on_network(architecture, settings, matrices) if matrices or tuning.method in ON_NETWORK else []
    return tuple(one._replace(name=f"{one.name}.{index}") for index, one in enumerate(made))
