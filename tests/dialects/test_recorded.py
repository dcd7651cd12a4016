"""Configurations as their projects document them, and what a reader finds in each: `recorded/*/expected.yaml`.

There each file, some of them in docs/examples, has its `dialect`; `job`, the fields that it settles, read by hand
beforehand (`precision`: the five dtypes in order), on top of those of another file (`as`); words that its sentences must
have (`says`); keys that nobody knows (`unknown`); and what is given `beside` it.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from peakcast.core.fields import flat
from peakcast.dialects.opening import opened
from peakcast.dialects.recognise import DIALECTS, dialect_of
from peakcast.dialects.translate import ReadOptions, translated
from peakcast.doors.questions import translation_of
from peakcast.jobs.spec import job_to_mapping
from peakcast.printing import answers as render

RECORDED = Path(__file__).parent / "recorded"
EXPECTED: dict[str, dict[str, Any]] = {
    f"{file.parent.name}/{name}": expected
    for file in sorted(RECORDED.glob("*/expected.yaml"))
    for name, expected in yaml.load(file.read_text(encoding="utf-8"), yaml.CSafeLoader).items()
}
PRECISION = ("parameters", "compute", "gradients", "optimizer_states", "main_parameters")
PARTS = {
    "llamafactory/ds_z3_config.json", "lmflow/ds_config_zero2.json", "axolotl/zero3_bf16.json",
    "accelerate/fsdp_offload.yaml", "peft_sft/fsdp_config_qlora.yaml",
}  # fmt: skip
"""What says too little by itself (test_recorded_parts.py), or stands beside another."""


@pytest.fixture(params=EXPECTED)
def example(request):
    expected = EXPECTED[request.param]
    beside = dict(expected.get("beside", {}))
    files = tuple(RECORDED / name for name in beside.pop("files", ()))
    return RECORDED / request.param, expected, ReadOptions(files=files, **beside)


def fields_of(expected):
    fields = {**fields_of(EXPECTED[expected["as"]]), **expected["job"]} if "as" in expected else dict(expected["job"])
    dtypes = fields.pop("precision", None)
    return fields | ({f"precision.{name}": each for name, each in zip(PRECISION, dtypes, strict=True)} if dtypes else {})


def test_the_job_is_what_a_reader_finds(example):
    file, expected, beside = example
    translation = translation_of(file, beside)
    job, fields = flat(job_to_mapping(translation.job)), fields_of(expected)
    assert {key: job.get(key) for key in fields} == fields
    said = " ".join((*translation.assumptions, *translation.warnings, *translation.unsupported))
    assert [words for words in expected.get("says", ()) if words not in said] == []
    assert translation.unknown == tuple(expected.get("unknown", ()))


def test_it_is_recognised_by_what_it_contains(example):
    file, expected, _ = example
    assert dialect_of(opened(file).values) == expected["dialect"]
    lone = file.name not in ("dpo_lora.sh", "fsdp_qlora.sh", "llama32_3b_fsdp.sh")  # their text alone names other files
    text = opened(file.read_text(encoding="utf-8") if lone else file)
    assert dialect_of(text.values) == expected["dialect"]


def test_print_job_gives_a_file_whose_reading_gives_the_same_job(example, tmp_path):
    file, _, beside = example
    translation = translation_of(file, beside)
    for as_json, ending in ((False, ".yaml"), (True, ".json")):
        printed = tmp_path / f"job{ending}"
        printed.write_text(render.job_text(translation, as_json=as_json), encoding="utf-8")
        assert translation_of(printed).job == translation.job


def test_no_key_is_passed_over_in_silence(example):
    file, _, beside = example
    pasted = opened(file)
    translation = translated(replace(pasted, values={**pasted.values, "no_such_key": 7}), beside)
    assert [name for name in translation.unknown if name.replace("-", "_") == "no_such_key"]
    warnings = [warning.replace("-", "_") for warning in translation.warnings if "not known here" in warning]
    assert sum("no_such_key" in warning for warning in warnings) == 1


def test_every_dialect_has_a_recorded_example_or_is_a_part_of_one():
    covered = {expected["dialect"] for expected in EXPECTED.values()}
    elsewhere = {"nemo_2", "job", "peft", "hf_config", "fsdp", "trl", "transformers"}  # test_recognise.py, test_readings.py
    assert set(DIALECTS) - covered == elsewhere


def test_every_recorded_file_is_used():
    used = {*(name for name in EXPECTED if "/docs/examples/" not in name), *PARTS, "README.md"}
    there = {str(path.relative_to(RECORDED)) for path in RECORDED.rglob("*") if path.is_file()}
    assert {name for name in there if not name.endswith("expected.yaml")} == used
