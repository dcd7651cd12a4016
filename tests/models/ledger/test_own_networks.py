"""Jobs of libraries that have networks of their own, beside transformers'."""

import pytest

from peakcast.core.fields import FrozenMapping
from peakcast.doors.recording import timelines_from
from peakcast.models.ledger.scope.scope import out_of_scope
from peakcast.models.recipes.baseline_choice import baseline_from


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
