"""`pip install peakcast` brings numpy, typer, rich, PyYAML and tree-sitter. In an environment that has only these,
questions are answered, and what needs more says in one sentence which command installs it."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import re
import subprocess
import tomllib
import venv
from pathlib import Path
from typing import Any

import pytest

from peakcast.core.errors import MissingPackageError
from peakcast.core.extras import PACKAGES, command, missing_extras, need

ROOT = Path(__file__).resolve().parents[1]
PROJECT: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
HISTORY = ROOT / "datasets/published/histories/kkaitlyn111-memory-ctx128-forward-0301.jsonl.gz"
LLAMA = {"architecture": "llama-3.2-1b"}
SMALL = ["--num-layers", "4", "--hidden-size", "512", "--num-attention-heads", "8", "--seq-length", "512", "--bf16"]
ANSWERED = [
    ["predict", "--model", "gpt2", "--gpu", "H100-80GB"],
    ["predict", "--batch", "questions.jsonl"],
    ["explain", "--model", "gpt2", "--snapshot", "memory.pickle"],
    ["search", "--model", "gpt2", "--gpu", "H100-80GB", "--find", "micro_batch_size"],
    ["megatron", *SMALL, "--micro-batch-size", "1", "--num-gpus", "1", "--gpu", "H100-80GB"],
    ["replay", str(HISTORY)],
    ["watch", "llama-3.2-1b", "--snapshot", str(HISTORY), "--gpu", "H100-80GB"],
    ["doctor"],
]
REFUSED = {
    "explain --model gpt2 --picture step.png": "report",
    "explain --model gpt2 --trace": "collect",
    "predict --model gpt2 --gpu H100-80GB --baseline trace": "collect",
    f"replay {HISTORY} --against gpt2 --output beside.png": "report",
    "fit --gpu H100-80GB --no-tracking": "fit",
    "fit --gpu H100-80GB": "fit,track",
    "evaluate": "fit,report,track",
    "evaluate --no-tracking": "fit",
    "report --gpu H100-80GB": "fit,report",
    "reproduce": "fit,report,track",
    "reproduce --no-tracking": "fit,report",
    "collect standard": "collect",
    "collect standard --trace": "collect",
    "collect constants": "collect",
    "verify agreement-sample": "collect",
    "record --model gpt2": "collect",
    "record --all recipes": "collect",
    "dryrun --gpu H100-80GB -- train.py": "collect",
    "web": "web,report",
    "mcp": "mcp",
}
"""Command -> the extras that its sentence names."""
ASK = """
import contextlib, io, json, sys
from peakcast.commands import cli
answers = []
for arguments in json.load(sys.stdin):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli._run(arguments)
    answers.append((code, out.getvalue(), err.getvalue()))
print(json.dumps(answers))
"""


def _installed_with(requirements: list[str]) -> set[str]:
    """The top-level files and folders of the packages that `requirements` name and of those that they need in turn."""
    entries: set[str] = set()
    waiting, done = list(requirements), set()
    while waiting:
        name = re.split(r"[\s<>=!~;\[(]", waiting.pop(), maxsplit=1)[0]
        if name in done:
            continue
        done.add(name)
        distribution = importlib.metadata.distribution(name)
        waiting += [line for line in distribution.requires or [] if ";" not in line]
        for file in distribution.files or []:
            if file.parts[0] != "..":
                entries.add(str(distribution.locate_file(file.parts[0])))
    return entries


@pytest.fixture(scope="module")
def light_python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The interpreter of an environment with the packages of `dependencies` and this peakcast, and nothing else."""
    folder = tmp_path_factory.mktemp("light")
    venv.create(folder, with_pip=False)
    (site,) = folder.glob("lib/python*/site-packages")
    for entry in _installed_with(PROJECT["dependencies"]):
        if Path(entry).name != "__pycache__":
            (site / Path(entry).name).symlink_to(entry)
    (site / "checkout.pth").write_text(f"{ROOT}\n")
    return str(folder / "bin" / "python")


