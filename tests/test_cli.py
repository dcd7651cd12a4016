"""The command line: exit codes, one screen of text, strict JSON, and a sentence for whatever cannot be done."""

from __future__ import annotations

import inspect
import json
import os
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from peakcast import api
from peakcast.collectors.measure.settings import CollectSettings
from peakcast.commands import cli
from peakcast.commands.cli import FITS_EXIT_CODES
from peakcast.core.units import GIB
from peakcast.doors.job_flags import BESIDE, FLAGS

SMALL = ("--model", "llama-3.2-1b", "--sequence-length", "512")
GPU = ("--gpu", "H100-80GB")


class Done:
    """What a command printed and exited with."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


Run = Callable[..., Done]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.chdir(tmp_path)

    def call(*arguments: str) -> Done:
        code = cli._run(list(arguments))
        printed = capsys.readouterr()
        return Done(code, printed.out, printed.err)

    return call


# -- predict --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "gpu", "fits"), [("llama-3.2-1b", "H100-80GB", "yes"), ("llama-3.1-70b", "RTX4090", "no")]
)
def test_predict_exits_with_whether_it_fits(run: Run, model: str, gpu: str, fits: str) -> None:
    done = run("predict", "--model", model, "--gpu", gpu, "--sequence-length", "512", "--json")
    answer = json.loads(done.out)
    assert (answer["fits"], done.code) == (fits, FITS_EXIT_CODES[fits])


def test_predict_says_the_same_in_json_as_in_python(run: Run) -> None:
    done = run("predict", *SMALL, *GPU, "--method", "lora", "--lora-rank", "8", "--json")
    job = {
        "architecture": "llama-3.2-1b",
        "sequence_length": 512,
        "finetuning": {"method": "lora", "rank": 8},
    }
    assert json.loads(done.out) == api.predict(job, "H100-80GB").to_mapping()


def test_reasons_that_only_widen_the_bars_are_left_to_the_details(run: Run) -> None:
    flags = ("--framework", "torch", "--sharding", "hsdp", "--data-parallel-size", "4", "--set", "compile=true")
    text = " ".join(run("predict", *SMALL, *GPU, *flags).out.split())
    assert "no measured run" not in text
    assert "no run measured" not in text
    assert "related runs" in text or "judgement" in text
    whole = " ".join(run("predict", *SMALL, *GPU, *flags, "--details").out.split())
    assert "no run measured on H100-80GB has layout=hsdp" in whole
    assert "First to try: not known, since the ledger does not cover this job in full." in whole


def test_predict_prints_one_screen_with_every_quantity_in_gib(run: Run) -> None:
    done = run("predict", *SMALL, *GPU)
    answer = api.predict({"architecture": "llama-3.2-1b", "sequence_length": 512}, "H100-80GB")
    lines = done.out.splitlines()
    assert len(lines) <= 20
    assert max(map(len, lines)) <= 100
    for quantity in ("allocated", "reserved", "device"):
        bar = getattr(answer, f"peak_{quantity}_bytes")
        (line,) = [line for line in lines if line.startswith(f"{quantity} ")]
        assert f"{bar.point / GIB:.2f}" in line
        assert f"{bar.lower / GIB:.2f} – {bar.upper / GIB:.2f}" in line
    assert lines[0].startswith(f"Fits on H100-80GB: expect {answer.peak_device_bytes.point / GIB:.2f} of ")
    assert not any(line.startswith("host") for line in lines)


def test_the_sentence_and_the_table_say_a_number_at_most_twice(run: Run) -> None:
    out = run("predict", *SMALL, *GPU).out.partition("The peak is in")[0]
    for size, count in Counter(re.findall(r"\d+\.\d\d(?= |\n)", out)).items():
        assert count <= 2, size


def test_the_details_have_all_of_the_first_screen(run: Run) -> None:
    first, details = (run("predict", *SMALL, "--gpu", "T4", *flags).out for flags in ((), ("--details",)))
    for line in first.splitlines()[:5]:
        assert line in details
    for title in ("By phase in GiB", "Biggest tensors", "It fits on", "Assumed", "Not modelled", "First to try"):
        assert title in details


def test_a_default_length_beyond_the_positions_is_shortened_and_said(run: Run) -> None:
    out = " ".join(run("predict", "--model", "gpt2", *GPU).out.split())
    assert out.startswith("Fits on H100-80GB")
    assert "sequence_length is not given, and 1024 is assumed instead of 2048" in out
    asked = run("predict", "--model", "gpt2", "--sequence-length", "2048", *GPU)
    assert asked.out.startswith("Would fail on H100-80GB: sequence_length=2048 is beyond the 1024 positions")
    assert asked.code == FITS_EXIT_CODES["uncertain"]


def test_flags_change_the_values_of_a_job_file(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "job.yaml"
    path.write_text("architecture: llama-3.2-1b\nsequence_length: 4096\noptimizer: {name: sgd, momentum: 0.9}\n")
    done = run(
        "predict", str(path), "--sequence-length", "512", "--set", "optimizer.momentum=0", "--print-job", "--json"
    )
    job = json.loads(done.out)
    assert done.code == 0
    assert job["architecture"] == "llama-3.2-1b"
    assert job["sequence_length"] == 512
    assert job["optimizer"] == {"name": "sgd", "implementation": "foreach", "momentum": 0.0}


def test_a_printed_job_is_a_job_file(run: Run, tmp_path: Path) -> None:
    flags = ("--tensor-parallel-size", "2", "--sequence-parallel", "--framework", "megatron", "--precision", "float32")
    path = tmp_path / "job.yaml"
    path.write_text(run("predict", *SMALL, *flags, "--print-job").out)
    again = run("predict", str(path), "--print-job").out
    assert again == path.read_text()
    assert "sequence_parallel: true" in again


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("predict", *SMALL), "--gpu is required"),
        (("predict", *GPU), "no architecture is given"),
        (("predict", *SMALL, "--gpu", "H100-80G"), "did you mean 'H100-80GB'"),
        (("predict", "--model", "llama-3.1-8", *GPU), "did you mean 'llama-3.1-8b'"),
        (("predict", *SMALL, *GPU, "--micro-batch-size", "-1"), "micro_batch_size=-1 must be at least 1"),
        (("predict", *SMALL, *GPU, "--micro-batch-size", "two"), "--micro-batch-size"),
        (("predict", *SMALL, *GPU, "--set", "micro_batch_size=.nan"), "must be a whole number"),
        (("predict", *SMALL, *GPU, "--set", "micro_batch_size"), "must be FIELD=VALUE"),
        (("predict", *SMALL, *GPU, "--set", "optimizer.nme=sgd"), "did you mean 'name'"),
        (("predict", *SMALL, *GPU, "--set", "sequence_length.x=1"), "not a mapping"),
        (("predict", *SMALL, *GPU, "--tensor-parallel-size", "7"), "does not divide num_attention_heads"),
        (("predict", *SMALL, *GPU, "--optimizer", "adam_w"), "did you mean 'adamw'"),
        (("predict", *SMALL, *GPU, "--num-gpus", "8"), "--data-parallel-size 8 --sharding fsdp2"),
        (("predict", *SMALL, *GPU, "--dialect", "axolotl"), "--dialect axolotl goes with a configuration"),
        (("predict", *SMALL, *GPU, "--rank", "5"), "from 0 to 0"),
        (("predict", *SMALL, *GPU, "--calibration", "nowhere.json"), "cannot be read"),
        (("predict", "nowhere.yaml", *GPU), "nowhere.yaml cannot be read"),
        (("predict", "--batch", "nowhere.jsonl"), "nowhere.jsonl cannot be read"),
        (("predict", "--batch", "x.jsonl", *SMALL), "give no JOB and no job flags"),
        (("predict", *SMALL, *GPU, "--no-such-flag"), "--no-such-flag"),
        (("pedict",), "pedict"),
        (("fit",), "either --gpu"),
        (("fit", "--all", *GPU), "either --gpu"),
        (("fit", "--gpu", "RTX5090", "--no-tracking"), "no measured rows"),
        (("report", "--gpu", "nonsense"), "not in the catalog"),
        (("evaluate", "--datasets", "nowhere", "--no-tracking"), "nowhere is not a folder"),
    ],
)
def test_what_cannot_be_done_is_one_sentence_and_exit_code_2(run: Run, arguments: tuple[str, ...], words: str) -> None:
    done = run(*arguments)
    assert done.code == 2
    assert done.out == ""
    assert done.err.startswith("peakcast: ")
    assert done.err.count("\n") == 1
    assert words in done.err


@pytest.mark.parametrize(
    "content", [b"{", b"\xff\xfe\x00", b"[1, 2]", b"a: [", b"", b"architecture: !!python/object:os.x {}"]
)
@pytest.mark.parametrize("name", ["job.yaml", "job.json"])
def test_a_damaged_job_file_is_one_sentence(run: Run, tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    done = run("predict", str(tmp_path / name), *GPU)
    assert (done.code, done.out, done.err.count("\n")) == (2, "", 1)
    assert "bug" not in done.err


def test_a_batch_is_one_answer_a_line(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "jobs.jsonl"
    path.write_text('{"id": 1, "gpu": "H100-80GB", "job": {"architecture": "llama-3.2-1b"}}\n{\n')
    done = run("predict", "--batch", str(path))
    first, second = map(json.loads, done.out.splitlines())
    assert done.code == 0
    assert first["fits"] in FITS_EXIT_CODES
    assert second["error"]["message"].startswith("the line is not valid JSON")


# -- all commands ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "command", [command.callback.__name__.replace("_", "-") for command in cli.app.registered_commands if command.callback]
)
def test_every_command_has_json_and_help_with_an_example(run: Run, command: str) -> None:
    done = run(command, "--help")
    assert done.code == 0
    assert "--json" in done.out
    assert f"Example: peakcast {command}" in done.out


def test_only_the_command_that_is_asked_for_is_built_and_all_where_none_is() -> None:
    for command in cli.app.registered_commands:
        assert command.callback is not None
        name = command.callback.__name__.replace("_", "-")
        assert cli._application([name, "--json"]).registered_commands == [command]
    for arguments in ([], ["--help"], ["predic"], ["--version", "predict"]):
        assert cli._application(arguments) is cli.app


def test_the_version_is_the_packages(run: Run) -> None:
    import peakcast

    assert run("--version").out == f"peakcast {peakcast.__version__}\n"


def test_a_bug_is_one_line_without_a_traceback_unless_asked_for(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object, **__: object) -> None:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(api, "predict", broken)
    done = run("predict", *SMALL, *GPU)
    assert done.code == 70
    assert done.err == "peakcast: this is a bug in peakcast: ZeroDivisionError: oops (PEAKCAST_DEBUG=1 shows where)\n"
    monkeypatch.setenv("PEAKCAST_DEBUG", "1")
    with pytest.raises(ZeroDivisionError):
        run("predict", *SMALL, *GPU)


def test_an_interrupt_exits_with_130(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(api, "predict", interrupted)
    assert run("predict", *SMALL, *GPU).code == 130


def _peakcast(shell: str, folder: Path) -> subprocess.CompletedProcess[str]:
    scripts = str(Path(sys.executable).parent)
    environment = {**os.environ, "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}"}
    return subprocess.run(["bash", "-c", shell], cwd=folder, env=environment, capture_output=True, text=True, check=False)


def test_a_reader_that_leaves_early_sees_no_complaint(tmp_path: Path) -> None:
    line = json.dumps({"gpu": "H100-80GB", "job": {"architecture": "llama-3.2-1b", "sequence_length": 512}})
    (tmp_path / "jobs.jsonl").write_text((line + "\n") * 500)
    done = _peakcast("peakcast predict --batch jobs.jsonl --processes 1 | head -1", tmp_path)
    assert done.stderr == ""
    assert json.loads(done.stdout)["fits"]


def test_standard_input_is_answered_line_by_line(tmp_path: Path) -> None:
    question = json.dumps({"id": 7, "gpu": "H100-80GB", "job": {"architecture": "llama-3.2-1b"}}) + "\n"
    command = [str(Path(sys.executable).parent / "peakcast"), "predict", "--batch", "-"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=tmp_path) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        for _ in range(2):
            process.stdin.write(question)
            process.stdin.flush()
            assert json.loads(process.stdout.readline())["id"] == 7
        process.stdin.close()
    assert process.returncode == 0


OTHER_QUESTIONS = {cli.evaluate: api.check, cli.predict: api.predict_batch, cli.collect: api.collect_constants}
OTHER_QUESTIONS |= {cli.record: api.record_all, cli.replay: api.replay_all}
"""What a command calls instead with --against, with --batch, with `constants` in the place of a grid, with --all, and with
several files."""
SETTINGS = {cli.collect: CollectSettings}
"""The value that a function takes many of its arguments in."""


COMMANDS = [command.callback for command in cli.app.registered_commands if command.callback]


@pytest.mark.parametrize("command", [command for command in COMMANDS if command is not cli.mcp])  # it serves the functions
def test_every_command_has_a_function_of_the_same_name_and_arguments(command: Callable[..., object]) -> None:
    own = {"json", "batch", "print_job", "markdown", "write_readme", "all_", "no_tracking"}
    own |= {"tracking_uri", "layers", "details", "context", *BESIDE}
    of_a_job = {*(flag.name for flag in FLAGS), "set_"}
    offered = set(inspect.signature(getattr(api, command.__name__)).parameters)
    if command in OTHER_QUESTIONS:
        offered |= set(inspect.signature(OTHER_QUESTIONS[command]).parameters)
    if command in SETTINGS:
        offered |= set(inspect.signature(SETTINGS[command]).parameters)
    assert set(inspect.signature(command).parameters) - own - of_a_job <= offered


RECORDED = Path(__file__).parent / "dialects" / "recorded"


def test_another_projects_configuration_is_a_job(run: Run) -> None:
    done = run("predict", str(RECORDED / "axolotl" / "llama3_70b_qlora_fsdp.yaml"), *GPU, "--json")
    assert done.code in (0, 3, 4), done.err
    said = "llama3_70b_qlora_fsdp.yaml is read as an Axolotl configuration, by base_model and micro_batch_size."
    assert said in json.loads(done.out)["assumptions"]


def test_flags_change_the_job_of_another_projects_configuration(run: Run) -> None:
    file = str(RECORDED / "llamafactory" / "llama3_full_sft.yaml")
    changes = ("--num-gpus", "8", "--micro-batch-size", "4", "--set", "compile=true")
    done = run("predict", file, *changes, "--print-job", "--json")
    job = json.loads(done.out)
    assert (job["micro_batch_size"], job["compile"], job["parallelism"]["data_parallel_size"]) == (4, True, 8)
    assert json.loads(run("predict", file, "--model", "gpt2", "--print-job", "--json").out)["architecture"] == "gpt2"


def test_a_printed_job_carries_what_was_assumed_as_comments(run: Run, tmp_path: Path) -> None:
    printed = run("predict", str(RECORDED / "deepspeed" / "zenflow.json"), "--model", "gpt2", "--print-job").out
    assert "# Assumed: zenflow.json is read as a DeepSpeed configuration, by zero_optimization." in printed
    assert "# Warning: zero_optimization.zenflow is not known here; it is left out, and may matter." in printed
    (tmp_path / "job.yaml").write_text(printed)
    again = run("predict", str(tmp_path / "job.yaml"), "--print-job").out
    assert again == "\n".join(line for line in printed.splitlines() if not line.startswith("#")) + "\n"


def test_files_that_belong_together(run: Run) -> None:
    engine, sft = str(RECORDED / "llamafactory" / "ds_z3_config.json"), str(RECORDED / "trl" / "zephyr_7b_sft_qlora.yaml")
    alone = run("predict", engine, "--gpu", "H100-80GB")
    assert (alone.code, alone.out) == (2, "")
    assert "the training arguments and the model are missing" in alone.err
    done = run("predict", engine, "--with", sft, "--num-gpus", "2", "--print-job", "--json")
    assert json.loads(done.out)["parallelism"]["zero_stage"] == 3


MEGATRON = "--num-layers 4 --hidden-size 512 --num-attention-heads 8 --seq-length 512 --micro-batch-size 2 --vocab-size 999"


def test_megatron_in_the_place_of_pretrain_gpt(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    done = run("megatron", *MEGATRON.split(), "--gpu", "H100-80GB", "--json")
    assert done.code in (0, 4), done.err
    env = {"CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    assert json.loads(done.out) == api.megatron(MEGATRON.split(), "H100-80GB", 2, env=env).to_mapping()
    job = json.loads(run("megatron", "--print-job", "--num-gpus", "4", "--json", *MEGATRON.split()).out)
    assert job["parallelism"]["data_parallel_size"] == 4
    assert "hidden-size is required" in run("megatron", "--bf16", *GPU).err


# -- what is no question --------------------------------------------------------------------------------------------------


def test_nothing_asked_is_answered_with_the_help(run: Run) -> None:
    done = run()
    assert (done.code, done.out) == (0, run("--help").out)
    assert done.out.count("\n") > 20


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["bogus"], "No such command 'bogus'. See peakcast --help."),
        (["collect"], "Missing argument 'grid'. See peakcast collect --help."),
        (["import-published", "--bogus"], "No such option: --bogus See peakcast import-published --help."),
    ],
)
def test_a_command_that_is_not_there_points_to_one_that_is(run: Run, arguments: list[str], says: str) -> None:
    done = run(*arguments)
    assert (done.code, done.err) == (2, f"peakcast: {says}\n")


# -- dryrun ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("words", "way"), [((), "give a GPU type"), (("--gpu", "H100-80GB"), "come before the command")])
def test_dryrun_says_where_its_gpu_goes(run: Run, words: tuple[str, ...], way: str) -> None:
    done = run("dryrun", "train.py", *words)
    assert (done.code, way in done.err) == (2, True)


def test_a_second_gpu_is_not_taken_in_silence(run: Run) -> None:
    done = run("search", "--model", "llama-3.1-8b", "--gpu", "A100-40GB", "--gpu", "H200")
    assert (done.code, "--gpu A100-40GB,H200" in done.err) == (2, True)
