"""Command lines: which script, how many ranks, in which Python; and the door of the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from peakcast.collectors.dryrun.command import read_command
from peakcast.collectors.dryrun.failures import report
from peakcast.collectors.dryrun.missing import hint
from peakcast.collectors.dryrun.process import _own_variables
from peakcast.collectors.dryrun.script import exported_script
from peakcast.collectors.machine.environments import environment_for
from peakcast.core.errors import SpecError
from peakcast.doors.dryrunning import _free_bytes

SCRIPT = str(Path(__file__).parent / "scripts" / "plain_loop.py")


@pytest.mark.parametrize(
    ("words", "world_size", "ranks_per_node", "launched"),
    [
        ("python {}", 1, 1, False),
        ("python3 -u -W ignore {} --lr 1", 1, 1, False),
        ("{} --lr 1", 1, 1, False),
        ("torchrun --nproc-per-node 8 {}", 8, 8, True),
        ("torchrun --standalone --nproc_per_node=4 --nnodes=2 {} --nnodes 9", 8, 4, True),
        ("torchrun --nproc-per-node gpu --nnodes 1:4 {}", 32, 8, True),
        ("python -m torch.distributed.run --nproc-per-node 2 {}", 2, 2, True),
        ("accelerate launch --multi_gpu --num_processes 16 --num_machines 2 {}", 16, 8, True),
        ("accelerate launch {}", 1, 1, True),
        ("python -m accelerate.commands.launch --num_processes 4 {}", 4, 4, True),
        ("python -m accelerate.commands.accelerate_cli launch --num_processes 4 {}", 4, 4, True),
        ("deepspeed --num_gpus 4 {} --deepspeed ds.json", 4, 4, True),
        ("OMP_NUM_THREADS=1 torchrun {}", 1, 1, True),
    ],
)
def test_launchers_say_how_many_ranks(words, world_size, ranks_per_node, launched):
    command = read_command(words.format(SCRIPT).split())
    assert command.script == SCRIPT
    assert (command.world_size, command.ranks_per_node, command.launched) == (world_size, ranks_per_node, launched)


@pytest.mark.parametrize(
    ("words", "world_size"),
    [
        ("uv run {}", 1),
        ("uv run --with torch python {}", 1),
        ("poetry run python {}", 1),
        ("pdm run python {}", 1),
        ("conda run --no-capture-output -n training python {}", 1),
        ("nice -n 10 timeout 3600 python {}", 1),
        ("env -u PYTHONPATH A=1 python {}", 1),
        ("nsys profile -o trace python {}", 1),
        ("srun --ntasks=16 --gpus-per-node 8 python {}", 16),
        ("srun -N 2 --ntasks-per-node=4 python {}", 8),
        ("srun -N 1 -n 1 torchrun --nproc-per-node 8 {}", 8),
        ("mpirun -np 4 --allow-run-as-root -x PATH python {}", 4),
    ],
)
def test_programs_that_run_another_one_are_left_out(words, world_size):
    command = read_command(words.format(SCRIPT).split())
    assert (command.script, command.arguments, command.world_size) == (SCRIPT, (), world_size)
    assert command.launched is (world_size > 1)


def test_two_dashes_after_a_launchers_script_are_the_launchers():
    assert read_command(["torchrun", "-m", "package.train", "--", "--depth", "12"]).arguments == ("--depth", "12")
    assert read_command(["python", "-m", "package.train", "--", "--depth"]).arguments == ("--", "--depth")


HUB = "https://huggingface.co/api/models/microsoft/phi-2"


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        (["ModuleNotFoundError: No module named 'yaml'"], "pip install pyyaml"),
        (["ModuleNotFoundError: No module named 'ao.nf4'"], "ao is there, without ao.nf4: install the release that the"),
        (["RuntimeError: Failed to import it because of:", "No module named 'flash_attn.ops'"], "pip install flash-attn"),
        (['  data = os.environ["DATA_DIR"]', "KeyError: 'DATA_DIR'"], "put DATA_DIR=... before the command"),
        (["EOFError: EOF when reading a line"], "reads from standard input"),
        (["usage: train.py [-h]", "train.py: error: argument --bf16: expected one argument"], "refuses its arguments"),
        (["    raise child_exception_type(errno_num)", "FileNotFoundError: [Errno 2] No file: 'trl'"], "no program trl"),
        ([f"huggingface_hub.errors.OfflineModeIsEnabled: Cannot reach {HUB}: offline"], "files of microsoft/phi-2 from"),
        (["FileNotFoundError: No such file: '/tmp/peakcast-dryrun-a1/written/data/a.pt'"], "/data/a.pt is not here; put"),
        (["KeyError: 'TEXT'"], ""),
        (["AutoImageProcessor requires the Torchvision library but it was not found in your"], "no Torchvision"),
        (["0/32 [?it/s]peakcast: the data of a is not here: 512 rows of 9 words stood in (--length)."], "put some 64 of"),
    ],
)
def test_a_failing_script_is_told_what_it_lacks(lines, sentence):
    assert sentence in hint(lines)
    assert bool(hint(lines)) is bool(sentence)


def test_what_stands_after_the_script_is_the_scripts():
    command = read_command(["torchrun", "--nproc-per-node", "2", SCRIPT, "--nproc-per-node", "3"])
    assert command.arguments == ("--nproc-per-node", "3")
    assert read_command(["python", "-m", "package.train", "--lr", "1"]).as_module
    assert read_command(["A=1", "B=2=3", "python", SCRIPT]).environment == ("A=1", "B=2=3")


def test_accelerates_file_says_how_many_ranks(tmp_path):
    settings = tmp_path / "fsdp.yaml"
    settings.write_text("num_processes: 8\nnum_machines: 1\n")
    assert read_command(["accelerate", "launch", "--config_file", str(settings), SCRIPT]).world_size == 8


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "no command is given"),
        (["python"], "names no script"),
        (["python", "nothere.py"], "'nothere.py' is not there"),
        (["rm", "-f", SCRIPT], "what 'rm' runs cannot be read; give the Python command that trains"),
        (["ls", "train"], "what 'ls' runs cannot be read; give the Python command that trains"),
        (["nosuchtool", "train"], "there is no program 'nosuchtool' here; install the package that has it, or give"),
        (["python", "-c", "print(1)"], "what '-c' runs cannot be read"),
        (["sbatch", "nothere.sh"], "'nothere.sh'] is not there"),
        (["python", "."], "is a folder"),
        (["/no/python", SCRIPT], "is not there"),
        (["/no/bin/python", SCRIPT], "no such interpreter"),
        (["torchrun", "--nproc-per-node", "x", SCRIPT], "nproc_per_node='x' must be a whole number"),
        (["accelerate", "test"], "only `accelerate launch` trains"),
    ],
)
def test_a_command_that_trains_nothing_is_refused_in_a_sentence(words, sentence):
    if words[:1] == ["/no/python"]:
        sentence = "no such interpreter"
    with pytest.raises(SpecError, match=sentence):
        read_command(words)


def test_the_command_line_says_soon_what_it_does_and_answers_as_predict(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(
        "import sys, torch\n"
        "print('width', sys.argv[1])\n"
        "model = torch.nn.Linear(int(sys.argv[1]), 64).to('cuda')\n"
        "optimizer = torch.optim.AdamW(model.parameters())\n"
        "while True:\n"
        "    model(torch.ones(8, int(sys.argv[1]), device='cuda')).sum().backward()\n"
        "    optimizer.step()\n"
        "    optimizer.zero_grad()\n"
    )
    words = [
        sys.executable,
        "-P",
        "-m",
        "peakcast",
        "dryrun",
        "--gpu",
        "A100-80GB",
        "--json",
        "--",
        "python",
        str(script),
        "256",
    ]
    started = time.monotonic()
    process = subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=tmp_path)
    said = process.stderr.readline()
    assert "train.py as one rank on a fake A100-80GB" in said
    assert time.monotonic() - started < 15  # a second on an idle machine
    answer, _ = process.communicate()
    assert process.returncode == 0
    found = json.loads(answer)
    assert found["fits"] == "yes"
    assert found["composition_bytes"]["optimizer_states"] >= 2 * (256 * 64 + 64) * 4
    assert found["dryrun"]["steps"] == 3
    assert [path.name for path in tmp_path.iterdir()] == ["train.py"]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            "FileNotFoundError: [Errno 2] No such file or directory: 'data/a.jsonl'",
            "data/a.jsonl is not here; put there 64 lines",
        ),
        ("FileNotFoundError: [Errno 2] No such file or directory: 'a/config.json'", "put there that of the network"),
        ("importlib.metadata.PackageNotFoundError: No package metadata was found for trl", "(pip install trl)"),
        ("FileNotFoundError: [Errno 2] No such file or directory: 'a.parquet'", "to_parquet('a.parquet')"),
        (
            "subprocess.CalledProcessError: Command '['mkdir', 'out']' returned non-zero exit status 1.",
            "if command '['mkdir', 'out']' needs that, run it before",
        ),
        ("FileNotFoundError: Unable to find '/data/train.csv'", "to_csv('/data/train.csv')"),
        (
            "datasets.exceptions.DataFilesNotFoundError: No data files in /data/mine.",
            "/data/mine is not here; put there a folder",
        ),
        ("FileNotFoundError: [Errno 2] No such file or directory: 'corpus'", "corpus is not here; put there a folder"),
        ("FileNotFoundError: [Errno 2] No such file or directory: 'x.weird'", "put there a small one as it expects"),
        ("ValueError: 'data/a.jsonl' is empty", ""),
    ],
)
def test_a_missing_file_is_answered_with_the_least_that_would_do(line, said):
    found = hint(["Traceback (most recent call last):", line])
    assert said in found
    assert bool(found) == bool(said)


@pytest.mark.parametrize("line", ["    from unsloth import FastLanguageModel", '  File "/x/unsloth/__init__.py", line 9'])
def test_a_script_with_unsloth_that_fails_is_told_that_predict_reads_it(line):
    said = hint([line, "ModuleNotFoundError: No module named 'unsloth'"])
    assert "`peakcast predict SCRIPT` reads what a script with Unsloth says" in said
    assert "Unsloth" not in hint(["    import torch", "ModuleNotFoundError: No module named 'torch'"])


def test_a_shell_script_has_the_arguments_that_it_is_given(tmp_path):
    script = tmp_path / "train.sh"
    script.write_text(f'GPUS=${{1:-2}}\nshift\ntorchrun --nproc-per-node $GPUS {SCRIPT} --name "${{1:-none}}" "$@"\n')
    given = read_command(["bash", str(script), "8", "llama a", "--batch", "4"])
    assert (given.world_size, given.arguments) == (8, ("--name", "llama a", "llama a", "--batch", "4"))
    bare = read_command(["bash", str(script)])
    assert (bare.world_size, bare.arguments) == (2, ("--name", "none"))


@pytest.mark.parametrize(
    ("lines", "world_size"),
    [
        ("#SBATCH --nodes=2\n#SBATCH --ntasks-per-node=8\nsrun python {}", 16),
        ("#SBATCH -N 3\n#SBATCH --gres=gpu:8\nsrun torchrun --nnodes $SLURM_NNODES --nproc_per_node 8 {}", 24),
        ("#SBATCH --nodes 2\nsrun --ntasks 4 python {}", 4),
        ("python {}", 1),
    ],
)
def test_a_batch_script_says_how_many_ranks(tmp_path, lines, world_size):
    script = tmp_path / "job.slurm"
    script.write_text(lines.format(SCRIPT))
    command = read_command(["sbatch", "--partition", "long", str(script)])
    assert (command.script, command.world_size) == (SCRIPT, world_size)


def test_a_notebook_is_read_as_the_script_of_its_cells(tmp_path):
    notebook = tmp_path / "train.ipynb"
    cells = [
        {"cell_type": "markdown", "source": ["# Training"]},
        {"cell_type": "code", "source": ["%matplotlib inline\n", "!pip install torch\n", "if True:\n", "    !nvidia-smi"]},
        {"cell_type": "code", "source": "steps = 7 % 4"},
    ]
    notebook.write_text(json.dumps({"cells": cells}))
    command = read_command(["jupyter", "nbconvert", "--to", "notebook", "--execute", str(notebook)])
    assert command.script == str(notebook)
    exported = Path(exported_script(command.script, tmp_path))
    assert exported.read_text() == "pass\npass\nif True:\n    pass\nsteps = 7 % 4"


@pytest.mark.parametrize(
    ("last", "says"),
    [
        (
            "ImportError: cannot import name 'gone' from 'trl' (/v/lib/site-packages/trl/__init__.py)",
            "trl has no gone in trl",
        ),
        ("AttributeError: module 'torch.cuda' has no attribute 'gone'", "torch has no gone in torch.cuda"),
        ("TypeError: SFTTrainer.__init__() got an unexpected keyword argument 'gone'", "takes no argument gone"),
        ("train.py: error: unrecognized arguments: --gone no", "does not take --gone no: leave that out"),
        ("NotADirectoryError: The checkpoint directory does not exist: EleutherAI/pythia", "EleutherAI/pythia is not here"),
        ("FileNotFoundError: no 'a/b' for json.load(f)", "a/b is not here; put there a list of"),
        ("OSError: a/b has no config.json here nor on the hub, and is not", "Put a folder a/b with that config.json"),
        ("NotADirectoryError: no tokenizer in /models/x", "/models/x is not here; put there a tokenizer's folder"),
    ],
)
def test_another_release_or_folder_is_named(last, says):
    assert says in hint(["Traceback (most recent call last):", last])


def test_a_name_that_the_script_s_own_module_lacks_is_its_own_error():
    assert hint(["ImportError: cannot import name 'gone' from 'utils' (/home/me/utils.py)"]) == ""


def test_an_attribute_that_the_installed_release_lacks_is_named_with_its_package():
    """Python 3.11 says of an enum only the name of what it lacks."""
    import torch
    from torch.distributed.fsdp import ShardingStrategy

    def said(thing):
        try:
            thing.GONE  # noqa: B018
        except AttributeError as error:
            return hint(report(error).splitlines())

    class Own:
        pass

    assert said(ShardingStrategy).startswith(f"torch {torch.__version__} has no GONE in ShardingStrategy: install the")
    assert "(Board of peakcast" in hint(["AttributeError: x", "Board of peakcast 0.1.0 has no x"])
    assert said(Own()) == ""


def test_an_error_between_libraries_names_them():
    own, library = (
        '  File "train.py", line 7, in <module>',
        '  File "/v/lib/python3.11/site-packages/{}/a.py", line 1, in f',
    )
    frames = [own, library.format("titan"), library.format("torch"), '  File "<string>", line 1, in g']
    assert hint([*frames, "ValueError: x"]).startswith(
        "It was raised in torch, called by titan. If the run has other releases"
    )
    assert hint([*frames, own, "ValueError: x"]) == ""
    rows = "peakcast: the data of a/b is not here: 512 rows of 8 words stood in (--length)."
    assert hint([rows, *frames, "ValueError: x"]).startswith("The data of a/b is not here: 512 rows of 8 words stood in")
    assert hint([*frames, "peakcast.core.errors.SpecError: no rows stand in for audio"]) == ""
    handled = ["Traceback (most recent call last):", library.format("bitsandbytes"), "OSError: no library"]
    again = [*handled, "Traceback (most recent call last):", own, library.format("torch"), "    linear(x)"]
    assert "torch, as the script calls it" in hint([*again, "RuntimeError: x"])
    assert "put its launcher before it" in hint([*again, "ValueError: Default process group has not been initialized, x"])
    assert hint([own, library.format("torch"), "    linear(x)", "RuntimeError: x"]).startswith(
        "It was raised in torch, as the script calls it: if that trains on a GPU"
    )


def test_what_a_library_refuses_by_its_own_rule_is_the_script_s_own_fault():
    library = '  File "/v/lib/python3.11/site-packages/{}/a.py", line 1, in f'
    cases = (("peft", "    raise ValueError(", True), ("peft", "    x[1]", False), ("torch", "    raise A(", False))
    for package, line, own in cases:
        lines = [library.format("trl"), "    f()", library.format(package), line, "ValueError: no such module"]
        assert (hint(lines) == "") is own


def test_a_shell_script_sees_the_environment_and_counts_gpus(tmp_path, monkeypatch):
    monkeypatch.setenv("NODES", "2")
    script = tmp_path / "train.sh"
    lines = (
        "export GPUS=$(nvidia-smi --list-gpus | wc -l)",
        f"torchrun --nnodes $NODES --nproc-per-node $GPUS {SCRIPT} $NAME",
    )
    script.write_text("\n".join(lines))
    command = read_command(["NAME=a b", "bash", str(script)])
    assert (command.world_size, command.ranks_per_node, command.arguments) == (16, 8, ("a", "b"))


def test_a_shell_script_that_cannot_be_read_names_its_command(tmp_path):
    script = tmp_path / "train.sh"
    script.write_text(f"torchrun --nproc-per-node $(count_them) {SCRIPT}")
    with pytest.raises(SpecError, match="torchrun --nproc-per-node"):
        read_command(["bash", str(script)])


@pytest.mark.parametrize(
    ("last", "says"),
    [
        ("torch.x.UnsupportedOperatorException: mine.f.default", "train.py:7 calls mine::f, of which"),
        ("torch.x.DynamicOutputShapeException: aten.g.default", "train.py:7 calls aten::g, whose result"),
        ("ModuleNotFoundError: No module named 'selective_scan_cuda'", "is a compiled extension of another package"),
    ],
)
def test_operators_and_extensions_that_cannot_be_followed_are_named(last, says):
    assert says in hint(['  File "train.py", line 7, in <module>', "    f(x)", last])


def test_the_script_s_own_line_is_named_where_a_long_traceback_hides_it(tmp_path):
    from peakcast.collectors.dryrun.process import MOST_LINES, _own_line

    own, library = '  File "train.py", line 7, in <module>', '  File "/v/lib/python3.11/site-packages/a.py", line 1, in f'
    assert _own_line([own, *[library] * MOST_LINES, "ValueError: x"]) == "Its own line there is train.py:7."
    assert _own_line([own, library, "ValueError: x"]) == ""
    assert _own_line([library] * 40) == ""
    program = tmp_path / "litgpt"
    program.write_text("#!/usr/bin/python\nimport sys\nfrom litgpt.__main__ import main\nsys.exit(main())\n")
    assert _own_line([f'  File "{program}", line 4, in <module>', *[library] * MOST_LINES, "ValueError: x"]) == ""


def test_the_path_of_a_command_is_beside_that_of_peakcast():
    command = read_command(["PYTHONPATH=src", "python", SCRIPT])
    assert _own_variables(command, {"PYTHONPATH": "/peakcast"}) == {"PYTHONPATH": "/peakcast:src"}
    assert _own_variables(read_command(["A=1", "PYTHONPATH=src", "python", SCRIPT]), {}) == {"A": "1", "PYTHONPATH": "src"}


def test_another_interpreter_keeps_the_path_of_the_caller(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/mine")
    with environment_for("/another/python") as environment:
        ours, mine = environment["PYTHONPATH"].split(":")
        assert (Path(ours) / "peakcast" / "collectors").is_dir()
        assert mine == "/mine"


def test_the_cache_of_files_counts_as_free_memory():
    assert _free_bytes() >= os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES") // 2


def test_a_program_that_is_named_by_its_path_brings_its_interpreter(tmp_path):
    (tmp_path / "python").touch()
    for name, first in (("torchrun", f"#!{tmp_path}/python"), ("tune", f"#!{tmp_path}/python"), ("other", "#!/bin/sh")):
        (tmp_path / name).write_text(f"{first}\nimport sys\n")
    launched = read_command([str(tmp_path / "torchrun"), "--nproc-per-node", "2", SCRIPT])
    assert (launched.python, launched.script, launched.world_size) == (str(tmp_path / "python"), SCRIPT, 2)
    assert read_command([str(tmp_path / "tune"), "run"]).python == str(tmp_path / "python")
    assert read_command(["torchrun", SCRIPT]).python == sys.executable
