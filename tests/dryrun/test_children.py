"""Programs that a script or a shell starts: one that trains is followed, whatever has started it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from peakcast.collectors.dryrun import ranks
from peakcast.collectors.dryrun.command import read_command, trains
from peakcast.collectors.dryrun.process import _last_lines, _wait
from peakcast.collectors.dryrun.programs import install_python
from peakcast.collectors.dryrun.rank_counts import start_one_rank
from peakcast.collectors.dryrun.tools import is_tool as named_a_tool
from peakcast.core.errors import SpecError
from peakcast.doors.dryrunning import dryrun

TRAINS = """
import os, sys, torch
assert sys.argv[1:] == ["--width", "256"], sys.argv
model = torch.nn.Linear(256, 256).cuda()
optimizer = torch.optim.SGD(model.parameters(), lr=float(os.environ.get("RATE", "1")))
for _ in range(5):
    model(torch.ones(8, 256, device="cuda")).sum().backward()
    optimizer.step()
"""


@pytest.fixture
def train(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(TRAINS)
    return str(path)


STARTS = {
    "run": "subprocess.run(['torchrun', '--nproc-per-node', '4', TRAIN, '--width', '256'], check=True)",
    "python": "subprocess.check_call([sys.executable, '-u', TRAIN, '--width', '256'])",
    "shell": "subprocess.run(f'RATE=2 torchrun --nproc-per-node=4 {TRAIN} --width 256', shell=True, check=True)",
    "system": "os.system(f'accelerate launch --num_processes 4 {TRAIN} --width 256')",
    "agent": "import torch.distributed.run as agent; agent.main(['--nproc-per-node', '4', TRAIN, '--width', '256'])",
    "becomes": "os.execvp('torchrun', ['torchrun', '--nproc-per-node', '4', TRAIN, '--width', '256'])",
    "process": "multiprocessing.get_context('spawn').Process(target=train).start()",
}


QUICK = ("process",)
"""Each start follows the same way, and so does what a running shell starts; the others take half a minute more."""


@pytest.mark.parametrize("how", [how if how in QUICK else pytest.param(how, marks=pytest.mark.whole) for how in STARTS])
def test_a_program_that_trains_is_followed(how, train, tmp_path):
    wrapper = tmp_path / "wrapper.py"
    wrapper.write_text(
        f"import multiprocessing, os, runpy, subprocess, sys, time\nTRAIN = {train!r}\n"
        "subprocess.run([sys.executable, '-c', 'print(1)'], check=True)\n"
        "def train():\n    sys.argv = [TRAIN, '--width', '256']\n    runpy.run_path(TRAIN)\n"
        f"{STARTS[how]}\ntime.sleep(100)\n"
    )
    found = dryrun(["python", str(wrapper)], "A100-80GB", timeout_seconds=90)
    assert found.steps == 3
    assert found.answer.composition["parameters"] == pytest.approx(257 * 256 * 4, rel=0.01)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["train.py", "wrapper.py"]


@pytest.mark.parametrize(
    ("path", "is_tool"),
    [
        ("lib/python3.11/site-packages/trl/scripts/sft.py", False),
        ("lib/python3.11/site-packages/pip/__main__.py", True),
        ("lib/python3.11/site-packages/torch/_inductor/compile_worker/__main__.py", True),
        ("lib/python3.11/json/tool.py", True),
    ],
)
def test_a_file_of_an_installed_package_may_train(path, is_tool, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    file = tmp_path / path
    file.parent.mkdir(parents=True)
    file.touch()
    assert named_a_tool(str(file)) == is_tool


CONSOLE_SCRIPT = "#!{python}\nimport sys\nfrom {module} import main\nsys.exit(main())\n"


@pytest.mark.parametrize(("module", "may_train"), [("trl.cli", True), ("pip._internal.cli.main", False)])
def test_a_console_script_of_a_package_may_train(module, may_train, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    program = tmp_path / "program"
    program.write_text(CONSOLE_SCRIPT.format(python=sys.executable, module=module))
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert trains(read_command(["program", "sft"])) == may_train
    script = tmp_path / "train.sh"
    script.write_text("program sft\n")
    if may_train:
        assert read_command(["bash", str(script)]).script == str(program)
    else:
        with pytest.raises(SpecError, match="starts nothing that trains"):
            read_command(["bash", str(script)])


@pytest.mark.parametrize("program", [("-u", "train.py", "-u", "8"), ("-u", "-m", "train", "-u", "8")])
def test_an_elastic_agent_starts_one_program_that_knows_of_all_ranks(program, monkeypatch):
    started = []
    monkeypatch.setattr("subprocess.run", lambda words, check: started.append(words))
    module = SimpleNamespace(launch_agent=lambda config, entrypoint, args, health_check_server: args)
    start_one_rank(module)
    config = SimpleNamespace(max_nodes=2, nproc_per_node=4)
    with monkeypatch.context() as patch:
        patch.setattr(ranks, "set_environment", lambda *sizes, launched: started.append(sizes))
        assert module.launch_agent(config, len, ["one"], health_check_server=None) == {0: 3}  # a function is no program
    assert started.pop() == (0, 8, 4)
    assert module.launch_agent(config, sys.executable, [*program], health_check_server=None) == {}
    assert started == [["torchrun", "--nnodes=2", "--nproc-per-node=4", *program[1:]]]


COUNTS = {
    "torchrun": "subprocess.run(['torchrun', '--nproc-per-node', str(torch.cuda.device_count()), TRAIN, '--width', '256'])",
    "spawn": "torch.multiprocessing.spawn(train, nprocs=torch.cuda.device_count())",
    "launcher": "launch.launch_command(launch.launch_command_parser().parse_args([TRAIN, '--width', '256']))",
}
"""Ways to start as many ranks as there are GPUs."""
SAYS = {
    "spawn": "torch.multiprocessing.spawn(train, nprocs=2)",
    "launcher": "launch.launch_command(launch.launch_command_parser().parse_args(['--num_processes', '2', *WORDS]))",
}
"""Ways to start two."""


@pytest.mark.parametrize(("starts", "number"), [(SAYS["spawn"], 2)] + [
    pytest.param(starts, number, marks=pytest.mark.whole)
    for starts, number in ((COUNTS["torchrun"], 1), (COUNTS["spawn"], 1), (COUNTS["launcher"], 1), (SAYS["launcher"], 2))
])  # fmt: skip
def test_ranks_that_a_script_starts_are_counted_or_it_is_said(starts, number, train, tmp_path):
    wrapper = tmp_path / "wrapper.py"
    wrapper.write_text(
        "import os, runpy, subprocess, sys, torch\nimport accelerate.commands.launch as launch\n"
        f"TRAIN = {train!r}\nWORDS = [TRAIN, '--width', '256']\n"
        "def train(rank):\n    os.environ['WORLD_SIZE'] = '2'\n"
        f"    if {number} == 2:\n        torch.distributed.init_process_group('nccl')\n"
        "    sys.argv = WORDS\n    runpy.run_path(TRAIN)\n"
        f"{starts}\n"
    )
    Path(train).write_text(
        "import os, torch\nif 'RANK' in os.environ: torch.distributed.init_process_group()\n" + TRAINS.lstrip()
    )
    found = dryrun(["python", str(wrapper)], "A100-80GB", timeout_seconds=90)
    assert found.job.parallelism.data_parallel_size == number
    said = [finding for finding in found.answer.findings if finding.parameter == "world_size"]
    assert len(said) == (1 if number == 1 else 0)


def test_a_shell_script_is_read_and_its_training_command_followed(train, tmp_path):
    script = tmp_path / "train.sh"
    script.write_text(
        "#!/bin/bash\nset -e\nexport RATE=0.5\nGPUS=8\nmkdir -p outputs\n"
        f"python prepare.py\nsrun -n 1 torchrun --nproc-per-node $GPUS \\\n    {train} --width 256\n"
    )
    for words in (["bash", str(script)], ["bash", "-x", str(script)], [str(script)], ["bash", "-c", script.read_text()]):
        command = read_command(words)
        assert (command.script, command.arguments) == (train, ("--width", "256"))
        assert (command.world_size, command.environment) == (8, ("RATE=0.5",))


def test_shell_scripts_that_another_one_runs_or_sources_are_read(train, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sizes.sh").write_text("export GPUS=4\n")
    (tmp_path / "inner.sh").write_text(f"accelerate launch --num_processes $GPUS {train} --width $1\n")
    (tmp_path / "outer.sh").write_text("source sizes.sh\nbash inner.sh 256\n")
    for words in (["bash", "outer.sh"], ["sh", "-c", "bash outer.sh"]):
        command = read_command(words)
        assert (command.script, command.arguments, command.world_size) == (train, ("--width", "256"), 4)


SHELL = """
COMMAND=$(cat command.txt)
[ "$(python -c 'print(6 * 7)')" = 42 ] || exit 1
$COMMAND
"""
"""A shell's script that cannot be read, since what it starts is in a file: it runs."""
SHELL_ASKS = "python -c 'print(6 * 7)'; command -v python; command -v torchrun"


