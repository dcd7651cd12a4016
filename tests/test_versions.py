"""Version texts, and which conventions they choose, in each form of a question."""

from __future__ import annotations

import importlib.metadata
import json
import tomllib
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

import peakcast
from peakcast import api
from peakcast.commands.cli import app
from peakcast.core.errors import SpecError
from peakcast.core.versions import (
    ASSUMED_TORCH,
    NEWEST,
    PACKAGES,
    check_versions,
    compare,
    installed,
    not_compared,
    read_versions,
    release,
    remarks,
    torch_release,
)
from peakcast.dialects.common.asked_versions import OF_THIS_RUN, asked_versions
from peakcast.dialects.common.job_file import job_from_mapping
from peakcast.dialects.megatron_arguments import from_arguments
from peakcast.doors.batching import predict_batch
from peakcast.doors.questions import question, translation_of
from peakcast.jobs.conventions import assumed_versions, conventions, unmodelled_versions
from peakcast.web.asking import PageState, answered
from peakcast.web.links import from_query, to_query

TINY = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 128,
        "intermediate_size": 128, "max_position_embeddings": 128}  # fmt: skip


@pytest.mark.parametrize(
    ("text", "numbers"),
    [
        ("2.11.0+cu130", (2, 11, 0)),
        ("4.48.1", (4, 48, 1)),
        ("5", (5,)),
        (2.9, (2, 9)),
        ("v0.3", (0, 3)),
        ("2.4.0.dev202406", (2, 4, 0)),
        ("2.10.0a0+b558c986e8.nv25.11", (2, 10, 0)),
        ("2.12.0a0+0291f960b6.nv26.04.48445190", (2, 12, 0)),
        ("0.16.1.dev0", (0, 16, 1)),
        ("2.0.0rc1", (2, 0, 0)),
        ("2.5.9.post1", (2, 5, 9)),
        ("0.17.0rc0", (0, 17, 0)),
        ("main", NEWEST),
        ("9dec370", ()),
        ("27aa49077", ()),
        ("2a13456", ()),
        ("1e29e72", ()),
        ("7654321", ()),
        ("d98e8a64ddf34856e74b24714e3bedb2f5a39553", ()),
        ("", ()),
        ("release", ()),
        ("9" * 5000 + ".1", ()),
    ],
)
def test_the_release_of_a_version_text(text: object, numbers: tuple[int, ...]) -> None:
    assert release(text) == numbers


@pytest.mark.parametrize("operator", ["<", "<=", ">", ">=", "=="])
@pytest.mark.parametrize("bound", ["0.3", "0.0", "99"])
def test_a_commit_is_in_no_range_of_releases(operator: str, bound: str) -> None:
    assert not compare("9dec370", operator + bound)
    assert compare("9dec370", "*")


def test_releases_of_different_length_are_compared_as_numbers_are() -> None:
    assert compare("2.11.0", "==2.11")
    assert compare("2.11", "<=2.11.0")
    assert not compare("2.11", "<2.11.0")
    assert compare("2.10", ">2.9")
    assert compare("main", ">=99")
    assert not compare("main", "<99")
    assert compare("2.4.0.dev202406", ">=2.4")
    assert compare("llama", "==bert|llama")


def test_a_malformed_clause_is_our_own_fault() -> None:
    with pytest.raises(ValueError, match="malformed"):
        compare("1.0", "~=1.0")


def test_no_stanza_asks_whether_a_stack_is_there_by_a_range_that_commits_fail() -> None:
    text = resources.files("peakcast").joinpath("catalog", "frameworks.toml").read_text(encoding="utf-8")
    whens = [stanza.get("when", {}) for stanzas in tomllib.loads(text).values() for stanza in stanzas]
    assert [when for when in whens if {">=0", ">=0.0", ">=0.0.0"} & set(when.values())] == []


def test_a_commit_of_a_stack_has_the_stacks_conventions_but_none_of_an_old_release() -> None:
    def of(version: str) -> Any:
        job = {"architecture": "mixtral-8x7b", "framework": "torch", "versions": {"torchtitan": version}}
        return dict(conventions(job_from_mapping(job)))

    plain = conventions(job_from_mapping({"architecture": "mixtral-8x7b", "framework": "torch"}))
    assert of("9dec370") == of("main") != dict(plain)
    assert of("0.1")["fsdp2_units"] != of("9dec370")["fsdp2_units"]


