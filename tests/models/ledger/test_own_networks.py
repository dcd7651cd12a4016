"""Jobs of libraries that have networks of their own, beside transformers'."""

import pytest

from peakcast.core.fields import FrozenMapping
from peakcast.doors.recording import timelines_from
from peakcast.models.ledger.scope.scope import out_of_scope
from peakcast.models.recipes.baseline_choice import StackTraces, baseline_from, tracer
from peakcast.models.recipes.shelf import installed
from peakcast.timelines.timeline import Timeline
from peakcast.timelines.traced import Traced


@pytest.mark.parametrize("library", ["nanotron", "torchtitan"])
def test_a_trace_of_another_network_says_so(library, job):
    asked = job(ranks=1, layout="ddp", versions=FrozenMapping({library: "main"}))
    with timelines_from("trace"):
        assert f"{library} has its own" in out_of_scope(asked)
        assert out_of_scope(asked.replace(versions=FrozenMapping())) == ""


def test_a_trace_of_a_users_program_is_of_its_own_network(job):
    asked = job(ranks=1, layout="ddp", versions=FrozenMapping({"nanotron": "main"}))
    with baseline_from("trace", lambda *_: {}):
        assert out_of_scope(asked) == ""


def test_a_trace_says_which_kernels_its_environment_lacked(job):
    step = Timeline.from_entries((), (0,))
    asked = job(ranks=1, layout="ddp")
    with baseline_from("trace", StackTraces(lambda *_: Traced(first=step, steady=step, replaced={"scan": "fla"}))):
        assert out_of_scope(asked) == ""  # nothing has been traced yet
        tracer()(asked, 0, None)
        assert "fla was not installed" in out_of_scope(asked)


def test_a_trace_of_another_release_than_asked_says_so(job):
    here = installed()["transformers"]
    with timelines_from("trace"):
        assert "is asked for" in out_of_scope(job(ranks=1, layout="ddp", versions=FrozenMapping({"transformers": "4.30"})))
        assert out_of_scope(job(ranks=1, layout="ddp", versions=FrozenMapping({"transformers": here}))) == ""


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"loss_kernel": "in_place"}, "loss_kernel='in_place'"),
        ({"norm_kernel": "fused"}, "norm_kernel='fused'"),
        ({"lora_kernel": "fused"}, ""),  # without adapters there is nothing for it to do
        ({"liger_kernels": True}, ""),  # which runs where a network is traced, or is missing there
    ],
)
def test_a_trace_says_which_kernels_of_the_job_it_does_not_run(options, said, job):
    asked = job(ranks=1, layout="ddp").replace(framework="huggingface", framework_options=FrozenMapping(options))
    with timelines_from("trace"):
        assert said in out_of_scope(asked)
        assert said or not out_of_scope(asked)
