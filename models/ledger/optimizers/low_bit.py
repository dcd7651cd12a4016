"""Optimizers with quantised, paged or fused states: bitsandbytes and torchao."""

from __future__ import annotations

from collections.abc import Sequence

from peakcast.core.units import FP32, INT64
from peakcast.models.ledger.optimizers.rule import OptimizerRule, Options, Sized, TrainedTensor
from peakcast.models.ledger.tape.local_variables import Locals

MIN_QUANTIZED_NUMEL = 4096
"""min_8bit_size of bitsandbytes; `_new_buffer` of torchao follows it."""
MIN_PAGED_NUMEL = 100_000
"""bitsandbytes 0.50.2 optim/optimizer.py get_state_buffer, optim/ademamix.py _get_state_double_buffer: the states of
parameters with fewer elements stay ordinary CUDA tensors."""
BLOCK = 256
"""Elements that share a scale: bitsandbytes since 0.44 (2048 before), torchao's 8-bit and fp8 states."""
BLOCK_4BIT = 128
QMAP_BYTES = 256 * FP32
FLUSHED_BYTES = 256_000_000
"""What `triton.testing.do_bench` writes before each run that it times, so that the GPU's cache is empty (Triton 3.1)."""

_BNB = "bitsandbytes 0.50.2 optim/optimizer.py Optimizer1State, Optimizer2State init_state; the update is one fused kernel"
MOMENTUM, ADAM, ADEMAMIX = (1,), (1, 1), (2, 1)
"""How many times as many elements as the parameter each state has. AdEMAMix keeps two averages of gradients in one state
(bitsandbytes optim/ademamix.py init_state)."""
_AO = "torchao 0.18 optim/adam.py _new_buffer, subclass_8bit.py, subclass_4bit.py, subclass_fp8.py; a compiled update"


def bitsandbytes(sizes: tuple[int, ...], bits: int, *, paged: bool = False) -> OptimizerRule:
    """States of `bits`, each `sizes` times as large as its parameter: fp32, or uint8 with an fp32 absmax per block. The
    Trainer keeps an nn.Embedding's states in fp32 (transformers 5.17 trainer.py create_optimizer,
    register_module_override)."""
    numbered = tuple(enumerate(sizes, 1))

    def quantized(tensor: TrainedTensor, options: Options) -> bool:
        return bits == 8 and tensor.numel >= MIN_QUANTIZED_NUMEL and not (tensor.is_embedding and options.trainer)

    def state_bytes(tensor: TrainedTensor, options: Options) -> int:
        return tensor.numel * (1 if quantized(tensor, options) else FP32)

    def is_paged(tensor: TrainedTensor) -> bool:
        return paged and tensor.numel >= MIN_PAGED_NUMEL

    def states(tensor: TrainedTensor, options: Options) -> list[Sized]:
        one = state_bytes(tensor, options)
        kept = [] if is_paged(tensor) else [(f"state{i}", size * one) for i, size in numbered]
        if quantized(tensor, options):
            kept += [(f"absmax{i}", size * -(-tensor.numel // BLOCK) * FP32) for i, size in numbered]
        return kept

    return OptimizerRule(
        _BNB,
        states,
        shared=tuple((f"qmap{i}", QMAP_BYTES) for i, _ in numbered) if bits == 8 else (),
        paged=lambda tensor, options: sum(sizes) * state_bytes(tensor, options) if is_paged(tensor) else 0,
    )


def torchao(code_bits: int, block: int, qmap_entries: int, *, normalized_bytes: int) -> OptimizerRule:
    """Two quantised states, each with codes, fp32 scales and a map. Tensors that are small, or no multiple of the block,
    have states of the parameter's dtype, and an update of one kernel. `normalized_bytes`: what both normalised states take
    per element between the kernels of a tensor's compiled update. Codes of 4 bits may be there too, in 8 bytes for each
    state (Inductor of torch 2.13, lowered for a GPU: torchao 0.10 and 0.18; 4 bits: 0.18).
    """

    def quantized(tensor: TrainedTensor) -> bool:
        return tensor.numel >= MIN_QUANTIZED_NUMEL and tensor.numel % block == 0

    def codes_bytes(options: Options) -> int:
        return 2 * INT64 if code_bits < 8 and options.keeps_wide_codes else 0

    def update(run: Locals, group: Sequence[TrainedTensor], options: Options) -> None:
        for tensor in filter(quantized, group):
            run.let("scales", *[tensor.numel // block * FP32] * 2)
            run.let("normalized", tensor.numel * (normalized_bytes + codes_bytes(options)))
            if options.first_step and options.times_kernels_on_copies:
                run.let("written", tensor.num_bytes, *[tensor.numel * code_bits // 8] * 2, FLUSHED_BYTES)
                run.free("written")
            run.free("scales", "normalized")

    def states(tensor: TrainedTensor, options: Options) -> list[Sized]:
        kept: list[Sized] = []
        for name in ("exp_avg", "exp_avg_sq"):
            if not quantized(tensor):
                kept.append((name, tensor.num_bytes))
                continue
            kept.append((f"{name}.codes", tensor.numel * code_bits // 8))
            kept.append((f"{name}.scale", tensor.numel // block * FP32))
            kept.append((f"{name}.qmap", qmap_entries * FP32))
        return kept

    return OptimizerRule(_AO, states, update)


BITSANDBYTES: dict[tuple[str, str], OptimizerRule] = {
    ("adamw_8bit", ""): bitsandbytes(ADAM, 8),
    ("paged_adamw_8bit", ""): bitsandbytes(ADAM, 8, paged=True),
    ("paged_adamw_32bit", ""): bitsandbytes(ADAM, 32, paged=True),
    ("lion", ""): bitsandbytes(MOMENTUM, 32),
    ("lion_8bit", ""): bitsandbytes(MOMENTUM, 8),
    ("paged_lion_32bit", ""): bitsandbytes(MOMENTUM, 32, paged=True),
    ("paged_lion_8bit", ""): bitsandbytes(MOMENTUM, 8, paged=True),
    ("rmsprop", ""): bitsandbytes(MOMENTUM, 32),
    ("rmsprop_8bit", ""): bitsandbytes(MOMENTUM, 8),
    ("ademamix", ""): bitsandbytes(ADEMAMIX, 32),
    ("ademamix_8bit", ""): bitsandbytes(ADEMAMIX, 8),
    ("paged_ademamix_32bit", ""): bitsandbytes(ADEMAMIX, 32, paged=True),
    ("paged_ademamix_8bit", ""): bitsandbytes(ADEMAMIX, 8, paged=True),
}
TORCHAO: dict[tuple[str, str], OptimizerRule] = {
    ("adamw_8bit", ""): torchao(8, BLOCK, 256, normalized_bytes=2 * FP32),
    ("adamw_4bit", ""): torchao(4, BLOCK_4BIT, 16, normalized_bytes=2 * FP32),
    ("adamw_fp8", ""): torchao(8, BLOCK, 0, normalized_bytes=0),
}
