"""The workflow and the container file that docs/integrations.md offers: their own commands, run here."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from peakcast.commands import cli
from peakcast.models.calibration.calibration import calibrations

ROOT = Path(__file__).resolve().parents[1]
WORKFLOW = yaml.safe_load((ROOT / "docs/examples/github/memory.yml").read_text(encoding="utf-8"))["jobs"]["fits"]
CONTAINERFILE = (ROOT / "Containerfile").read_text(encoding="utf-8")


def _check(folder: Path, **jobs: str) -> tuple[int, str, str]:
    """Exit code, log and summary of the workflow's own step on configurations of these names."""
    (folder / "configs").mkdir()
    for name, content in jobs.items():
        (folder / "configs" / f"{name}.yaml").write_text(content)
    step = next(step["run"] for step in WORKFLOW["steps"] if step.get("name", "").startswith("Does every"))
    scripts = str(Path(sys.executable).parent)
    environment = {**os.environ, **WORKFLOW["env"], "GITHUB_STEP_SUMMARY": "summary.md"}
    environment["PATH"] = scripts + os.pathsep + environment["PATH"]
    done = subprocess.run(  # as GitHub runs a step
        ["bash", "-e", "-o", "pipefail", "-c", step],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.returncode, done.stdout, (folder / "summary.md").read_text(encoding="utf-8")


def test_a_configuration_that_does_not_fit_fails_the_pull_request(tmp_path: Path) -> None:
    code, log, summary = _check(
        tmp_path,
        large="architecture: llama-3.1-70b\n",
        small="architecture: llama-3.2-1b\n",
        wrong="architecture: llama-9\n",
    )
    assert code == 1
    assert "::error file=configs/large.yaml::Does not fit on H100-80GB: expect " in log
    assert "::error file=configs/wrong.yaml::peakcast: architecture='llama-9' is not in the catalog" in log
    assert "configs/small.yaml: Fits on H100-80GB" in log
    assert summary.count("### configs/") == 3


def test_one_that_may_not_fit_is_a_warning(tmp_path: Path) -> None:
    code, log, _ = _check(tmp_path, unsure="architecture: llama-3.1-8b\n")
    assert code == 0
    assert "::warning file=configs/unsure.yaml::May or may not fit" in log


def test_the_containers_commands_are_those_of_peakcast_and_every_copied_stage_is_there() -> None:
    stages = re.findall(r"^FROM \S+ AS (\w+)$", CONTAINERFILE, re.MULTILINE)
    assert stages == ["wheel", "base", "page", "model"]
    assert set(re.findall(r"--from=(\w+)", CONTAINERFILE)) | set(
        re.findall(r"^FROM (base)", CONTAINERFILE, re.MULTILINE)
    ) <= set(stages)
    (page, model) = (json.loads(line) for line in re.findall(r"^CMD (.*)$", CONTAINERFILE, re.MULTILINE))
    assert page[0] == "peakcast"
    command = next(found.callback for found in cli.app.registered_commands if found.callback.__name__ == page[1])
    assert all(flag[2:] in command.__annotations__ for flag in page[2:] if flag.startswith("--"))
    assert f"EXPOSE {page[-1]}\n" in CONTAINERFILE
    assert f"EXPOSE {model[-1]}\n" in CONTAINERFILE


@pytest.mark.whole
@pytest.mark.filterwarnings("ignore:The ``noload`` loader strategy")  # MLflow's own
def test_the_containers_model_is_the_calibration_that_comes_with_peakcast(empty_store: Path, tmp_path: Path) -> None:
    from peakcast.tracking import Tracker

    pytest.importorskip("mlflow")
    (line,) = re.findall(r'^RUN (\["python".*)$', CONTAINERFILE, re.MULTILINE)
    _, *arguments = json.loads(line)
    shutil.copytree(empty_store, tmp_path / "mlruns")
    subprocess.run([sys.executable, *arguments], cwd=tmp_path, check=True, capture_output=True)
    store = Tracker(tmp_path / "mlruns")
    for name, calibration in calibrations().items():
        champion = store.champion(name)
        assert champion is not None
        assert champion.to_bytes() == calibration.to_bytes()
