"""The trainable tensors of a state-space mixer (transformers 5.17 `models/mamba`, `mamba2`, `bamba`, `jamba`)."""

from __future__ import annotations

from collections.abc import Iterator

from peakcast.jobs.architecture import Architecture, StateSpace
from peakcast.models.ledger.parameters.tensor import ParameterTensor, linear


def state_space(architecture: Architecture, ssm: StateSpace) -> Iterator[ParameterTensor]:
    """The projections in and out, the convolution, the decay and, depending on the version, the tensors that make the scan
    depend on its input."""
    width, inner = architecture.hidden_size, ssm.inner_size
    yield from linear("mamba.in_proj", ssm.input_size, width, "attention", 0, bias=ssm.projection_bias)
    yield ParameterTensor("mamba.conv1d.weight", (ssm.conv_size, 1, ssm.conv_kernel), "state_space", 0)
    if ssm.conv_bias:
        yield ParameterTensor("mamba.conv1d.bias", (ssm.conv_size,), "state_space", 0)
    yield from _mamba_1_only(ssm) if ssm.version == 1 else _mamba_2_only(ssm)
    yield from linear("mamba.out_proj", width, inner, "attention", 1, bias=ssm.projection_bias)


def _mamba_1_only(ssm: StateSpace) -> Iterator[ParameterTensor]:
    """The tensors that only version 1 (Mamba) has."""
    inner, rank, states = ssm.inner_size, ssm.time_step_rank, ssm.state_size
    yield ParameterTensor("mamba.A_log", (inner, states), "state_space", 0)
    yield ParameterTensor("mamba.D", (inner,), "state_space", 0)
    yield from linear("mamba.x_proj", rank + 2 * states, inner, "attention", 1, bias=False)
    yield from linear("mamba.dt_proj", inner, rank, "attention", 0, bias=True)
    if ssm.norm == "time_step_and_states":
        for name, size in (("dt", rank), ("b", states), ("c", states)):
            yield ParameterTensor(f"mamba.{name}_layernorm.weight", (size,), "norm", None)


def _mamba_2_only(ssm: StateSpace) -> Iterator[ParameterTensor]:
    """The tensors that only version 2 (Mamba-2) has."""
    for name in ("dt_bias", "A_log", "D"):
        yield ParameterTensor(f"mamba.{name}", (ssm.num_heads,), "state_space", 0)
    if ssm.norm == "gated":
        yield ParameterTensor("mamba.norm.weight", (ssm.inner_size,), "norm", 0)