def test_a_commit_is_said_and_torch_falls_back_to_what_is_assumed() -> None:
    job = job_from_mapping({"architecture": TINY, "versions": {"torch": "9dec370"}})
    (finding,) = unmodelled_versions(job)
    assert finding.parameter == "versions.torch"
    assert "9dec370" in finding.sentence
    assert "is no release" in finding.sentence
    assert torch_release(job.versions) == torch_release({})
    assert not_compared({"torch": "main", "transformers": "4.48.1"}) == []


# -- how versions are given ---------------------------------------------------------------------------------------------


def test_versions_of_the_command_line() -> None:
    text = "torch=2.9, transformers=4.45.2 flash-attn=2.7.3,peft==0.13.2"
    assert read_versions(text) == {"torch": "2.9", "transformers": "4.45.2", "flash_attn": "2.7.3", "peft": "0.13.2"}


@pytest.mark.parametrize(
    "text",
    ["", "torch", "torch=", "=2.9", "torch=2.9,torch=2.8", "torch=2.9,,x", "a b=c=", "flash-attn=1.0,flash_attn=2.0"],
)
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(SpecError, match="versions"):
        read_versions(text)


@pytest.mark.parametrize(
    "versions", [["torch"], {"torch": None}, {"torch": True}, {"torch": {}}, {"torch": "1" * 101}, "2.9"]
)
def test_what_is_no_mapping_of_versions_is_refused(versions: object) -> None:
    for form in ({"architecture": TINY, "versions": versions},):
        with pytest.raises(SpecError, match="versions"):
            job_from_mapping(form)
    with pytest.raises(SpecError, match="versions"):
        check_versions(versions)


def test_a_number_that_may_have_lost_a_zero_is_said() -> None:
    (sentence,) = remarks({"torch": 2.1, "transformers": "4.48"})
    assert "versions.torch=2.1" in sentence
    assert "2.10" in sentence
    assert remarks({"torch": 2.12, "transformers": 5}) == []


def test_both_foreign_forms_carry_versions() -> None:
    hf = translation_of({"huggingface": {"config": TINY, "versions": {"transformers": "4.45.2", "flash-attn": "2.7"}}}).job
    assert hf.versions == {"transformers": "4.45.2", "flash_attn": "2.7"}
    assert conventions(hf)["logits_upcast"] == "model"
    flags = {"num-layers": 2, "hidden-size": 64, "num-attention-heads": 4, "seq-length": 128, "micro-batch-size": 1,
             "max-position-embeddings": 128, "vocab-size": 128, "bf16": True}  # fmt: skip
    megatron = translation_of({"megatron": {"arguments": flags, "versions": {"megatron_core": "0.13.1"}}}).job
    assert megatron.versions == {"megatron_core": "0.13.1"}
    assert not conventions(megatron)["cached_output_layer_placeholder"]


def test_a_batch_takes_versions_and_names_the_one_that_is_wrong() -> None:
    ask = {"gpu": "H200", "huggingface": {"config": TINY, "training_arguments": {"max_length": 64}}}
    old, new, wrong = predict_batch(
        [
            {**ask, "huggingface": {**ask["huggingface"], "versions": versions}}  # type: ignore[dict-item]
            for versions in ({"transformers": "4.45.2"}, {"transformers": "5.17"}, {"transformers": []})
        ]
    )
    assert old["peak_allocated_bytes"]["baseline"] != new["peak_allocated_bytes"]["baseline"]
    assert wrong["error"]["parameter"] == "versions.transformers"


def test_transformers_4_in_a_form_has_its_own_defaults() -> None:
    def asked(version: str) -> Any:
        form = {
            "config": TINY,
            "training_arguments": {"gradient_checkpointing": True},
            "versions": {"transformers": version},
        }
        return translation_of({"huggingface": form}).job

    assert asked("4.48.1").activation_checkpointing.use_reentrant
    assert asked("4.48.1").optimizer.implementation == "foreach"
    for newest in ("5.17", "main", "9dec370"):
        assert not asked(newest).activation_checkpointing.use_reentrant


def test_what_is_installed_here_is_what_the_metadata_says() -> None:
    found = installed()
    assert set(found) <= set(PACKAGES)
    assert all(importlib.metadata.version(PACKAGES[name]) == version for name, version in found.items())


