"""What a Hugging Face rank keeps outside the GPU: offloaded activations, and optimizer states in managed memory or by ZeRO.

ZeRO's modules are imported inside a function, as only its jobs need them and a prediction's time is mostly imports.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from peakcast.jobs.spec import TrainingJob
from peakcast.models.ledger.huggingface.blocks.head import head
from peakcast.models.ledger.huggingface.blocks.hybrid import layer_template
from peakcast.models.ledger.huggingface.contexts import block_context
from peakcast.models.ledger.huggingface.layers import Blocks
from peakcast.models.ledger.huggingface.stored_parameters import stored_parameters
from peakcast.models.ledger.layouts import layout_of
from peakcast.models.ledger.optimizers.choice import optimizer_options, optimizer_rule

if TYPE_CHECKING:
    from peakcast.models.ledger.layouts.zero_host import HostMemory


def pinned_activation_bytes(job: TrainingJob) -> list[int]:
    """Sizes of the host copies of offloaded activations at the end of forward: the inputs of checkpointed layers or,
    without checkpointing, every saved tensor (`save_on_cpu` copies a tensor once for each operation that saves it, and
    copies parameters as well)."""
    checkpointing, blocks = job.activation_checkpointing, Blocks(job, block_context(job, None))
    if checkpointing.mode != "none":
        return [one.input_bytes for one, held in zip(blocks.contexts, blocks.checkpointed, strict=True) if held]
    templates = [blocks.embedding(), *(layer_template(layer) for layer in blocks.contexts), head(blocks.context)]
    return [size for template in templates for size in template.saved_bytes]


def paged_state_bytes(job: TrainingJob) -> int:
    """Bytes of the optimizer states that this rank keeps in managed memory, outside PyTorch's allocator (bitsandbytes)."""
    rule, options, layout = optimizer_rule(job), optimizer_options(job, "steady"), layout_of(job, stored_parameters(job))
    return sum(rule.paged(tensor, options) for tensor in layout.optimized())


def zero_host_memory(job: TrainingJob) -> HostMemory:
    """What a ZeRO job keeps on the host, for the rank that keeps most."""
    from peakcast.models.ledger.layouts.zero3 import Zero3
    from peakcast.models.ledger.layouts.zero12 import Zero12
    from peakcast.models.ledger.layouts.zero_host import host_memory

    layout = layout_of(job, stored_parameters(job))
    assert isinstance(layout, Zero12 | Zero3)
    return host_memory(layout, accumulates=job.gradient_accumulation_steps > 1)