def test_shells_find_python_and_its_launchers_and_what_trains_is_followed(tmp_path, monkeypatch):
    """A shell whose PATH has no Python runs those of this environment."""
    monkeypatch.setattr(os, "environ", {**os.environ, "PATH": f"{tmp_path / 'bin'}:/usr/bin:/bin"})
    install_python({"folder": str(tmp_path)})
    done = subprocess.run(["bash", "-c", SHELL_ASKS], env=os.environ, capture_output=True, text=True, check=True)
    number, python, torchrun = done.stdout.split()
    assert number == "42"
    assert python == str(tmp_path / "bin" / "python")
    assert Path(torchrun).resolve() == Path(python)
    assert "peakcast.collectors.dryrun.started" in Path(python).read_text()


@pytest.mark.whole  # the test before it has the programs that a shell finds, and those above what is followed
def test_what_a_running_shell_starts_is_followed_without_the_environment_on_path(train, tmp_path, monkeypatch):
    folder = tmp_path / "below"
    folder.mkdir()
    (folder / "command.txt").write_text(f"torchrun --nproc-per-node 4 {train} --width 256")
    (folder / "train.sh").write_text(SHELL)
    wrapper = tmp_path / "wrapper.py"
    wrapper.write_text("import subprocess\nsubprocess.run(['bash', 'train.sh'], cwd='below', check=True)\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    found = dryrun(["python", str(wrapper)], "A100-80GB", timeout_seconds=90)
    assert found.steps == 3
    assert found.answer.composition["parameters"] == pytest.approx(257 * 256 * 4, rel=0.01)
    assert sorted(path.name for path in folder.iterdir()) == ["command.txt", "train.sh"]


def test_a_shell_script_that_trains_nothing_is_refused(tmp_path):
    script = tmp_path / "train.sh"
    script.write_text("#!/bin/bash\nls\n./configure --all\n")
    with pytest.raises(SpecError, match="put peakcast dryrun before the command in it"):
        read_command(["bash", str(script)])
    with pytest.raises(SpecError, match="is not there"):
        read_command(["bash", str(tmp_path / "no.sh")])


@pytest.mark.parametrize("counts", ["nvidia-smi -L | wc -l", "python -c 'import torch; print(torch.cuda.device_count())'"])
def test_a_shell_script_that_counts_gpus_has_those_of_a_node(counts, train, tmp_path):
    script = tmp_path / "train.sh"
    script.write_text(f"N=$({counts})\ntorchrun --nproc-per-node $N {train} --width 256\n")
    assert read_command(["bash", str(script)]).world_size == 8


def test_a_variable_that_a_shell_script_needs_is_named(train, tmp_path):
    script = tmp_path / "train.sh"
    script.write_text(f"PORT=1\ntorchrun --master-port $PORT --nproc-per-node $MY_GPUS {train}\n")
    with pytest.raises(SpecError, match=r"MY_GPUS is not set; put"):
        read_command(["bash", str(script)])
    assert read_command(["MY_GPUS=4", "bash", str(script)]).world_size == 4


def test_what_runs_a_command_is_left_out(train):
    command = read_command(["nohup", "env", "RATE=1", sys.executable, train])
    assert (command.script, command.environment) == (train, ("RATE=1",))


def test_a_request_to_stop_ends_in_order():
    from peakcast.collectors.dryrun.process import STOPS, _stopped_in_order

    for number in STOPS:
        before = signal.signal(number, signal.SIG_DFL)  # Ray leaves a handler of its own
        try:
            with pytest.raises(SystemExit) as stopped, _stopped_in_order():
                signal.raise_signal(number)  # to this thread; to the process, another thread may get it later
            assert stopped.value.code == 128 + number
            assert signal.getsignal(number) == signal.SIG_DFL
        finally:
            signal.signal(number, before)


@pytest.mark.parametrize(("answered", "code"), [(True, 0), (False, 11)])
def test_a_script_that_ends_when_what_it_started_has_answered_has_not_failed(answered, code, tmp_path):
    """It ends without a step of its own (11), and may end before anybody has looked at the answer."""
    answer, log = tmp_path / "answer.json", tmp_path / "log"
    log.touch()
    if answered:
        answer.write_text("{}")
    assert _wait(SimpleNamespace(poll=lambda: 11), time.monotonic() + 10, log, answer, None) == code


LAUNCHER = [
    "Traceback (most recent call last):",
    "    raise subprocess.CalledProcessError(returncode=process.returncode, cmd=cmd)",
    "subprocess.CalledProcessError: Command '['python', 'train.py']' returned non-zero exit status 10.",
]


def test_the_error_of_a_launched_script_is_shown_and_not_its_launchers(tmp_path):
    own = ["Traceback (most recent call last):", '  File "train.py", line 3, in <module>', "ValueError: no rank"]
    log = tmp_path / "output.txt"
    log.write_text("\n".join([*own, *LAUNCHER, *LAUNCHER]))  # a launcher may start another
    assert _last_lines(log) == own
    log.write_text("\n".join(["Loading", *LAUNCHER]))
    assert _last_lines(log) == ["Loading", *LAUNCHER], "it is all that is known"
