"""What a Hugging Face model's own forward holds beside its blocks: buffers, embeddings by name, masks, rotary tables, and
the gradient of a tied table that waits for its other half."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from peakcast.models.analytical.blocks.attention_kernels import flex_block_mask_bytes
from peakcast.models.analytical.blocks.hf_builder import HFContext
from peakcast.models.analytical.blocks.hf_ends import embedding_variables
from peakcast.models.analytical.blocks.hf_layer import decoder_layer
from peakcast.models.analytical.blocks.hf_traits import traits
from peakcast.models.analytical.step import Run, Step
from peakcast.spec import TrainingJob
from peakcast.timeline import Category

FP32 = 4


def hold_buffers(timeline: Step, job: TrainingJob) -> None:
    """Buffers of size: a causal mask for the longest sequence, in old code."""
    if traits(job.architecture).causal_mask_buffer:
        timeline.hold("causal_mask", Category.PARAMETERS, job.architecture.max_position_embeddings**2, 0)


def hold_embeddings(
    timeline: Step, layers: Sequence[HFContext], embedded: Run, in_checkpoint: bool, dies: int
) -> None:
    """Variables of the model's forward, until its last norm is done."""
    is_input, sizes = embedding_variables(layers[0])
    born = embedded.forward_start + embedded.template.num_forward
    if is_input:
        first = decoder_layer(layers[0])
        born += first.num_forward
        if in_checkpoint or first.keeps_input:
            return  # the checkpoint or the graph holds it anyway
    for size in sizes:
        timeline.hold("inputs_embeds", Category.ACTIVATIONS, size, born, dies, "embedding")


def model_ends(loss: Run) -> int:
    """The instant of the lm_head: the model's last norm is done and its forward's variables are gone."""
    labels = loss.template.forward_labels
    return loss.forward_start + next(index for index, label in enumerate(labels) if label.startswith("lm_head"))


def hold_tied_gradient(timeline: Step, loss: Run, dies: int) -> None:
    """A tied table's gradient from the lm_head waits for the embedding's before it is added to one that exists."""
    template = loss.template
    for index in np.flatnonzero(template.weight_gradient):
        if template.names[index] == "lm_head.weight.grad" and loss.backward_start is not None:
            born = loss.backward_start + int(template.dies[index])
            size = int(template.num_bytes[index])
            timeline.hold("lm_head.weight.grad", Category.TEMPORARIES, size, born, dies, "head")


def hold_masks(timeline: Step, layers: Sequence[HFContext], start: int, dies: int) -> None:
    """The model's attention masks, one per kind of layer: for eager in the compute dtype, for sdpa bool and shared by all
    sequences. They live as long as the model's forward, and as arguments of checkpointed layers to the last of these."""
    one = layers[0]
    scores = one.sequence**2
    if one.architecture.kind == "encoder":
        sizes = []  # nothing is masked without padding
    elif one.attention == "eager":
        both = one.architecture.sliding_window is not None and traits(one.architecture).full_attention_every
        sizes = [one.batch * scores * one.compute_bytes] * (2 if both else 1)
    elif one.attention == "flex":
        sizes = [flex_block_mask_bytes(one.batch, one.sequence)]
    else:
        sizes = [scores] if one.attention == "sdpa" and any(layer.masked for layer in layers) else []
    for size in sizes:
        timeline.hold("attention_mask", Category.INPUTS, size, start, dies)


def hold_rotary_tables(timeline: Step, job: TrainingJob, context: HFContext, start: int) -> None:
    """cos and sin [1, sequence_length, head_dim], shared by all layers until the first layer's backward is done."""
    if job.architecture.position_embedding == "rope":
        mla = job.architecture.mla
        width = mla.qk_rope_head_dim if mla else int(job.architecture.head_dim * traits(job.architecture).rotary_fraction)
        wide = traits(job.architecture).rotary == "promoted"
        size = job.sequence_length * width * (FP32 if wide else context.weight_bytes)
        for name in ("rotary.cos", "rotary.sin") * traits(job.architecture).rotary_tables:
            timeline.hold(name, Category.ACTIVATIONS, size, start, timeline.now)