def _ask(python: str, commands: list[list[str]], folder: Path) -> list[tuple[int, str, str]]:
    done = subprocess.run(
        [python, "-P", "-c", ASK], input=json.dumps(commands), capture_output=True, text=True, cwd=folder, check=True
    )
    answers: list[tuple[int, str, str]] = json.loads(done.stdout)
    return answers


def test_questions_are_answered_with_the_light_packages_alone(light_python: str, tmp_path: Path) -> None:
    (tmp_path / "questions.jsonl").write_text('{"id": 1, "gpu": "H100-80GB", "job": {"architecture": "llama-3.2-1b"}}\n')
    answers = _ask(light_python, ANSWERED, tmp_path)
    for asked, (code, out, err) in zip(ANSWERED, answers, strict=True):
        assert (code in (0, 3, 4), err) == (True, ""), asked
        assert out, asked
    assert (tmp_path / "memory.pickle").is_file()
    assert json.loads(answers[1][1])["fits"] == "yes"
    assert "Packages are missing for fitting" in answers[-1][1]


def test_what_needs_more_says_the_command_that_installs_it(light_python: str, tmp_path: Path) -> None:
    answers = _ask(light_python, [asked.split() for asked in REFUSED], tmp_path)
    for (asked, extras), (code, out, err) in zip(REFUSED.items(), answers, strict=True):
        assert (code, out) == (2, ""), asked
        assert err.count("\n") == 1, asked
        assert f"install {'it' if ' is not ' in err else 'them'} with" in err, asked
        assert command(extras) in err, asked
    assert list(tmp_path.iterdir()) == []


def test_every_command_is_tried_without_the_extras() -> None:
    from peakcast.commands import cli

    names = {found.callback.__name__.replace("_", "-") for found in cli.app.registered_commands if found.callback}
    tried = {asked[0] for asked in ANSWERED} | {asked.split()[0] for asked in REFUSED}
    assert names - tried == {"import-published"}  # which needs nothing, and writes twenty tables


def test_every_package_that_a_door_asks_for_is_brought_by_its_extra() -> None:
    for module, package in PACKAGES.items():
        brought = [re.split(r"[<>=\[]", line)[0] for line in PROJECT["optional-dependencies"][package.extra]]
        assert package.name in brought, module


def test_the_readmes_command_brings_every_extra_and_the_packages_that_were_always_there() -> None:
    extras = PROJECT["optional-dependencies"]

    def brought(name: str) -> set[str]:
        found = set()
        for line in extras[name]:
            inner = re.fullmatch(r"peakcast\[(.*)\]", line)
            found |= set().union(*map(brought, inner[1].split(","))) if inner else {re.split(r"[<>=\[]", line)[0]}
        return found

    wanted = {"torch", "scikit-learn", "pandas", "mlflow", "nvidia-ml-py", "pytest", "matplotlib", "jinja2", "cloudpickle"}
    assert wanted <= brought("dev")
    assert brought("all") == set().union(*map(brought, ("fit", "report", "track", "collect", "web", "mcp")))


def test_missing_packages_are_named_together_with_one_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in ("scipy", "mlflow") else name)
    need("this", "torch")
    with pytest.raises(MissingPackageError) as raised:
        need("this", "sklearn", "scipy", "mlflow")
    assert raised.value.message == (
        "this needs scipy and mlflow, which are not installed here; install them with: pip install 'peakcast[fit,track]'."
    )
    assert missing_extras() == ["fit", "track"]


def test_a_batch_goes_on_without_the_packages_of_one_question(light_python: str, tmp_path: Path) -> None:
    """A network that only transformers knows is answered as far as it can be, and the next line as always."""
    unknown = {"model_type": "sam", "hidden_size": 64}
    lines = [{"id": 1, "gpu": "H100-80GB", "job": {"architecture": unknown}}, {"id": 2, "gpu": "H100-80GB", "job": LLAMA}]
    (tmp_path / "two.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    ((code, out, _),) = _ask(light_python, [["predict", "--batch", "two.jsonl"]], tmp_path)
    first, second = map(json.loads, out.splitlines())
    assert code == 0
    assert "error" in first or first["findings"]
    assert second["fits"] == "yes"
