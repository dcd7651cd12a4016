"""The loss that balances the experts of a mixture in transformers, which the ledger does not count."""

from __future__ import annotations

from peakcast.core.units import GIB
from peakcast.dialects.common.translation import Notes, Settings
from peakcast.jobs.spec import TrainingJob

KEY = "output_router_logits"
"""The key of a network's configuration that switches it on."""
SAVED_BYTES = 6
"""Bytes of each router logit of each layer: in bf16, and the float32 softmax that backward needs."""
MASK_BYTES = 12
"""Bytes of each element of the one-hot masks: int64, and its float32 copy (transformers 4 `load_balancing_loss_func`)."""


def note_balancing(job: TrainingJob, training: Settings, notes: Notes, *, on: bool) -> None:
    """Note the balancing loss of a mixture. `on`: whether the network's configuration switches it on, which applies if the
    run does not say."""
    if not training.switch(KEY, on) or job.architecture.moe is None:
        return
    moe, layers = job.architecture.moe, range(job.architecture.num_hidden_layers)
    logits = job.num_tokens * moe.num_experts * sum(map(job.architecture.is_moe_layer, layers))
    saved_gib, masks_gib = SAVED_BYTES * logits / GIB, MASK_BYTES * moe.num_experts_per_tok * logits / GIB
    name = training.spell(KEY)
    notes.unsupported.append(
        f"The experts' balancing loss ({name}) is not counted: it saves {saved_gib:.2f} GiB of all routers' logits, and in "
        f"transformers 4 it also makes masks of {masks_gib:.1f} GiB between forward and backward.",
        name,
        "more",
    )
