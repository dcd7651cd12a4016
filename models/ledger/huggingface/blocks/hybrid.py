"""A layer of a hybrid network: state-space mixers next to attention and feed-forward, each after a norm.

Attention and feed-forward are those of other decoders. A mixer saves what the kernels of mamba_ssm save for backward, read
from their source (`ops/triton/ssd_combined.py` MambaSplitConv1dScanCombinedFn, `ops/selective_scan_interface.py`
MambaInnerFn). The temporaries of those kernels are not known, and without that package transformers computes the scan step
by step, with many times these tensors. So hybrids are out of scope, and are answered as far as this goes.
"""

from __future__ import annotations

from functools import lru_cache

from peakcast.core.units import FP32
from peakcast.jobs.architecture import StateSpace
from peakcast.models.ledger.huggingface.blocks.attention import self_attention
from peakcast.models.ledger.huggingface.blocks.builder import BlockBuilder
from peakcast.models.ledger.huggingface.blocks.context import HFContext
from peakcast.models.ledger.huggingface.blocks.layer import decoder_layer, feed_forward
from peakcast.models.ledger.parameters.state_space import state_space
from peakcast.models.ledger.tape import primitives as ops
from peakcast.models.ledger.tape.tape import Saved, Tape, Tensor, WeightGradient
from peakcast.models.ledger.tape.template import Template

SCAN_CHUNK = 2048
"""Tokens between two states that Mamba's scan saves (mamba_ssm csrc/selective_scan/selective_scan.cpp, kMaxChunkSize)."""
PROJECTIONS = ("mamba.in_proj", "mamba.out_proj")
"""The modules of the mixer that are not fused into the scan."""


def layer_template(context: HFContext) -> Template:
    """The template of a decoder's layer, or of a hybrid's."""
    return hybrid_layer(context) if context.layer.parts else decoder_layer(context)


@lru_cache(maxsize=128)
def hybrid_layer(context: HFContext) -> Template:
    """One layer with the context's parts: [micro_batch_size, sequence_length, hidden_size] in and out."""
    tape = Tape(gpu=context.gpu, saves_on_cpu=context.backward.saves_on_cpu)
    build = BlockBuilder(tape, context)
    owned = not context.backward.checkpointed
    hidden = tape.input(context.input_bytes, requires_grad=context.layer.input_requires_grad, owned=owned)
    output = hidden
    for number, group in enumerate(context.layer.parts.split("+")):
        normed = build.norm(output, context.architecture.hidden_size, f"norm_{number}")
        results = [_part(build, normed, part) for part in group.split("|")]
        result = results[0]
        for other in results[1:]:
            result = ops.add(tape, result, other, "parts_add")
        output = ops.add(tape, output, result, "residual_add")
    for variable in (hidden, *build.variables):
        tape.hold(variable)
    return tape.finish(output, cached_matmuls=context.backward.cached_matmuls, cached_kinds=context.backward.cached_kinds)


def _part(build: BlockBuilder, x: Tensor, part: str) -> Tensor:
    """The output of one part."""
    ssm = build.context.architecture.ssm
    if part == "mamba" and ssm is not None:
        return _mixer(build, x, ssm)
    return self_attention(build, x) if part == "attention" else feed_forward(build, x)


def _mixer(build: BlockBuilder, x: Tensor, ssm: StateSpace) -> Tensor:
    """The projection in, the scan with everything fused into it, the projection out."""
    context, width = build.context, build.context.architecture.hidden_size
    rows, size = context.rows, context.precision.compute_bytes
    projected = build.projection(x, width, ssm.input_size, "mamba.in_proj", ssm.projection_bias)
    if ssm.version == 1:
        chunks = -(-context.sequence // SCAN_CHUNK)
        kept = [
            rows * (ssm.time_step_rank + 2 * ssm.state_size) * size,  # dt, B and C
            context.batch * ssm.inner_size * chunks * 2 * ssm.state_size * FP32,
            rows * ssm.inner_size * size,  # the scan's output before its gate
        ]
    else:
        groups = rows * (ssm.num_groups if ssm.norm == "gated" else 0)
        kept = [rows * ssm.inner_size * size, groups * FP32]  # ... and the gated norm's statistics
    scanned = build.tape.operation(
        "mamba.scan",
        [projected],
        rows * ssm.inner_size * size,
        saves=Saved([projected], extra_bytes=kept),
        weight_gradients=_gradients(ssm, context) if context.weights_get_gradients else [],
    )
    return build.projection(scanned, ssm.inner_size, width, "mamba.out_proj", ssm.projection_bias)


def _gradients(ssm: StateSpace, context: HFContext) -> list[WeightGradient]:
    """The gradients of what is fused into the scan: all of the mixer but its projections in and out."""
    element = context.precision.weight_bytes
    fused = (one for one in state_space(context.architecture, ssm) if one.name.rsplit(".", 1)[0] not in PROJECTIONS)
    return [WeightGradient(f"{one.name}.grad", one.numel * element) for one in fused]