# -- what is assumed ----------------------------------------------------------------------------------------------------


def test_what_is_not_given_is_assumed_in_one_sentence() -> None:
    plain = {"architecture": TINY}
    said = assumed_versions(job_from_mapping(plain))
    assert f"torch {ASSUMED_TORCH} and the newest accelerate and transformers;" in said
    given = {"torch": "2.9", "transformers": "5.17", "accelerate": "1.15"}
    assert assumed_versions(job_from_mapping({**plain, "versions": given})) == ""
    commit = assumed_versions(job_from_mapping({**plain, "versions": {**given, "transformers": "9dec370"}}))
    assert "the newest transformers;" in commit
    assert "torch" not in commit.partition(";")[0]


def test_only_the_packages_that_a_job_uses_are_asked_for() -> None:
    fused = {"architecture": TINY, "loss": {"fused_linear_cross_entropy": True}}
    assert "liger_kernel" in assumed_versions(job_from_mapping(fused))
    assert "liger_kernel" not in assumed_versions(job_from_mapping({"architecture": TINY}))
    megatron = assumed_versions(job_from_mapping({"architecture": TINY, "framework": "megatron"}))
    assert "megatron_core and transformer_engine" in megatron
    assert "transformers" not in megatron


# -- versions beside any job --------------------------------------------------------------------------------------------


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    found = {"megatron_core": "0.13.1", "peft": "0.13", "torch": "2.7.1", "torchtitan": "0.2", "transformers": "4.45.2"}
    monkeypatch.setattr("peakcast.dialects.common.asked_versions.installed", lambda: dict(found))
    return found


def test_what_is_installed_holds_where_it_concerns_the_job(here: dict[str, str]) -> None:
    plain = api.read({"architecture": TINY}, here=True)
    assert plain.job.versions == {name: here[name] for name in ("torch", "transformers", "peft")}
    assert plain.assumptions == ("Versions are those installed here: peft 0.13, torch 2.7.1, transformers 4.45.2.",)
    megatron = api.read({"architecture": TINY, "framework": "megatron"}, here=True).job
    assert megatron.versions == {"torch": "2.7.1", "megatron_core": "0.13.1"}
    titan = {"architecture": TINY, "framework": "torch", "versions": {"torchtitan": "main"}}
    assert api.read(titan, here=True).job.versions == {"torch": "2.7.1", "torchtitan": "0.2"}
    loop = {"architecture": TINY, "framework": "torch"}  # that torchtitan is installed does not make it one of its runs
    assert api.read(loop, here=True).job.versions == {"torch": "2.7.1", "transformers": "4.45.2"}  # its networks are of it


def test_what_is_given_holds_over_what_is_installed_and_over_the_job(here: dict[str, str]) -> None:
    job = {"architecture": TINY, "versions": {"torch": "2.4", "trl": "0.13"}}
    read = api.read(job, here=True, versions="transformers=4.48.1")
    assert read.job.versions == {"torch": "2.7.1", "transformers": "4.48.1", "peft": "0.13", "trl": "0.13"}
    assert "transformers" not in read.assumptions[-1]
    assert api.read(job, versions={"torch": "2.9"}).job.versions == {"torch": "2.9", "trl": "0.13"}


def test_a_configuration_is_read_as_its_version_has_it(tmp_path: Path) -> None:
    (tmp_path / "train.yaml").write_text(
        "model_name_or_path: gpt2\noutput_dir: x\ngradient_checkpointing: true\nbf16: true\n"
    )
    old, new = (api.read(tmp_path / "train.yaml", versions={"transformers": version}).job for version in ("4.45.2", "5.17"))
    assert old.versions == {"transformers": "4.45.2"}
    assert conventions(old)["logits_upcast"] == "none_shifted"  # GPT-2's own loss, which 4.46 took away
    assert (old.optimizer.implementation, new.optimizer.implementation) == ("foreach", "fused")
    assert (old.activation_checkpointing.use_reentrant, new.activation_checkpointing.use_reentrant) == (True, False)


