"""A collection runs from a source checkout with nothing installed but torch, pynvml and the stack under test."""

import importlib.metadata
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
STACK = ("torch", "nvidia-ml-py", "transformers", "peft", "accelerate")
"""accelerate and peft are of the stack; what they and torch need comes with them."""
RUN = """
import sys
from pathlib import Path
from peakcast.measurements import store
from peakcast.collectors.measure import recorder, worker
from peakcast.collectors.measure.grid import expand
from peakcast.collectors.measure.runner import collect
from peakcast.collectors.measure.settings import CollectSettings
cells = [{"architecture": {"name": "gpt2", "num_hidden_layers": 1}, "sequence_length": 64, **more}
         for more in ({}, {"finetuning": {"method": "lora", "rank": 4}})]
summary = collect(expand({"include": cells}), Path(sys.argv[1]), CollectSettings(trace=True, history=True, processes=1))
rows, bad = store.read_shard(Path(sys.argv[1]))
print("FOUND", summary.finished, len(rows), len(bad), summary.reasons, worker.__file__, sorted(
    name for name in sys.modules if name in ("torch", "transformers")))
"""


def needed(names):
    """The distributions called `names` and all that they need, extras left out."""
    found, waiting = {}, list(names)
    while waiting:
        name = re.sub(r"[-_.]+", "-", waiting.pop()).lower()
        if name in found:
            continue
        try:
            found[name] = importlib.metadata.distribution(name)
        except importlib.metadata.PackageNotFoundError:  # for another system
            continue
        requires = found[name].requires or ()
        waiting += [re.match(r"[\w.-]+", text)[0] for text in requires if "extra ==" not in text]
    return found


def links(folder, distributions):
    """A folder of links to the distributions alone, as an offline machine has them."""
    for distribution in distributions.values():
        for file in distribution.files or ():
            top = file.parts[0]
            source = Path(distribution.locate_file(top))
            if top not in ("..", "__pycache__") and not (folder / top).exists() and source.exists():
                (folder / top).symlink_to(source)


@pytest.mark.slow
def test_a_collection_needs_nothing_but_torch_pynvml_and_the_stack(tmp_path):
    pytest.importorskip("transformers")
    if sys.prefix == sys.base_prefix:
        pytest.skip("needs an interpreter that sees no packages: run the tests in a virtual environment")
    packages = tmp_path / "packages"
    packages.mkdir()
    links(packages, needed(STACK))
    plain = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    environment = {**plain, "PYTHONPATH": os.pathsep.join((str(packages), str(ROOT))), "PYTHONNOUSERSITE": "1"}
    done = subprocess.run(
        [sys._base_executable, "-P", "-c", RUN, str(tmp_path / "a.shard.jsonl")],
        env=environment, capture_output=True, text=True, timeout=300, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    found = done.stdout.partition("FOUND ")[2].strip()
    assert found == f"2 2 0 [] {ROOT / 'collectors' / 'measure' / 'worker.py'} []", done.stdout
    for package in ("sklearn", "pandas", "mlflow", "matplotlib"):  # what the rest of peakcast needs is not there
        assert not (packages / package).exists()
