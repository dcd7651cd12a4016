"""BERT and T5 of megatron-core: their networks, and the forward steps of Megatron-LM's `pretrain_bert.py` and
`pretrain_t5.py`."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.models.bert import bert_layer_specs
from megatron.core.models.bert.bert_model import BertModel
from megatron.core.models.T5 import t5_spec
from megatron.core.models.T5.t5_model import T5Model

from peakcast.jobs.conventions import conventions
from peakcast.jobs.spec import TrainingJob

Forward = Callable[[Any, TrainingJob, str], tuple[Any, Callable[[Any], tuple[Any, ...]]]]


def bert(job: TrainingJob, config: Any, common: dict[str, Any]) -> Any:
    """BertModel; pairs of sentences, which token types tell apart, need its binary head."""
    types, engine = job.architecture.type_vocab_size, conventions(job)["transformer_impl"] == "transformer_engine"
    spec = (
        bert_layer_specs.get_bert_layer_with_transformer_engine_spec() if engine else bert_layer_specs.bert_layer_local_spec
    )
    return BertModel(config, types, spec, add_binary_head=bool(types), **common)


def t5(job: TrainingJob, config: Any, common: dict[str, Any]) -> Any:
    """T5Model, with encoder and decoder on one rank."""
    architecture, encoder = job.architecture, copy(config)
    encoder.num_layers, config.num_layers = architecture.num_hidden_layers, architecture.num_decoder_layers
    kind = "transformer_engine" if conventions(job)["transformer_impl"] == "transformer_engine" else "local"
    specs = (
        getattr(t5_spec, f"get_t5_{stack}_with_{kind}_block_spec")(number)
        for stack, number in (("encoder", encoder.num_layers), ("decoder", config.num_layers))
    )
    common.pop("vp_stage")  # it has no virtual stages
    return T5Model(config, encoder, *specs, **common)


def _broadcast(sizes: dict[str, tuple[int, ...]], device: str) -> dict[str, Any]:
    """Tensors as `tensor_parallel.broadcast_data` returns them: int64 views of one tensor."""
    numbers = [torch.Size(size).numel() for size in sizes.values()]
    flat = torch.zeros(sum(numbers), dtype=torch.int64, device=device)
    return {name: part.view(sizes[name]) for name, part in zip(sizes, flat.split(numbers), strict=True)}


def bert_forward(chunk: Any, job: TrainingJob, device: str) -> tuple[Any, Callable[[Any], tuple[Any, ...]]]:
    """`forward_step` of pretrain_bert.py."""
    shape = job.micro_batch_size, job.sequence_length
    names = ("text", "types", "labels", "loss_mask", "padding_mask")
    data = _broadcast({**dict.fromkeys(names, shape), "is_random": shape[:1]}, device)
    types = data["types"] if job.architecture.type_vocab_size else None
    loss_mask, order = data["loss_mask"].float(), data["is_random"]

    def loss_function(output: Any) -> tuple[Any, dict[str, Any]]:
        losses, logits = output
        loss = torch.sum(losses.float().view(-1) * loss_mask.reshape(-1)) / loss_mask.sum()
        if logits is not None:
            loss = loss + F.cross_entropy(logits.view(-1, 2).float(), order.view(-1), ignore_index=-1).float()
        return loss, {"lm loss": loss.detach()}

    return chunk(data["text"], data["padding_mask"], tokentype_ids=types, lm_labels=data["labels"]), loss_function


def t5_forward(chunk: Any, job: TrainingJob, device: str) -> tuple[Any, Callable[[Any], tuple[Any, ...]]]:
    """`forward_step` of pretrain_t5.py, with masks as `T5MaskedWordPieceDataset.config_attention_mask` makes them."""
    source = job.micro_batch_size, job.sequence_length
    target = job.micro_batch_size, job.decoder_sequence_length or job.sequence_length
    lengths = {"text_enc": source, "text_dec": target, "labels": target, "loss_mask": target}
    data = _broadcast({**lengths, "enc_mask": source, "dec_mask": target}, device)
    loss_mask, reads, writes = data["loss_mask"].float(), data["enc_mask"] < 0.5, data["dec_mask"] < 0.5
    if conventions(job)["transformer_impl"] == "local":
        masks: tuple[Any, ...] = _square(reads, reads), _square(writes, writes), _square(writes, reads)
    else:
        reads, writes = reads[:, None, None], writes[:, None, None]
        masks = reads, None, (writes, reads)
    losses = chunk(data["text_enc"], data["text_dec"], *masks, lm_labels=data["labels"])

    def loss_function(output: Any) -> tuple[Any, ...]:
        loss = torch.sum(output.float().view(-1) * loss_mask.view(-1))
        tokens = loss_mask.sum()
        return loss, tokens.clone().detach().to(torch.int), {"lm loss": torch.stack([loss.detach(), tokens])}

    return losses, loss_function


def _square(rows: Any, columns: Any) -> Any:
    """[batch, 1, rows, columns] booleans: whether the row's or the column's token is padding."""
    return (rows[:, :, None] | columns[:, None, :])[:, None]


ENCODER_NETWORKS: dict[str, Callable[[TrainingJob, Any, dict[str, Any]], Any]] = {"encoder": bert, "encoder_decoder": t5}
FORWARDS: dict[str, Forward] = {"encoder": bert_forward, "encoder_decoder": t5_forward}
"""The architecture's kind -> its forward step."""
