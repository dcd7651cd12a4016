"""`peakcast explain` and `peakcast.explain`: the same explanation in text, JSON and Python, from the ledger and traces."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import peakcast
from peakcast import api
from peakcast.answers.explanation import LAYER_COLUMNS
from peakcast.catalog.kernel_workspaces import CUBLAS_BYTES
from peakcast.collectors.tracing import module
from peakcast.commands import cli
from peakcast.core.errors import CollectorError, SpecError
from peakcast.doors.questions import translation_of
from peakcast.models.baseline.ledger import ledger
from peakcast.models.ledger.parameters.inventory import num_parameters

SMALL = ("--model", "llama-3.2-1b", "--sequence-length", "512")
MEGATRON = ("--framework", "megatron", "--tensor-parallel-size", "2", "--pipeline-parallel-size", "2")
Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> tuple[int, str, str]:
        code = cli._run(list(arguments))
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return call


def test_json_is_what_python_says(run: Run) -> None:
    code, out, _ = run("explain", *SMALL, "--gpu", "H100-80GB", "--json")
    assert code == 0
    job = {"architecture": "llama-3.2-1b", "sequence_length": 512}
    found = peakcast.explain(job, "H100-80GB")
    assert json.loads(out) == json.loads(json.dumps(found.to_mapping()))
    assert max(json.loads(out)["timeline"]["allocated_bytes"]) == found.peak.num_bytes


def test_the_phases_are_predicts() -> None:
    """The steady step's phases are those that predict shows."""
    job = {"architecture": "llama-3.2-1b", "sequence_length": 512}
    phases = peakcast.explain(job, "H100-80GB").timeline.phase_peaks()
    assert {phase.name.lower(): size for phase, size in phases.items()} == api.predict(job, "H100-80GB").phase_peaks_bytes


@pytest.mark.parametrize("layers", [(), ("--layers",)])
@pytest.mark.parametrize("flags", [SMALL, (*SMALL, *MEGATRON)])
def test_the_text_answers_every_question_in_a_hundred_columns(
    run: Run, flags: tuple[str, ...], layers: tuple[str, ...]
) -> None:
    code, out, _ = run("explain", *flags, *layers, "--gpu", "H100-80GB", "--against", "micro_batch_size=4")
    assert code == 0
    assert max(map(len, out.splitlines())) <= 104
    for title in ("Why this is the peak", "Layer by layer", "First to try", "What would lower it", "Compared"):
        assert title in out
    assert ("Communication of one step" in out) == ("Who rank" in out) == (MEGATRON[0] in flags)
    assert ("layers.7 " in out) == bool(layers)
    assert ("Parameters (whole model" in out) == bool(layers)


def test_the_sums_printed_are_the_ledgers(run: Run) -> None:
    _, out, _ = run("explain", *SMALL)
    (line,) = [line for line in out.splitlines() if line.startswith("  sum over all")]
    timeline = ledger(translation_of({"architecture": "llama-3.2-1b", "sequence_length": 512}).job)
    assert line.split()[-1] == f"{timeline.peak().num_bytes / 2**30:.3f}"
    assert len(line.split()) == 4 + len(LAYER_COLUMNS) + 1


def test_picture_and_snapshot_are_written_and_named(run: Run, tmp_path: Path) -> None:
    code, out, _ = run("explain", *SMALL, "--picture", "step.svg", "--snapshot", "step.pickle")
    assert code == 0
    assert "Written: step.svg" in out
    assert "<svg" in (tmp_path / "step.svg").read_text()
    assert set(pickle.loads((tmp_path / "step.pickle").read_bytes())) >= {"segments", "device_traces"}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("explain",), "no architecture is given"),
        (("explain", *SMALL, "--gpu", "H100-80G"), "did you mean"),
        (("explain", *SMALL, "--rank", "3"), "from 0 to 0"),
        (("explain", *SMALL, "--picture", "x.jpg"), "must end in .png or .svg"),
        (("explain", *SMALL, "--picture", "nowhere/x.png"), "cannot be written"),
        (("explain", *SMALL, "--snapshot", "nowhere/x.pickle"), "cannot be written"),
        (("explain", *SMALL, "--against", "llama-3.1-8"), "did you mean"),
        (("explain", *SMALL, "--against", "nonsense=1"), "nonsense is not a known key"),
        (("explain", *SMALL, "--module", "a.py:f"), "give no JOB"),
        (("explain", "--module", "a.py:f"), "a.py is not a file"),
        (("explain", "--module", "a.py"), "must be FILE.py:FUNCTION"),
    ],
)
def test_what_cannot_be_explained_is_one_sentence(run: Run, arguments: tuple[str, ...], words: str) -> None:
    code, out, err = run(*arguments)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert words in err


