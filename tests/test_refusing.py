"""A run that surely does not fit is refused before it starts; one that may fit never is. The frameworks are real ones."""

from __future__ import annotations

import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

import peakcast
from peakcast import api
from peakcast.collectors.machine import installed
from peakcast.collectors.stacks.steps import observing
from peakcast.core.errors import SpecError
from peakcast.doors.refusing import VARIABLE, in_plain_values, trl_program

TOO_LARGE = {"architecture": "llama-3.1-70b", "sequence_length": 4096}
SMALL = {"architecture": "llama-3.2-1b", "sequence_length": 1024}
UNSURE = {"architecture": "llama-3.1-8b", "sequence_length": 2048}


@pytest.fixture(autouse=True)
def said_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)


def test_a_run_that_does_not_fit_is_refused_with_the_numbers_and_what_to_try() -> None:
    lines: list[str] = []
    with pytest.raises(peakcast.DoesNotFitError, match=r"First to try, together: .* allocated then\.") as refused:
        peakcast.preflight(TOO_LARGE, "H100-80GB", say=lines.append)
    assert refused.value.prediction.fits == "no"
    assert refused.value.prediction.peak_device_bytes.lower > refused.value.prediction.capacity_bytes
    assert lines[0].startswith("peakcast: does not fit on H100-80GB: expect ")


@pytest.mark.parametrize(("job", "fits"), [(SMALL, "yes"), (UNSURE, "uncertain")])
def test_a_run_that_may_fit_is_never_refused(job: dict[str, Any], fits: str) -> None:
    lines: list[str] = []
    found = peakcast.preflight(job, "H100-80GB", refuse=True, say=lines.append)
    assert found is not None
    assert found.fits == fits
    assert len(lines) == 1


