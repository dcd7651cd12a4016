"""`Loss`: how the network's output becomes a loss, and what else has to be computed for it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from peakcast.core.errors import SpecError
from peakcast.core.fields import require_positive, unsaid

LossKind = Literal["cross_entropy", "dpo", "reward", "kto", "grpo"]
Reference = Literal["none", "model", "adapter_off", "precomputed"]
PAIRS: tuple[LossKind, ...] = ("dpo", "reward")
"""Losses of a chosen sequence and a rejected one, which pass through the network in one batch."""
REFERRING: tuple[LossKind, ...] = ("dpo", "kto", "grpo")
"""Losses that compare the network with a reference."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Loss:
    """How the network's output becomes a loss, and what else has to be computed for it."""

    fused_linear_cross_entropy: bool = False
    kind: LossKind = unsaid("cross_entropy")  # noqa: RUF009  # a field
    """`cross_entropy` of the next token; the others as TRL's trainers compute them. `dpo`: log-probabilities of pairs, with
    a reference's. `reward`: a head with one output scores pairs. In a pair, `micro_batch_size` counts both sequences.
    `kto`: log-probabilities of sequences, with a reference's. `grpo`: log-probabilities of completions that were generated
    before, with their prompts; generating them is not part of the step."""
    reference: Reference | None = unsaid(None)  # noqa: RUF009  # a field
    """Source of the reference's log-probabilities: a frozen copy of the network (`model`), the network with its adapters
    switched off (`adapter_off`), or the data set, which had them computed before training. null: the source that `kind`
    needs, which is `model`, or `adapter_off` with adapters; none for `grpo`, whose beta is 0 by default."""
    completion_length: int | None = unsaid(None)  # a field
    """Only for losses of log-probabilities (`dpo`, `kto`, `grpo`): tokens at the end of each sequence, after its prompt,
    whose log-probabilities the loss needs. null, or as many as the sequence has: all but the first."""

    def __post_init__(self) -> None:
        require_positive(self, "completion_length", where="loss.")
        if self.completion_length is not None and self.kind not in REFERRING:
            raise SpecError(
                f"loss.completion_length={self.completion_length} has no effect with loss.kind={self.kind!r}: only "
                f"{', '.join(REFERRING)} score completions alone; leave it out.",
                parameter="loss.completion_length",
                value=self.completion_length,
            )
        if self.reference not in (None, "none") and self.kind not in REFERRING:
            raise SpecError(
                f"loss.reference={self.reference!r} needs a loss with a reference ({', '.join(REFERRING)}), not "
                f"loss.kind={self.kind!r}; leave it out.",
                parameter="loss.reference",
                value=self.reference,
            )

    def reference_beside(self, *, adapters: bool) -> Reference:
        """The source of this loss's reference, given whether adapters are trained or the whole network. Raises: SpecError
        if adapters are to be switched off and there are none."""
        if self.reference == "adapter_off" and not adapters:
            raise SpecError(
                "loss.reference='adapter_off' needs an adapter to switch off (finetuning.method: lora); with full "
                "fine-tuning use model or precomputed.",
                parameter="loss.reference",
                value=self.reference,
            )
        if self.reference is not None or self.kind not in REFERRING or self.kind == "grpo":
            return self.reference or "none"
        return "adapter_off" if adapters else "model"
