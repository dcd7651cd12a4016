"""Adam-mini: AdamW with one second moment for each attention head of queries and keys, for each row of other matrices,
and for each remaining tensor."""

from __future__ import annotations

from collections.abc import Sequence

from peakcast.core.units import FP32
from peakcast.models.ledger.optimizers.rule import OptimizerRule, Options, Sized, TrainedTensor
from peakcast.models.ledger.tape.local_variables import Locals

BY_HEAD = ("k_proj", "q_proj", "wq", "wk", "query", "key")
BY_ROW = (
    "embed", "embd", "wte", "lm_head", "output", "final_layer", "v_proj", "wv", "value", "feed_forward", "linear", "mlp",
    "o_proj", "wo", "attn.proj",
)  # fmt: skip
"""BY_HEAD, BY_ROW: parts of a parameter's name, by which Adam-mini tells what it is (`Adam_mini.__init__`)."""


def _num_second_moments(tensor: TrainedTensor, options: Options) -> int:
    """Elements of the second moment `vmean`."""
    name = tensor.name.lower()
    if "bias" in name:
        return tensor.numel
    if any(part in name for part in BY_HEAD):
        return -(-tensor.numel // options.head_elements)
    return tensor.shape[0] if _by_row(tensor) else 1


def _by_row(tensor: TrainedTensor) -> bool:
    return any(part in tensor.name.lower() for part in BY_ROW)


def _states(tensor: TrainedTensor, options: Options) -> list[Sized]:
    return [("m", tensor.num_bytes), ("vmean", _num_second_moments(tensor, options) * tensor.element_bytes)]


def _step(run: Locals, group: Sequence[TrainedTensor], options: Options) -> None:
    """Adam_mini.step, whose variables live on into the next iteration."""
    for tensor in group:
        size, few = tensor.num_bytes, _num_second_moments(tensor, options) * tensor.element_bytes
        run.make_states()
        if "bias" in tensor.name.lower():
            _root(run, few)
            continue
        one = few == tensor.element_bytes
        if one and options.first_step:
            run.let("block_numel", FP32)
        run.let("squared", size)
        run.let("tmp_lr", few)
        run.free("squared")
        if one:
            run.let("tmp_lr", few)  # divided by block_numel
        _root(run, few)
        run.let("inverse", few)
        run.rename("inverse", "stepsize")
        run.let("update", size)
        run.let("negated", size)
        run.free("negated")


def _root(run: Locals, few: int) -> None:
    """h = (vmean.sqrt() / bias_correction).add_(eps)"""
    run.let("root", few)
    run.let("h", few)
    run.free("root")


RULES: dict[tuple[str, str, str], OptimizerRule] = {
    ("adam_mini", "adam_mini", ""): OptimizerRule(
        "adam-mini 1.1.1 adam_mini.py Adam_mini", _states, _step, groups=lambda tensors: [list(tensors)]
    ),
}
"""(name, library, implementation) -> rule."""
