"""What a script reads and cannot have here: encodings, texts, folders of tokens, and a notebook's shell."""

from __future__ import annotations

import importlib.util
import inspect
import json
import sys
import textwrap
from types import SimpleNamespace

import pytest

from peakcast.collectors.dryrun.noted import RunFindings
from peakcast.core.errors import ScriptError

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


def test_files_that_a_script_refuses_to_run_without_are_there_if_something_stands_in(run_script, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def train():
        import os
        from pathlib import Path

        import torch

        assert os.path.isfile("./tokenizer.model"), "no tokenizer"
        if not Path("data/train.bin").exists():
            raise FileNotFoundError("run prepare.py first")
        assert os.path.getsize("data/train.bin") > 2**20
        assert not os.path.exists("data/val.bin")  # what is not asked for stays away
        found = os.path.exists("weights.pth")
        assert not found
        torch.set_default_tensor_type(torch.cuda.HalfTensor)
        model = torch.nn.Linear(64, 64)
        torch.set_default_tensor_type("torch.FloatTensor")
        assert (model.weight.device.type, model.weight.dtype) == ("cuda", torch.float16)
        optimizer = torch.optim.SGD(model.parameters())
        for _ in range(3):
            model(torch.ones(8, 64).half().cuda()).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    script = tmp_path / "train.py"
    script.write_text(textwrap.dedent(inspect.getsource(train)) + "\n\ntrain()\n")
    assert run_script(script).steps == 3
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


def test_an_encoding_that_cannot_be_fetched_has_as_many_tokens():
    if importlib.util.find_spec("tiktoken") is None:
        pytest.skip("tiktoken is not installed")
    import tiktoken

    from peakcast.collectors.dryrun import byte_tokenizers
    from peakcast.collectors.dryrun.noted import RunFindings

    def refused(name):
        raise OSError("no network")

    class Library:
        Encoding = tiktoken.Encoding
        get_encoding = encoding_for_model = staticmethod(refused)

    notes = RunFindings()
    byte_tokenizers._in_tiktoken(Library, notes)
    for name, size, end in (("gpt2", 50257, 50256), ("cl100k_base", 100277, 100257)):
        made = Library.get_encoding(name)
        assert (made.n_vocab, made.eot_token) == (size, end)
        assert made.decode(made.encode("words and words")) == "words and words"
    assert Library.encoding_for_model("gpt-4o-mini").n_vocab == 200019
    assert len(notes.findings) == 3


def test_a_sentencepiece_model_that_is_not_here_has_the_number_of_pieces_in_its_name():
    from peakcast.collectors.dryrun import byte_pieces
    from peakcast.collectors.dryrun.noted import RunFindings

    class Pieces(byte_pieces.Pieces):
        notes = RunFindings()

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
        token_files._write(tmp_path / "train.bin", ".bin", script)
        tokens = np.fromfile(tmp_path / "train.bin", dtype=np.uint16)[2 * token_files.HEADER_LENGTH :]
        assert (len(tokens), tokens.max()) == (token_files.NUM_TOKENS, last)


@pytest.mark.parametrize("suffix", [".jsonl", ".json", ".csv", ".tsv", ".parquet"])
def test_rows_of_a_file_have_the_keys_of_training_data(suffix, tmp_path):
    import pandas

    from peakcast.collectors.dryrun import file_rows

    path = tmp_path / f"train{suffix}"
    file_rows.write(path, path.name, 10, 40)
    if suffix in (".csv", ".tsv"):
        rows = pandas.read_csv(path, sep="\t" if suffix == ".tsv" else ",").to_dict("records")
    elif suffix == ".parquet":
        rows = pandas.read_parquet(path).to_dict("records")
    else:
        text = path.read_text()
        rows = json.loads(text) if suffix == ".json" else [json.loads(line) for line in text.splitlines()]
    assert len(rows) == file_rows.NUM_ROWS
    assert {len(row["text"].split()) for row in rows} <= set(range(10, 41))
    assert max(len(row["text"].split()) for row in rows) == 40
    longest = max(rows, key=lambda row: len(row["text"]))
    assert len((longest["prompt"] + " " + longest["completion"]).split()) == 40
    assert longest["label"] == 0
    if suffix in (".csv", ".tsv"):  # which have no lists
        return
    assert [turn["role"] for turn in longest["messages"]] == ["user", "assistant"]
    assert [turn["from"] for turn in longest["conversations"]] == ["human", "gpt"]


def test_a_download_of_alpaca_gets_the_keys_of_that(monkeypatch):
    import io

    from peakcast.collectors.dryrun.downloads import Downloads
    from peakcast.collectors.dryrun.noted import RunFindings

    def fails(*_):
        raise OSError

    notes = RunFindings()
    fetch = Downloads(notes, (10, 40))._opening(fails)
    rows = json.load(io.TextIOWrapper(fetch("https://example.org/alpaca_data_cleaned.json")))
    assert set(rows[0]) == {"instruction", "input", "output"}
    assert "512 rows stood in for it" in notes.findings[0].sentence
    with pytest.raises(OSError):
        fetch("https://example.org/weights.bin")


@pytest.mark.needs("litgpt", "tokenizers")
def test_a_checkpoint_of_litgpt_has_the_files_that_it_asks_for(tmp_path):
    from litgpt.tokenizer import Tokenizer
    from litgpt.utils import check_valid_checkpoint_dir

    from peakcast.collectors.dryrun.litgpt_checkpoints import _checkpoint

    made = _checkpoint("pythia-14m", tmp_path)
    check_valid_checkpoint_dir(made, raise_error=True)
    assert Tokenizer(made).encode("word word").tolist()[-2:] == [3, 3]
    assert _checkpoint("no such network", tmp_path) is None


def test_files_of_tokens_and_rows_are_told_by_their_names():
    from peakcast.collectors.dryrun.token_files import _kind

    kinds = {
        "train.bin": ".bin",
        "a/train.npy.000": ".npy",
        "x.jsonl": ".jsonl",
        "y.txt": ".txt",
        "data/alpaca_data_cleaned.json": ".json",
        "my_data/a.csv": ".csv",
        "input/valid-00001.parquet": ".parquet",
        "train.tsv": ".tsv",
    }
    others = ("model.bin.index.json", "weights.safetensors", "noend", "config.json", "train_config.json", "results.csv")
    others += ("data/dataset_info.json", "trainer_state.json", "runs/eval_results.json", "latest.json")
    assert {name: _kind(name) for name in (*kinds, *others)} == {**kinds, **dict.fromkeys(others, "")}


ROWS_SCRIPT = """
import csv, json
import pandas
import torch

rows = pandas.read_csv("data/train.csv")["text"].tolist()
rows += [row["instruction"] for row in json.load(open("alpaca_data.json"))]
rows += pandas.read_parquet("data/part.parquet")["text"].tolist()
with open("valid.csv", newline="") as file:
    rows += [row["text"] for row in csv.DictReader(file)]
rows += pandas.read_json("data/test.json")["text"].tolist()
assert len(rows) == 5 * 512
try:
    json.load(open("train_config.json"))
except FileNotFoundError:
    pass
else:
    raise AssertionError("settings were made up")
model = torch.nn.Embedding(1000, 64).cuda()
optimizer = torch.optim.SGD(model.parameters())
for step in range(4):
    tokens = torch.tensor([[len(word) for word in row.split()] for row in rows[2 * step : 2 * step + 2]])
    model(tokens.cuda()).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


def test_rows_that_are_not_here_are_made(run_script, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "train.py"
    script.write_text(ROWS_SCRIPT)
    found = run_script(script, length=96)
    assert (found.job.micro_batch_size, found.job.sequence_length) == (2, 96)
    said = " ".join(finding.sentence for finding in found.answer.findings)
    for name in ("train.csv", "alpaca_data.json", "part.parquet", "valid.csv", "test.json"):
        assert f"{name} is not here" in said
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


def test_a_reward_that_fails_on_made_up_texts_is_nothing():
    from peakcast.collectors.dryrun.noted import RunFindings
    from peakcast.collectors.dryrun.rewards import or_nothing

    notes = RunFindings()
    reads = or_nothing(lambda completions, **_: [float(one[0]["content"]) for one in completions], notes)
    assert reads(completions=["word", "word"]) == [0.0, 0.0]
    assert [finding.code for finding in notes.findings] == ["value_assumed"]
    assert reads(completions=[[{"content": "3"}]]) == [3.0]
    assert or_nothing("a/network", notes) == "a/network"


ABSENT = ("wandb", "tiktoken", "evaluate", "tensorboard")


def test_absent_packages_and_downloads(run_script):
    for name in ABSENT:
        if importlib.util.find_spec(name) is not None:
            pytest.skip(f"{name} is installed")
    found = run_script("needs_others.py")
    assert (found.job.micro_batch_size, found.job.sequence_length) == (2, 128)
    said = " ".join(finding.sentence for finding in found.answer.findings)
    assert "book.txt cannot be downloaded here" in said
    assert all(f"{name} is not installed here" in said for name in ABSENT)
    with pytest.raises(ScriptError, match="downloads"):  # no text
        run_script("needs_others.py", "--url", "https://host.invalid/table.csv")


def test_nothing_is_pushed_to_the_hub():
    from huggingface_hub import hf_api

    from peakcast.collectors.dryrun import outside

    class Api:
        """As much of the hub as is asked here."""

        def create_repo(self, repo_id, **_):
            raise AssertionError(repo_id)

        upload_folder = create_repo

    said = RunFindings()
    hub = SimpleNamespace(HfApi=Api, api=Api(), create_repo=None, upload_folder=None)
    assert hasattr(hf_api.HfApi, "create_repo")
    outside.push_nothing(hub, said)
    assert hub.api.create_repo("me/mine", private=True).repo_id == "me/mine"
    assert hub.create_repo("me/mine", private=True).repo_id == "me/mine"
    assert hub.api.upload_folder(repo_id="me/mine", folder_path=".") is hub.upload_folder(repo_id="me/mine") is None
    assert [one.parameter for one in said.findings] == ["push_to_hub"]


@pytest.mark.parametrize(
    ("release", "asked", "dtype"),
    [
        ("4.48.1", {}, "float32"),
        ("4.48.1", {"torch_dtype": "auto"}, "bfloat16"),
        ("4.57.0", {"dtype": "float16"}, "float16"),
        ("5.17.0", {}, "bfloat16"),
        ("5.17.0", {"torch_dtype": "float32"}, "float32"),
    ],
)
def test_weights_have_the_dtype_in_which_the_release_of_transformers_loads_them(monkeypatch, release, asked, dtype):
    torch, transformers = pytest.importorskip("torch"), pytest.importorskip("transformers")
    from peakcast.collectors.dryrun.pretrained import _dtype

    monkeypatch.setattr(transformers, "__version__", release)
    assert _dtype("a/network", SimpleNamespace(dtype=torch.bfloat16), asked) is getattr(torch, dtype)


def test_the_widest_embedding_gets_the_tokens():
    pytest.importorskip("torch")
    from peakcast.collectors.dryrun.lengths import StepLengths
    from peakcast.collectors.dryrun.steps import ScriptSteps

    steps = SimpleNamespace(_widest=0, tokens=(), lengths=StepLengths())
    for width, shape in ((8, (4096, 4096)), (512, (8, 1024)), (8, (1024, 1024)), (512, (16, 1024)), (512, (1, 1024))):
        ScriptSteps._saw_tokens(steps, width, shape)
    assert steps.tokens == (16, 1024)
