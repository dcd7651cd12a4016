"""The table of what is not covered is whole: its sentences and parameters name what a job has, and its facts combine."""

import dataclasses
import re
import string
from operator import attrgetter

import pytest

from peakcast import catalog
from peakcast.core.findings import FAILS, NEARLY, NEARLY_LESS, NEARLY_MORE, UNKNOWN
from peakcast.jobs.conventions import known_conventions
from peakcast.jobs.spec import ActivationCheckpointing, TrainingJob
from peakcast.models.ledger.scope.fact import above, option, setting
from peakcast.models.ledger.scope.scope import not_covered, scope_findings, sections
from peakcast.models.ledger.scope.table import Section, fails, more, unknown
from peakcast.models.ledger.scope.words import WORDS

JOB = TrainingJob(architecture=catalog.architecture("llama-3.2-1b"))
FIELDS = {field.name for field in dataclasses.fields(TrainingJob)}
ROWS = {row: framework for framework in ("megatron", "huggingface") for s in sections(framework) for row in s.every()}
FLEX = setting("attention", "flex")
COMPILED = setting("compile")


def test_facts_combine_as_conditions_do():
    flex, both = JOB.replace(attention="flex"), JOB.replace(attention="flex", compile=True)
    for job, is_flex, is_compiled in ((JOB, False, False), (flex, True, False), (both, True, True)):
        assert (FLEX(job), COMPILED(job)) == (is_flex, is_compiled)
        assert (FLEX & COMPILED)(job) == (is_flex and is_compiled)
        assert (FLEX | COMPILED)(job) == (is_flex or is_compiled)
        assert (~FLEX)(job) != is_flex
    assert repr(~(FLEX | COMPILED) & above("sequence_length", 1)) == "(not (attention=flex | compile)) & sequence_length>1"


def test_a_share_is_the_largest_that_its_sentence_says():
    said = {row.share: re.findall(r"([\d.]+)\s%", row.sentence) for row in ROWS if row.share is not None}
    assert len(said) > 8
    assert all(100 * share == pytest.approx(max(map(float, numbers))) for share, numbers in said.items())
    assert all(row.effect in (NEARLY, NEARLY_MORE, NEARLY_LESS) for row in ROWS if row.share is not None)


def test_an_option_is_what_the_release_or_the_job_says():
    assert option("logits_upcast", None)(JOB.replace(framework="megatron"))  # Megatron-LM has no such convention
    assert not option("autocast")(JOB)
    assert option("fsdp2_units", "ends", "root")(JOB)


def test_a_section_gives_the_first_row_that_holds_and_lends_what_its_rows_share():
    rows = more("attention", FLEX, "flex."), fails("compile", ~FLEX, "no.")
    inner, last = Section("inner", rows, COMPILED, start="inside, "), unknown("attention", FLEX, "last")
    section = Section("outer", (inner, last), start="{architecture.model_type} ", end="!")
    assert section.finding(JOB) is None
    flex = JOB.replace(attention="flex")
    assert section.finding(flex).sentence == "llama last!"
    found = section.finding(flex.replace(compile=True))
    assert (found.sentence, found.parameter, found.direction) == ("llama inside, flex.!", "attention", "more")
    assert [row.feature for row in section.holding(flex.replace(compile=True))] == ["inner", "outer"]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.sentence[:60])
def test_a_row_names_settings_and_values_that_there_are(row):
    for _, name, _, _ in string.Formatter().parse(row.sentence):
        if name and name not in WORDS:
            path = name.partition(".")[0]
            assert path in FIELDS, name
            attrgetter(name)(JOB)
    group, _, name = row.parameter.partition(".")
    if group == "framework_options" and name:
        assert any(name in known_conventions(stack) for stack in ("huggingface", "torch", "deepspeed", "megatron"))
    elif group != "versions":
        assert group in FIELDS
        assert not name or hasattr(getattr(JOB, group), name)


def test_what_is_unknown_or_fails_is_seen_behind_the_first_row_too():
    float8 = dataclasses.replace(JOB.precision, compute="float8")
    kept = ActivationCheckpointing(mode="selective", modules=("mlp",))
    job = JOB.replace(task="inference", precision=float8, sequence_length=1001, activation_checkpointing=kept)
    both = ("activation_checkpointing.modules", "precision.compute")
    (first,) = [finding for finding in scope_findings(job) if finding.parameter in both]
    assert first.parameter == both[0]
    assert set(both) <= {row.parameter for row in not_covered(job)}
    assert {row.effect for row in not_covered(job)} == {FAILS, UNKNOWN}
