"""Training programs that packages ship, unmodified: each is followed to its third step, with what its arguments ask for.

Packages that are absent here are named in what is skipped. Nothing is fetched: networks are those of the catalog.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
from pathlib import Path

import pytest

from peakcast.doors.dryrunning import dryrun

SMALL, NETWORK = ("--per_device_train_batch_size", "2", "--max_length", "256"), "Qwen/Qwen2.5-0.5B"
PARAMETERS = 494_032_768
"""Of `NETWORK`."""
TRL = {
    "sft": "trl-lib/Capybara",
    "dpo": "trl-lib/ultrafeedback_binarized",
    "reward": "trl-lib/ultrafeedback_binarized",
    "kto": "trl-lib/kto-mix-14k",
}
"""Programs of `trl.scripts` and the data that their documentation names."""
ACCELERATE = ("test_performance", "test_peak_memory_usage", "test_checkpointing")
TITAN = """
[model]
name = "llama3"
flavor = "debugmodel"
hf_assets_path = "assets"
[training]
local_batch_size = 8
seq_len = 2048
dataset = "c4_test"
[job]
dump_folder = "out"
"""
LITGPT = ("finetune_full", "finetune_lora")

pytestmark = [pytest.mark.whole, pytest.mark.slow]


def followed(words, tmp_path, monkeypatch, **options):
    """The dry run of a command, which has written nothing where it was started."""
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    found = dryrun(words, "H100-80GB", timeout_seconds=900, **options)
    assert found.steps == 3
    assert sorted(tmp_path.rglob("*")) == before
    return found


def package(name):
    """Where the package `name` lies."""
    return Path(importlib.util.find_spec(name).submodule_search_locations[0])


def trl_command(program):
    return [
        *("-m", f"trl.scripts.{program}", "--model_name_or_path", NETWORK, "--dataset_name", TRL[program]),
        *("--output_dir", "out", *SMALL),
    ]


@pytest.mark.needs("trl", "datasets")
@pytest.mark.parametrize("program", TRL)
def test_programs_of_trl(program, tmp_path, monkeypatch):
    found = followed(["accelerate", "launch", *trl_command(program)], tmp_path, monkeypatch, length=256)
    assert found.job.micro_batch_size in (2, 4)  # a pair of answers is two sequences
    assert found.job.sequence_length <= 256
    held = found.answer.composition
    assert held["parameters"] >= 4 * PARAMETERS
    assert held["optimizer_states"] == pytest.approx(8 * PARAMETERS, rel=0.01)


@pytest.mark.needs("trl", "datasets")
def test_sft_of_trl_under_fsdp2_as_its_own_file_configures_it(tmp_path, monkeypatch):
    settings = package("trl") / "accelerate_configs" / "fsdp2.yaml"
    words = ["accelerate", "launch", "--config_file", str(settings), *trl_command("sft"), "--use_peft"]
    found = followed(words, tmp_path, monkeypatch, length=256)
    assert (found.job.parallelism.data_parallel_size, found.job.parallelism.sharding) == (8, "fsdp2")
    assert found.job.finetuning.method == "lora"


@pytest.mark.needs("evaluate", "datasets")
@pytest.mark.parametrize("program", ACCELERATE)
def test_programs_of_accelerate(program, tmp_path, monkeypatch):
    script = package("accelerate") / "test_utils" / "scripts" / "external_deps" / f"{program}.py"
    words = ["accelerate", "launch", str(script), "--output_dir", "out", "--model_name_or_path", "bert-base-uncased"]
    found = followed(words, tmp_path, monkeypatch, length=64)
    assert found.job.micro_batch_size == 16
    assert found.answer.composition["parameters"] == pytest.approx(4 * 109_483_778, rel=0.01)


@pytest.mark.needs("litgpt")
@pytest.mark.parametrize("program", LITGPT)
def test_programs_of_litgpt(program, tmp_path, monkeypatch):
    """On a checkpoint of its own that is there, and instructions in a file."""
    import torch
    from litgpt.config import Config
    from litgpt.model import GPT
    from litgpt.utils import save_config

    checkpoint = tmp_path / "pythia-14m"
    checkpoint.mkdir()
    config = Config.from_name("pythia-14m")
    network = GPT(config)
    torch.save(network.state_dict(), checkpoint / "lit_model.pth")
    save_config(config, checkpoint)
    words_tokenizer(checkpoint)
    row = {"instruction": "hello world", "input": "this is text", "output": "hello world text " * 50}
    (tmp_path / "data.json").write_text(json.dumps([row] * 200))
    words = ["python", "-m", "litgpt", program, str(checkpoint), "--data", "JSON", "--data.json_path", "data.json"]
    words += ["--data.val_split_fraction", "0.1", "--train.micro_batch_size", "2", "--train.global_batch_size", "4"]
    found = followed(words, tmp_path, monkeypatch)
    assert found.job.micro_batch_size == 2
    assert found.job.gradient_accumulation_steps == 2
    weights = 4 * sum(parameter.numel() for parameter in network.parameters())
    assert found.answer.composition["parameters"] >= weights * 0.99
    trained = found.answer.composition["optimizer_states"]
    assert trained == pytest.approx(2 * weights, rel=0.01) if program == "finetune_full" else trained < weights


@pytest.mark.needs("torchtitan", "datasets")
def test_torchtitan_shards_over_eight_ranks(tmp_path, monkeypatch):
    if tuple(map(int, importlib.metadata.version("torchtitan").split(".")[:2])) > (0, 2):
        pytest.skip("torchtitan 0.3 needs a torch that has torch.distributed.set_timeout")
    (tmp_path / "assets").mkdir()
    words_tokenizer(tmp_path / "assets")
    (tmp_path / "llama3.toml").write_text(TITAN)
    words = ["torchrun", "--nproc-per-node", "8", "-m", "torchtitan.train", "--job.config_file", "llama3.toml"]
    found = followed(words, tmp_path, monkeypatch)
    assert (found.job.micro_batch_size, found.job.sequence_length) == (8, 2048)
    assert (found.job.parallelism.data_parallel_size, found.job.parallelism.sharding) == (8, "fsdp2")
    held = found.answer.composition
    assert held["optimizer_states"] == pytest.approx(2 * held["parameters"], rel=0.05)


def words_tokenizer(folder):
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = ["<unk>", "<s>", "</s>", "hello", "world", "this", "is", "text", "."]
    made = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, "<unk>"))
    made.pre_tokenizer = pre_tokenizers.Whitespace()
    made.save(str(folder / "tokenizer.json"))
    named = {"bos_token": "<s>", "eos_token": "</s>", "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
