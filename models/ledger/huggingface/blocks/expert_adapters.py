"""LoRA on stacked experts and their router. They are parameters and not modules, so that an adapter changes the weight
itself before it is used, and the changed weight is as large as all experts of the layer.

Source: peft 0.21 `tuners/lora/layer.py` ParamWrapper (`get_delta_factors`, `_activate_lora`) and
`utils/transformers_weight_conversion.py` `_convert_peft_config_moe`.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

from peakcast.jobs.architecture import Architecture
from peakcast.jobs.spec import Finetuning
from peakcast.models.ledger.huggingface.blocks.builder import BlockBuilder
from peakcast.models.ledger.tape.tape import Tensor, WeightGradient
from peakcast.networks.families import family_of

GATE_UP, DOWN, ROUTER = "mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate"
JOINED = 2
"""An adapter of gate and up, which are one parameter, has the ranks of both."""


class ExpertAdapter(NamedTuple):
    """The adapter of a parameter that is `matrices` stacked matrices, each with `rank`."""

    name: str
    matrices: int
    columns_in: int
    rows_out: int
    rank: int

    @property
    def shapes(self) -> dict[str, tuple[int, int]]:
        """Its own two matrices."""
        both = self.rank * self.matrices
        return {"lora_A": (both, self.columns_in), "lora_B": (self.rows_out, both)}

    @property
    def numels(self) -> dict[str, int]:
        """Elements of its matrices, in the order in which they are prepared."""
        return {name: rows * columns for name, (rows, columns) in reversed(self.shapes.items())}

    @property
    def weight_numel(self) -> int:
        """Elements of the parameter."""
        return self.matrices * self.columns_in * self.rows_out


def names_of(architecture: Architecture) -> dict[str, set[str]]:
    """Parameter -> the names that `finetuning.targets` must have for it; empty if peft adapts no experts of the family."""
    names = family_of(architecture).libraries.peft_adapts_experts
    return {ROUTER: {"gate"}, GATE_UP: {*names[:2]}, DOWN: {*names[2:]}} if names else {}


@lru_cache(maxsize=256)
def expert_adapters(architecture: Architecture, tuning: Finetuning, implementation: str) -> Mapping[str, ExpertAdapter]:
    """The adapters on the experts of each layer and on their router, by parameter. `implementation`: of the experts."""
    moe, names = architecture.moe, names_of(architecture)
    modelled = implementation == "grouped_mm" and tuning.method in ("lora", "qlora")
    if not names or moe is None or not modelled or tuning.quantization not in (None, "nf4"):
        return {}
    width, inner, rank, targets = architecture.hidden_size, moe.moe_intermediate_size, tuning.rank or 0, set(tuning.targets)
    known = (
        ExpertAdapter(ROUTER, 1, width, moe.num_experts, rank),
        ExpertAdapter(GATE_UP, moe.num_experts, width, JOINED * inner, JOINED * rank),
        ExpertAdapter(DOWN, moe.num_experts, inner, width, rank),
    )
    return {one.name: one for one in known if "all-linear" in targets or names[one.name] <= targets}


class RegisteredAdapter(NamedTuple):
    """An adapter that is applied when its parameter is used."""

    adapter: ExpertAdapter
    factors: list[Tensor]
    """Its matrices in the parameter's dtype and as batches; of no bytes if they are views."""


def registered(build: BlockBuilder, *, router: bool = False) -> dict[str, RegisteredAdapter]:
    """The adapters on the experts of the block that is built, or on its router, cast to the parameters' dtype: the
    outermost wrapper is that of the down projection."""
    context = build.context
    adapters = expert_adapters(context.architecture, context.finetuning, context.experts.implementation)
    names = (ROUTER,) if router else (DOWN, GATE_UP)
    return {name: _register(build, adapters[name]) for name in names if name in adapters}


def _register(build: BlockBuilder, adapter: ExpertAdapter) -> RegisteredAdapter:
    """What comes before the experts' forward, so that its backward comes after theirs. Registering a parametrization
    applies it once, for nothing (torch `nn/utils/parametrize.py` ParametrizationList)."""
    tape, narrow, wide = build.tape, build.context.precision.weight_bytes, build.context.adapters.weight_bytes
    factors = []
    for name, numel in adapter.numels.items():
        gradients = [WeightGradient(f"{adapter.name}.{name}.grad", numel * wide)]
        copied = numel * wide if name == "lora_B" and narrow != wide else 0  # its gradient is permuted, and so copied
        size = 0 if narrow == wide else numel * narrow
        label = f"{adapter.name}.{name}.factor"
        factors.append(tape.operation(label, [], size, weight_gradients=gradients, backward_temporary_bytes=copied))
    tape.operation(f"{adapter.name}.lora.registered", [], 0, forward_temporary_bytes=adapter.weight_numel * narrow)
    return RegisteredAdapter(adapter, factors)


def changed(build: BlockBuilder, adapters: Mapping[str, RegisteredAdapter], name: str) -> list[Tensor]:
    """The parameter `name` plus the product of its adapter's matrices, in one kernel (`baddbmm`); none without an
    adapter."""
    if name not in adapters:
        return []
    (adapter, factors), narrow = adapters[name], build.context.precision.weight_bytes
    gradients = [(factor, numel * narrow) for factor, numel in zip(factors, adapter.numels.values(), strict=True)]
    size = adapter.weight_numel * narrow
    return [build.tape.operation(f"{name}.lora", factors, size, saves=factors, gradients=gradients)]
