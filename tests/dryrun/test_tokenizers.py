"""Tokenizers in the place of those that are not there."""

from __future__ import annotations

from types import SimpleNamespace

import pytest


def test_a_tokenizer_that_stands_in_has_as_many_words_and_the_tokens_of_chats():
    pytest.importorskip("transformers")
    from peakcast.collectors.dryrun.pretrained import _words_tokenizer

    made = _words_tokenizer(151_936)
    assert len(made) == made.vocab_size == 151_936  # scripts resize embeddings to it
    assert {"<|im_end|>", "<|eot_id|>", "[PAD]"} <= set(made.get_vocab())
    assert made.mask_token_id is not None
    assert set(made("word word")) == {"input_ids", "attention_mask"}
    assert made("word word")["input_ids"] == [made.get_vocab()["word"]] * 2
    assert len(_words_tokenizer(0)) < 64
    cut = _words_tokenizer(0, positions=512)("word " * 600, truncation=True)  # as bert's own tokenizer, which has 512
    assert len(cut["input_ids"]) == 512


@pytest.mark.parametrize("error", [OSError, TypeError])
def test_a_tokenizer_that_stands_in_has_the_settings_that_it_is_asked_for(monkeypatch, error):
    """transformers 5 says that a tokenizer is not there; 4 opens the file that it has no name of."""
    pytest.importorskip("transformers")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)  # no hub is asked, again and again
    from peakcast.collectors.dryrun.pretrained import Stand

    class Absent:
        @classmethod
        def from_pretrained(cls, name, **_):
            raise error(name)

    said = []
    Stand._in_auto(SimpleNamespace(_say=said.append), Absent)
    made = Absent.from_pretrained("a/b", model_max_length=64, padding_side="left", pad_token="[PAD]", use_fast=True)
    assert (made.model_max_length, made.padding_side, made.pad_token) == (64, "left", "[PAD]")
    assert len(made("word " * 100, truncation=True)["input_ids"]) == 64
    assert said


@pytest.mark.parametrize(("family", "positions"), [("roberta", 512), ("bert", 514)])
def test_networks_that_count_positions_from_behind_padding_have_fewer(family, positions, tmp_path):
    transformers = pytest.importorskip("transformers")
    from peakcast.collectors.dryrun.pretrained import _positions_of

    config = transformers.AutoConfig.for_model(family, max_position_embeddings=514, pad_token_id=1)
    config.save_pretrained(tmp_path)
    assert _positions_of(tmp_path) == positions


@pytest.mark.parametrize(("file", "stands_in"), [("config.json", True), ("tokenizer.json", False)])
def test_a_folder_with_a_configuration_alone_has_no_tokenizer(file, stands_in, tmp_path):
    """transformers 5 makes one without words of it, to which a long text is a few tokens."""
    pytest.importorskip("transformers")
    from peakcast.collectors.dryrun.pretrained import Stand

    (tmp_path / file).write_text("{}")

    class Wordless:
        vocab_size = 5

        def __len__(self):
            return 5

        @classmethod
        def from_pretrained(cls, name, **_):
            return cls()

    said = []
    Stand._in_auto(SimpleNamespace(_say=said.append), Wordless)
    assert (len(Wordless.from_pretrained(str(tmp_path))) > 5) == bool(said) == stands_in


def test_a_tokenizer_that_stands_in_cuts_pairs_of_long_texts():
    pytest.importorskip("transformers")
    from peakcast.collectors.dryrun.pretrained import _words_tokenizer

    made, long = _words_tokenizer(0), "word " * 4096
    pairs = made([long] * 64, ["word word"] + [long] * 63, truncation=True, max_length=128)  # else of a million parts
    assert [len(ids) for ids in pairs["input_ids"]] == [128] * 64
    assert made(long)["input_ids"] == [made.get_vocab()["word"]] * 4096
    split = made([["word"] * 300], is_split_into_words=True, truncation=True, max_length=10)
    assert [len(ids) for ids in split["input_ids"]] == [10]
