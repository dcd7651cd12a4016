"""The micro-batch as Megatron-LM's scripts put it on the GPU: ids, labels, masks.

Source: Megatron-LM `pretrain_gpt.py`, `pretrain_bert.py`, `pretrain_t5.py`.
"""

from __future__ import annotations

from peakcast.models.analytical.megatron_persistent import FP32
from peakcast.models.analytical.megatron_share import RankShare
from peakcast.models.analytical.pipeline import Chunk
from peakcast.models.analytical.step import Step
from peakcast.timeline import Category

INT64 = 8


def hold_inputs(step: Step, share: RankShare, chunk: Chunk, start: int, end: int) -> None:
    """Hold on `step`, whose backward of the micro-batch has just run, what its forward from `start` to `end` read: ids and
    labels until now, the attention mask until its forward is done (checkpoints, and the graph of megatron-core's unfused
    softmax, keep it until their backward). Stages between the ends read none of them."""
    context, hold, now = share.context, step.hold, step.now
    tokens = context.batch * context.sequence
    reads = chunk.is_first or (chunk.is_last and share.job.architecture.num_nextn_predict_layers > 0)
    names = ["tokens", "position_ids"] if reads else []
    targets = share.target.batch * share.target.sequence if share.target is not None else tokens
    if context.masked_tokens and (chunk.is_first or chunk.is_last):  # broadcast to both ends
        names = ["tokens", "types", "is_random", "padding_mask"]
    for name in names:
        hold(name, Category.INPUTS, tokens * INT64, start, now)
    if chunk.is_last:
        hold("labels", Category.INPUTS, targets * INT64, start, now)
        hold("loss_mask", Category.INPUTS, targets * FP32, start, now)
    if share.target is not None:
        hold("decoder_tokens", Category.INPUTS, targets * INT64, start, now)
    if reads_mask(share, chunk):
        masked = context.attention == "local" and not context.fused_softmax
        kept = masked or context.recompute_attention or share.job.activation_checkpointing.mode == "full"
        hold("attention_mask", Category.INPUTS, _mask_bytes(share), start, now if kept and chunk.layers else end)


def reads_mask(share: RankShare, chunk: Chunk) -> bool:
    """Whether the layers of `chunk` are handed an attention mask: those between the ends are not (`get_batch`), but for a
    BERT's, whose every stage reads a batch."""
    made = share.context.padding or bool(share.convention.get("create_attention_mask_in_dataloader", True))
    return share.context.masked_tokens or (made and (chunk.is_first or chunk.is_last))


def _mask_bytes(share: RankShare) -> int:
    """Bytes of the boolean masks: a GPT's is causal, of all pairs of tokens; those of BERT and T5 are of padding, which
    Transformer Engine's attention takes as one number a token (megatron-core 0.16.1 `bert_model.py`
    `bert_extended_attention_mask`, `t5_dataset.py` `config_attention_mask`)."""
    context = share.context
    pairs = context.batch * context.sequence * share.job.sequence_length
    if not context.padding:
        return pairs
    if context.attention != "local":
        return 0
    if share.target is None:
        return pairs
    source, target = context.sequence, share.target.sequence
    return context.batch * (source * source + target * source + target * target)
