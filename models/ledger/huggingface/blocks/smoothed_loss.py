"""The loss of transformers' label smoother (`label_smoothing_factor`), which the Trainer computes from the logits that the
network has returned.

Source: transformers 5.17 `trainer_pt_utils.py` LabelSmoother, `trainer.py` compute_loss; accelerate 1.15
`utils/operations.py` convert_outputs_to_fp32; torch 2.13 derivatives.yaml (gather saves its input).
"""

from __future__ import annotations

from peakcast.core.units import FP32
from peakcast.models.ledger.huggingface.blocks.context import HFContext
from peakcast.models.ledger.huggingface.blocks.whole_logits import logits_op, shift_logits, widened_by_model
from peakcast.models.ledger.tape.tape import Output, Saved, Tape, Tensor
from peakcast.timelines.timeline import Category


def smoothed_loss(tape: Tape, logits: Tensor, context: HFContext) -> None:
    """Append the smoothed loss of whole logits: their shifted copy, its log-softmax and that with the other sign exist at
    once, as variables of its code. The gradient of the sum of all log-probabilities is one number for each row, a view,
    where they are in float32."""
    given = logits
    wide = widened_by_model(tape, logits, context) if context.precision.autocast else logits
    tape.hold(given)
    part = shift_logits(tape, wide, context)
    rows, size = context.batch * (context.sequence - 1), part.num_bytes
    result = tape.operation("log_softmax", [part], Output(size, category=Category.LOGITS), saves=Saved(output=True))
    negative = logits_op(tape, result, size, "log_probabilities")
    narrow = size < rows * context.architecture.vocab_size * FP32
    total = tape.operation(
        "log_probabilities.sum", [negative], rows * FP32, gradients=[(negative, size if narrow else 0)]
    )
    chosen = tape.operation("log_probabilities.gather", [negative], rows * FP32, saves=[negative])
    tape.operation("smoothed_loss", [chosen, total], FP32)
    for variable in (wide, part, negative):
        tape.hold(variable)
