"""The micro-batch as Megatron-LM's scripts put it on the GPU: ids, labels, masks.

Source: Megatron-LM `pretrain_gpt.py`, `pretrain_bert.py`, `pretrain_t5.py`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from peakcast.core.units import FP32, INT64
from peakcast.models.ledger.layouts.pipeline import Chunk
from peakcast.models.ledger.megatron.received import Span
from peakcast.models.ledger.megatron.share import RankShare
from peakcast.models.ledger.tape.step import Step
from peakcast.timelines.timeline import Category


@dataclass(frozen=True, slots=True)
class Input:
    """One tensor of a micro-batch. `until_backward`: whether it lives to the end of the backward (else of the forward)."""

    name: str
    num_bytes: int
    until_backward: bool = True


def inputs(share: RankShare, chunk: Chunk) -> Iterator[Input]:
    """What `chunk` reads of a micro-batch. Ids and labels live to the end of its backward; the attention mask to the end of
    its forward, unless checkpoints, or the graph of megatron-core's unfused softmax, keep it until their backward. Stages
    between the ends read none."""
    context = share.context
    tokens = context.batch * context.sequence
    reads = chunk.is_first or (chunk.is_last and share.job.architecture.num_nextn_predict_layers > 0)
    names = ["tokens", "position_ids"] if reads else []
    targets = share.target.batch * share.target.sequence if share.target is not None else tokens
    if context.ends.masked_tokens and (chunk.is_first or chunk.is_last):  # broadcast to both ends
        names = ["tokens", "types", "is_random", "padding_mask"]
    for name in names:
        yield Input(name, tokens * INT64)
    if chunk.is_last:
        yield Input("labels", targets * INT64)
        yield Input("loss_mask", targets * FP32)
    if share.target is not None:
        yield Input("decoder_tokens", targets * INT64)
    if reads_mask(share, chunk):
        softmax_saves_mask = context.attention.core == "local" and not context.attention.fused_softmax
        checkpointed = context.attention.recompute or share.job.activation_checkpointing.mode == "full"
        until_backward = softmax_saves_mask or checkpointed
        yield Input("attention_mask", _mask_bytes(share), until_backward=until_backward and bool(chunk.layers))


def hold_inputs(step: Step, share: RankShare, chunk: Chunk, start: int, end: int) -> None:
    """Hold, on a `step` whose backward of the micro-batch has just run, what its forward from `start` to `end` read."""
    for tensor in inputs(share, chunk):
        step.hold(tensor.name, Category.INPUTS, tensor.num_bytes, start, step.now if tensor.until_backward else end)


def hold_saved_batches(step: Step, share: RankShare, spans: Sequence[Span]) -> None:
    """Hold, on a `step` with the turns `spans`, every micro-batch from its use to the beginning of the next step.
    `RerunDataIterator` saves the dictionaries that it returns, to be able to run a step again, and `get_batch` puts the
    tensors on the GPU into the same dictionary, so the saved batches are on the GPU too. The first rank of a
    tensor-parallel group reads batches; the others receive copies. (`rerun_state_machine.py` `RerunDataIterator.__next__`,
    `advance`; `pretrain_gpt.py` `get_batch` since Megatron-LM's pull request 4103; pull request 5635 saves a copy of the
    dictionary.)"""
    saves = share.convention.get("saves_batches_on_gpu") and reads_batches(share)
    if not saves or share.context.padding:  # BERT and T5 have their own
        return
    backwards = {(span.turn.micro_batch, span.turn.chunk): span.end for span in spans if not span.turn.forward}
    unplaced = share.job.gradient_accumulation_steps - len(backwards) // len(share.chunks)
    for span in spans:
        if span.turn.forward:
            number, chunk = span.turn.micro_batch, share.chunks[span.turn.chunk]
            for one in inputs(share, chunk):
                since = backwards[number, span.turn.chunk] if one.until_backward else span.end
                step.hold(f"saved.{one.name}", Category.OTHER, one.num_bytes, since, module="batches")
                if number == 0:  # it also represents the micro-batches that are not simulated
                    step.hold(f"saved.{one.name}", Category.OTHER, unplaced * one.num_bytes, since, module="batches")


def reads_batches(share: RankShare) -> bool:
    """Whether this rank is the one of its tensor-parallel group that reads batches."""
    return share.shard % share.job.parallelism.tensor_parallel_size == 0


def reads_mask(share: RankShare, chunk: Chunk) -> bool:
    """Whether the layers of `chunk` get an attention mask: those between the ends do not (`get_batch`), except BERT's,
    whose every stage reads a batch."""
    made = share.context.padding or bool(share.convention.get("create_attention_mask_in_dataloader", True))
    return share.context.ends.masked_tokens or (made and (chunk.is_first or chunk.is_last))


def _mask_bytes(share: RankShare) -> int:
    """Bytes of the boolean masks. GPT's is causal, over all pairs of tokens; those of BERT and T5 mark padding, for which
    Transformer Engine's attention uses one number per token (megatron-core 0.16.1 `bert_model.py`
    `bert_extended_attention_mask`, `t5_dataset.py` `config_attention_mask`)."""
    context = share.context
    pairs = context.batch * context.sequence * share.job.sequence_length
    if not context.padding:
        return pairs
    if context.attention.core != "local":
        return 0
    if share.target is None:
        return pairs
    source, target = context.sequence, share.target.sequence
    return context.batch * (source * source + target * source + target * target)
