"""Standard output that is full, closed, broken off or of another character set: a sentence and an exit code, no fault."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from peakcast.commands import cli

COMMANDS = {
    "answer": ("predict", "--model", "gpt2", "--sequence-length", "512", "--gpu", "H100-80GB"),
    "JSON": ("predict", "--model", "gpt2", "--sequence-length", "512", "--gpu", "H100-80GB", "--json"),
    "explanation": ("explain", "--model", "gpt2"),
    "help": ("--help",),
}
PEAKCAST = (sys.executable, "-P", "-m", "peakcast")


def run(command, redirection, **environment):
    """Exit code and standard error of a command whose output a shell redirects."""
    line = " ".join([*PEAKCAST, *command]) + " " + redirection
    done = subprocess.run(
        ["bash", "-c", line], capture_output=True, text=True, env={**os.environ, **environment}, timeout=120, check=False
    )
    return done.returncode, done.stderr


def test_no_output_of_a_process_ends_in_a_fault():
    code, said = run(COMMANDS["answer"], ">/dev/full")
    assert (code, said) == (74, "peakcast: the answer cannot be written: No space left on device.\n")
    assert run(COMMANDS["answer"], ">&-") == (0, "")
    assert run(COMMANDS["answer"], ">/dev/null", PYTHONIOENCODING="latin-1") == (0, "")


@pytest.fixture
def run_here(monkeypatch, capfd):
    """A function that gives the exit code and the standard error of a command, run in this process, whose output is
    `stream`."""

    def call(command, stream):
        with monkeypatch.context() as patch:
            patch.setattr(sys, "argv", ["peakcast", *command])
            patch.setattr(sys, "stdout", stream)
            patch.setattr(sys, "stderr", open(2, "w", closefd=False))  # noqa: SIM115  # it is replaced by the command
            with pytest.raises(SystemExit) as ended:
                cli.main()
            sys.stderr.flush()
        return ended.value.code, capfd.readouterr().err

    return call


@pytest.mark.parametrize("name", COMMANDS)
def test_no_command_ends_in_a_fault_where_its_output_is_full_or_lacks_characters(run_here, name):
    """As the processes above, with the streams that Python would open for them."""
    with open("/dev/full", "w") as full:
        said = "peakcast: the answer cannot be written: No space left on device.\n"
        assert run_here(COMMANDS[name], full) == (74, said)
    for encoding in ("latin-1", "ascii"):
        with open(os.devnull, "w", encoding=encoding) as stream:
            assert run_here(COMMANDS[name], stream) == (0, "")


def test_a_reader_that_has_gone_is_exit_code_141():
    """The reader has gone before anything is written."""
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [*PEAKCAST, *COMMANDS["JSON"]], stdout=writer, stderr=subprocess.PIPE, text=True, timeout=120, check=False
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, "")


def test_an_error_that_cannot_be_said_is_an_exit_code_all_the_same():
    refused = ("predict", "--model", "no-such-model", "--gpu", "H100-80GB")
    assert run(refused, "2>&-")[0] == run(refused, "2>/dev/full")[0] == 2
    assert run(("predict", "--batch", "-"), "<&-") == (0, "")