def test_the_environment_decides_where_the_script_does_not(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[str] = []
    monkeypatch.setenv(VARIABLE, "warn")
    found = peakcast.preflight(TOO_LARGE, "H100-80GB", say=lines.append)
    assert found is not None
    assert found.fits == "no"
    with pytest.raises(peakcast.DoesNotFitError):
        peakcast.preflight(TOO_LARGE, "H100-80GB", refuse=True, say=lines.append)
    monkeypatch.setenv(VARIABLE, "off")
    assert peakcast.preflight(TOO_LARGE, "H100-80GB", say=lines.append) is None
    assert len(lines) == 2
    monkeypatch.setenv(VARIABLE, "yes")
    with pytest.raises(SpecError, match="must be one of refuse, warn, off"):
        peakcast.preflight(SMALL, "H100-80GB")


def test_only_the_first_rank_prints(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for rank, lines in (("0", 1), ("3", 0)):
        monkeypatch.setenv("RANK", rank)
        peakcast.preflight(SMALL, "H100-80GB")
        assert capsys.readouterr().out.count("\n") == lines


def test_without_a_name_the_gpu_is_the_one_that_the_driver_names(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observing.Observation, "gpu_name", staticmethod(lambda: None))
    reading = {"name": "NVIDIA H100 80GB HBM3", "memory_bytes": 85_520_809_984, "used_bytes": 0}
    monkeypatch.setattr(installed, "nvml_gpus", lambda: ("580.65.06", [reading]))
    found = peakcast.preflight(SMALL)
    assert found is not None
    assert found.gpu == "H100-80GB"


def test_the_objects_of_a_script_are_read_as_their_mappings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    peft = pytest.importorskip("peft")
    monkeypatch.setenv("WORLD_SIZE", "1")
    shape = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
    objects = {
        "config": transformers.LlamaConfig(num_hidden_layers=2, vocab_size=512, **shape),
        "training_arguments": transformers.TrainingArguments(
            str(tmp_path), per_device_train_batch_size=3, bf16=True, report_to=[], use_cpu=True
        ),
        "peft": peft.LoraConfig(r=4, target_modules=["q_proj"], task_type="CAUSAL_LM"),
    }
    plain = in_plain_values({"huggingface": objects})
    assert isinstance(plain, dict)
    assert plain["huggingface"]["num_gpus"] == 1
    read = api.read(plain).job
    assert (read.micro_batch_size, read.architecture.hidden_size, read.finetuning.rank) == (3, 256, 4)
    assert read.finetuning.targets == ("q_proj",)  # peft keeps a set
    found = peakcast.preflight({"huggingface": objects}, "A100-80GB")
    assert found is not None
    assert found == peakcast.preflight(plain, "A100-80GB")


def test_a_training_script_loads_its_weights_only_where_the_run_may_fit(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    shape = {"num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 64}
    small = transformers.LlamaConfig(num_hidden_layers=2, hidden_size=32, intermediate_size=64, **shape)
    large = transformers.LlamaConfig(num_hidden_layers=80, hidden_size=8192, intermediate_size=28672, **shape)
    transformers.AutoModelForCausalLM.from_config(small).save_pretrained(tmp_path / "small")
    large.save_pretrained(tmp_path / "large")
    happened: list[str] = []

    def train(name: str) -> int:
        config = transformers.AutoConfig.from_pretrained(tmp_path / name)
        arguments = transformers.TrainingArguments(
            str(tmp_path), max_steps=2, per_device_train_batch_size=1, report_to=[], use_cpu=True, disable_tqdm=True
        )
        run = {"config": config, "training_arguments": {**arguments.to_dict(), "max_length": 8}}
        peakcast.preflight({"huggingface": run}, "A100-80GB", say=happened.append)
        happened.append(f"weights of {name}")
        model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name)
        rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}] * 4
        trainer = transformers.Trainer(model, arguments, train_dataset=rows)
        trainer.train()
        return int(trainer.state.global_step)

    with pytest.raises(peakcast.DoesNotFitError, match=r"does not fit on A100-80GB: expect .* First to try"):
        train("large")
    assert train("small") == 2
    assert [line for line in happened if "weights" in line] == ["weights of small"]


def test_the_class_of_trls_arguments_says_how_a_step_runs() -> None:
    base = type("SFTConfig", (), {"__module__": "trl.trainer.sft_config", "to_dict": lambda self: dict(self.values)})
    preference = type("DPOConfig", (base,), {"__module__": "trl.trainer.dpo_config"})
    mine = type("MyConfig", (preference,), {"__module__": "__main__"})  # a script's own class derived from it
    values = {"per_device_train_batch_size": 3, "max_length": 512, "bf16": True, "gradient_checkpointing": True}
    run = {"config": "llama-3.2-1b", "num_gpus": 2}

    def job(kind: Any, **more: object) -> Any:
        arguments = kind()
        arguments.values = {**values, **more}
        return api.read(in_plain_values({"huggingface": {**run, "training_arguments": arguments}})).job

    supervised, compared = job(base), job(mine, beta=0.1, loss_type=["sigmoid"])
    assert (supervised.loss.kind, supervised.micro_batch_size) == ("cross_entropy", 3)
    assert (compared.loss.kind, compared.micro_batch_size, compared.reference) == ("dpo", 6, "model")
    assert compared.parallelism.data_parallel_size == 2
    assert trl_program(type("OnlineDPOConfig", (), {"__module__": "trl.experimental"})) == "online_dpo.py"
    assert trl_program(dict) == ""


def test_it_needs_neither_torch_nor_a_loaded_model() -> None:
    code = (
        "import sys, peakcast\n"
        f"try: peakcast.preflight({TOO_LARGE!r}, 'H100-80GB')\n"
        "except peakcast.DoesNotFitError: print('refused', 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "refused False"


def _lightning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[Any, list[str]]:
    """A run of Lightning's real Trainer on the CPU, ready to start with callbacks, and what has happened in it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pl = pytest.importorskip("lightning.pytorch")
    import torch

    happened: list[str] = []

    class Tiny(pl.LightningModule):  # type: ignore[misc]
        def configure_model(self) -> None:
            happened.append("weights are made")
            self.layer = torch.nn.Linear(4, 1)

        def training_step(self, batch: Any, index: int) -> Any:
            happened.append("a step runs")
            return self.layer(batch).sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    def fit(callback: Any) -> None:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
            trainer = pl.Trainer(
                max_steps=2, accelerator="cpu", callbacks=[callback], default_root_dir=tmp_path,
                enable_model_summary=False, **quiet
            )  # fmt: skip
            trainer.fit(Tiny(), torch.utils.data.DataLoader(torch.ones(8, 4), batch_size=2))

    return fit, happened


def test_lightning_is_refused_before_its_weights_are_made(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fit, happened = _lightning(monkeypatch, tmp_path)
    lines: list[str] = []
    with pytest.raises(peakcast.DoesNotFitError):
        fit(peakcast.lightning_callback(TOO_LARGE, "H100-80GB", refuse=True, say=lines.append))
    assert happened == []
    fit(peakcast.lightning_callback(SMALL, "H100-80GB", refuse=True, say=lines.append))
    assert happened == ["weights are made", "a step runs", "a step runs"]
    assert lines[-1] == "peakcast: nothing to compare; the run used no GPU that can be read"


def test_a_trainer_is_refused_before_its_first_step_where_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    model = transformers.AutoModelForCausalLM.from_config(
        transformers.LlamaConfig(num_hidden_layers=2, vocab_size=64, **shape)
    )
    model.config = transformers.AutoConfig.for_model(
        "llama", hidden_size=8192, num_hidden_layers=80, num_attention_heads=64, intermediate_size=28672
    )  # what is asked about; the weights stay small
    arguments = transformers.TrainingArguments(
        str(tmp_path), max_steps=1, per_device_train_batch_size=1, report_to=[], use_cpu=True, disable_tqdm=True
    )
    rows = [{"input_ids": torch.arange(8), "labels": torch.arange(8)}]
    monkeypatch.setenv(VARIABLE, "refuse")
    callback = peakcast.trainer_callback("H100-80GB", say=lambda line: None)
    trainer = transformers.Trainer(model, arguments, train_dataset=rows, callbacks=[callback])
    with pytest.raises(peakcast.DoesNotFitError):
        trainer.train()
    assert trainer.state.global_step == 0


NETWORK = {
    "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "vocab_size": 256, "dtype": "bfloat16",
}  # fmt: skip


@pytest.mark.parametrize(("inner", "dtype"), [(None, "bfloat16"), ({"dtype": "float32"}, "float32")])
def test_a_network_that_the_script_loads_for_trl_has_its_own_dtype(inner: dict[str, str] | None, dtype: str) -> None:
    """Where TRL itself loads a network by name, its default is float32."""
    run = {"config": NETWORK, "training_arguments": {"max_length": 64, "model_init_kwargs": inner}}
    found: Any = in_plain_values({"huggingface": run}, "sft.py")
    assert found.job.precision.parameters == dtype