def test_a_job_outside_the_ledger_is_explained_with_a_warning(run: Run) -> None:
    _, out, _ = run("explain", *SMALL, "--set", "compile=true", "--set", "attention=eager")
    assert "Warning: compile=true with attention='eager' is not modelled" in out
    assert "What would lower it" not in out


# -- traces ---------------------------------------------------------------------------------------------------------------

OWN = """
import torch
from torch import nn

def training():
    model = nn.Sequential(nn.Linear(1024, 4096, bias=False), nn.ReLU(), nn.Linear(4096, 1024, bias=False)).to("cuda")
    optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
    data = torch.randn(256, 1024, device="cuda")

    def step():
        loss = nn.functional.mse_loss(model(data), data)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return model, step

def asking_and_compiled():
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(context, x):
            context.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(context, gradient):
            (x,) = context.saved_tensors
            return torch.full(x.shape, 2.0, device="cuda") * x * gradient

    model = nn.Sequential(nn.Linear(1024, 1024, bias=False), nn.GELU(), nn.Tanh()).cuda()
    data, run = torch.randn(1024, 1024).cuda(), torch.compile(model)

    def step():
        torch.cuda.reset_peak_memory_stats()
        Square.apply(run(data)).sum().backward()
        torch.cuda.synchronize()
        print(torch.cuda.max_memory_allocated())
        model.zero_grad()

    return model, step

def on_the_cpu():
    model = nn.Linear(4, 4)
    return model, lambda: model(torch.randn(4, 4)).sum().backward()

def nothing():
    return 1

def broken():
    raise ValueError("no data")
"""


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "own.py"
    path.write_text(OWN)
    return path


def test_a_module_of_ones_own_is_traced(own: Path) -> None:
    """Two matrices of 4 Mi floats: weights, gradients, two states and the square roots of foreach."""
    found = peakcast.explain(module=f"{own}:training")
    matrices = 2 * 4096 * 1024 * 4
    assert found.source == "trace"
    assert found.peak.phase == "optimizer_step"
    assert found.peak.standing_bytes["parameters"] == matrices
    assert found.peak.standing_bytes["optimizer_states"] == 2 * matrices
    assert found.peak.on_top_bytes["gradients"] == matrices
    assert found.peak.on_top_bytes["optimizer_temporaries"] == matrices
    phases = {phase.name for phase in found.timeline.phase_peaks()}
    assert phases == {"FORWARD", "LOSS", "BACKWARD", "GRADIENT_CLIPPING", "OPTIMIZER_STEP"}
    rows = {row.module: row for row in found.modules}
    assert rows["0"].weights == rows["2"].weights == matrices // 2
    assert rows["0"].optimizer == matrices


@pytest.mark.whole
def test_a_step_may_ask_cuda_and_compile(own: Path) -> None:
    """One matrix and its gradient, each 4 MiB; compiled, GELU and tanh are one kernel."""
    found = peakcast.explain(module=f"{own}:asking_and_compiled")
    matrix = 1024 * 1024 * 4
    assert found.peak.standing_bytes["parameters"] == matrix
    names = [entry for entry in found.timeline.names if "tanh" in entry or "gelu" in entry]
    assert names
    assert all(name.startswith("triton") for name in names)


