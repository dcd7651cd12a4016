"""lm_head and loss as one operation over chunks of tokens: whole logits never exist."""

from __future__ import annotations

from peakcast.core.units import FP32, INT64, power_of_two
from peakcast.models.ledger.huggingface.blocks.builder import BlockBuilder
from peakcast.models.ledger.huggingface.blocks.context import HFContext
from peakcast.models.ledger.tape.local_variables import Locals
from peakcast.models.ledger.tape.marks import Mark
from peakcast.models.ledger.tape.tape import Output, Saved, Tensor, WeightGradient
from peakcast.networks.families import family_of
from peakcast.timelines.timeline import Category


def fused_loss(build: BlockBuilder, hidden: Tensor) -> None:
    """Append lm_head and loss by the job's kernel: Unsloth's, torchtitan's, or Liger's."""
    if build.context.kernels.loss == "chunked":
        unsloth_cross_entropy(build, hidden)
    elif build.context.loss.fused_chunks:
        loss_in_chunks(build, hidden)
    else:
        fused_linear_cross_entropy(build, hidden)


def unsloth_cross_entropy(build: BlockBuilder, hidden: Tensor) -> None:
    """Unsloth's: a compiled function makes the logits of one chunk of tokens, overwrites them with their gradient, and
    computes from that the gradient of the hidden states, which is copied into the saved one.

    Counted from its source; no trace has confirmed it.

    Source: unsloth_zoo 2025.11.5 `fused_losses/cross_entropy_loss.py` UnslothFusedLoss.
    """
    context, tape, rows = build.context, build.tape, build.context.rows
    width, vocabulary = context.architecture.hidden_size, context.architecture.vocab_size
    weight = vocabulary * width * context.precision.end_weight_bytes if context.head_trains else 0
    tokens = -(-rows // max(context.loss.fused_chunks, 1))
    gradient = tokens * width * (hidden.num_bytes // (rows * width)) + weight  # of a chunk, before it is stored or added
    tape.begin_loss()
    labels = tape.operation("shift_labels", [], Output(rows * INT64, category=Category.INPUTS), gradients=[])
    with tape.marked(Mark.LM_HEAD):
        tape.operation(
            "lm_head.chunked_cross_entropy",
            [hidden],
            Output(FP32, category=Category.LOGITS),
            saves=Saved(extra_bytes=[hidden.num_bytes, *([weight] if weight else [])], become_gradients=True),
            weight_gradients=[WeightGradient("lm_head.weight.grad", weight)] if weight else [],
            forward_temporary_bytes=tokens * vocabulary * context.precision.compute_bytes + gradient,
        )
    tape.hold(labels)


def fused_linear_cross_entropy(build: BlockBuilder, hidden: Tensor) -> None:
    """Liger's fused linear cross entropy: for each chunk of tokens it computes logits and at once the gradients of the
    hidden states and the weight, which are all that it saves.

    Source: liger_kernel 0.8.5 `ops/fused_linear_cross_entropy.py` fused_linear_cross_entropy_forward.
    """
    context, tape, rows = build.context, build.tape, build.context.rows
    width, vocabulary = context.architecture.hidden_size, context.architecture.vocab_size
    weight = vocabulary * width * context.precision.weight_bytes
    tape.begin_loss()
    labels = tape.operation("pad_labels", [], Output(2 * rows * INT64, category=Category.INPUTS), gradients=[])
    with tape.marked(Mark.LM_HEAD):
        tape.operation(
            "lm_head.fused_linear_cross_entropy",
            [hidden],
            Output(FP32, category=Category.LOGITS),
            saves=Saved(extra_bytes=[hidden.num_bytes, *([weight] if context.head_trains else [])], become_gradients=True),
            weight_gradients=[WeightGradient("lm_head.weight.grad", weight)] if context.head_trains else [],
            forward_temporary_bytes=passing_bytes(context, width, vocabulary, hidden.num_bytes) + rows * (FP32 + 1),
        )
    tape.hold(labels)  # variables of transformers and Liger refer to them until the kernel returns


def passing_bytes(context: HFContext, width: int, vocabulary: int, hidden_bytes: int) -> int:
    """The most bytes of temporaries in the loop over chunks, line by line. Products that autocast does not cast write
    directly into their destination. For those that it does cast it makes narrow copies: the trained weight's is cached
    until the forward ends, its transpose's (not a leaf) never. The weight's product is added directly to its destination,
    except in fp32; before 0.8.3 each was made, widened and then added."""
    rows, element = context.rows, context.precision.compute_bytes
    budget = family_of(context.architecture).liger.loss_budget
    chunk, matrix = fused_loss_chunk(rows, width * budget, vocabulary), vocabulary * width
    casts, held = context.precision.autocast and element < context.precision.weight_bytes, Locals()
    input_element = element if hidden_bytes > rows * width * element else 0  # else the norm's output is narrow already
    for tokens in (chunk, *([min(chunk, rows - chunk)] if chunk < rows else [])):  # the last one is shorter
        if casts:
            held.let("input_cast", tokens * width * input_element)
            held.let("transpose_cast", matrix * element)
        held.let("logits", tokens * vocabulary * element)
        held.free("input_cast", "transpose_cast")
        if casts:
            if "weight_cast" not in held:
                held.let("weight_cast", matrix * element)
            held.let("grad_input", tokens * width * element)
            held.free("grad_input", *(() if context.head_trains else ("weight_cast",)))
        if context.head_trains:
            if casts:
                held.let("input_cast", tokens * width * input_element)
            held.let("product", matrix * (FP32 if element == FP32 else context.loss.fused_temporary_bytes))
            held.free("input_cast", "product")
        held.free("logits")
    return held.most_bytes()


def loss_in_chunks(build: BlockBuilder, hidden: Tensor) -> None:
    """lm_head, loss and their backward for one chunk of the sequence after the other. It keeps copies of the hidden states
    and the fp32 sum of their gradients. A chunk has logits, their log-softmax, its gradient and the logits' gradient in
    fp32, or a second product of the weight's gradient, which is added to the first. FSDP2 widens that sum for its
    reduction, which waits for the last chunk.

    Source: torchtitan 0.3.0 `components/loss.py` ChunkedLossWrapper, GradAccumulator. Traced by hand with that wrapper
    around transformers' network: within 0.25 % on one GPU; under FSDP2 up to 1.2 % low in backward.
    """
    context, tape, rows = build.context, build.tape, build.context.rows
    width, vocabulary = context.architecture.hidden_size, context.architecture.vocab_size
    weight = vocabulary * width * context.precision.weight_bytes
    logits = -(-rows // context.loss.fused_chunks) * vocabulary
    in_loss = logits * (context.precision.compute_bytes + 3 * FP32)
    in_product = logits * 2 * context.precision.compute_bytes + (weight if context.head_trains else 0)
    wider = max(context.loss.reduced_bytes - context.precision.weight_bytes, 0) if context.head_trains else 0
    widened = vocabulary * width * wider
    tape.begin_loss()
    with tape.marked(Mark.LM_HEAD):
        tape.operation(
            "lm_head.loss_in_chunks",
            [hidden],
            Output(FP32, category=Category.LOGITS),
            saves=Saved(extra_bytes=[hidden.num_bytes, *([weight] if context.head_trains else [])], become_gradients=True),
            weight_gradients=[WeightGradient("lm_head.weight.grad", weight)] if context.head_trains else [],
            forward_temporary_bytes=max(in_loss, in_product) + rows * width * FP32 + widened,
        )


def fused_loss_chunk(rows: int, width: int, vocabulary: int) -> int:
    """Tokens in a chunk, a power of two, chosen so that their logits are about as large as all hidden states."""
    factor = -(-vocabulary // width)
    return min(rows, power_of_two(-(-rows // factor)))
