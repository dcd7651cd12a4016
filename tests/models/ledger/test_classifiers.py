"""Heads of classifiers in the place of the vocabulary's logits. Traces of their steps are cells of the agreement grids."""

from __future__ import annotations

import pytest

from peakcast.collectors.measure.grid import expand
from peakcast.core.units import FP32
from peakcast.dialects.common.job_file import resolve_architecture
from peakcast.models.baseline.ledger import ledger
from peakcast.models.ledger.huggingface.stored_parameters import stored_parameters
from peakcast.models.ledger.scope.scope import out_of_scope
from peakcast.networks.reverse import hf_config_of
from peakcast.timelines.timeline import Category

BATCH, LENGTH, WIDTH, LABELS = 4, 64, 768, 5
BERT = {"name": "bert-base", "num_hidden_layers": 2, "num_labels": LABELS}
ROBERTA = {
    "model_type": "roberta", "hidden_size": WIDTH, "num_hidden_layers": 2, "num_attention_heads": 12, "vocab_size": 9000,
    "intermediate_size": 3072, "max_position_embeddings": 514, "type_vocab_size": 1, "num_labels": LABELS,
}  # fmt: skip
LLAMA = {"name": "llama-3.2-1b", "num_hidden_layers": 2, "num_labels": LABELS}
CLASS_OF_TOKENS, CLASS_OF_SEQUENCES = {"head": "token_classifier"}, {"head": "sequence_classifier"}


def job(architecture, **fields):
    asked = {"architecture": architecture, "micro_batch_size": BATCH, "sequence_length": LENGTH}
    return expand({"include": [{**asked, "precision.parameters": "float32", "precision.compute": "float32", **fields}]})[0]


def outside_layers(one):
    """Shapes of the weights after the layers, by name."""
    return {tensor.name: tensor.shape for tensor in stored_parameters(one) if tensor.module == "head"}


@pytest.mark.parametrize(
    ("network", "expected"),
    [
        (BERT | CLASS_OF_SEQUENCES, {"pooler.dense": (WIDTH, WIDTH), "classifier": (LABELS, WIDTH)}),
        (BERT | CLASS_OF_TOKENS, {"classifier": (LABELS, WIDTH)}),
        (
            ROBERTA | {"architectures": ["RobertaForSequenceClassification"]},
            {"classifier.dense": (WIDTH, WIDTH), "classifier.out_proj": (LABELS, WIDTH)},
        ),
        (LLAMA | CLASS_OF_SEQUENCES, {"norm": (2048,), "score": (LABELS, 2048)}),
    ],
)
def test_a_classifier_has_the_weights_of_its_class_of_transformers(network, expected):
    found = outside_layers(job(network))
    assert {name.removesuffix(".weight"): shape for name, shape in found.items() if name.endswith("weight")} == expected


@pytest.mark.parametrize("network", [BERT, LLAMA])
def test_no_logits_of_the_vocabulary_are_made(network):
    made = [set(ledger(job(network | head)).categories.tolist()) for head in ({}, CLASS_OF_TOKENS)]
    assert [int(Category.LOGITS) in kinds for kinds in made] == [True, False]


def test_the_first_position_gets_a_gradient_of_all_positions():
    """It is a view of the last layer's states, so autograd fills zeros of their size."""
    step = ledger(job(BERT | CLASS_OF_SEQUENCES))
    sizes = [size for name, size in zip(step.names, step.num_bytes.tolist(), strict=True) if "first_position" in name]
    assert sizes == [BATCH * LENGTH * WIDTH * FP32]


def test_peft_trains_a_copy_of_the_head_beside_adapters():
    tuned = job(BERT | CLASS_OF_SEQUENCES, finetuning={"method": "lora", "rank": 8})
    trained = {one.name for one in stored_parameters(tuned) if one.trains and one.module == "head"}
    assert trained == {"classifier.weight", "classifier.bias"}


@pytest.mark.parametrize(
    ("named", "head", "labels"),
    [
        ("BertForSequenceClassification", "sequence_classifier", 3),
        ("BertForTokenClassification", "token_classifier", 3),
        ("BertForQuestionAnswering", "token_classifier", 3),
        ("BertForMaskedLM", "language_model", 2),
    ],
)
def test_a_config_json_names_the_class(named, head, labels):
    config = hf_config_of(job(BERT | {"num_labels": 2}).architecture)
    read = resolve_architecture({**config, "architectures": [named], "id2label": {"0": "a", "1": "b", "2": "c"}})
    assert (read.head, read.num_labels) == (head, labels)
    assert hf_config_of(read)["model_type"] == "bert"


def test_what_no_trace_has_confirmed_is_said():
    assert out_of_scope(job(BERT | CLASS_OF_SEQUENCES)) == ""
    assert "torch.compile" in out_of_scope(job(BERT | CLASS_OF_SEQUENCES, compile=True))
    t5 = {"model_type": "t5", "d_model": 64, "num_layers": 2, "num_heads": 4, "d_ff": 128, "vocab_size": 1000, "d_kv": 16}
    assert "the head that predicts words is" in out_of_scope(job(t5 | {"architectures": ["T5ForSequenceClassification"]}))