@pytest.fixture
def traced_in_a_copy(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Modules are traced in a copy of this process, which has imported torch, instead of one that imports it each time."""
    pytest.importorskip("peakcast.collectors.tracing.tracer")

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        printed, said = tmp_path / "printed", tmp_path / "said"
        if not (child := os.fork()):
            with printed.open("w") as sys.stdout, said.open("w") as sys.stderr:
                code = module.main(command[command.index(module.__name__) + 1 :])
            os._exit(code)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        return subprocess.CompletedProcess(command, code, printed.read_text(), said.read_text())

    monkeypatch.setattr(subprocess, "run", run)


@pytest.mark.usefixtures("traced_in_a_copy")
def test_a_module_that_cannot_be_traced_is_a_sentence(own: Path) -> None:
    with pytest.raises(CollectorError, match="broken raised ValueError: no data"):
        peakcast.explain(module=f"{own}:broken")
    with pytest.raises(CollectorError, match=r"did nothing on device 'cuda'.*is_available\(\) says no"):
        peakcast.explain(module=f"{own}:on_the_cpu")
    for function, words in (("missing", "has no function 'missing'"), ("nothing", "must return")):
        with pytest.raises(CollectorError, match=words):
            module.built(own, function)


def test_a_trace_of_a_job_is_explained_like_the_ledger(tmp_path: Path) -> None:
    config = {
        "model_type": "llama", "hidden_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 4, "intermediate_size": 512, "vocab_size": 1024, "tie_word_embeddings": False,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    job = {"architecture": str(tmp_path / "config.json"), "sequence_length": 256}
    traced, computed = peakcast.explain(job, "A100-80GB", trace=True), peakcast.explain(job, "A100-80GB")
    assert (traced.source, traced.gpu) == ("trace", "A100-80GB")
    assert traced.peak.standing_bytes["workspaces"] == 2 * CUBLAS_BYTES  # the forward and the autograd thread's
    assert traced.peak.num_bytes == pytest.approx(computed.peak.num_bytes, rel=1e-3)
    weights = {row.module: row.weights for row in computed.modules if row.weights}
    assert {row.module: row.weights for row in traced.modules if row.weights} == weights


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch, traced: Callable[..., object]) -> None:
    """Traces are forked from a process that has imported the libraries, instead of importing them each."""
    monkeypatch.setattr("peakcast.collectors.tracing.trace.trace_job", lambda job, *, rank, gpu: traced(job, rank))


@pytest.mark.usefixtures("forked")
def test_a_network_that_the_ledger_does_not_know_is_traced(tmp_path: Path) -> None:
    """Latent attention and routed experts, which need what `collectors/tracing` replaces for them."""
    config = {
        "model_type": "deepseek_v2", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 4, "intermediate_size": 128, "vocab_size": 256, "q_lora_rank": 32, "kv_lora_rank": 32,
        "qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 32, "n_routed_experts": 4, "n_shared_experts": 1,
        "num_experts_per_tok": 2, "moe_intermediate_size": 32, "first_k_dense_replace": 1, "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    job = {"architecture": str(tmp_path / "config.json"), "sequence_length": 64}
    found = peakcast.explain(job, trace=True)
    elements = num_parameters(translation_of(job).job.architecture)
    held = sum(row.weights for row in found.modules)
    assert 2 * elements <= held < 2 * elements + 512 * len(found.parameters)
    assert found.warnings == ()
    assert found.advice == ()


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "lfm2", "num_key_value_heads": 4, "layer_types": ["conv", "full_attention"]},
        {"model_type": "openai-gpt", "n_embd": 64, "n_layer": 2, "n_head": 8},  # eager alone
    ],
)
def test_a_network_that_no_family_describes_is_traced_alone_and_refused_without_a_recipe(
    tmp_path: Path, config: dict[str, object]
) -> None:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 8, "intermediate_size": 128}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**sizes, "vocab_size": 500, **config}))
    job = {"architecture": str(path), "sequence_length": 64}
    found = peakcast.explain(job, trace=True)
    assert found.source == "trace"
    assert found.peak.num_bytes > 0
    assert any("is not known to the ledger" in warning for warning in found.warnings)
    with pytest.raises(SpecError, match="is no family of the ledger, and no recipe of it has been recorded"):
        peakcast.predict(job, "H100-80GB")


@pytest.mark.parametrize("package", ["torch", "transformers"])
def test_a_trace_without_its_packages_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, package: str
) -> None:
    hidden = tmp_path / package
    hidden.mkdir()
    (hidden / "__init__.py").write_text(f"raise ModuleNotFoundError('No module named {package}', name={package!r})")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), os.environ.get("PYTHONPATH", "")]))
    with pytest.raises(CollectorError, match=f"{package}.*pip install"):
        peakcast.explain("llama-3.2-1b", trace=True)
