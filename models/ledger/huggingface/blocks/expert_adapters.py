"""LoRA on stacked experts and their router. They are parameters and not modules, so that an adapter changes the weight itself
before it is used, and the changed weight is as large as all experts of the layer.

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
NAMED = {
    GATE_UP: ({"w1", "w3"}, {"gate_proj", "up_proj"}),
    DOWN: ({"w2"}, {"down_proj"}),
    ROUTER: ({"gate"},),
}
"""Parameter -> the names that `finetuning.targets` must have for it, in one of two spellings."""


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
    def weight_numel(self) -> int:
        """Elements of the parameter."""
        return self.matrices * self.columns_in * self.rows_out


@lru_cache(maxsize=256)
def expert_adapters(architecture: Architecture, tuning: Finetuning, implementation: str) -> Mapping[str, ExpertAdapter]:
    """The adapters on the experts of each layer and on their router, by parameter. `implementation`: of the experts."""
    moe = architecture.moe
    adapts = moe is not None and family_of(architecture).libraries.peft_adapts_experts
    if not adapts or moe is None or implementation != "grouped_mm" or tuning.method != "lora" or tuning.quantization:
        return {}
    width, inner, rank, targets = architecture.hidden_size, moe.moe_intermediate_size, tuning.rank or 0, set(tuning.targets)
    known = (
        ExpertAdapter(ROUTER, 1, width, moe.num_experts, rank),
        ExpertAdapter(GATE_UP, moe.num_experts, width, JOINED * inner, JOINED * rank),
        ExpertAdapter(DOWN, moe.num_experts, inner, width, rank),
    )
    named = {one.name: one for one in known if "all-linear" in targets or any(names <= targets for names in NAMED[one.name])}
    return named


def of_block(build: BlockBuilder) -> Mapping[str, ExpertAdapter]:
    """The adapters on the experts of the block that is built."""
    context = build.context
    return expert_adapters(context.architecture, context.finetuning, context.experts.implementation)


class ChangedWeight(NamedTuple):
    """A parameter whose adapter has been registered, and is applied when the parameter is used."""

    adapter: ExpertAdapter
    factors: list[Tensor]
    """The adapter's matrices in the parameter's dtype; none if that is theirs."""
    gradients: list[WeightGradient]
    """Of the adapter's matrices, if nothing else gives them."""


def register(build: BlockBuilder, adapter: ExpertAdapter) -> ChangedWeight:
    """Cast the adapter to the parameter's dtype. Registering a parametrization applies it once, for nothing (torch
    `nn/utils/parametrize.py` ParametrizationList)."""
    tape, narrow, wide = build.tape, build.context.precision.weight_bytes, build.context.adapters.weight_bytes
    factors, unused = [], []
    for name in ("lora_B", "lora_A"):
        numel = adapter.shapes[name][0] * adapter.shapes[name][1]
        gradient = WeightGradient(f"{adapter.name}.{name}.grad", numel * wide)
        if narrow == wide:
            unused.append(gradient)
            continue
        copied = numel * wide if name == "lora_B" else 0  # its gradient is permuted, and so copied
        label = f"{adapter.name}.{name}.to_weight_dtype"
        factors.append(
            tape.operation(label, [], numel * narrow, weight_gradients=[gradient], backward_temporary_bytes=copied)
        )
    tape.operation(f"{adapter.name}.lora.registered", [], 0, forward_temporary_bytes=adapter.weight_numel * narrow)
    return ChangedWeight(adapter, factors, unused)


def changed(build: BlockBuilder, weight: ChangedWeight) -> Tensor:
    """The weight plus the product of its adapter's matrices, in one kernel (`baddbmm`)."""
    tape, adapter = build.tape, weight.adapter
    result = tape.operation(
        f"{adapter.name}.lora",
        weight.factors,
        adapter.weight_numel * build.context.precision.weight_bytes,
        saves=weight.factors,
        weight_gradients=weight.gradients,
        backward_temporary_bytes=max((one.num_bytes for one in weight.gradients), default=0),
    )
    tape.hold(result)  # `parametrize.cached`
    return result