def test_a_job_has_the_defaults_of_the_versions_that_the_question_gives(tmp_path: Path) -> None:
    """Not those of the newest release, which a job without versions of its own would have."""
    job: dict[str, Any] = {"architecture": TINY, "activation_checkpointing": {"mode": "full"}}
    (tmp_path / "job.json").write_text(json.dumps(job))
    for form in (job, {"job": job}, tmp_path / "job.json"):
        old, new = (api.read(form, versions={"transformers": version}).job for version in ("4.45.2", "5.1"))
        assert (old.activation_checkpointing.use_reentrant, new.activation_checkpointing.use_reentrant) == (True, False)
    said = {**job, "activation_checkpointing": {"mode": "full", "use_reentrant": False}}
    assert not api.read(said, versions={"transformers": "4.45.2"}).job.activation_checkpointing.use_reentrant


def test_versions_that_are_given_in_several_places_are_all_read():
    assert asked_versions(["torch=2.9", "peft=0.12,trl=0.10"]).given == {"torch": "2.9", "peft": "0.12", "trl": "0.10"}
    with pytest.raises(SpecError, match="says torch twice; keep one"):
        asked_versions(["torch=2.9", "torch=2.4"])


def test_forms_and_megatrons_command_line_take_them_too() -> None:
    form = {"huggingface": {"config": TINY, "versions": {"torch": "2.4", "trl": "0.24"}}}
    assert api.read(form, versions="torch=2.9").job.versions == {"torch": "2.9", "trl": "0.24"}
    words = [
        "--num-layers",
        "2",
        "--hidden-size",
        "64",
        "--num-attention-heads",
        "4",
        "--seq-length",
        "128",
        "--micro-batch-size",
        "1",
        "--bf16",
    ]
    asked = asked_versions(container="25.10")
    job = from_arguments([*words, "--max-position-embeddings", "128", "--vocab-size", "128"], {}, 1, asked).job
    assert job.versions == {"ngc_pytorch": "25.10"}
    assert torch_release(job.versions) == (2, 9, 0)


def test_a_run_about_to_start_has_what_is_installed_unless_its_job_says_otherwise(monkeypatch: pytest.MonkeyPatch) -> None:
    here = {"transformers": "4.45.2", "trl": "0.9"}
    monkeypatch.setattr("peakcast.dialects.common.asked_versions.installed", lambda: here)
    run = {"config": "llama-3.2-1b", "training_arguments": {"bf16": True}}
    for own, version in ({}, "4.45.2"), ({"transformers": "5.17.0"}, "5.17.0"), ({"ngc_pytorch": "25.10"}, None):
        asked = question({"huggingface": {**run, "versions": own}}, "H100-80GB", versions=OF_THIS_RUN)
        assert asked.job.versions.get("transformers") == version
    found = peakcast.preflight({"huggingface": run}, "H100-80GB", say=list)
    assert "Versions are those installed here: transformers 4.45.2, trl 0.9." in found.assumptions


def test_two_sources_of_versions_are_refused() -> None:
    with pytest.raises(SpecError, match="both name an image"):
        asked_versions("ngc_pytorch=25.10", "26.04")
    with pytest.raises(SpecError, match="keep one"):
        asked_versions(container="26.04", here=True)


@pytest.mark.parametrize(
    "command",
    [
        ["predict", "gpt2", "--gpu", "H200"],
        ["explain", "gpt2", "--gpu", "H200"],
        ["search", "gpt2", "--gpu", "H200", "--num-gpus", "1", "--find", "micro_batch_size"],
    ],
)
def test_every_command_that_asks_about_a_job_has_the_flags(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []

    def stop(job: Any, *_: Any, **__: Any) -> Any:
        asked.append(job.job.versions)
        raise SpecError("seen")

    monkeypatch.setattr(f"peakcast.api.{command[0]}", stop)
    for flags in (["--versions", "torch=2.9"], ["--container", "26.04"]):
        with pytest.raises(SpecError, match="seen"):
            app([*command, *flags], standalone_mode=False)
    assert asked == [{"torch": "2.9"}, {"ngc_pytorch": "26.04"}]


def test_the_page_has_a_field_for_versions_or_a_container() -> None:
    assert answered(PageState(text="gpt2", versions="torch=2.9")).job.versions == {"torch": "2.9"}
    assert answered(PageState(text="gpt2", versions="26.04")).job.versions == {"ngc_pytorch": "26.04"}
    assert from_query(to_query(PageState(text="gpt2", versions="26.04"))).versions == "26.04"
    with pytest.raises(SpecError, match="ngc_pytorch"):
        answered(PageState(text="gpt2", versions="newest"))
