"""Configuration text is parsed with bounds: bombs, depth, size and nonsense get a sentence, quickly."""

import pickle
import time

import pytest

import peakcast
from peakcast.core.errors import SpecError
from peakcast.dialects.common.text import MAX_FILE_BYTES, format_of, parse, read_text

LAUGHS = "a: &a [x,x,x,x,x,x,x,x,x,x]\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} [{','.join(['*' + chr(97 + i)] * 10)}]\n" for i in range(12)
)
MERGES = "a: &a {x: 1}\n" + "".join(
    f"{chr(98 + i)}: &{chr(98 + i)} {{<<: [{','.join(['*' + chr(97 + i)] * 10)}]}}\n" for i in range(12)
)


@pytest.mark.parametrize(
    ("text", "kind", "says"),
    [
        (LAUGHS, "YAML", "stands for more than"),
        (MERGES, "YAML", "stands for more than"),
        ("a: &a [*a]", "YAML", "nested too deeply"),
        ("[" * 100_000, "YAML", "nested too deeply"),
        ("".join(" " * i + "a:\n" for i in range(700)), "YAML", "nested too deeply"),
        ("? " * 100_000, "YAML", "nested too deeply"),
        ("[" * 100_000, "JSON", "nested too deeply"),
        ("a=" + "[" * 10_000, "TOML", "nested too deeply"),
        ("a=" + "[" * 100_000, "TOML", "more than 20,000 keys"),
        (".".join("a" * 90_000) + "=1", "TOML", "more than 20,000 keys"),
        (" . ".join("a" * 900) + "=1", "TOML", "more than 100 parts"),
        ("a: 1\n" * 200_000, "YAML", "a configuration is not that big"),
        ("a = 1\n" * 200_000, "TOML", "a configuration is not that big"),
        (" " * (MAX_FILE_BYTES + 1), "JSON", "a configuration is not that big"),
        ("a: !!python/object/apply:os.system [true]", "YAML", "is not valid YAML"),
        ("a: *b", "YAML", "is not valid YAML"),
        ("{[a]: 1}", "YAML", "is not valid YAML"),
        ("a: " + "9" * 5000, "YAML", "is not valid YAML"),
        ("{'a': 1}", "JSON", "is not valid JSON"),
        ('{"a": 1}\n\n{"a": 2}\n', "JSON", "holds 2 JSON values, one a line: give one of them, or ask all of them by"),
        ('{"a": 1}\n{"a"\n', "JSON", "is not valid JSON"),
        ("a: 1", "TOML", "is not valid TOML"),
    ],
    ids=lambda value: str(value)[:20].strip(),
)
def test_what_cannot_be_a_configuration_is_refused_in_a_sentence_and_at_once(text, kind, says):
    begun = time.monotonic()
    with pytest.raises(SpecError, match="the text ") as caught:
        parse(text, kind, "the text")
    assert says in caught.value.message
    assert time.monotonic() - begun < 2


def test_anchors_and_merge_keys_of_honest_files_are_read():
    text = "base: &base {lr: 1e-4, layers: [1, 2]}\nrun:\n  <<: *base\n  layers: [3]\nother: *base\n"
    assert parse(text, "YAML", "x")["run"] == {"lr": "1e-4", "layers": [3]}


def test_ten_megabytes_are_refused_before_they_are_read(tmp_path):
    file = tmp_path / "big.yaml"
    with file.open("wb") as handle:
        handle.truncate(10 * 2**20)
    with pytest.raises(SpecError, match=r"big.yaml cannot be read: it is larger than"):
        read_text(file)
    binary = tmp_path / "binary.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(SpecError, match="is not UTF-8"):
        read_text(binary)


@pytest.mark.parametrize("protocol", [2, pickle.DEFAULT_PROTOCOL, pickle.HIGHEST_PROTOCOL])
def test_a_memory_snapshot_in_the_place_of_a_job_is_shown_to_replay(tmp_path, protocol):
    file = tmp_path / "snapshot.pickle"
    file.write_bytes(pickle.dumps({"segments": [], "device_traces": []}, protocol) + bytes(2 * MAX_FILE_BYTES))
    for ask in (lambda job: peakcast.watch(job, "H100-80GB"), lambda job: peakcast.predict(job, "H100-80GB")):
        with pytest.raises(SpecError, match=f"`peakcast replay {file} --against JOB`"):
            ask(str(file))


@pytest.mark.parametrize(
    ("text", "ending", "kind"),
    [
        ("model: x", ".yml", "YAML"),
        ('{"a": 1}', "", "JSON"),
        ("base_model: x\nmicro_batch_size: 1", "", "YAML"),
        ("# comment\n\n[model]\nname = 'llama3'", "", "TOML"),
        ("#!/bin/bash\necho", ".txt", "shell"),
        ("#!/usr/bin/env bash\n", "", "shell"),
        ("export A=1\npython x.py", "", "shell"),
        ("torchrun --nproc_per_node 8 pretrain_gpt.py --bf16", "", "shell"),
        ("ARGS=(\n --bf16\n)", "", "shell"),
        ("NPROC_PER_NODE=8 HF_HOME=/x megatron sft --model x", "", "shell"),
        ('title="a torchrun b"\n[model]\n', "", "TOML"),
        ("import torch", ".py", "Python"),
    ],
)
def test_what_a_text_is_shows_in_its_ending_or_its_look(text, ending, kind):
    assert format_of(text, ending) == kind
