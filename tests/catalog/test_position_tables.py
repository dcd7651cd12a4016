"""Where the positions of families end that recipes answer: real forwards on the CPU, of one layer and a short table."""

from __future__ import annotations

import tomllib
from importlib.resources import files

import pytest

from peakcast import catalog
from peakcast.networks.config import architecture_from_hf_config

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

TABLES = tomllib.loads(files("peakcast.catalog").joinpath("position_tables.toml").read_text(encoding="utf-8"))
COMPLETED = tomllib.loads(files("peakcast.catalog").joinpath("completed.toml").read_text(encoding="utf-8"))
DEPTHS = ("num_hidden_layers", "encoder_layers", "decoder_layers", "n_layers")
ROWS = 24
SAMPLE = ("camembert", "electra", "bart")
"""Families of the default lane, one of each kind of table; the others take most of a minute."""


def _runs(model, length):
    tokens = torch.full((1, length), 7)
    given = {"decoder_input_ids": tokens} if model.config.is_encoder_decoder else {}
    if model.config.model_type == "whisper":
        given["input_features"] = torch.zeros(1, model.config.num_mel_bins, 3000)
    else:
        given["input_ids"] = tokens
    try:
        with torch.no_grad():
            model(**given)
    except (IndexError, RuntimeError, ValueError):
        return False
    return True


@pytest.mark.parametrize(
    "family", [pytest.param(one, marks=() if one in SAMPLE else pytest.mark.whole) for one in TABLES]
)
def test_a_run_fails_beyond_the_last_position(family):
    kind, key = transformers.CONFIG_MAPPING[family], TABLES[family]["key"]
    told = {name: None if value == [] else value for name, value in COMPLETED.get(family, {}).items()}
    known = kind(**told).to_dict()
    part, _, own = key.rpartition(".")  # of a network with a part for words, "text_config.max_position_embeddings"
    sizes = {name: 1 for name in DEPTHS if name in known.get(part, known)} | {"vocab_size": 300, own: ROWS}
    told |= {part: sizes} if part else sizes
    tokens = {name: value for name, value in known.items() if name.endswith("token_id") and isinstance(value, int)}
    told |= {name: 1 for name, value in tokens.items() if value > 299}
    config = kind(**told)
    heads = (transformers.AutoModelForSpeechSeq2Seq, transformers.AutoModelForSeq2SeqLM, transformers.AutoModelForCausalLM)
    [first, *_] = [one for one in (*heads, transformers.AutoModel) if type(config) in one._model_mapping]
    model = first.from_config(config)
    most = architecture_from_hf_config({"model_type": family, **({part: sizes} if part else {own: ROWS})}).most_positions
    assert most == ROWS - TABLES[family].get("before", 0)
    model = model.text_model if part else model
    assert _runs(model, most)
    assert not _runs(model, most + 1)


def test_tokens_of_roberta_have_the_rows_after_that_of_padding():
    """Of its 514 rows, which the ledger counts, 512 are of tokens."""
    architecture = catalog.architecture("roberta-base")
    assert (architecture.most_positions, architecture.position_embedding_offset) == (512, 2)
