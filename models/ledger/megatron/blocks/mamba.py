"""A state-space layer of a Megatron-LM hybrid on one rank: Mamba-2's mixer, after its norm and before its residual
addition.

Sources: megatron-core 0.16 to 0.20 `ssm/mamba_layer.py`, `ssm/mamba_mixer.py` (`_ssm_training`); mamba_ssm 2.2
`ops/triton/ssd_combined.py` (`MambaSplitConv1dScanCombinedFn`, `_mamba_chunk_scan_combined_fwd` and `_bwd`),
`ops/triton/layernorm_gated.py`. Heads, groups and inner width are split over the tensor-parallel group.
"""

from __future__ import annotations

from dataclasses import replace

from peakcast.core.units import FP32
from peakcast.models.ledger.megatron.blocks.context import MambaContext, MegatronContext
from peakcast.models.ledger.megatron.blocks.gradients import trained
from peakcast.models.ledger.megatron.blocks.primitives import bias_dropout_add, column_linear_of_norm, own_norm, row_linear
from peakcast.models.ledger.tape.tape import Saved, Tape, Tensor, WeightGradient

CHUNK = 128
"""Tokens between two states of the scan (`MambaMixer`, chunk_size)."""


def mamba_layer(tape: Tape, hidden: Tensor, context: MegatronContext, mamba: MambaContext) -> Tensor:
    """Append one layer: [stream_rows, hidden] in and out."""
    size = context.rows * context.element_bytes
    normalized = own_norm(tape, hidden, context, "norm")
    projected = column_linear_of_norm(tape, normalized, context, mamba.input, "linear_in_proj", False)
    if context.batch > 1:  # from [sequence, batch, width] to [batch, sequence, width], a view for one sample
        projected = tape.operation("in_proj_contiguous", [projected], projected.num_bytes)
    scanned = _scan(tape, projected, context, mamba)
    if context.batch > 1:
        scanned = tape.operation("scan_contiguous", [scanned], scanned.num_bytes)
    scanned = tape.operation(
        "gated_norm",
        [scanned],
        size * mamba.inner,
        saves=Saved([scanned], extra_bytes=[context.rows * mamba.groups * FP32]),
        weight_gradients=trained(context, WeightGradient("gated_norm.weight.grad", mamba.inner * context.element_bytes)),
    )
    output = row_linear(tape, scanned, context, mamba.inner, "linear_out_proj")
    plain = replace(context, linear_bias=False)  # the mixer's projections have no bias
    return bias_dropout_add(tape, output, hidden, plain, "mamba_bda")


def _scan(tape: Tape, projected: Tensor, context: MegatronContext, mamba: MambaContext) -> Tensor:
    """Convolution, scan and gate in one function. It saves its input and the scan's output before the gate, and recomputes
    the rest in backward."""
    size, rows = context.element_bytes, context.rows
    inner = rows * mamba.inner * size
    convolved = rows * mamba.convolved * size
    chunks = context.batch * -(-context.sequence // CHUNK)
    states = chunks * mamba.inner * mamba.state * FP32
    pairs = chunks * mamba.groups * CHUNK * CHUNK * FP32  # C·B within a chunk
    steps = 2 * rows * mamba.heads * FP32  # time steps and their sums
    parameters = mamba.convolved * (mamba.kernel + 1) + 3 * mamba.heads
    return tape.operation(
        "mamba.scan",
        [projected],
        inner,
        saves=Saved([projected], extra_bytes=[inner]),
        weight_gradients=trained(context, WeightGradient("mamba.scan.weights.grad", parameters * size)),
        # states in fp32, then converted to the narrow dtype
        forward_temporary_bytes=(convolved, steps, states, states * size // FP32, pairs),
        # recomputed: the above; then gradients of the convolution's output, of the gate's input, of states, and of C·B
        backward_temporary_bytes=(
            *(convolved, steps, states, states * size // FP32, pairs),
            *(convolved, inner, steps, states * size // FP32, pairs),
        ),
    )
