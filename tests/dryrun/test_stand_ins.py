"""What a script reads and cannot have here: encodings, texts, folders of tokens, and a notebook's shell."""

from __future__ import annotations

import importlib.util
import sys

import pytest

SCRIPT = """
import os
import numpy as np
import torch

get_ipython().run_line_magic("matplotlib", "inline")
shards = sorted(name for name in os.listdir("shards") if "train" in name)
tokens = torch.from_numpy(np.load(os.path.join("shards", shards[0])).astype(np.int64))
with open("input.txt") as file:
    letters = sorted(set(file.read()))
assert len(letters) > 64 and len(tokens) > 2**20
model = torch.nn.Embedding(50304, 64).cuda()
optimizer = torch.optim.SGD(model.parameters())
for step in range(4):
    model(tokens[:256].view(2, 128).cuda()).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.slow
def test_folders_texts_and_notebook_lines(tmp_path, monkeypatch):
    import peakcast

    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text(SCRIPT.replace("\n", "\r\n"))
    found = peakcast.dryrun([sys.executable, "train.py"], "H100-80GB")
    assert (found.job.micro_batch_size, found.job.sequence_length) == (2, 128)
    said = " ".join(finding.sentence for finding in found.answer.findings)
    assert "train_*.npy is not here" in said
    assert "input.txt is not here" in said
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


def test_an_encoding_that_cannot_be_fetched_has_as_many_tokens():
    if importlib.util.find_spec("tiktoken") is None:
        pytest.skip("tiktoken is not installed")
    import tiktoken

    from peakcast.collectors.dryrun import byte_tokenizers
    from peakcast.collectors.dryrun.noted import Notes

    def refused(name):
        raise OSError("no network")

    class Library:
        Encoding = tiktoken.Encoding
        get_encoding = encoding_for_model = staticmethod(refused)

    notes = Notes()
    byte_tokenizers._in_tiktoken(Library, notes)
    for name, size, end in (("gpt2", 50257, 50256), ("cl100k_base", 100277, 100257)):
        made = Library.get_encoding(name)
        assert (made.n_vocab, made.eot_token) == (size, end)
        assert made.decode(made.encode("words and words")) == "words and words"
    assert Library.encoding_for_model("gpt-4o-mini").n_vocab == 200019
    assert len(notes.findings) == 3


def test_a_sentencepiece_model_that_is_not_here_has_the_number_of_pieces_in_its_name():
    from peakcast.collectors.dryrun import byte_pieces
    from peakcast.collectors.dryrun.noted import Notes

    class Pieces(byte_pieces.Pieces):
        notes = Notes()

    model = Pieces(model_file="data/tokenizers/fineweb_1024_bpe.model")
    assert model.vocab_size() == model.GetPieceSize() == len(model) == 1024
    ids = model.encode("words and wörds", add_bos=True)
    assert ids == [model.bos_id(), *model.EncodeAsIds("words and wörds")]
    assert model.decode(ids) == "words and wörds"
    kinds = [(model.is_control(one) or model.is_unknown(one), model.is_byte(one)) for one in range(1024)]
    assert (sum(control for control, _ in kinds), sum(byte for _, byte in kinds)) == (3, 256)
    assert len({model.id_to_piece(one) for one in range(1024)}) == 1024
    assert len(Pieces(model_file="tokenizer.model")) == 32_000
    assert [finding.code for finding in Pieces.notes.findings] == ["script_part_skipped"] * 2


def test_tokens_are_those_of_gpt2_only_where_the_script_has_them(tmp_path):
    import numpy as np

    from peakcast.collectors.dryrun import token_files

    for script, last in (("vocab_size = 50257  # 20240520", 50256), ("vocab_size = 1024  # 20240520", 255)):
        token_files._write(tmp_path / "train.bin", script)
        tokens = np.fromfile(tmp_path / "train.bin", dtype=np.uint16)[2 * token_files.HEADER_LENGTH :]
        assert (len(tokens), tokens.max()) == (token_files.NUM_TOKENS, last)
