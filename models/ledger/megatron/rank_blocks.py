"""The templates of the blocks on one Megatron-LM rank, and the groups in which its layers run and are checkpointed."""

from __future__ import annotations

from dataclasses import replace
from functools import cached_property, lru_cache
from itertools import groupby
from typing import NamedTuple

from peakcast.models.ledger.layouts.pipeline import Chunk
from peakcast.models.ledger.megatron.blocks.context import LayerRun, MegatronContext
from peakcast.models.ledger.megatron.blocks.ends import embedding
from peakcast.models.ledger.megatron.blocks.head import encoder_end, head, parted_head
from peakcast.models.ledger.megatron.blocks.layer import decoder_layer
from peakcast.models.ledger.megatron.contexts import part_context
from peakcast.models.ledger.megatron.inputs import reads_mask
from peakcast.models.ledger.megatron.share import RankShare
from peakcast.models.ledger.tape.template import Template


@lru_cache(maxsize=1024)
def layer_template(context: MegatronContext, runs: LayerRun) -> Template:
    """The template of a layer in these surroundings."""
    return decoder_layer(replace(context, runs=runs))


class AlikeLayers(NamedTuple):
    """Consecutive layers with one template."""

    template: Template
    modules: list[str]
    after_encoder: bool
    """Whether they are the first layers of a decoder whose encoder is in the same chunk."""


def receives(chunk: Chunk, layer: int) -> bool:
    """Whether the input of a chunk's layer comes from another stage."""
    return not chunk.is_first and layer == chunk.layers[0]


class RankBlocks:
    """The templates of a rank's blocks. Blocks that are alike share a template."""

    def __init__(self, share: RankShare, *, first_step: bool = False) -> None:
        self.share, self._first_step = share, first_step
        self._unmasked = {layer for chunk in share.chunks if not reads_mask(share, chunk) for layer in chunk.layers}
        self._of_layer: dict[tuple[int, bool, bool], Template] = {}
        """By layer, whether other code holds the layer's input, and whether it runs without a graph."""
        self._of_context: dict[tuple[int, LayerRun], Template] = {}
        """By id of a layer's context, and its surroundings."""
        self._alike: dict[range, list[AlikeLayers]] = {}

    @cached_property
    def embedding(self) -> Template:
        """The template of the embedding, of the encoder's if there are two."""
        return embedding(self.share.context)

    @cached_property
    def head(self) -> Template:
        """The template of the head."""
        runs = LayerRun(input_held=not self.share.chunks[-1].layers)
        context = replace(self.share.layer_context(self._last_layer()), runs=runs)
        if self._parts_head:
            return self.ending[-1]
        return head(context, self.share.job.architecture.num_nextn_predict_layers)

    @cached_property
    def ending(self) -> tuple[Template, ...]:
        """The blocks after a network's last layer. Usually this is the head, of which a layer that predicts a further token
        is a part. Where micro-batches overlap, that layer's two halves are blocks before the head. Its saved tensors go to
        the host in the first step only, since its backward comes next."""
        if not self._parts_head:
            return (self.head,)
        context = self.share.layer_context(self._last_layer())
        parts = part_context(context, "attention"), replace(part_context(context, "moe"), runs=LayerRun(in_parts=True))
        return parted_head(context, *parts, offloads=self._first_step)

    @property
    def _parts_head(self) -> bool:
        return self.share.overlaps_micro_batches and self.share.job.architecture.num_nextn_predict_layers == 1

    def between_stacks(self) -> tuple[tuple[Template, str], ...]:
        """(template, module) of what runs between an encoder's last layer and its decoder's first."""
        target = embedding(self.share.layer_context(self._last_layer()))
        return (encoder_end(self.share.context), "encoder"), (target, "embedding")

    def layer(self, layer: int, input_held: bool, *, without_graph: bool = False) -> Template:
        """The template of decoder layer `layer`. `input_held`: other code holds its input (a checkpoint, the receive
        buffer)."""
        place = layer, input_held, without_graph
        if place not in self._of_layer:
            context, makes_mask = self.share.layer_context(layer), layer in self._unmasked
            runs = LayerRun(
                input_held=input_held,
                makes_mask=makes_mask,
                without_graph=without_graph,
                input_is_constant=layer == 0 and self.embeds_constants,
            )
            kind = id(context), runs
            if kind not in self._of_context:
                self._of_context[kind] = layer_template(context, kind[1])
            self._of_layer[place] = self._of_context[kind]
        return self._of_layer[place]

    def _halves(self, layer: int, input_held: bool) -> tuple[Template, Template]:
        """A layer as two blocks: attention, and the feed-forward."""
        context = self.share.layer_context(layer)
        runs = LayerRun(input_held=input_held, makes_mask=layer in self._unmasked)
        feed_forward = layer_template(part_context(context, "moe"), LayerRun(in_parts=True))
        return layer_template(part_context(context, "attention"), runs), feed_forward

    def alike(self, chunk: Chunk, layers: range) -> list[AlikeLayers]:
        """The `layers` of a chunk in groups of consecutive layers with one template. Where micro-batches overlap, each half
        of a layer is a group."""
        if layers not in self._alike and self.share.overlaps_micro_batches:
            halves = ((i, half) for i in layers for half in self._halves(i, receives(chunk, i)))
            self._alike[layers] = [AlikeLayers(half, [f"layers.{i}"], after_encoder=False) for i, half in halves]
        if layers not in self._alike:
            decoder = self.share.job.architecture.num_hidden_layers
            templates = {i: self.layer(i, receives(chunk, i)) for i in layers}
            parts = [list(part) for _, part in groupby(layers, lambda i: (id(templates[i]), i >= decoder))]
            self._alike[layers] = [
                AlikeLayers(templates[part[0]], [f"layers.{i}" for i in part], chunk.layers[0] < part[0] == decoder)
                for part in parts
            ]
        return self._alike[layers]

    @property
    def embeds_constants(self) -> bool:
        """Whether the first layer reads the output of a frozen embedding, which needs no gradient. Under a checkpoint the
        input is made to need one (Megatron-Bridge 0.3 `peft/recompute.py`)."""
        return self.share.context.frozen and self.share.job.activation_checkpointing.mode != "full"

    def checkpointed(self, layers: range) -> list[tuple[range, bool]]:
        """The layers of a chunk, in the groups in which they are checkpointed (`_checkpointed_forward`), and whether each
        is."""
        recompute = self.share.job.activation_checkpointing
        if recompute.mode != "full" or not layers:
            return [(layers, False)]
        size = recompute.num_layers or 1
        if recompute.method == "uniform":
            return [(layers[i : i + size], True) for i in range(0, len(layers), size)]
        return [(layers[i : i + 1], True) for i in range(min(size, len(layers)))] + [(layers[size:], False)]

    def _last_layer(self) -> int:
        """Index of the network's last layer."""
        return self.share.job.architecture.num_layers - 1
